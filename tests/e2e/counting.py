"""What end-to-end tests compare: counts before and after, and answers with those of a plain vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from chat import Answer, ask, chat_body
from fleet import Server
from metrics import Metrics
from processes import until

from tests.e2e.rig import PATIENCE_S

ROUNDING = 0.04
"""Of a logprob: two ranks in bfloat16 were seen to differ from one by 0.016, another image to make 0.05 to 0.5."""


def salted(text: str, *images: str, **more: Any) -> dict[str, Any]:
    """A chat request that vLLM's prefix cache has not seen: it would answer instead of us."""
    return chat_body(text, images, cache_salt=text, **more)


def same(answer: Answer, plain: Server, body: Mapping[str, Any]) -> None:
    """Tokens and logprobs as a plain vLLM computes them."""
    reference = ask(plain.url, body)
    assert answer.tokens == reference.tokens


def same_but_for_rounding(answer: Answer, plain: Server, body: Mapping[str, Any]) -> None:
    """As `same`, of ranks that add up in another order. From a token on for which two were as likely as each other the
    answers may go apart. Wrong embeddings show in the first tokens already."""
    for token, expected in zip(answer.tokens, ask(plain.url, body).tokens, strict=True):
        assert token["logprob"] == pytest.approx(expected["logprob"], abs=ROUNDING)
        if token["token"] != expected["token"]:
            likely = [each["logprob"] for each in expected["top_logprobs"] if each["token"] == token["token"]]
            assert any(each == pytest.approx(expected["logprob"], abs=ROUNDING) for each in likely)
            return


class Change:
    """What a server counts from here on. Its metrics leave the engine with a step's output, so they are waited for."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._before = server.metrics()

    def now(self) -> Metrics:
        return self.server.metrics() - self._before

    def settles(self, **expected: int) -> None:
        """Wait until the counts are these: encodes, landed_local, _disk, _remote, missing, encoder_cache, answered."""

        def counts() -> dict[str, int]:
            change = self.now()
            landed = {
                source: change.total("vllm:ec_p2p_fetches_total", outcome="landed", source=source)
                for source in ("local", "disk", "remote")
            }
            return {
                "answered": change.total("vllm:request_success_total"),
                "encodes": change.total("vllm:ec_p2p_local_encodes_total"),
                "landed_local": landed["local"],
                "landed_disk": landed["disk"],
                "landed_remote": landed["remote"],
                "missing": change.total("vllm:ec_p2p_lookups_total", outcome="missing"),
                "encoder_cache": change.total("vllm:ec_p2p_lookups_total", outcome="encoder_cache"),
            }

        until(
            lambda: {**counts(), **expected} == counts(),
            f"{self.server.name} to count {expected}",
            timeout_s=PATIENCE_S,
        )
