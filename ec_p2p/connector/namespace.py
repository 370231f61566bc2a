"""The parts of vLLM's configuration that change an embedding, and where the weights are.

Owns the choice of what counts. Must leave out whatever may differ between instances that compute equal embeddings:
paths, versions, the language model and its quantisation, parallelism.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ec_p2p.config import Config
from ec_p2p.identity import WeightsError, namespace_of

logger = logging.getLogger("vllm.ec_p2p")

_LANGUAGE_MODEL = {
    "text_config",
    "llm_config",
    "language_config",
    "talker_config",
    "code2wav_config",
    "token2wav_config",
}
_NOISE = {
    "_name_or_path",
    "_commit_hash",
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_MEDIA_SETTINGS = (
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)


def namespace(config: Config, vllm_config: Any) -> str:
    """This instance's namespace: what the operator configured, else the fingerprint. Reads a few KiB per tensor."""
    if config.namespace:
        return config.namespace
    model_dir = model_directory(vllm_config)
    parts = embedding_parts(vllm_config, model_dir)
    model = vllm_config.model_config
    fallback = f"{getattr(model, 'model_weights', '') or model.model}@{model.revision}"
    try:
        return namespace_of(parts, model_dir, fallback=fallback)
    except (WeightsError, OSError) as error:
        logger.warning("the weights say nothing of the namespace, the model's name %r does: %s", fallback, error)
        return namespace_of(parts, None, fallback=fallback)


def embedding_parts(vllm_config: Any, model_dir: Path | None) -> dict[str, object]:
    """What changes an embedding besides the media and the weights, as JSON values."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    parts: dict[str, object] = {
        "encoder": _without_language_model(model.hf_config.to_dict()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "media": {name: plain(getattr(multimodal, name, None)) for name in _MEDIA_SETTINGS},
        "processor": _processor_files(model_dir),
    }
    if model.quantization and not getattr(model.hf_config, "quantization_config", None):
        # Quantised while loading: the checkpoint does not show it, and it may include the encoder.
        parts["quantization"] = plain(model.quantization)
    # Pinned by the operator: it may mean other code, too, of which the files above say nothing.
    pinned = {name: getattr(model, name, None) for name in ("revision", "code_revision")}
    if any(pinned.values()):
        parts["pinned"] = pinned
    if str(vllm_config.load_config.load_format) == "dummy":
        parts["weights"] = "dummy"
    return parts


def model_directory(vllm_config: Any) -> Path | None:
    """Where this machine has the model's files; None if that cannot be told."""
    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(
            model.model, "config.json", cache_dir=vllm_config.load_config.download_dir, revision=model.revision
        )
    except ValueError:
        # The model's name is not one of a hub: an object store's address, say.
        return None
    return Path(found).parent if isinstance(found, str) else None


def plain(value: Any) -> object:
    """`value` as JSON, equal in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    # The default text of an object holds its address.
    return type(value).__qualname__ if " at 0x" in str(value) else str(value)


def _without_language_model(settings: Mapping[str, Any]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, value in settings.items():
        if key in _LANGUAGE_MODEL or key in _NOISE:
            continue
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        kept[str(key)] = _without_language_model(value) if isinstance(value, Mapping) else plain(value)
    return kept


def _processor_files(model_dir: Path | None) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in _PROCESSOR_FILES if model_dir is not None else ():
        assert model_dir is not None
        try:
            found[name] = json.loads((model_dir / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            logger.warning("%s does not count for the namespace: %s", model_dir / name, error)
    return found
