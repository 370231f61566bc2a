"""The scheduler's side of an instance that shares nothing.

Owns one rule, which vLLM leaves to connectors even then: what cannot be encoded here must not reach the encoder.
"""

from __future__ import annotations

from typing import Any

from ec_p2p.connector.counts import Counts
from ec_p2p.connector.media import Carries, MediaFields
from ec_p2p.connector.metadata import ECP2PMetadata


class NoSharing:
    """Scheduler hooks of an instance that shares nothing: always no, and what cannot be encoded here fails alone.

    `media` None: do not even look, as for encoder-decoder models, whose items vLLM handles in its own way.
    """

    def __init__(self, counts: Counts, media: MediaFields | None) -> None:
        self._counts = counts
        self._media = media
        self._unavailable: set[str] = set()
        self._failed: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if self._media is None:
            return True
        last = request.mm_features[-1].mm_position
        if last.offset + last.length <= num_computed_tokens:
            return True
        if request.request_id in self._failed:
            return False
        for feature in request.mm_features:
            position = feature.mm_position
            beyond = position.offset + position.length > num_computed_tokens
            if beyond and self._media.carried_by(feature) is Carries.NOTHING:
                self._failed.add(request.request_id)
                self.fail(request.request_id)
                return False
        return True

    def has_cache_item(self, _identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, _request: Any, _index: int) -> None:
        self._counts.add("local_encodes", "not_shared")

    def update_state_after_free(self, _request: Any, _index: int) -> None:
        return

    def take_unavailable_requests(self) -> set[str]:
        failed, self._unavailable = self._unavailable, set()
        return failed

    def listen(self) -> None:
        return

    def end_step(self, _scheduler_output: Any) -> ECP2PMetadata:
        return ECP2PMetadata()

    def request_finished(self, request: Any) -> None:
        self._failed.discard(request.request_id)

    def fail_without_media(self, request: Any, num_computed_tokens: int) -> bool:
        return self.ensure_cache_available(request, num_computed_tokens)

    def fail(self, request_id: str) -> None:
        self._unavailable.add(request_id)
        self._counts.add("failed_requests", "not_shared")

    def close(self) -> None:
        return
