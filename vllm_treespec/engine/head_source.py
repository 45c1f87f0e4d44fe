"""A draft head beside vLLM's target: how it is loaded, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from vllm._custom_ops import rms_norm
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_treespec.batch.stats import StepStats
from vllm_treespec.heads import Head, OutputLayer, load_head
from vllm_treespec.heads.decoder import RMSNorm
from vllm_treespec.heads.source import HeadSource


class EngineHeadSource(HeadSource):
    """A head that shares weights of the loaded target."""

    def __init__(self, vllm_config: VllmConfig, folder: str, stats: StepStats) -> None:
        """Prepare to load the head in ``folder``."""
        super().__init__(stats)
        self.folder = Path(folder)
        self.device = vllm_config.device_config.device
        self.dtype = vllm_config.model_config.dtype

    def load(self, target_model: torch.nn.Module) -> None:
        """Load the head and let it share weights of the loaded target.

        Raises:
            ValueError: the target's embedding or output layer is not found, or is
                quantised.

        """
        self.head = load_head(self.folder).to(device=self.device, dtype=self.dtype)
        config = self.head.config
        if config.share_embedding or config.share_output:
            self.head.share(*shared_weights(target_model))
        if self.device.type == "cpu":
            pack_layers(self.head)


class PackedLinear(torch.nn.Module):
    """A linear layer with its weight packed for vLLM's kernel on this CPU.

    At the few rows of a beam PyTorch's own takes two to three times as long.
    """

    cpu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(self, layer: torch.nn.Linear | OutputLayer) -> None:
        """Pack the layer."""
        super().__init__()
        self.weight = torch.nn.Parameter(layer.weight.detach(), requires_grad=False)
        self.bias = layer.bias
        dispatch_cpu_unquantized_gemm(self, remove_weight=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [..., in_features]."""
        return self.cpu_linear(x, self.weight, self.bias)


class FusedNorm(torch.nn.Module):
    """A norm on vLLM's kernel for this CPU; PyTorch's own is a chain of operations."""

    def __init__(self, norm: RMSNorm) -> None:
        """Take the norm's weight."""
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to [..., size]."""
        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
        rms_norm(normed, x.contiguous(), self.weight, self.eps)
        return normed


def pack_layers(head: Head) -> None:
    """Put vLLM's kernels for this CPU into a head, its output layer too."""
    for name, layer in list(head.named_modules()):
        if isinstance(layer, torch.nn.Linear | OutputLayer):
            head.set_submodule(name, PackedLinear(layer))
        elif isinstance(layer, RMSNorm):
            head.set_submodule(name, FusedNorm(layer))


def shared_weights(
    target_model: torch.nn.Module,
) -> tuple[Tensor | None, Tensor | None]:
    """Find the embedding and the output layer of a vLLM model.

    Both are found by their layer's type, which all text models of vLLM share, and
    inside LoRA's wrappers too. Tensor-parallel ranks must call this together.

    Returns:
        [at least vocab_size, hidden_size], both; the same tensor when they are tied.
        The target's own tensors, unless ranks hold a part each. None for a layer that
        is quantised.

    Raises:
        ValueError: when there is not exactly one embedding and at most one output
            layer.

    """
    outputs: list[VocabParallelEmbedding] = []
    embeddings: list[VocabParallelEmbedding] = []
    for layer in target_model.modules():
        if isinstance(layer, ParallelLMHead):
            outputs.append(layer)
        elif isinstance(layer, VocabParallelEmbedding):
            embeddings.append(layer)
    if len(embeddings) != 1 or len(outputs) > 1:
        raise ValueError(
            f"the head shares the target's embedding and output layer, and "
            f"{type(target_model).__name__} has {len(embeddings)} and {len(outputs)} "
            f"of them; train a head with --own-embedding and --own-output, or remove "
            f"speculative_config"
        )
    embedding = whole_weight(embeddings[0])
    if not outputs or is_tied(outputs[0], embeddings[0]):
        return embedding, embedding
    return embedding, whole_weight(outputs[0])


def is_tied(output: VocabParallelEmbedding, embedding: VocabParallelEmbedding) -> bool:
    """Whether two layers have one weight."""
    if is_quantised(output) or is_quantised(embedding):
        return False
    return output.weight is embedding.weight


def is_quantised(layer: VocabParallelEmbedding) -> bool:
    """Whether the rows of a layer lie in another form than the head can read."""
    return not isinstance(layer.quant_method, UnquantizedEmbeddingMethod)


def whole_weight(layer: VocabParallelEmbedding) -> Tensor | None:
    """The rows of all tokens, [at least vocab_size, hidden_size].

    Ranks hold equal parts, padded; this puts them together in the order of the
    tokens, with the padding behind them. None: the layer is quantised.
    """
    if is_quantised(layer):
        return None
    order = layer.get_sharded_to_full_mapping()
    if order is None:
        return layer.weight
    parts = tensor_model_parallel_all_gather(layer.weight.detach(), dim=0)
    return parts[torch.tensor(order, device=parts.device)]
