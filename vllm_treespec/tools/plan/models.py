"""Sizes of models, from ``config.json`` and the headers of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_treespec.config import SpecConfigError
from vllm_treespec.config.reading import read_config
from vllm_treespec.heads import HeadError
from vllm_treespec.heads.checkpoint import INDEX, listed_files
from vllm_treespec.heads.weights import tensor_headers, weights_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# vLLM pads the rows of embeddings and output layers to a multiple of this.
VOCABULARY_PADDING = 64
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WINDOWED = "sliding_attention"
ATTENTION = {"full_attention", WINDOWED}
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Model:
    """What memory depends on.

    Attributes:
        name: as the user wrote it.
        config: transformers'.
        shapes: of all weights, by their names.
        from_files: whether ``shapes`` are those of files.

    """

    name: str
    config: PretrainedConfig
    shapes: Mapping[str, tuple[int, ...]]
    from_files: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with keys and values."""
        return int(self.config.num_hidden_layers)

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest text; None: the configuration does not say it.

        Of scaled RoPE only linear and dynamic factors are not in its number already.
        """
        said = self.config.to_dict()
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        # layers of several kinds may have their own
        parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
        factors = [
            part.get("factor") or 1.0
            for part in parts
            if part.get("rope_type", part.get("type")) in ("linear", "dynamic")
        ]
        most = said.get("max_position_embeddings")
        return None if most is None else int(most * max(factors, default=1.0))

    @property
    def num_heads(self) -> int:
        """Query heads of all ranks."""
        return int(self.config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of all ranks."""
        said = self.config.to_dict()
        return next((said[key] for key in KV_HEADS if said.get(key)), self.num_heads)

    @property
    def head_size(self) -> int:
        """Size of one head."""
        said = self.config.to_dict().get("head_dim")
        return int(said or self.hidden_size // self.num_heads)

    @property
    def inner_size(self) -> int:
        """Width of the MLP."""
        said = self.config.to_dict().get("intermediate_size")
        return int(said or 4 * self.hidden_size)

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.config.vocab_size)

    def kv_heads(self, num_ranks: int) -> list[tuple[int, int]]:
        """Key-value heads of one rank and their size, of every layer."""
        num_heads = max(1, self.num_kv_heads // num_ranks)
        return [(num_heads, self.head_size)] * self.num_layers

    @property
    def windows(self) -> list[int | None]:
        """Tokens that each layer sees; None: all. One window for all is not counted."""
        said = self.config.to_dict()
        kinds = said.get("layer_types") or ()
        if len(set(kinds)) == 1 or not said.get("sliding_window"):
            kinds = ()
        return [
            int(said["sliding_window"]) if kind == WINDOWED else None for kind in kinds
        ] or [None] * self.num_layers

    def num_parameters(self, num_ranks: int = 1) -> int:
        """Parameters that one of so many tensor-parallel ranks holds."""
        return sum(
            self._num_rank_parameters(name, shape, num_ranks)
            for name, shape in self.shapes.items()
        )

    def _num_rank_parameters(
        self, name: str, shape: tuple[int, ...], num_ranks: int
    ) -> int:
        """Parameters of one tensor: matrices are divided, norms and biases are not."""
        size = math.prod(shape)
        if len(shape) < 2:
            return size
        if shape[0] == self.vocab_size:
            return padded(shape[0]) * shape[1] // num_ranks
        if re.search(r"\.[kv]_proj\.", name):
            num_ranks = min(num_ranks, self.num_kv_heads)
        return math.ceil(size / num_ranks)


def padded(vocab_size: int) -> int:
    """Rows that vLLM gives an embedding or an output layer."""
    return math.ceil(vocab_size / VOCABULARY_PADDING) * VOCABULARY_PADDING


def read_model(option: str, name: str) -> Model:
    """Read a model's sizes.

    Args:
        option: what the user named the model with, for messages.
        name: a folder, a ``config.json``, or a hub id, of which only the
            configuration is fetched.

    Raises:
        SpecConfigError: there is no such model, or trees do not support it.

    """
    config = read_config(option, name, AutoConfig.from_pretrained)
    path = Path(name)
    refuse_model(option, name, config)
    shapes = file_shapes(option, path, config) if path.is_dir() else {}
    if shapes:
        return Model(name, config, shapes, from_files=True)
    return Model(name, config, config_shapes(option, name, config), from_files=False)


def refuse_model(option: str, name: str, config: PretrainedConfig) -> None:
    """Refuse models that draft trees do not support, as the plugin does.

    Raises:
        SpecConfigError: naming what is not supported.

    """
    said = config.to_dict()
    unsupported = {
        "an encoder-decoder model": config.is_encoder_decoder,
        "multi-head latent attention": bool(said.get("kv_lora_rank")),
        "a hybrid or state-space model": bool(
            set(said.get("layer_types") or ()) - ATTENTION
        ),
    }
    for what, found in unsupported.items():
        if found:
            raise SpecConfigError(
                f"{option}: draft trees do not support {what} yet ({name}); name "
                f"another model"
            )
    if config.get_text_config() is not config:
        raise SpecConfigError(
            f"{option}: treespec plan does not know the sizes of multimodal models yet "
            f"({name}); name the config.json of its language model"
        )
    if said.get("quantization_config"):
        raise SpecConfigError(
            f"{option}: treespec plan does not know the sizes of quantised weights yet "
            f"({name}); name the model before it was quantised"
        )


def config_shapes(
    option: str, name: str, config: PretrainedConfig
) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that transformers makes of a configuration.

    Raises:
        SpecConfigError: transformers has no such architecture.

    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise SpecConfigError(
            f"{option}: transformers makes no model of {name} "
            f"({' '.join(str(error).split())}); name a folder with its safetensors"
        ) from None
    return {key: tuple(weight.shape) for key, weight in model.named_parameters()}


def file_shapes(
    option: str, folder: Path, config: PretrainedConfig
) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a folder's safetensors; none where it has none.

    Raises:
        SpecConfigError: a file is missing or broken.

    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        try:
            files = listed_files(folder / INDEX)
        except HeadError as error:
            raise SpecConfigError(
                f"{option}: {error}, or name the config.json alone"
            ) from None
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if problem := weights_problem(file):
            raise SpecConfigError(
                f"{option}: {problem}; copy the file again, or name the config.json "
                f"alone"
            )
        shapes |= {n: header.shape for n, header in tensor_headers(file).items()}
    if config.tie_word_embeddings:
        # a copy of the embedding, which vLLM does not load
        shapes.pop("lm_head.weight", None)
    return shapes
