"""Builds a tiny random Idefics3 that vLLM serves on two CPU cores: `python tiny_model.py FOLDER`.

Owns the recipe: a byte-level tokenizer, a processor that cuts an image into tiles, and seeded random weights, so that
two builds on one machine are equal. It downloads nothing, and needs no torchvision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

_IMAGE, _TILE_EDGE, _GLOBAL, _END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
_BEGIN, _PAD, _UNKNOWN = "<|im_start|>", "<pad>", "<unk>"
_TILE_NAMES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<image>{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif %}<end_of_utterance>
{% endfor -%}
{%- if add_generation_prompt -%}assistant: {% endif -%}"""


def _tokenizer() -> PreTrainedTokenizerFast:
    special = [_BEGIN, _END, _PAD, _UNKNOWN, _IMAGE, _TILE_EDGE, _GLOBAL, *_TILE_NAMES]
    vocabulary = {token: number for number, token in enumerate(special)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(byte, len(vocabulary))
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_UNKNOWN))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        extra_special_tokens={
            "image_token": _IMAGE,
            "fake_image_token": _TILE_EDGE,
            "global_image_token": _GLOBAL,
            "end_of_utterance_token": _END,
        },
    )


def build(folder: Path, *, tile: int = 224, tower_width: int = 64, tower_layers: int = 2, width: int = 128) -> None:
    """Write model, tokenizer and processor to `folder`.

    An embedding is (rows, `width`) bfloat16, 64 rows per tile of `tile` x `tile` pixels; an image of 400x300 has five
    tiles (2 x 2 and a small copy of the whole). `tower_width` and `tower_layers` make the encoder slower, `width` the
    embedding larger.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    patch, merge, heads = 14, 2, max(2, tower_width // 64)
    tokenizer = _tokenizer()
    token: dict[str, int] = tokenizer.get_vocab()
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * tile}, max_image_size={"longest_edge": tile}, do_image_splitting=True
        ),
        tokenizer=tokenizer,
        image_seq_len=(tile // patch // merge) ** 2,
        chat_template=_CHAT_TEMPLATE,
    )
    language: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": width,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "bos_token_id": token[_BEGIN],
        "eos_token_id": token[_END],
        "pad_token_id": token[_PAD],
        "tie_word_embeddings": False,
    }
    tower: dict[str, Any] = {
        "hidden_size": tower_width,
        "intermediate_size": 2 * tower_width,
        "num_hidden_layers": tower_layers,
        "num_attention_heads": heads,
        "image_size": tile,
        "patch_size": patch,
    }
    config = Idefics3Config(
        vision_config=tower,
        text_config=language,
        scale_factor=merge,
        image_token_id=token[_IMAGE],
        pad_token_id=token[_PAD],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).bfloat16()
    for weight in model.parameters():
        if weight.dim() > 1:
            # Large enough that different images give different tokens, small enough that wide layers stay in range.
            torch.nn.init.normal_(weight, std=min(0.05, weight.shape[-1] ** -0.5))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower-width", type=int, default=64, help="a multiple of 64; 512 is a visibly slow encoder")
    parser.add_argument("--tower-layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help="of the embedding; a multiple of 64")
    args = parser.parse_args()
    build(args.folder, tower_width=args.tower_width, tower_layers=args.tower_layers, width=args.width)
    print(f"tiny Idefics3 in {args.folder}")


if __name__ == "__main__":
    main()
