"""Which identifiers may be shared, and what a request's hint says about them.

Owns two judgements: whether this instance's identifiers mean the same elsewhere, and how little of a hint is believed.
A hint comes from whoever sent the request: it may say which entries to expect, never where they are or what they hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Sharing(NamedTuple):
    on: bool
    why: str
    """For people; empty when sharing is on."""
    expected: bool = False
    """Off, but by the nature of the model: nothing to warn of."""


def sharing_of(vllm_config: Any) -> Sharing:
    """Whether this instance shares encoder outputs, by its configuration alone."""
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        return Sharing(False, "encoder-decoder models keep no encoder cache", expected=True)
    multimodal = model.multimodal_config
    if multimodal is None:
        return Sharing(False, "the model takes no media", expected=True)
    if multimodal.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        # vLLM then counts media items per process: every instance names its first image alike.
        return Sharing(
            False,
            "with mm_processor_cache_gb=0 and prefix caching off (on an ec_producer always) vLLM names media by a "
            "counter, not by content, and equal names would mean different media on other instances; "
            "leave --mm-processor-cache-gb above 0",
        )
    parallel = vllm_config.parallel_config
    first_stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    if first_stage > getattr(parallel, "local_world_size", first_stage):
        return Sharing(False, "the tensor-parallel ranks of this engine are spread over several hosts")
    return Sharing(True, "")


def is_hinted(hint: object, identifier: str) -> bool:
    """Whether a request's `ec_transfer_params` name this identifier. They may be anything; the values are not read."""
    return isinstance(hint, dict) and identifier in hint
