"""The class that vLLM makes, once in the scheduler's process and once in every worker.

Owns the wiring: configuration, which side this is, whether anything is shared. Every hook is total, see hooks.py; only
a bad setting keeps an engine from starting. Importing this starts nothing and loads no NIXL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from ec_p2p.config import Config, ConfigError
from ec_p2p.config_sources import load_ec_engine_config
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.hooks import note_failure, nothing, total
from ec_p2p.connector.identifiers import Sharing, sharing_of
from ec_p2p.connector.media import MediaFields
from ec_p2p.connector.metadata import ECP2PMetadata
from ec_p2p.connector.namespace import namespace
from ec_p2p.connector.no_sharing import NoSharing
from ec_p2p.connector.scheduler import SchedulerSide
from ec_p2p.connector.topology import instance_of, readers_of, role_of, worker_rank
from ec_p2p.connector.worker import EncoderCache, WorkerSide, current_device
from ec_p2p.identity import entry_identity
from ec_p2p.node.client import NodeClient
from ec_p2p.node.device import Device
from ec_p2p.node.lander import Lander
from ec_p2p.node.tensors import Loader, Saver
from ec_p2p.transport import chosen_kind

logger = logging.getLogger("vllm.ec_p2p")

SCHEDULER_ATTACH_S = 5.0
WORKER_ATTACH_S = 20.0


class ECP2PConnector(ECConnectorBase):  # type: ignore[misc]
    """Shares encoder outputs through the host's node. Roles ec_producer, ec_consumer and ec_both."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Raises ConfigError for a setting that is unknown or cannot be used; no other error leaves here."""
        super().__init__(vllm_config=vllm_config, role=role)
        if not hasattr(ECConnectorBase, "take_unavailable_requests"):
            raise ConfigError("this vLLM is too old for ECP2PConnector; accepted: vLLM 0.30 and later")
        transfer = vllm_config.ec_transfer_config
        settings = {**transfer.ec_connector_extra_config, "ec_ip": transfer.ec_ip, "ec_port": transfer.ec_port}
        _log_as_vllm_does()
        config = load_ec_engine_config(settings)
        self.counts = Counts()
        self.hook_failures: set[tuple[str, type[Exception]]] = set()
        self._scheduler: SchedulerSide | NoSharing | None = None
        self._worker: WorkerSide | None = None
        sharing = sharing_of(vllm_config)
        if role == ECConnectorRole.WORKER:
            self._worker = self._make_worker(config, vllm_config) if sharing.on else None
        else:
            self._scheduler = self._make_scheduler(config, vllm_config, sharing)

    # -------------------------------------------------------- scheduler hooks

    @total(lambda self, request, computed: self._decide_by_media(request, computed))
    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        assert self._scheduler is not None
        return self._scheduler.ensure_cache_available(request, num_computed_tokens)

    @total(lambda *_: False)
    def has_cache_item(self, identifier: str) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_cache_item(identifier)

    @total(nothing)
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, index)

    @total(nothing)
    def update_state_after_free(self, request: Any, index: int) -> None:
        assert self._scheduler is not None
        self._scheduler.update_state_after_free(request, index)

    @total(lambda *_: set())
    def take_unavailable_requests(self) -> set[str]:
        assert self._scheduler is not None
        return self._scheduler.take_unavailable_requests()

    @total(lambda self, scheduler_output: self._scheduler.end_step(scheduler_output))
    def build_connector_meta(self, scheduler_output: Any) -> ECP2PMetadata:
        assert self._scheduler is not None
        self._scheduler.listen()
        return self._scheduler.end_step(scheduler_output)

    @total(lambda *_: (False, None))
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        """Never: the node works on its own, so an idle engine may sleep, pause and exit."""
        return False

    # -------------------------------------------------------- worker hooks

    @total(nothing)
    def start_worker_services(self) -> None:
        if self._worker is not None:
            self._worker.start(WORKER_ATTACH_S)

    @total(nothing)
    def start_save_caches(self, **kwargs: Any) -> None:
        # A producer that is no consumer gets no start_load_caches, but what it was promised is loaded all the same.
        if self._worker is not None and not self.is_consumer:
            self._worker.before_model(kwargs["encoder_cache"], self._step())

    def start_load_caches(self, encoder_cache: EncoderCache, **kwargs: Any) -> None:
        """Raises RuntimeError when a promised embedding cannot be loaded: vLLM would fail on it a moment later."""
        if self._worker is not None:
            self._worker.before_model(encoder_cache, self._step())

    @total(nothing)
    def save_caches(self, encoder_cache: EncoderCache, mm_hash: str, **kwargs: Any) -> None:
        if self._worker is not None and self.is_producer:
            self._worker.save(encoder_cache, mm_hash, self._step())

    # -------------------------------------------------------- both

    @total(nothing)
    def get_ec_connector_stats(self) -> Any:
        """What happened since the last call, or None."""
        from ec_p2p.connector.metrics import ECP2PStats

        if self._scheduler is not None:
            self._scheduler.listen()
        data = self.counts.take()
        return ECP2PStats(data=data) if data else None

    @total(nothing)
    def shutdown(self) -> None:
        """May be called any number of times, and is often not called at all."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from ec_p2p.connector.metrics import ECP2PStats

        return ECP2PStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        from ec_p2p.connector.metrics import ECP2PPromMetrics

        return ECP2PPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -------------------------------------------------------- inside

    def _step(self) -> ECP2PMetadata:
        bound = self._connector_metadata
        return bound if isinstance(bound, ECP2PMetadata) else ECP2PMetadata()

    def _decide_by_media(self, request: Any, computed: int) -> bool:
        """`ensure_cache_available` has failed. What can be encoded here is; the rest fails alone."""
        assert self._scheduler is not None
        try:
            return self._scheduler.fail_without_media(request, computed)
        except Exception as error:
            note_failure(self, "ensure_cache_available", error)
            self._scheduler.fail(request.request_id)
            return False

    def _make_scheduler(self, config: Config, vllm_config: Any, sharing: Sharing) -> SchedulerSide | NoSharing:
        model = vllm_config.model_config
        role = vllm_config.ec_transfer_config.ec_role
        media = None if model.is_encoder_decoder else MediaFields.of(model)
        if not sharing.on:
            log = logger.info if sharing.expected else logger.warning
            log("ec-p2p, %s: NOTHING IS SHARED: %s", role, sharing.why)
            return NoSharing(self.counts, media)
        assert media is not None
        try:
            name = namespace(config, vllm_config)
            lora = vllm_config.lora_config
            client = NodeClient(
                config, "scheduler", instance_of(vllm_config), role=role_of(vllm_config), namespace=name
            )
        except Exception as error:
            note_failure(self, "__init__", error)
            logger.warning("ec-p2p, %s: NOTHING IS SHARED: %s", role, error)
            return NoSharing(self.counts, media)
        attached = client.attach(SCHEDULER_ATTACH_S)
        logger.info(
            "ec-p2p, %s: sharing through node %s%s, namespace %.12s",
            role,
            client.node_name,
            "" if attached else " (not there yet)",
            name,
        )
        return SchedulerSide(
            client,
            config,
            self.counts,
            media,
            partial(entry_identity, name),
            saves=self.is_producer,
            fetches=self.is_consumer,
            readers=readers_of(vllm_config),
            lookahead=getattr(vllm_config, "num_prefill_lookahead_tokens", 0),
            shares_lora=not (lora and getattr(lora, "enable_tower_connector_lora", False)),
        )

    def _lander_maker(self, config: Config, instance: str, reader: int) -> Callable[[Device], Lander] | None:
        """None where fetched entries land in the node's arena."""
        if config.landing != "device" or not self.is_consumer:
            return None
        if chosen_kind(config.transport) != "nixl":
            logger.warning("landing=device needs NIXL: with transport=%s entries land on the host", config.transport)
            return None
        return partial(Lander, config, instance, reader, on_error=partial(note_failure, self))

    def _make_worker(self, config: Config, vllm_config: Any) -> WorkerSide | None:
        try:
            rank = worker_rank(vllm_config)
            if rank.reader < 0:
                return None
            # Without the namespace: the scheduler tells it, and a worker would have to read the weights' files for it.
            client = NodeClient(config, "worker", instance_of(vllm_config), rank.reader, role=role_of(vllm_config))
            return WorkerSide(
                client,
                Saver(client),
                Loader(client),
                # Who saves nothing holds no write windows: they would be taken from everybody's arena.
                rank._replace(saves=rank.saves and self.is_producer),
                fetches=self.is_consumer,
                on_error=partial(note_failure, self),
                device=current_device,
                make_lander=self._lander_maker(config, instance_of(vllm_config), rank.reader),
            )
        except Exception as error:
            note_failure(self, "__init__", error)
            return None


def _log_as_vllm_does() -> None:
    """What the node's client says inside a vLLM process belongs into vLLM's log, in its form."""
    ours, vllms = logging.getLogger("ec_p2p"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in vllms.handlers:
            ours.addHandler(handler)
        ours.setLevel(vllms.level)
        ours.propagate = vllms.propagate
