"""Importing this imports vLLM, past the warnings that it and its dependencies raise on the way."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.config
    import vllm.distributed.ec_transfer.ec_connector.base
    import vllm.multimodal
    import vllm.v1.request  # noqa: F401
