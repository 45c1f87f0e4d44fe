"""Folders of models without weights, in the sizes of published ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path

from transformers import LlamaConfig

from tests.published_heads import PublishedHead


def llama(*sizes: int, dtype: str = "bfloat16") -> LlamaConfig:
    """A Llama of so many layers, width, heads, KV heads, inner width, tokens, text."""
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        dtype=dtype,
        **dict(zip(names, sizes, strict=True)),
    )


LLAMA_70B = llama(80, 8192, 64, 8, 28672, 32000, 4096, dtype="float16")
TINY_LLAMA = llama(22, 2048, 32, 4, 5632, 32000, 2048)
LLAMA_8B = llama(32, 4096, 32, 8, 14336, 128256, 131072)
# an EAGLE-3 head for it, as published: three hidden states, 32,000 draft tokens
EAGLE_8B = PublishedHead(
    form="eagle3",
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    draft_vocab_size=32000,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layer_ids=None,
    max_positions=2048,
    rope={"rope_theta": 10000.0},
)
# yuhuili/EAGLE-llama2-chat-70B: one layer of the target's shape, and a plain fc
EAGLE_70B = PublishedHead(
    form="eagle",
    hidden_size=8192,
    intermediate_size=28672,
    vocab_size=32000,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    lm_head=False,
    max_positions=4096,
    rope={"rope_theta": 10000.0},
)


def write_config(folder: Path, config: LlamaConfig) -> str:
    """A folder that holds a ``config.json`` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder)


def write_hollow(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of its full length, which takes no room on disk.

    Weights are float16; ``d2t``, the target's ids of a draft vocabulary, is int64.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype, width = ("I64", 8) if name == "d2t" else ("F16", 2)
        begin, end = end, end + width * prod(shape)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_hollow_head(folder: Path, head: PublishedHead) -> str:
    """The folder of a published head whose weights are hollow."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head.config()))
    shapes = head.shapes()
    if head.draft_vocab_size is not None:
        shapes["d2t"] = (head.draft_vocab_size,)
    write_hollow(folder / "model.safetensors", shapes)
    return str(folder)
