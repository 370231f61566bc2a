"""What changes an embedding changes the namespace, and nothing else does."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import Idefics3Config

from ec_p2p.config import make_config
from ec_p2p.connector.namespace import embedding_parts, model_directory, namespace, plain


def write_model(folder, vision=1.0, language=1.0):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "model.vision_model.patch.weight": torch.full((64, 64), vision),
            "model.text_model.layers.0.q.weight": torch.full((64, 64), language),
        },
        folder / "model.safetensors",
    )
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 364}))
    return folder


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def vllm_config(folder, hf=None, dtype=torch.bfloat16, quantization=None, load_format="auto", **multimodal):
    hf = hf or Idefics3Config(vision_config={"hidden_size": 32}, text_config={"model_type": "llama"})
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            hf_config=hf,
            dtype=dtype,
            quantization=quantization,
            multimodal_config=SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}, **multimodal),
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def name(folder, **settings):
    return namespace(make_config({}), vllm_config(folder, **settings))


def hf_config(**changes):
    hf = Idefics3Config(vision_config={"hidden_size": 32}, text_config={"model_type": "llama"})
    for key, value in changes.items():
        setattr(hf, key, value)
    return hf


def test_it_is_equal_wherever_the_model_lies(model, tmp_path):
    assert name(model) == name(write_model(tmp_path / "elsewhere" / "copy"))


def test_the_language_model_and_its_quantisation_do_not_count(model, tmp_path):
    other = write_model(tmp_path / "int4", language=7.0)
    hf = hf_config(quantization_config={"quant_method": "awq"}, transformers_version="9", _name_or_path="/elsewhere")
    hf.text_config.num_hidden_layers = 3
    assert name(model) == name(other, hf=hf, quantization="awq")


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float16},
        {"hf": hf_config(scale_factor=9)},
        {"quantization": "fp8"},
        {"load_format": "dummy"},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
    ids=str,
)
def test_what_changes_an_embedding_counts(model, settings):
    assert name(model) != name(model, **settings)


def test_the_encoders_configuration_counts(model):
    hf = hf_config()
    hf.vision_config.patch_size = 99
    assert name(model) != name(model, hf=hf)


def test_the_encoders_weights_count(model, tmp_path):
    assert name(model) != name(write_model(tmp_path / "tuned", vision=2.0))


def test_the_processor_counts(model):
    before = name(model)
    (model / "preprocessor_config.json").write_text(json.dumps({"size": 100}))
    assert name(model) != before


def test_the_operator_has_the_last_word(model):
    assert namespace(make_config({"namespace": "mine-2"}), vllm_config(model)) == "mine-2"


def test_without_weights_the_models_name_counts(tmp_path, caplog):
    first, second = name("org/model-a"), name("org/model-b")
    assert first != second
    assert name("s3://bucket/model") != first
    model = write_model(tmp_path / "broken")
    (model / "model.safetensors").write_bytes(b"\xff" * 8)
    assert name(model) not in (first, second)
    assert "the weights say nothing" in caplog.text


def test_a_broken_processor_file_is_said_and_does_not_count(model, caplog):
    (model / "preprocessor_config.json").write_text("{")
    assert embedding_parts(vllm_config(model), model)["processor"] == {}
    assert "does not count" in caplog.text


def test_the_parts_are_json(model):
    hf = hf_config(odd={1: {torch.float16}, "f": print, "o": object(), "t": (1, 2)})
    parts = embedding_parts(vllm_config(model, hf=hf), model_directory(vllm_config(model)))
    assert json.loads(json.dumps(parts)) == parts
    assert " at 0x" not in json.dumps(parts)


def test_plain():
    assert plain({1: (True, None, {"b", "a"})}) == {"1": [True, None, ["a", "b"]]}
