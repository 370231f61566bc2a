"""The namespace of real configurations: what vLLM itself makes of its arguments."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_model
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from ec_p2p.config import make_config
from ec_p2p.connector.namespace import namespace


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("namespace") / "model"
    tiny_model.build(folder)
    return folder


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "elsewhere" / "copy")


def name(folder, **arguments):
    vllm_config = EngineArgs(
        model=str(folder), max_model_len=512, enforce_eager=True, **arguments
    ).create_engine_config()
    return namespace(make_config({}), vllm_config)


def test_equal_content_in_two_folders_is_one_namespace(model, copy):
    assert name(model) == name(copy)


def test_what_does_not_change_an_embedding_does_not_count(model):
    assert name(model) == name(model, max_num_seqs=3, seed=7, max_num_batched_tokens=600)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float16"},
        {"revision": "0123456789abcdef"},
        {"mm_processor_kwargs": {"size": {"longest_edge": 448}}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
    ],
    ids=str,
)
def test_one_other_argument_is_another_namespace(model, arguments):
    assert name(model) != name(model, **arguments)


def test_one_other_encoder_weight_is_another_namespace(model, copy):
    before = name(copy)
    [file] = copy.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118 (not a dict)
        metadata = opened.metadata()
    encoder = next(key for key in sorted(tensors) if "vision" in key)
    language = next(key for key in sorted(tensors) if "layers" in key and "vision" not in key)
    tensors[language] += 1
    save_file(tensors, file, metadata)
    assert name(copy) == before
    tensors[encoder].view(-1)[0] += 1
    save_file(tensors, file, metadata)
    assert name(copy) != before


def test_one_other_processor_option_is_another_namespace(model, copy):
    path = next(path for path in (copy / "preprocessor_config.json", copy / "processor_config.json") if path.exists())
    settings = json.loads(path.read_text())
    settings["do_rescale"] = False
    path.write_text(json.dumps(settings))
    assert name(model) != name(copy)
