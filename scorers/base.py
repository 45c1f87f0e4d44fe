"""What a rule is, what it gets and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sampling.penalties import Penalties
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import NO_NODE, TreeBatch


@dataclass(frozen=True)
class TargetLogits:
    """The target's logits at every node; a rule asks for the distributions it needs."""

    # [total_num_nodes, vocab_size]
    logits: Tensor
    # int64 [num_reqs], row of each request's root
    root_rows: Tensor
    sampling: SamplingTensors
    # None when no request has any
    penalties: Penalties | None = None

    def probs(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Target distributions after the given nodes, float32 [n, vocab_size]."""
        return self.sampling.select(reqs).probs(self._after(reqs, nodes))

    def argmax(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Most likely next tokens after the given nodes, int64 [n]."""
        return self._after(reqs, nodes).to(torch.float32).argmax(dim=-1)

    def _after(self, reqs: Tensor, nodes: Tensor) -> Tensor:
        """Logits after the given nodes, with penalties, [n, vocab_size]."""
        rows = self.logits[self.root_rows[reqs] + nodes]
        if self.penalties is None:
            return rows
        return self.penalties.apply(rows, reqs, nodes)

    def select(self, rows: Tensor, sampling: SamplingTensors) -> TargetLogits:
        """Return the logits of the given requests.

        Args:
            rows: int64 [n], the requests.
            sampling: of them.

        """
        penalties = self.penalties
        return replace(
            self,
            root_rows=self.root_rows[rows],
            sampling=sampling,
            penalties=None if penalties is None else penalties.select(rows),
        )


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


# From trees, the target's logits at their nodes and random numbers (``Rule``) to
# accepted paths and one more token each.
Walk = Callable[[TreeBatch, TargetLogits, Tensor], ScorerOutput]
# The same from the trees' bounds besides, known on the host: too large ones only cost
# time. Paths are int64 [num_reqs, max_depth].
Batched = Callable[[TreeBatch, TargetLogits, Tensor, TreeSizes], ScorerOutput]


@dataclass(frozen=True)
class Rule:
    """A way to verify trees: a walk and, where there is one, its batched form.

    The walk goes down each tree. It computes only the distributions on its way, but
    on a GPU the host waits for the device at every level. The batched form computes
    all nodes together, and the host never waits. Both give the same results.

    Random numbers are keys of the noise of positions, int64 [num_reqs, at least
    1 + max_depth], if the rule follows that noise; otherwise uniform numbers, float64
    [num_reqs, at least 1 + max_draws] in [0, 1).
    """

    name: str
    walk: Walk
    batched: Batched | None = None
    # whether emitted tokens may follow another law than the target's
    lossy: bool = False
    # whether the token of a position is drawn by the noise of the position; then drafts
    # may depend on that noise in any way
    follows_noise: bool = False

    def apply(
        self,
        tree: TreeBatch,
        target: TargetLogits,
        numbers: Tensor,
        sizes: TreeSizes | None,
    ) -> ScorerOutput:
        """Score trees in the batched form if there is one and ``sizes`` are given.

        Args:
            tree: the trees.
            target: the target's logits at the nodes.
            numbers: the rule's random numbers.
            sizes: the trees' bounds; None: walk.

        """
        if sizes is None or self.batched is None:
            return self.walk(tree, target, numbers)
        return self.batched(tree, target, numbers, sizes)


def path_width(tree: TreeBatch) -> int:
    """Levels of the deepest tree of a batch, at least 1."""
    return max(int(tree.depths.max()), 1)


def empty_path(tree: TreeBatch) -> Tensor:
    """A path buffer of the batch's depth, int64 [num_reqs, max_depth], all -1."""
    shape = tree.num_reqs, path_width(tree)
    return torch.full(shape, NO_NODE, device=tree.token_ids.device)


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
