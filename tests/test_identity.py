from __future__ import annotations

import enum
import hashlib
import json
import random
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ec_p2p.identity import (
    SAMPLE_BYTES,
    CacheEngineKey,
    WeightsError,
    entry_identity,
    identities_in,
    in_language_model,
    namespace_of,
    stable_u64,
    weights_fingerprint,
)

TEXTS = st.text(st.characters(), max_size=20)  # surrogates too


# ---------------------------------------------------------------- keys and identities


def test_stable_u64_is_the_head_of_sha256() -> None:
    assert stable_u64("abc") == 0xBA7816BF8F01CFEA
    assert stable_u64("") == int.from_bytes(hashlib.sha256(b"").digest()[:8], "big")
    assert stable_u64("é") == int.from_bytes(hashlib.sha256("é".encode()).digest()[:8], "big")


def test_stable_u64_is_equal_in_every_process() -> None:
    script = "from ec_p2p.identity import stable_u64; print(stable_u64('media'))"
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert int(out) == stable_u64("media")


@pytest.mark.parametrize("bad", [123, None, b"abc", 1.5])
def test_only_text_has_a_hash_or_an_identity(bad: object) -> None:
    with pytest.raises(TypeError, match="accepted: str"):
        stable_u64(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="identifier"):
        entry_identity("n", bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="namespace"):
        entry_identity(bad, "i")  # type: ignore[arg-type]


def test_the_key_reads_like_lmcaches_and_hashes_like_a_value() -> None:
    key = CacheEngineKey("org/model", 1, 0, 0xC0FFEE, torch.bfloat16)
    assert key.request_configs == {}
    assert key.to_string() == "org/model@1@0@0000000000c0ffee@bfloat16"
    assert {key: 1}[CacheEngineKey("org/model", 1, 0, 0xC0FFEE, torch.bfloat16, {})] == 1
    assert key != CacheEngineKey("org/model", 1, 0, 0xC0FFEE, torch.float16)


def test_identity_is_the_documented_hash() -> None:
    expected = hashlib.sha256(struct.pack("<QQ", 2, 3) + b"ns" + "aé".encode()).digest()
    assert entry_identity("ns", "aé") == expected
    assert [identities_in("ns")(name) for name in ("aé", "b")] == [expected, entry_identity("ns", "b")]


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_different_names_have_different_identities(space: str, name: str, other_space: str, other_name: str) -> None:
    same = (space, name) == (other_space, other_name)
    assert (entry_identity(space, name) == entry_identity(other_space, other_name)) == same
    assert len(entry_identity(space, name)) == 32


@given(TEXTS, TEXTS, st.integers(0, 100))
def test_moving_the_border_changes_the_identity(space: str, name: str, cut: int) -> None:
    joined = space + name
    cut %= len(joined) + 1
    if cut != len(space):
        assert entry_identity(joined[:cut], joined[cut:]) != entry_identity(space, name)


def test_a_surrogate_pair_is_not_the_character_it_stands_for() -> None:
    assert entry_identity("", "\ud83d\ude00") != entry_identity("", "\U0001f600")


# ---------------------------------------------------------------- configuration parts

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def named(parts: Mapping[str, object]) -> str:
    return namespace_of(parts, None, fallback="org/model@main")


def shuffled(value: object, rng: random.Random) -> object:
    if isinstance(value, dict):
        items = [(key, shuffled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return tuple(shuffled(item, rng) for item in value)
    return value


@settings(max_examples=40)
@given(st.dictionaries(TEXTS, JSON, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_parts_does_not_matter(parts: dict[str, object], rng: random.Random) -> None:
    other = shuffled(parts, rng)
    assert isinstance(other, dict)
    assert named(parts) == named(other)


def test_every_part_matters() -> None:
    base: dict[str, object] = {"dtype": "bfloat16", "vision": {"depth": 2, "patch": [14, 14]}, "lora": None}
    variants: list[dict[str, object]] = [
        base,
        {},
        {**base, "dtype": "float16"},
        {**base, "vision": {"depth": 3, "patch": [14, 14]}},
        {**base, "vision": {"depth": 2, "patch": [14, 15]}},
        {**base, "vision": {"depth": "2", "patch": [14, 14]}},
        {**base, "vision": {"depth": True, "patch": [14, 14]}},
        {**base, "lora": ""},
        {**base, "more": None},
    ]
    assert len({named(parts) for parts in variants}) == len(variants)


class Word(enum.StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ({"a": {1: "x"}}, "parts['a'] has the key 1"),
        ({"a": [0, {"b": Path("/models/a")}]}, "parts['a'][1]['b'] is"),
        ({"a": {1, 2}}, "parts['a'] is"),
        ({"a": b"x"}, "parts['a'] is"),
        ({"a": torch.bfloat16}, "parts['a'] is torch.bfloat16"),
        ({"a": Word.ONE}, "parts['a'] is"),
    ],
)
def test_a_part_without_one_json_form_is_an_error(parts: dict[str, object], where: str) -> None:
    with pytest.raises(TypeError) as error:
        named(parts)
    assert where in str(error.value)


# ---------------------------------------------------------------- weights


def write(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1, name: str = "model") -> Path:
    """A checkpoint of `tensors` dealt out over `shards` safetensors files."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    for shard in range(shards):
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / f"{name}-{shard:05}.safetensors", metadata={"format": "pt", "shard": str(shard)})
    return folder


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "lm_head.weight": torch.randn(64, 32),
        "model.text_model.embed_tokens.weight": torch.randn(64, 32),
        "model.text_model.layers.0.mlp.down_proj.weight": torch.randn(32, 64),
        "model.text_model.norm.weight": torch.randn(32),
        "model.connector.modality_projection.proj.weight": torch.randn(32, 48),
        "model.vision_model.embeddings.patch_embedding.weight": torch.randn(48, 3, 4, 4),
        "model.vision_model.encoder.layers.0.mlp.fc1.weight": torch.randn(100, 200),
        "model.vision_model.post_layernorm.bias": torch.zeros(48),
        "model.vision_model.empty": torch.zeros(0, 7),
    }


def test_equal_content_is_equal_wherever_and_however_it_is_stored(tmp_path: Path) -> None:
    tensors = checkpoint()
    expected = weights_fingerprint(write(tmp_path / "a", tensors))
    turned = dict(reversed(tensors.items()))
    assert weights_fingerprint(write(tmp_path / "b", turned, shards=4, name="other")) == expected
    both = write(tmp_path / "c", tensors)
    write(both, tensors, name="consolidated")
    assert weights_fingerprint(both) == expected
    linked = tmp_path / "d"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(tmp_path / "a" / "model-00000.safetensors")
    (linked / "config.json").write_text("{}")
    assert weights_fingerprint(linked) == expected
    assert namespace_of({}, linked) == namespace_of({}, tmp_path / "a", fallback="not used")


def test_another_language_model_is_the_same_namespace(tmp_path: Path) -> None:
    tensors = checkpoint()
    expected = weights_fingerprint(write(tmp_path / "a", tensors))
    prefix = "model.text_model.layers.0.mlp.down_proj"
    quantised = {name: tensor for name, tensor in tensors.items() if name != f"{prefix}.weight"}
    quantised |= {
        f"{prefix}.qweight": torch.zeros(4, 64, dtype=torch.int32),
        f"{prefix}.scales": torch.ones(1, 64, dtype=torch.float16),
        "lm_head.weight": torch.randn(64, 32).half(),
    }
    assert weights_fingerprint(write(tmp_path / "b", quantised)) == expected


ENCODER = [name for name in checkpoint() if not in_language_model(name)]


@pytest.mark.parametrize("name", ENCODER)
def test_every_encoder_tensor_matters(tmp_path: Path, name: str) -> None:
    tensors = checkpoint()
    seen = {weights_fingerprint(write(tmp_path / "a", tensors))}
    tensor = tensors[name]
    changed = [
        {**tensors, name: tensor.to(torch.float64)},
        {**tensors, name: tensor.reshape(-1, 1)},
        {**{key: value for key, value in tensors.items() if key != name}, f"{name}_": tensor},
        {key: value for key, value in tensors.items() if key != name},
    ]
    if tensor.numel():
        nudged = tensor.clone()
        nudged.view(-1)[0] += 1
        changed.append({**tensors, name: nudged})
    for index, variant in enumerate(changed):
        seen.add(weights_fingerprint(write(tmp_path / str(index), variant)))
    assert len(seen) == 1 + len(changed)


def test_bytes_of_the_start_the_middle_and_the_end_are_sampled(tmp_path: Path) -> None:
    size = 100_000
    data = torch.zeros(size, dtype=torch.uint8)
    expected = weights_fingerprint(write(tmp_path / "plain", {"visual.w": data}))
    middle = (size - SAMPLE_BYTES) // 2
    sampled = {0, SAMPLE_BYTES - 1, middle, middle + SAMPLE_BYTES - 1, size - SAMPLE_BYTES, size - 1}
    for at in sampled | {SAMPLE_BYTES, middle - 1, middle + SAMPLE_BYTES, size - SAMPLE_BYTES - 1}:
        changed = data.clone()
        changed[at] = 1
        same = weights_fingerprint(write(tmp_path / "changed", {"visual.w": changed})) == expected
        assert same == (at not in sampled)


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, 3 * SAMPLE_BYTES])
def test_all_of_a_small_tensor_is_read(tmp_path: Path, size: int) -> None:
    seen = {weights_fingerprint(write(tmp_path / "plain", {"visual.w": torch.zeros(size, dtype=torch.uint8)}))}
    places = {0, size // 3, size // 2, size - 1} if size else set()
    for at in places:
        data = torch.zeros(size, dtype=torch.uint8)
        data[at] = 1
        seen.add(weights_fingerprint(write(tmp_path / "changed", {"visual.w": data})))
    assert len(seen) == 1 + len(places)


def test_without_safetensors_the_fallback_stands_in(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert weights_fingerprint(tmp_path) is None
    names = {
        namespace_of({}, tmp_path, fallback="org/a@main"),
        namespace_of({}, tmp_path, fallback="org/a@v2"),
        namespace_of({}, write(tmp_path / "w", {"visual.w": torch.ones(1)}), fallback="org/a@main"),
    }
    assert len(names) == 3
    assert namespace_of({}, None, fallback="org/a@main") in names
    for folder in (None, tmp_path):
        with pytest.raises(ValueError, match="no fallback"):
            namespace_of({}, folder)


def raw(header: bytes | object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def described(**changes: object) -> dict[str, object]:
    return {"visual.w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        raw(b""),
        raw(b"{}", length=1 << 62),
        raw(b"{}", length=3),
        raw(b"{", b"1234"),
        raw(b"\xff\xfe"),
        raw(b"[" * 50_000),
        raw([1, 2]),
        raw({"visual.w": 7}),
        raw({"visual.w": {"dtype": "F32"}}),
        raw(described(dtype=3), b"1234"),
        raw(described(shape=["1"]), b"1234"),
        raw(described(shape=1), b"1234"),
        raw(described(data_offsets=[0, 5]), b"1234"),
        raw(described(data_offsets=[3, 2]), b"1234"),
        raw(described(data_offsets=[-8, 4]), b"1234"),
        raw(described(data_offsets=[0]), b"1234"),
        raw(described(data_offsets=["0", "4"]), b"1234"),
        raw(described(data_offsets=[0, 1 << 70]), b"1234"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        namespace_of({}, tmp_path, fallback="org/a")


# ---------------------------------------------------------------- whose tensor is it

LANGUAGE = """
model.layers.0.self_attn.q_proj.weight
model.layers.11.mlp.experts.3.down_proj.weight_scale
model.norm.weight
lm_head.weight
model.lm_head.weight
language_model.model.layers.0.input_layernorm.weight
language_model.model.norm.weight
language_model.lm_head.weight
language_model.output.weight
language_model.backbone.layers.3.mixer.in_proj.weight
language_model.model.decoder.layers.3.fc1.weight
model.language_model.layers.35.mlp.gate_proj.weight_scale_inv
model.language_model.norm.weight
model.text_model.layers.1.self_attn.o_proj.weight
model.text_model.norm.weight
llm.model.layers.0.mlp.up_proj.qweight
llm.lm_head.weight
language.model.layers.0.self_attn.kv_b_proj.weight
thinker.model.layers.0.mlp.up_proj.weight
thinker.lm_head.weight
vlm.model.language_model.layers.0.mlp.up_proj.weight
layers.0.attention.wq.weight
norm.weight
output.weight
"""

ENCODERS = """
visual.blocks.0.attn.qkv.weight
visual.merger.ln_q.weight
model.visual.deepstack_merger_list.0.norm.weight
model.visual.blocks.26.norm1.bias
vision_tower.vision_model.encoder.layers.0.layer_norm1.bias
vision_tower.text_model.encoder.layers.0.layer_norm1.bias
vision_tower.transformer.layers.0.attention.q_proj.weight
model.vision_tower.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight
model.mm_projector.0.weight
multi_modal_projector.linear_1.weight
model.multi_modal_projector.norm.weight
model.image_newline
image_newline
model.vision_model.encoder.layers.0.mlp.fc1.weight
model.connector.modality_projection.proj.weight
model.connector.perceiver_resampler.layers.0.self_attn.q_proj.weight
model.connector.perceiver_resampler.norm.weight
vision_model.encoder.layers.0.norm1.weight
mlp1.0.weight
audio_tower.layers.0.fc1.weight
audio_tower.layer_norm.weight
multi_modal_projector.ln_mid.weight
vision_encoder.transformer.layers.0.attention.wq.weight
vision_language_adapter.w_in.weight
mm_whisper_embeddings.whisper_encoder.transformer.layers.0.attention.wq.weight
pre_mm_projector_norm.weight
model.vision_embed_tokens.img_processor.vision_model.encoder.layers.0.mlp.fc1.weight
model.embed_tokens_extend.audio_embed.encoder.encoders.0.norm.weight
vpm.encoder.layers.0.mlp.fc1.weight
resampler.attn.in_proj_weight
thinker.audio_tower.layers.0.fc1.weight
thinker.visual.blocks.0.norm1.weight
transformer.vision.transformer.layers.0.mlp.fc1.weight
model.encoder.layers.0.fc1.weight
model.projector.layers.weight
model.sam_model.blocks.0.norm1.weight
model.vision_model.transformer.layers.0.mlp.fc1.weight
projector.layers.0.weight
visual_tokenizer.backbone.encoder.layers.0.norm.weight
qformer.encoder.layer.0.attention.output.dense.weight
language_projection.weight
text_projection.weight
model.embed_vision.embedding.weight
model.embed_tokens.weight
language_model.model.embed_tokens.weight
model.text_model.embed_tokens.weight
tok_embeddings.weight
model.transformer.blocks.0.att_proj.weight
backbone.layers.0.mlp.fc1.weight
transformer.layers.0.mlp.fc1.weight
blocks.0.norm1.weight
something.nobody.knows
model
language_model
layer
"""


@pytest.mark.parametrize("name", LANGUAGE.split())
def test_tensors_of_language_models_are_recognised(name: str) -> None:
    assert in_language_model(name)


@pytest.mark.parametrize("name", ENCODERS.split())
def test_tensors_of_encoders_and_unknown_ones_are_not(name: str) -> None:
    assert not in_language_model(name)


@given(TEXTS)
def test_any_name_is_judged(name: str) -> None:
    assert in_language_model(f"vision_tower.{name}") is False
    in_language_model(name)
