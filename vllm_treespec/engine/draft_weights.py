"""vLLM's loader of weights, strict: a draft model without some is refused.

vLLM checks that every parameter is loaded, but for those of linear layers and
embeddings, and for quantised models. Such parameters hold whatever was in memory.
"""

from __future__ import annotations

import textwrap
from collections.abc import Generator

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_treespec.heads.weights import listed

# Weights of a layer that vLLM leaves as memory was, and how many dimensions they have
# at least: of one scale for all rows of joined matrices only a part is loaded.
MARKED = {"weight": 1, "bias": 1, "weight_scale": 2}
# What vLLM's loaders of single weights raise.
MISFITS = (AssertionError, IndexError, KeyError, RuntimeError, ValueError)


class DraftModelLoader(DefaultModelLoader):
    """Loads a draft model whose files hold its weights, all of them and no others."""

    # name and shape
    last_read = "none"

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load the weights.

        Raises:
            ValueError: one is missing, left over, of another shape, or NaN.

        """
        marked = {
            f"{prefix}.{name}": weight
            for prefix, layer in model.named_modules()
            if isinstance(layer, LinearBase | VocabParallelEmbedding)
            for name, weight in layer.named_parameters(recurse=False)
            if weight.dim() >= MARKED.get(name, 3) and has_mark(weight)
        }
        for weight in marked.values():
            weight.data.fill_(mark(weight.dtype))
        self.enable_weights_track = True
        try:
            super().load_weights(model, model_config)
        except MISFITS as error:
            reason = textwrap.shorten(str(error), 200) or "another shape"
            reason = f"{reason}; the last tensor read was {self.last_read}"
            raise misfit(model_config, reason) from error
        left = [name for name, weight in marked.items() if is_marked(weight)]
        if left:
            raise misfit(model_config, f"missing in part, or NaN: {listed(left)}")

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, Tensor]]:
        """Read the files' tensors, and remember the last one for a message."""
        for name, weight in super().get_all_weights(model_config, model):
            self.last_read = f"{name} {list(weight.shape)}"
            yield name, weight

    def track_weights_loading(
        self,
        model: torch.nn.Module,
        loaded_weights: set[str] | None,
        quantized: bool = False,
    ) -> None:
        """Check norms and the like, of quantised models as of others."""
        super().track_weights_loading(model, loaded_weights)


def has_mark(weight: Tensor) -> bool:
    """Whether a weight's dtype has a number of which no row of a model consists.

    Weights that are quantised while they are loaded have no numbers yet.
    """
    sixteen_bits_or_more = weight.is_floating_point() and weight.element_size() > 1
    return not weight.is_meta and (sixteen_bits_or_more or weight.dtype == torch.int8)


def mark(dtype: torch.dtype) -> float:
    """What a weight holds before it is loaded: NaN, or -128."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def is_marked(weight: Tensor) -> bool:
    """Whether a row of a weight was not loaded."""
    if weight.is_floating_point():
        return bool(weight.isnan().any())
    return bool((weight == mark(weight.dtype)).all(dim=-1).any())


def misfit(model_config: ModelConfig, reason: str) -> ValueError:
    """The refusal of a draft model's weights."""
    return ValueError(
        f"speculative_config 'model': the weights of {model_config.model} do not fit "
        f"its config.json ({reason}); copy or save the draft model again"
    )
