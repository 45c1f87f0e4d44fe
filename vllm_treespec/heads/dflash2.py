"""What DFlash2 adds to DFlash: convolutions along a block, and scores of edges.

Source: github.com/z-lab/dflash.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_treespec.heads.config import DFlashHeadConfig
from vllm_treespec.heads.decoder import Attend, DecoderLayer


class LayerConvolutions(nn.Module):
    """A decoder layer with convolutions around its attention and around its MLP."""

    def __init__(self, config: DFlashHeadConfig) -> None:
        """Make convolutions that change nothing."""
        super().__init__()
        self.attention = BlockConvolution(config)
        self.mlp = BlockConvolution(config)

    def decode(
        self,
        layer: DecoderLayer,
        x: Tensor,
        residual: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        num_rows: int,
    ) -> Tensor:
        """What the layer makes of blocks; see ``DecoderLayer.forward``.

        Args:
            layer: whose attention and MLP they are around.
            x: [num_reqs * num_rows, hidden_size].
            residual: [num_reqs * num_rows, hidden_size].
            angles: of the rows' positions.
            attend: attention over the context and the block.
            num_rows: of a block.

        Returns:
            [num_reqs * num_rows, hidden_size].

        """
        before, after = self.attention.kernels(x)
        x = layer.attention(convolved(x, before, num_rows), angles, attend)
        y = residual + convolved(x, after, num_rows)
        x = layer.post_attention_norm(y)
        before, after = self.mlp.kernels(x)
        x = layer.mlp(convolved(x, before, num_rows))
        return y + convolved(x, after, num_rows)


class BlockConvolution(nn.Module):
    """Two kernels that each row computes: one before a part of a layer, one after it.

    A kernel is a learned one for each channel, plus a computed one for each group of
    channels. Its tap t weighs the row t rows before, in the same block.
    """

    def __init__(self, config: DFlashHeadConfig) -> None:
        """Make kernels that keep each row as it is."""
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.group_size = config.conv_group_size
        base = torch.zeros(2, taps, size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.project = nn.Linear(size, 2 * taps * (size // self.group_size), bias=False)
        nn.init.zeros_(self.project.weight)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Kernels before and after, [n, taps, hidden_size], of [n, hidden_size]."""
        _, taps, size = self.base_kernel.shape
        computed = self.project(x).view(len(x), 2, taps, size // self.group_size)
        kernels = self.base_kernel + computed.repeat_interleave(self.group_size, -1)
        return kernels[:, 0], kernels[:, 1]


def convolved(x: Tensor, kernels: Tensor, num_rows: int) -> Tensor:
    """Weigh each row and those before it in its block.

    Args:
        x: [n, hidden_size], block after block.
        kernels: [n, taps, hidden_size].
        num_rows: of a block.

    Returns:
        [n, hidden_size].

    """
    blocks = x.unflatten(0, (-1, num_rows))
    weights = kernels.unflatten(0, (-1, num_rows))
    out = weights[:, :, 0] * blocks
    for tap in range(1, min(weights.shape[2], num_rows)):
        out[:, tap:] += weights[:, tap:, tap] * blocks[:, :-tap]
    return out.flatten(0, 1)


class CandidateSelector(nn.Module):
    """Scores of the edges between a node's token and the best tokens of the next level.

    Letters: codebooks A, B; projection P; state x of the child's level::

        score of child c below p = logit(c) + (A[p] * P x) . B[c]
    """

    def __init__(self, config: DFlashHeadConfig) -> None:
        """Make a selector whose scores are the logits."""
        super().__init__()
        rank = config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessors = nn.Parameter(torch.randn(config.vocab_size, rank))
        self.successors = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.project = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(
        self, base: Tensor, states: Tensor, token_ids: Tensor, vocabulary: Tensor | None
    ) -> Tensor:
        """Logits below nodes: -inf for all but the level's candidates.

        Args:
            base: [num_reqs, draft_vocab_size], the level's logits.
            states: [num_reqs, hidden_size], the level's states.
            token_ids: int64 [num_reqs, width], the nodes' tokens.
            vocabulary: int64 [draft_vocab_size], see ``DraftModel``.

        Returns:
            [num_reqs, width, draft_vocab_size].

        """
        logits, rows = base.topk(min(self.top_k, base.shape[-1]))
        candidates = rows if vocabulary is None else vocabulary[rows]
        edges = self.edges(states, token_ids, candidates)
        width = token_ids.shape[1]
        out = base.new_full((len(base), width, base.shape[-1]), -torch.inf)
        return out.scatter_(
            2, rows[:, None].expand(-1, width, -1), logits[:, None] + edges
        )

    def edges(self, states: Tensor, token_ids: Tensor, candidates: Tensor) -> Tensor:
        """What is added to the logits of candidates below nodes.

        Args:
            states: [..., hidden_size], of the candidates' levels.
            token_ids: int64 [..., width], the nodes' tokens.
            candidates: int64 [..., count], tokens.

        Returns:
            [..., width, count].

        """
        left = self.predecessors[token_ids] * self.project(states)[..., None, :]
        return left @ self.successors[candidates].transpose(-1, -2)
