"""Shapes of the targets of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import heads


class Shape(NamedTuple):
    """Sizes of a Llama; the names are those of its config file."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def write(self, folder: Path, **changes: Any) -> str:
        """Write a folder that vLLM loads with ``load_format="dummy"``; returns it.

        ``changes``: of the config file.
        """
        from transformers import LlamaConfig

        config = {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "dtype": "bfloat16",
            **self._asdict(),
        }
        LlamaConfig(**{**config, **changes}).save_pretrained(folder)
        return str(folder)

    def write_head(self, folder: Path) -> str:
        """Write a folder of an EAGLE-3 head, to be loaded alike; returns it."""
        return self.write(
            folder,
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=min(self.vocab_size, heads.DRAFT_VOCABULARY),
        )


# 70b-tp8 is what one of eight tensor-parallel ranks computes of a 70B model, without
# the communication between the ranks.
SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2, 64, 1024),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "70b-tp8": Shape(8192, 3584, 80, 8, 1, 128, 16032),
}
