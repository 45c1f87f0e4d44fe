"""The draft model: a small Llama whose tied embedding is cut out of the target's."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from vllm_treespec.atomic_files import atomic_writes

# RMS of one embedding entry at the start. Llama adds layer outputs to the embedding as
# it is. The outputs of fresh layers, which are added to it, have an RMS of about 0.1.
EMBEDDING_RMS = 0.12


@dataclass(frozen=True)
class DraftShape:
    """Sizes of the draft model; everything else is taken over from the target.

    The head costs ``vocab_size * hidden_size`` per draft step and dominates, so
    ``hidden_size`` is the number to keep small.
    """

    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 768


@dataclass(frozen=True)
class TargetStatistics:
    """What the start of the draft model needs to know of the target's outputs.

    Attributes:
        token_weights: float32 [vocab_size], how often the target gives each token,
            summing to 1; errors in frequent tokens' logits count more.
        hidden_moment: float32 [target_hidden, target_hidden], mean of x x^T over
            positions, x being the target's hidden state after the final norm.
    """

    token_weights: Tensor
    hidden_moment: Tensor

    def likeliest(self, count: int) -> Tensor:
        """The most frequent tokens, int64 [count], ascending."""
        return self.token_weights.topk(count).indices.sort().values

    @classmethod
    def without_text(cls, target: PreTrainedModel) -> "TargetStatistics":
        """Assume uniform tokens and a hidden state that fills its norm evenly."""
        vocab_size = target.config.vocab_size
        norm = target.model.norm.weight.detach().float()
        return cls(torch.full((vocab_size,), 1 / vocab_size), torch.diag(norm**2))


def draft_config(target: PretrainedConfig, shape: DraftShape) -> LlamaConfig:
    """Return the draft model's config: the target's vocabulary, positions and rope.

    Raises:
        ValueError: the target scales its rotary positions, which is not supported.
    """
    rope = dict(target.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope_parameters.rope_type={rope['rope_type']!r} of the target is not"
            " supported for a draft model: use a target with rope_type 'default'"
        )
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        use_cache=True,
    )


def project_embedding(
    embedding: Tensor, statistics: TargetStatistics, hidden_size: int
) -> Tensor:
    """Cut the target's output embedding down to ``hidden_size`` columns.

    Weighted PCA: the columns span the space in which the error of the logits,
    ``sum_v weight[v] * E_x (embedding[v] @ x - D[v] @ y(x))^2``, is least, where y(x)
    is the best linear image of the target's hidden state x. The weighted mean row is
    taken off first: it moves all logits of a position alike. Columns are scaled by the
    inverse square root of their singular value. That is half way between logits, whose
    first directions would be far larger than the outputs of fresh layers, and whitened
    rows, whose directions are all of one size.

    Args:
        embedding: float [vocab_size, target_hidden].

    Returns:
        float32 [vocab_size, hidden_size].
    """
    # float64 from here to the eigenvectors: the spectrum spans many decades.
    weights = statistics.token_weights.double()
    centred = embedding.double() - weights @ embedding.double()
    values, vectors = torch.linalg.eigh(statistics.hidden_moment.double())
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    whitened = centred @ root
    gram = whitened.T @ (weights[:, None] * whitened)
    squares, directions = torch.linalg.eigh(gram)
    kept = squares.flip(0)[:hidden_size].clamp_min(torch.finfo(torch.float64).tiny)
    return (whitened @ directions.flip(1)[:, :hidden_size] / kept**0.25).float()


def build_draft(
    target: PreTrainedModel,
    shape: DraftShape,
    statistics: TargetStatistics,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a float32 draft model: projected embedding, fresh layers.

    The embedding is scaled to ``EMBEDDING_RMS``; with norm weights of 1 fresh layers
    then give logits of standard deviation ``EMBEDDING_RMS * hidden_size ** 0.5``.
    """
    torch.manual_seed(seed)
    draft = LlamaForCausalLM(draft_config(target.config, shape)).float()
    # The statistics are on the CPU, whatever device the target is on.
    head = target.get_output_embeddings().weight.detach().cpu()
    embedding = project_embedding(head, statistics, shape.hidden_size)
    scale = EMBEDDING_RMS / embedding.pow(2).mean().sqrt()
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(embedding * scale)
    return draft


def save_draft(draft: LlamaForCausalLM, folder: Path, max_mb: float | None) -> float:
    """Write config and bfloat16 safetensors; return the size of the weights in MB.

    Raises:
        ValueError: the file is larger than ``max_mb`` (10^6 bytes).
    """
    draft = draft.to(torch.bfloat16)
    draft.config.dtype = "bfloat16"
    draft.config.use_cache = True  # the Trainer switches it off
    with atomic_writes(folder) as partial:
        draft.save_pretrained(partial)
    return check_size(folder / "model.safetensors", max_mb, "--hidden-size")


def check_size(path: Path, max_mb: float | None, options: str) -> float:
    """Return a file's size in MB (10^6 bytes).

    Raises:
        ValueError: it is larger than ``max_mb``.
    """
    size_mb = path.stat().st_size / 1e6
    if max_mb is not None and size_mb > max_mb:
        raise ValueError(
            f"{path} has {size_mb:.1f} MB, more than the {max_mb:g} MB allowed:"
            f" lower {options} or raise --max-mb"
        )
    return size_mb
