"""What an entry is called, so that equal names mean equal bytes.

Owns the key that LMCache users know, the 256-bit identity that is compared before a byte is used, and the namespace:
the fingerprint of everything that changes an embedding except the media. Must never let a path or a vLLM version into a
namespace, nor trust an identifier: clients choose them. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

NAMESPACE_FORMAT = 1
"""Part of every namespace: raised whenever stored bytes or the rules below change their meaning."""

_LENGTHS = struct.Struct("<QQ")

SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""


class WeightsError(ValueError):
    """A weights file is not what its header says; the text names the file."""


# ---------------------------------------------------------------- entries


def stable_u64(text: str) -> int:
    """First 8 bytes, big-endian, of the sha256 of `text`: equal in every process. TypeError unless it is a str."""
    return int.from_bytes(hashlib.sha256(_utf8("text", text)).digest()[:8], "big")


@dataclass(frozen=True)
class CacheEngineKey:
    """The key of LMCache's encoder cache. It names an entry to people; 64 bits never prove that it is the right one.

    Encoder outputs are equal on all tensor-parallel ranks, hence one world and one worker.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int
    dtype: torch.dtype
    request_configs: dict[str, str] = field(default_factory=dict, hash=False)

    def to_string(self) -> str:
        """Such as `org/model@1@0@00c0ffee00c0ffee@bfloat16`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash:016x}@{dtype}"


def entry_identity(namespace: str, identifier: str) -> bytes:
    """The 32 bytes that an entry is found by and checked against. Any two str are accepted; TypeError for others.

    Lengths go first, so that no choice of identifier reaches into another namespace.
    """
    return identities_in(namespace)(identifier)


def identities_in(namespace: str) -> Callable[[str], bytes]:
    """`entry_identity` for the many identifiers of one namespace, which is encoded once."""
    space = _utf8("namespace", namespace)
    nbytes, pack, sha256 = len(space), _LENGTHS.pack, hashlib.sha256

    def identity(identifier: str) -> bytes:
        name = _utf8("identifier", identifier)
        return sha256(pack(nbytes, len(name)) + space + name).digest()

    return identity


def _utf8(name: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{name} {text!r} is of type {type(text).__name__}; accepted: str")
    # Identifiers come from JSON, where lone surrogates are legal.
    return text.encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- namespaces


def namespace_of(parts: Mapping[str, object], model_dir: Path | None, *, fallback: str = "") -> str:
    """Fingerprint (64 hex digits) of `parts` and of the weights in `model_dir` that lie outside the language model.

    `parts` holds what else changes an embedding, as JSON values: the encoder's and projector's configuration, processor
    settings, dtype, LoRA. `fallback` (model string and revision) stands in for the weights when there is no directory
    or no safetensors file in it. Reads a few KiB per tensor. Raises TypeError for a part that has no single JSON form,
    ValueError when there are neither weights nor a fallback, WeightsError or OSError for a file that cannot be read.
    """
    weights = None if model_dir is None else weights_fingerprint(model_dir)
    if weights is None and not fallback:
        raise ValueError(f"no safetensors file in {model_dir}, and no fallback that says which weights are meant")
    known = {"sampled": weights} if weights is not None else {"named": fallback}
    _check_json("parts", parts)
    text = json.dumps({"format": NAMESPACE_FORMAT, "parts": parts, "weights": known}, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _check_json(where: str, value: object) -> None:
    # json.dumps would make 1 and "1" the same key.
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; accepted: str")
            _check_json(f"{where}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(f"{where}[{index}]", item)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{where} is {value!r}; accepted: None, bool, int, float, str, and lists and dicts of them")


# ---------------------------------------------------------------- weights

_OUTSIDE = {"model", "thinker", "vlm"}
_LANGUAGE_MODELS = {"language_model", "text_model", "language", "llm"}
_INSIDE = {"model", "transformer", "backbone", "decoder"}
_DECODER_PARTS = {"layers", "norm", "lm_head", "output"}


def in_language_model(tensor: str) -> bool:
    """Whether a tensor of this name belongs to the language model's decoder or head.

    The name may begin with wrappers (`model`, `thinker`, ...), may then name a language model (`language_model`,
    `text_model`, `llm`, `language`) and wrappers inside it, and must go on with a part of a decoder (`layers`, `norm`,
    `lm_head`, ...). So `model.text_model.layers.0...` is of the language model; `model.vision_model.layers.0...`,
    `vision_tower.text_model...` and all unknown names are not: a wrong no costs sharing, a wrong yes a wrong embedding.

    Token embedding tables are not counted in, on purpose. Some encoders (Molmo2; Qwen3-VL and Nemotron-VL video) put
    rows of that table between the rows they compute, and quantised checkpoints leave it as it is.
    """
    rest = list(dropwhile(_OUTSIDE.__contains__, tensor.split(".")))
    if rest and rest[0] in _LANGUAGE_MODELS:
        rest = list(dropwhile(_INSIDE.__contains__, rest[1:]))
    return bool(rest) and rest[0] in _DECODER_PARTS


def weights_fingerprint(model_dir: Path) -> str | None:
    """Hash over name, dtype, shape and sampled bytes of each tensor outside the language model; None without any
    safetensors file.

    Which file holds a tensor, and whether several do, does not matter. Raises WeightsError or OSError.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        return None
    tensors = {_describe(tensor, sample) for file in files for tensor, sample in _sampled(file)}
    digest = hashlib.sha256()
    for line in sorted(tensors):
        digest.update(line)
    return digest.hexdigest()


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    start: int
    """First byte in the file."""
    end: int


def _describe(tensor: _Tensor, sample: bytes) -> bytes:
    words = [tensor.name, tensor.dtype, tensor.shape, hashlib.sha256(sample).hexdigest()]
    return json.dumps(words).encode("ascii") + b"\n"


def _sampled(file: Path) -> Iterator[tuple[_Tensor, bytes]]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tensor in _header(file, fd):
            if not in_language_model(tensor.name):
                yield tensor, b"".join(_read(file, fd, start, end) for start, end in _samples(tensor))
    finally:
        os.close(fd)


def _samples(tensor: _Tensor) -> list[tuple[int, int]]:
    """First, middle and last bytes; all of a small tensor."""
    start, end = tensor.start, tensor.end
    if end - start <= 3 * SAMPLE_BYTES:
        return [(start, end)]
    middle = (start + end - SAMPLE_BYTES) // 2
    return [(at, at + SAMPLE_BYTES) for at in (start, middle, end - SAMPLE_BYTES)]


def _header(file: Path, fd: int) -> list[_Tensor]:
    size = os.fstat(fd).st_size
    (length,) = struct.unpack("<Q", _read(file, fd, 0, 8))
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise WeightsError(f"{file}: a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(_read(file, fd, 8, 8 + length))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{file}: the header is not a JSON object")
    return [_tensor(file, name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"]


def _tensor(file: Path, name: str, entry: Any, data: int, size: int) -> _Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = type(dtype) is str and all(type(n) is int for n in shape) and 0 <= start <= end <= size - data
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise WeightsError(f"{file}: tensor {name!r} is described by {entry!r}")
    return _Tensor(name, dtype, list(shape), data + start, data + end)


def _read(file: Path, fd: int, start: int, end: int) -> bytes:
    data = bytearray()
    while len(data) < end - start:
        chunk = os.pread(fd, end - start - len(data), start + len(data))
        if not chunk:
            raise WeightsError(f"{file}: ends at byte {start + len(data)}, before {end}")
        data += chunk
    return bytes(data)
