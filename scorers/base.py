"""What every scorer gets and returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.core.sampling import SamplingTensors
from vllm_treespec.core.tree import NO_NODE, TreeBatch


@dataclass(frozen=True)
class TargetLogits:
    """The target's logits at every node; distributions are made where a walk looks."""

    # [total_num_nodes, vocab_size]
    logits: Tensor
    # int64 [num_reqs], row of each request's root
    first_row: Tensor
    sampling: SamplingTensors

    def probs(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Target distributions after the given nodes, float32 [n, vocab_size]."""
        rows = self.logits[self.first_row[reqs] + nodes]
        return self.sampling.select(reqs).probs(rows)

    def argmax(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Most likely next tokens after the given nodes, int64 [n]."""
        rows = self.logits[self.first_row[reqs] + nodes]
        return rows.to(torch.float32).argmax(dim=-1)


@dataclass(frozen=True)
class ScorerOutput:
    """The accepted path of every request and the one token after it.

    ``path`` lists the accepted draft nodes from the top, -1 behind the last. The
    token after it is a recovered token (from a residual) or a bonus token (from the
    target, at a leaf). Emitted tokens are the accepted ones and that token.
    """

    # int64 [num_reqs, max_depth]
    path: Tensor
    # int64 [num_reqs], draft tokens only
    num_accepted: Tensor
    # int64 [num_reqs]
    next_token_ids: Tensor

    def last_node(self) -> Tensor:
        """Deepest accepted node, int64 [num_reqs]; the root if none was accepted."""
        last = self.path.gather(1, (self.num_accepted - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(self.num_accepted > 0, last, 0)

    def emitted(self, tree: TreeBatch) -> Tensor:
        """Emitted tokens, int64 [num_reqs, max_depth + 1], padded with -1."""
        tokens = tree.token_ids.gather(1, self.path.clamp(min=0))
        tokens = tokens.masked_fill(self.path < 0, -1)
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=-1)
        return tokens.scatter(
            1, self.num_accepted[:, None], self.next_token_ids[:, None]
        )


def empty_path(tree: TreeBatch) -> Tensor:
    """A path buffer of the batch's depth, int64 [num_reqs, max_depth], all -1."""
    max_depth = max(int(tree.depths.max()), 1)
    return torch.full((tree.num_reqs, max_depth), NO_NODE, device=tree.token_ids.device)


def normalised(mass: Tensor, if_empty: Tensor | None = None) -> Tensor:
    """Divide the positive part of each row by its sum, however small that is.

    Args:
        mass: [n, vocab_size].
        if_empty: same shape, what a row without a positive part becomes; None: zeros.

    """
    positive = mass.clamp(min=0)
    total = positive.sum(dim=-1, keepdim=True)
    empty = (total == 0).to(mass.dtype)
    law = positive.div_(total + empty)
    return law if if_empty is None else law.addcmul_(if_empty, empty)
