"""Typical acceptance: what it accepts, what it emits, and that it is lossy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.fast.enumeration import NOTICEABLE, Weighted
from tests.fast.languages import Language, plain_sampling
from tests.fast.rule_forms import grid_law_error, grid_target
from vllm_treespec.scorers import ScorerOutput, TargetLogits, TypicalAcceptance
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

# Medusa's setting: delta is the square root of epsilon.
MEDUSA = TypicalAcceptance(epsilon=0.09, delta=0.3)


def score(
    typical: TypicalAcceptance, tree: TreeBatch, rows: list[Tensor]
) -> ScorerOutput:
    """Score one tree whose nodes have the given target distributions."""
    logits = torch.stack(rows)
    return typical.walk(
        tree,
        TargetLogits(logits, torch.zeros(1, dtype=torch.int64), plain_sampling(1)),
        torch.zeros(1, 0),
    )


def test_threshold_is_the_smaller_of_both() -> None:
    """Red when the entropy is in bits, the minimum a maximum, or the test not strict.

    A flat row over 4 tokens: entropy log 4, probabilities 1/4 = exp(-entropy).
    """
    tree = from_parents([[0, 1]], [[-1, 0]])
    flat = torch.full((4,), 0.25, dtype=torch.float64)

    def accepted(epsilon: float, delta: float) -> int:
        output = score(TypicalAcceptance(epsilon, delta), tree, [flat, flat])
        return int(output.num_accepted)

    assert accepted(0.25, 2.0) == 0  # not above epsilon
    assert accepted(0.2499, 2.0) == 1
    assert accepted(1.0, 1.001) == 0  # not above delta / 4
    assert accepted(1.0, 0.999) == 1
    assert accepted(1.0, 0.5 + 0.5 * math.log(2)) == 1


def test_longest_typical_path_is_accepted() -> None:
    r"""Red when a path is cut short, skips a node, or ties are broken at random.

    Nodes: 1 to 3 below the root; 4 below 1; 5, 6 below 2; 7 below 3. Node 1 is not
    typical, so its typical child 4 must not count; 5 and 6 tie, 5 comes first; 7 is
    not typical::

                 0
              /  |  \
             1   2   3
             |  / \  |
             4 5   6 7
    """
    tree = from_parents([[0, 3, 1, 2, 0, 0, 1, 3]], [[-1, 0, 0, 0, 1, 2, 2, 3]])
    rows = torch.tensor([[0.02, 0.4, 0.57, 0.01]] * 8, dtype=torch.float64)
    rows[2] = torch.tensor([0.4, 0.4, 0.1, 0.1])
    rows[5] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows[1] = torch.tensor([0.9, 0.1, 0.0, 0.0])
    output = score(TypicalAcceptance(0.09, 0.6), tree, list(rows))
    assert output.path.tolist() == [[2, 5]]
    assert output.num_accepted.tolist() == [2]
    assert output.next_token_ids.tolist() == [3]


def test_nothing_typical_leaves_the_greedy_token() -> None:
    """Red when a step could emit nothing, or emits a random token."""
    tree = from_parents([[0, 2]], [[-1, 0]])
    row = torch.tensor([0.3, 0.69, 0.01], dtype=torch.float64)
    output = score(MEDUSA, tree, [row, row])
    assert output.path.tolist() == [[-1]]
    assert output.num_accepted.tolist() == [0]
    assert output.next_token_ids.tolist() == [1]


def test_requests_of_a_batch_do_not_mix() -> None:
    """Red when a request's threshold or path is taken from another's rows."""
    generator = torch.Generator().manual_seed(0)
    trees = [([0, 1, 2, 0], [-1, 0, 0, 2]), ([0, 2], [-1, 0]), ([0], [-1])]
    batch = from_parents([t for t, _ in trees], [p for _, p in trees])
    probs = torch.rand((12, 3), generator=generator, dtype=torch.float64) ** 2
    probs /= probs.sum(1, keepdim=True)
    root_rows = torch.tensor([4, 8, 0])
    typical = TypicalAcceptance(0.3, 0.6)
    together = typical.walk(
        batch, TargetLogits(probs, root_rows, plain_sampling(3)), torch.zeros(3, 0)
    )
    for req, (tokens, parents) in enumerate(trees):
        start = int(root_rows[req])
        rows = list(probs[start : start + 4])
        alone = score(typical, from_parents([tokens], [parents]), rows)
        found = together.path[req][together.path[req] >= 0]
        assert found.tolist() == alone.path[0][alone.path[0] >= 0].tolist()
        assert together.next_token_ids[req] == alone.next_token_ids[0]


@pytest.mark.parametrize("typical", [MEDUSA, TypicalAcceptance(0.3, 0.09)], ids=str)
def test_it_is_lossy(typical: TypicalAcceptance) -> None:
    """Red when the rule is called lossless: its law must be far from the target's."""
    tree = from_parents([[0, 0, 1]], [[-1, 0, 1]])
    drawn = Weighted(tree, torch.ones(1).double())
    assert typical.rule.lossy
    assert grid_law_error(typical.rule.walk, drawn, grid_target()) > 100 * NOTICEABLE


def test_thresholds_of_one_are_greedy_decoding() -> None:
    """Red when an epsilon and delta above all probabilities accept anything."""
    tree = from_parents([[0, 0, 1, 2]], [[-1, 0, 0, 0]])
    target: Language = grid_target()
    output = score(TypicalAcceptance(1.0, 3.0), tree, list(target.table[:4]))
    assert output.num_accepted.tolist() == [0]
    assert output.next_token_ids[0] == target.table[0].argmax()
