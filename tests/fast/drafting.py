"""One step's drafts of any proposer, and how trees are read and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fast.languages import Language, LanguageDraft, plain_sampling
from vllm_treespec.proposers import Proposer, ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sources.base import DraftModel
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import Draws, TreeBatch

Path = tuple[int, ...]


def at_temperature(
    temperature: float,
    num_reqs: int = 1,
    top_k: int | None = None,
    top_p: float | None = None,
) -> SamplingTensors:
    """Requests that all have the same sampling parameters."""
    return SamplingTensors(
        torch.full((num_reqs,), temperature),
        None if top_k is None else torch.full((num_reqs,), top_k),
        None if top_p is None else torch.full((num_reqs,), top_p),
        all_greedy=temperature == 0,
        all_random=temperature > 0,
    )


def draft_of(
    proposer: Proposer,
    models: Language | DraftModel | Sequence[Language | DraftModel] = (),
    uniforms: Tensor | None = None,
    sampling: SamplingTensors | None = None,
    vocabulary: Tensor | None = None,
    num_reqs: int = 1,
    **more: Any,
) -> Draft:
    """Let a proposer draw one tree for each request.

    Args:
        proposer: any.
        models: what it drives; languages speak through columns of ``vocabulary``.
        uniforms: a row for each request; None: zeros.
        sampling: None: what models say is probabilities already.
        vocabulary: None: of all tokens.
        num_reqs: how many requests there are, where no uniforms say it.
        more: other fields of the inputs; roots are token 0 where none are given.

    """
    if uniforms is None:
        count = proposer.sizes.num_uniforms
        uniforms = torch.zeros(num_reqs, count, dtype=torch.float64)
    num_reqs = len(uniforms)
    inputs = {
        "root_token_ids": torch.zeros(num_reqs, dtype=torch.int64),
        "sampling": sampling or plain_sampling(num_reqs),
        "uniforms": uniforms,
        "draft_models": [
            LanguageDraft(model, num_reqs, vocabulary)
            if isinstance(model, Language)
            else model
            for model in (models if isinstance(models, Sequence) else [models])
        ],
    }
    return proposer.propose(ProposerInputs(**{**inputs, **more}))


def propose(*arguments: Any, **more: Any) -> TreeBatch:
    """The trees of ``draft_of``."""
    return draft_of(*arguments, **more).tree


def token_paths(tree: TreeBatch, req: int = 0) -> list[Path]:
    """Tokens from the root's child down to each node, the root's () first."""
    paths: list[Path] = [()]
    for node in range(1, int(tree.num_nodes[req])):
        above = paths[int(tree.parents[req, node])]
        paths.append((*above, int(tree.token_ids[req, node])))
        assert len(paths[-1]) == int(tree.depths[req, node])
    return paths


def same_trees(one: TreeBatch, other: TreeBatch) -> bool:
    """Whether two batches have the same nodes; the wider one may have empty places."""
    width = min(one.max_nodes, other.max_nodes)
    return one.num_nodes.equal(other.num_nodes) and all(
        getattr(one, name)[:, :width].equal(getattr(other, name)[:, :width])
        for name in ("token_ids", "parents", "depths")
    )


def draws_of(tree: TreeBatch) -> Draws:
    """The draws of a tree that was drawn."""
    assert tree.draws is not None
    return tree.draws


def all_drawn(tree: TreeBatch, probs: Tensor) -> TreeBatch:
    """Trees whose nodes are siblings drawn in their order without replacement.

    Args:
        tree: whose siblings are side by side.
        probs: float64 [num_reqs, max_nodes, vocab_size], what was drawn from, by node.

    """
    nodes = torch.arange(1, tree.max_nodes).expand(tree.num_reqs, -1)
    draws = Draws(
        nodes=nodes.masked_fill(~tree.is_node()[:, 1:], 0),
        rows=tree.parents[:, 1:].clamp(min=0),
        without_replacement=tree.parents[:, 1:] == tree.parents[:, :-1],
        probs=probs,
    )
    return replace(tree, draws=draws)


def together(trees: Sequence[TreeBatch]) -> TreeBatch:
    """Drawn trees of one width as a batch."""

    def joined(parts: Sequence[Any], *names: str) -> dict[str, Any]:
        return {n: torch.cat([getattr(part, n) for part in parts]) for n in names}

    draws = [draws_of(tree) for tree in trees]
    return TreeBatch(
        **joined(trees, "token_ids", "parents", "depths", "num_nodes"),
        draws=Draws(**joined(draws, "nodes", "rows", "without_replacement", "probs")),
    )


def check_unused(tree: TreeBatch) -> None:
    """Fail where a place behind a tree's last node holds anything."""
    unused = ~tree.is_node()
    assert bool((tree.parents[unused] == -1).all())
    assert not bool(tree.token_ids[unused].any() | tree.depths[unused].any())


class CountingDraft:
    """A draft model that notes how many nodes each of its forwards reads."""

    def __init__(self, draft: DraftModel) -> None:
        self.draft, self.vocabulary = draft, draft.vocabulary
        self.widths: list[int] = []

    def root_logits(self) -> Tensor:
        return self.draft.root_logits()

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self.widths.append(token_ids.shape[1])
        return self.draft.extend(token_ids, parents)


def check_bounds(sizes: TreeSizes, tree: TreeBatch, widths: Sequence[int] = ()) -> None:
    """Fail where a tree, or a level that was read, is larger than announced."""
    assert tree.max_nodes <= sizes.max_nodes
    assert max(widths, default=0) <= sizes.draft_width
    assert sum(widths) <= sizes.draft_nodes
    for req, num_nodes in enumerate(tree.num_nodes.tolist()):
        children = Counter(tree.parents[req, 1:num_nodes].tolist())
        levels = Counter(tree.depths[req, 1:num_nodes].tolist())
        assert max(levels, default=0) <= sizes.max_depth
        assert max(levels.values(), default=0) <= sizes.max_width
        assert max(children.values(), default=0) <= sizes.max_siblings
        assert len(children) <= sizes.max_parents
        assert num_nodes - len(children) <= sizes.max_leaves
    if tree.draws is not None:
        assert tree.draws.nodes.shape[1] <= sizes.max_draws
