"""Folders of models without weights, in the sizes of published ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from transformers import LlamaConfig

from tests.published_heads import PublishedHead

LLAMA_70B = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    num_hidden_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    num_key_value_heads=8,
    intermediate_size=28672,
    vocab_size=32000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    dtype="float16",
)
TINY_LLAMA = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    num_hidden_layers=22,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    intermediate_size=5632,
    vocab_size=32000,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    dtype="bfloat16",
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
    """A float16 safetensors file of its full length, which takes no room on disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, size = end, 2
        for number in shape:
            size *= number
        end = begin + size
        header[name] = {
            "dtype": "F16",
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
    write_hollow(folder / "model.safetensors", head.shapes())
    return str(folder)
