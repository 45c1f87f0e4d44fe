"""SpecInfer: trees of one or more draft models, siblings with replacement, merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from vllm_treespec.proposers.base import (
    DraftModel,
    Proposer,
    ProposerInputs,
    tokens_of,
)
from vllm_treespec.proposers.rsd_c import level_widths
from vllm_treespec.sampling.draws import draw
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.trees.builders import first_equal, from_draws
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch


def sizes(branching_factors: Sequence[Sequence[int]]) -> TreeSizes:
    """Sizes of merged trees with these draws per node, by draft model and level."""
    widths = [level_widths(factors)[1:] for factors in branching_factors]
    merged_widths = list(map(sum, zip_longest(*widths, fillvalue=0)))
    num_draws = sum(merged_widths)
    return TreeSizes(
        max_nodes=1 + num_draws,
        max_depth=len(merged_widths),
        max_width=max(merged_widths),
        max_leaves=sum(own[-1] for own in widths),
        num_uniforms=num_draws,
    )


class SpecInfer(Proposer):
    """Draws and merges the trees of arXiv 2305.09781, section 3.

    Each draft model draws a tree of its own: a draw at depth l gets
    ``branching_factors[model][l]`` draws below it, independent of each other. Equal
    sequences become one node, which has below it what was drawn for each of them,
    the first model's draws first. At temperature 0 a node's draws are its most
    likely tokens.
    """

    draws_on_device = True

    def __init__(self, branching_factors: Sequence[Sequence[int]]) -> None:
        """Take the draws per node of each level, for every draft model."""
        self.branching_factors = [tuple(factors) for factors in branching_factors]
        # per model and level below the root
        self.widths = [level_widths(factors)[1:] for factors in self.branching_factors]
        self.sizes = sizes(self.branching_factors)

    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw one tree per request, one forward per draft model and level.

        Raises:
            ValueError: when the draft models' vocabularies differ.

        """
        vocabulary = shared_vocabulary(inputs.draft_models)
        uniforms = inputs.uniforms.split([sum(w) for w in self.widths], dim=1)
        drawn = [
            draw_levels(model, factors, own.split(widths, dim=1), inputs.sampling)
            for model, factors, own, widths in zip(
                inputs.draft_models,
                self.branching_factors,
                uniforms,
                self.widths,
                strict=True,
            )
        ]
        tree = merge(inputs.root_token_ids, drawn, vocabulary)
        if inputs.sampling.all_greedy:
            tree = replace(tree, draws=None)
        return Draft(tree, levels=sum(map(len, drawn)))


def shared_vocabulary(draft_models: Sequence[DraftModel]) -> Tensor | None:
    """The vocabulary that all draft models draw from.

    Raises:
        ValueError: when they differ.

    """
    first = draft_models[0].vocabulary
    for other in draft_models[1:]:
        own = other.vocabulary
        if own is not first and (own is None or first is None or not own.equal(first)):
            raise ValueError(
                "the draft models of one tree draw from different vocabularies; "
                "give all of them the same hot tokens"
            )
    return first


@dataclass(frozen=True)
class DrawnLevel:
    """What one draft model drew in one level of its own tree."""

    # int64 [num_reqs, width]
    token_ids: Tensor
    # int64 [num_reqs, width], index within the model's level above
    parents: Tensor
    # int64 [num_reqs, width], row of this level's ``probs``
    rows: Tensor
    # float32 [num_reqs, width of the level above, draft_vocab_size]
    probs: Tensor


def draw_levels(
    draft_model: DraftModel,
    branching_factors: Sequence[int],
    uniforms: Sequence[Tensor],
    sampling: SamplingTensors,
) -> list[DrawnLevel]:
    """Draw one model's own tree, before equal draws are merged.

    Args:
        draft_model: at the root.
        branching_factors: draws per node, by level.
        uniforms: per level, [num_reqs, width] in [0, 1).
        sampling: whose greedy requests take the most likely tokens.

    """
    logits = draft_model.root_logits()[:, None]
    same = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    levels: list[DrawnLevel] = []
    for depth, count in enumerate(branching_factors):
        # Equal sequences share one distribution to the last bit, although a forward
        # may round their logits differently.
        probs = sampling.probs(logits.gather(1, same[..., None].expand_as(logits)))
        columns = draw_independently(probs, count, uniforms[depth], sampling)
        token_ids = tokens_of(columns, draft_model.vocabulary)
        above = torch.arange(logits.shape[1], device=logits.device)
        parents = above.repeat_interleave(count).expand(len(logits), -1)
        rows = same.gather(1, parents)
        levels.append(DrawnLevel(token_ids, parents, rows, probs))
        if depth + 1 < len(branching_factors):
            same = first_equal(rows, token_ids)
            logits = draft_model.extend(token_ids, parents)
    return levels


def draw_independently(
    probs: Tensor, count: int, uniforms: Tensor, sampling: SamplingTensors
) -> Tensor:
    """Draw tokens below each node with replacement, or the top ones if greedy.

    Args:
        probs: float32 [num_reqs, width, vocab_size].
        count: draws per node.
        uniforms: [num_reqs, width * count] in [0, 1).
        sampling: whose greedy requests take the most likely tokens.

    Returns:
        int64 [num_reqs, width * count].

    """
    if sampling.all_greedy:
        return top_tokens(probs, count)
    rows = probs.flatten(0, 1)
    columns = uniforms.reshape(-1, count)
    tokens = torch.stack([draw(rows, columns[:, k]) for k in range(count)], dim=1)
    tokens = tokens.view_as(uniforms)
    if sampling.all_random:
        return tokens
    return torch.where(sampling.greedy[:, None], top_tokens(probs, count), tokens)


def top_tokens(probs: Tensor, count: int) -> Tensor:
    """Most likely tokens, int64 [num_reqs, width * count]; repeats if there are few."""
    mass, best = probs.topk(count, dim=-1)
    return torch.where(mass > 0, best, best[..., :1]).flatten(1)


def merge(
    root_token_ids: Tensor,
    drawn: Sequence[Sequence[DrawnLevel]],
    vocabulary: Tensor | None,
) -> TreeBatch:
    """Merge the draft models' trees.

    Args:
        root_token_ids: int64 [num_reqs].
        drawn: per draft model, its levels.
        vocabulary: all draft models'.

    """
    token_ids: list[list[Tensor]] = []
    parents: list[list[Tensor]] = []
    rows: list[list[Tensor]] = []
    probs: list[Tensor] = []
    widths: list[int] = []
    num_rows = 0
    for levels in drawn:
        left_of = 0
        for depth, level in enumerate(levels):
            if depth == len(token_ids):
                token_ids.append([])
                parents.append([])
                rows.append([])
                widths.append(0)
            token_ids[depth].append(level.token_ids)
            parents[depth].append(level.parents + left_of)
            rows[depth].append(level.rows + num_rows)
            probs.append(level.probs)
            num_rows += level.probs.shape[1]
            left_of = widths[depth]
            widths[depth] += level.token_ids.shape[1]
    return from_draws(
        root_token_ids,
        [torch.cat(level, dim=1) for level in token_ids],
        [torch.cat(level, dim=1) for level in parents],
        [torch.cat(level, dim=1) for level in rows],
        torch.cat(probs, dim=1),
        vocabulary,
    )
