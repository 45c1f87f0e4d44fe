"""Rules in both forms as functions of trees, logits and uniform numbers.

Rules that follow the noise of positions are enumerable here: the noise of a position is
one uniform number, by which a token is drawn through inversion. So a grid of such
numbers gives their law.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from tests.fast.enumeration import Scorer, Weighted
from tests.fast.languages import NUM_TOKENS, Language, plain_sampling
from vllm_treespec.sampling.draws import draw
from vllm_treespec.scorers import RULES, Rule, ScorerOutput, TargetLogits, batched
from vllm_treespec.scorers.coupled_draw import COUPLED_DRAW
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import MAX_NODES, TreeBatch, num_draws

STEPS = 6
NOISE = "vllm_treespec.scorers.coupled_draw.draw_coupled"
# Thousands of small trees; groups of them are in test_batched_rules.py.
AT_ONCE = "ROWS_PER_GROUP", 1 << 14


def tree_sizes(
    max_depth: int, max_siblings: int = 0, max_parents: int = 0
) -> TreeSizes:
    """Bounds as far as rules look at them."""
    return TreeSizes(
        max_nodes=MAX_NODES,
        max_depth=max_depth,
        max_width=MAX_NODES,
        max_leaves=MAX_NODES,
        max_siblings=max_siblings,
        max_parents=max_parents,
    )


def sizes_of(tree: TreeBatch) -> TreeSizes:
    """The tightest bounds."""
    depth = int(tree.depths.max())
    if tree.draws is None:
        return tree_sizes(depth)
    counts = num_draws(tree)
    return tree_sizes(depth, int(counts.amax()), int((counts > 0).sum(1).max()))


def by_uniform(probs: Tensor, uniforms: Tensor, can_sync: bool = False) -> Tensor:
    """Draw by one uniform number a row, in the place of ``draw_coupled``."""
    return draw(probs, uniforms)


def forms_of(rule: Rule) -> dict[str, Scorer]:
    """The rule's walk and, where there is one, its batched form."""

    def applied(is_batched: bool) -> Scorer:
        def scorer(
            tree: TreeBatch, target: TargetLogits, uniforms: Tensor
        ) -> ScorerOutput:
            sizes = sizes_of(tree) if is_batched else None
            with patch(NOISE, by_uniform), patch.object(batched, *AT_ONCE):
                return rule.apply(tree, target, uniforms, sizes)

        return scorer

    forms = {"walk": applied(False), "batched": applied(True)}
    return forms if rule.batched is not None else {"walk": forms["walk"]}


FORMS = {name: forms_of(rule) for name, rule in RULES.items()}
by_position = FORMS[COUPLED_DRAW.name]["walk"]
by_position_batched = FORMS[COUPLED_DRAW.name]["batched"]
rejection = FORMS["recursive_rejection"]["batched"]


def random_keys(*shape: int, seed: int = 0) -> Tensor:
    """Keys of independent noise, int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


def numbers_of(rule: Rule, uniforms: Tensor) -> Tensor:
    """Random numbers of a rule from uniform ones: keys, if it follows noise."""
    return (uniforms * 2.0**62).long() if rule.follows_noise else uniforms


def grid_target(vocab_size: int = 3) -> Language:
    """A language whose probabilities are multiples of 1 / STEPS."""
    generator = torch.Generator().manual_seed(0)
    num_prefixes = sum(vocab_size**depth for depth in range(NUM_TOKENS))
    balls = torch.randint(vocab_size, (num_prefixes, STEPS), generator=generator)
    counts = torch.nn.functional.one_hot(balls, vocab_size).sum(1)
    return Language(counts.double() / STEPS)


def grid_law_error(
    scorer: Scorer, drawn: Weighted, target: Language | None = None
) -> float:
    """Largest error of the law under a rule with one uniform a position.

    Args:
        scorer: uses column d of its uniforms at nodes of depth d.
        drawn: trees of at most two levels.
        target: its probabilities are multiples of 1 / STEPS, so that the middles of
            STEPS equal intervals draw its tokens exactly as often as they should;
            left out: ``grid_target``.

    """
    target = target or grid_target()
    middles = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    grid = torch.cartesian_prod(*[middles] * NUM_TOKENS)
    # Every tree with every point of the grid.
    tree = drawn.tree.select(torch.arange(drawn.tree.num_reqs).repeat(len(grid)))
    weights = drawn.weights.repeat(len(grid)) / len(grid)
    logits = target.target_logits(tree, plain_sampling(tree.num_reqs))
    numbers = grid.repeat_interleave(drawn.tree.num_reqs, dim=0)
    output = scorer(tree, logits, numbers)
    above = target.prefixes(tree).gather(1, output.last_node()[:, None])[:, 0]
    emitted = above * target.vocab_size + 1 + output.next_token_ids
    reached = target.no_mass().index_add(0, emitted, weights)
    law = target.joint_law(reached, NUM_TOKENS)
    return float((law - target.true_law(NUM_TOKENS)).abs().max())
