"""The scheduler's side: which requests may run, which items are loaded, encoded or published.

Owns the records of live requests and a mirror of vLLM's encoder cache. Two rules hold whatever happens: an item is
promised as a load only while a lease on it is held, and an item that cannot be encoded here never reaches the encoder.
Everything runs on the scheduler's thread, so nothing here waits, but for the moment of `inline_wait_s` a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

from ec_p2p.config import Config
from ec_p2p.connector.asking import Asking
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.identifiers import is_hinted
from ec_p2p.connector.media import Carries, MediaFields
from ec_p2p.connector.metadata import ECP2PMetadata
from ec_p2p.connector.request_state import Event, Item, RequestRecord, State
from ec_p2p.node.client import NodeClient

logger = logging.getLogger("vllm.ec_p2p")

Params = dict[str, Any]


class SchedulerSide:
    """Scheduler hooks of an instance that shares. `identity_of` maps an identifier to its 32-byte identity; `lookahead`
    is the number of tokens that vLLM makes room for items ahead of time, for its drafter."""

    def __init__(
        self,
        client: NodeClient,
        config: Config,
        counts: Counts,
        media: MediaFields,
        identity_of: Callable[[str], bytes],
        *,
        saves: bool,
        fetches: bool,
        readers: int,
        shares_lora: bool = True,
        lookahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._counts = counts
        self._media = media
        self._identity_of = identity_of
        self._saves = saves
        self._fetches = fetches
        self._shares_lora = shares_lora
        self._lookahead = lookahead
        self._clock = clock
        self._asking = Asking(client, config, counts, readers=readers, fetches=fetches, clock=clock)
        self._records: dict[str, RequestRecord] = {}
        self._current: RequestRecord | None = None
        """The request that vLLM is scheduling: has_cache_item is not told."""
        self._resident: set[str] = set()
        """Mirror of vLLM's encoder cache. It may be stale: vLLM does not tell us when it resets its cache."""
        self._allocated: set[str] = set()
        """What vLLM has made room for in this step."""
        self._contradicted = False
        """The mirror had some of that already."""
        self._unavailable: set[str] = set()
        self._step = ECP2PMetadata()
        self._wait_left = config.inline_wait_s
        self._idle = True

    # -------------------------------------------------------- before a step

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether everything the request still needs is leased, resident, or can be encoded here."""
        last = request.mm_features[-1].mm_position
        if last.offset + last.length <= num_computed_tokens:
            # Asked at every decode step.
            record = self._records.get(request.request_id)
            if record is not None and record.admitted:
                self._leave(record)
            elif record is not None and record.wants:
                self._asking.forget(record)  # a prefix cache has overtaken what it waited for
            return True
        record = self._record(request)
        if record.contradiction is not None and not record.failed:
            self._fail(record, record.contradiction, "rows")
        if record.failed:
            return False
        if request.num_preemptions != record.preemptions or num_computed_tokens < record.computed:
            self._asking.rewind(record)
        record.preemptions = request.num_preemptions
        record.computed = num_computed_tokens
        needed = record.beyond(num_computed_tokens)
        for item in record.items.values():
            if item.end > num_computed_tokens:
                item.needed = True
            else:
                self._asking.release(item)
        self._current = record
        self._asking.reconsider(needed)
        self._settle(record, needed)
        lost = next((item for item in needed if item.state is State.MISSING and not _harmless(item)), None)
        if lost is not None:
            self._fail(record, lost, lost.reason)
            return False
        record.admitted = all(item.settled for item in needed)
        return record.admitted

    def has_cache_item(self, identifier: str) -> bool:
        """Whether a load of it can be promised to the request that is being scheduled."""
        item = self._current.items.get(identifier) if self._current else None
        return item is not None and self._asking.serves(item)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Record the load that was promised, or the encode."""
        item = self._record(request).items[request.mm_features[index].identifier]
        lease = self._asking.take(item)
        if lease is not None:
            self._step.loads.append((item.identifier, lease.place))
            self._count_lookup(item, lease.source)
        else:
            self._encode(item)
            self._count_lookup(item, "missing")
        item.apply(Event.ALLOCATED)
        # vLLM has made room for what we thought it had: it has just evicted that, or reset its cache.
        self._contradicted |= item.identifier in self._resident
        self._resident.add(item.identifier)
        self._allocated.add(item.identifier)

    def update_state_after_free(self, request: Any, index: int) -> None:
        """vLLM has given up the request's hold on an item, unless an occurrence that has begun needs it still."""
        record = self._records.get(request.request_id)
        item = record.items.get(request.mm_features[index].identifier) if record else None
        if item is not None and item.kept and not item.is_begun(request.num_computed_tokens, self._lookahead):
            self._asking.freed(item)

    def take_unavailable_requests(self) -> set[str]:
        """Ids of the requests to fail, each once."""
        failed, self._unavailable = self._unavailable, set()
        return failed

    def listen(self) -> None:
        """Tell the node, if there is one, what this step encodes, and take in what it has said meanwhile."""
        if self._client.attach():
            self._asking.announce(list(self._step.encodes.values()))
        self._asking.hear()

    def end_step(self, scheduler_output: Any) -> ECP2PMetadata:
        """What the workers have to do in this step. A promised load is never dropped."""
        freed = scheduler_output.free_encoder_mm_hashes
        if self._contradicted and not freed:
            # A full cache that evicts and takes back one thing evicts others. One that was reset has room.
            self._resident = set(self._allocated)
        self._resident.difference_update(freed)
        self._contradicted = False
        self._allocated.clear()
        self._idle = scheduler_output.total_num_scheduled_tokens == 0
        self._wait_left = self._config.inline_wait_s
        if self._idle and self._fetches:
            # Model Runner V1 calls no hook of a consumer in a step without tokens: keep it for the next.
            return ECP2PMetadata()
        step, self._step = self._step, ECP2PMetadata()
        if self._saves:
            step.saves_resident = self._asking.not_in_node
        self._asking.not_in_node = {}
        return step

    # -------------------------------------------------------- after a request

    def request_finished(self, request: Any) -> Params | None:
        """Give back what the request holds. For producers: the parameters of the response."""
        self._unavailable.discard(request.request_id)
        record = self._records.pop(request.request_id, None)
        if record is not None:
            if record.admitted:
                self._leave(record)
            self._asking.forget(record)
        if self._current is record:
            self._current = None
        if record is None or not self._saves:
            return None
        return self._params(request, record)

    def fail_without_media(self, request: Any, num_computed_tokens: int) -> bool:
        """The answer of `ensure_cache_available` when it failed itself: what cannot be encoded here fails alone."""
        for feature in request.mm_features:
            position = feature.mm_position
            beyond = position.offset + position.length > num_computed_tokens
            if beyond and self._media.carried_by(feature) is Carries.NOTHING:
                self.fail(request.request_id)
                return False
        return True

    def fail(self, request_id: str) -> None:
        self._unavailable.add(request_id)
        self._counts.add("failed_requests", "error")

    def close(self) -> None:
        self._client.close()

    # -------------------------------------------------------- inside

    def _record(self, request: Any) -> RequestRecord:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = RequestRecord(request.request_id)
        hint = request.ec_transfer_params
        may_share = self._shares_lora or getattr(request, "lora_request", None) is None

        def make(feature: Any) -> Item:
            carries = self._media.carried_by(feature)
            return Item(
                feature.identifier,
                self._identity_of(feature.identifier),
                feature.mm_position.get_num_embeds(),
                has_media=carries is not Carries.NOTHING,
                shareable=may_share and carries is not Carries.EMBEDDING,
                hinted=is_hinted(hint, feature.identifier),
            )

        record.grow(request.mm_features, make)
        return record

    def _settle(self, record: RequestRecord, needed: list[Item]) -> None:
        fresh = heard = False
        check = 0
        while True:
            for item in needed:
                self._look(item)
            if any(map(_to_ask, needed)):
                # What was lost with a node comes to light before more is asked of the next one.
                self._asking.hear()
                fresh |= self._asking.ask(record, [item for item in needed if _to_ask(item)])
            unchecked = [i for i in needed if i.state is State.RESIDENT and i.shareable and not i.checked]
            if unchecked:
                check = self._asking.check(record, unchecked)
                fresh = True
            self._asking.expire(needed)
            if all(map(_has_answer, needed)) and not self._asking.is_unanswered(check):
                return
            # A running batch is held up only for what was asked just now, which mostly lands within the wait.
            wait = self._wait_left if fresh or self._idle else 0.0
            if heard and wait <= 0:
                return
            self._listen(wait)
            heard = True

    def _listen(self, wait: float) -> None:
        began = self._clock()
        heard = self._asking.hear(wait)
        if wait > 0:
            self._wait_left = max(0.0, self._wait_left - (self._clock() - began)) if heard else 0.0

    def _look(self, item: Item) -> None:
        in_reach = item.has_media and item.identifier in self._resident
        if item.state is State.RESIDENT and not in_reach:
            item.apply(Event.EVICTED)
        if in_reach and item.state in (State.UNASKED, State.MISSING):
            item.apply(Event.FOUND)
        elif item.state is State.UNASKED and not item.shareable:
            item.apply(Event.MISSED)
            item.reason = "not_shared"

    def _leave(self, record: RequestRecord) -> None:
        """The request needs no embedding any more, unless it is preempted."""
        for item in record.items.values():
            if item.needed and item.identifier in self._resident:
                # vLLM never asked for room for it, so it had it.
                self._count_lookup(item, "encoder_cache")
        self._asking.forget(record)
        record.admitted = False

    def _count_lookup(self, item: Item, outcome: str) -> None:
        if not item.counted:
            item.counted = True
            self._counts.add("lookups", outcome)

    def _encode(self, item: Item) -> None:
        reason = {State.MISSING: item.reason, State.RESIDENT: "evicted"}.get(item.state, "unasked")
        if reason == "no_source" and not self._fetches:
            reason = "producer"
        self._counts.add("local_encodes", reason)
        if self._saves and item.shareable:
            self._step.encodes[item.identifier] = item.identity

    def _fail(self, record: RequestRecord, item: Item, reason: str) -> None:
        record.failed = True
        self._unavailable.add(record.request_id)
        self._count_lookup(item, "missing")
        self._asking.forget(record)
        self._counts.add("failed_requests", reason)
        why = "the request gives it two sizes" if item is record.contradiction else "it carries no media to encode"
        logger.warning(
            "request %s fails: no embedding for %.64r (%s), and %s", record.request_id, item.identifier, reason, why
        )

    def _params(self, request: Any, record: RequestRecord) -> Params | None:
        saved = [item.identity for item in record.items.values() if item.placed and item.shareable]
        while self._wait_left > 0 and not all(map(self._asking.knows, saved)):
            # The step's saves are committed; the node says so at about the same time as vLLM comes here.
            self._listen(self._wait_left)
        items: Params = collect_ec_item_metadata(request.mm_features, self._media)
        for identifier, entry in items.items():
            item = record.items[identifier]
            if self._asking.is_held(item.identity):
                entry["ec_p2p"] = {"node": self._client.node_name, "rows": item.rows}
            else:
                # With metadata a router may send placeholders instead of the media, and then nothing could be encoded.
                entry["metadata"] = {}
        return items or None


def _harmless(item: Item) -> bool:
    """A MISSING item that does not matter: it can be encoded here, or vLLM keeps it for this request already."""
    return item.has_media or item.kept


def _has_answer(item: Item) -> bool:
    return item.settled and item.state is not State.WANTED


def _to_ask(item: Item) -> bool:
    if item.state is State.ALLOCATED:
        # vLLM's cache may be reset while the item's tokens are being computed; without media only a lease helps then.
        return not item.has_media
    return item.state is State.UNASKED
