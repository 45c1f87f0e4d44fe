"""Model shapes for benchmarks with random weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; the names are those of its config file."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


# 70b-tp8 is what one of eight tensor-parallel ranks computes of a 70B model, without
# the communication between the ranks.
SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2, 64, 1024),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "70b-tp8": Shape(8192, 3584, 80, 8, 1, 128, 16032),
}
CARD_SHAPES = "8b,70b-tp8"


def known_shapes(text: str) -> list[str]:
    """Read a comma-separated list of shapes; ValueError for one that is unknown."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in SHAPES:
            raise ValueError(
                f"--shapes: there is no {name!r}; there are {', '.join(SHAPES)}"
            )
    return names


def write_config(shape: Shape, folder: Path, dtype: str = "bfloat16") -> Path:
    """Write a folder that vLLM loads with ``load_format="dummy"``; returns it."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "attention_bias": False,
        "mlp_bias": False,
        **asdict(shape),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
