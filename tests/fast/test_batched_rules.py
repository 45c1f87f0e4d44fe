"""Batched forms of rules against their walks: same results, and no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast import rule_forms
from tests.fast.drafting import draws_of
from tests.fast.languages import plain_sampling
from tests.fast.no_waiting import NoWaiting, on_meta
from tests.fast.random_trees import random_trees
from tests.fast.rule_forms import (
    by_position,
    by_position_batched,
    numbers_of,
    rejection,
    sizes_of,
    tree_sizes,
)
from tests.tiers import grid
from vllm_treespec.sampling import laws as sampling
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    RULES,
    Rule,
    ScorerOutput,
    TargetLogits,
    greedy_matching,
    recursive_rejection,
    score,
)
from vllm_treespec.scorers.greedy import greedy_matching_batched
from vllm_treespec.scorers.recursive_rejection import recursive_rejection_batched
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import Draws, TreeBatch

ONE_RANDOM = SamplingTensors(torch.ones(1), all_random=True)

BATCHED = [name for name, rule in RULES.items() if rule.batched is not None]


def assert_same(found: ScorerOutput, expected: ScorerOutput) -> None:
    """Compare results; the path of looser bounds is wider."""
    wider = found.path.shape[1] - expected.path.shape[1]
    padded = torch.nn.functional.pad(expected.path, (0, wider), value=-1)
    assert found.path.equal(padded)
    assert found.num_accepted.equal(expected.num_accepted)
    assert found.next_token_ids.equal(expected.next_token_ids)


# Bit equality with the walks


def mixed_draws(tree: TreeBatch, generator: torch.Generator) -> TreeBatch:
    """Some draws become independent ones of a distribution of their own."""
    draws = draws_of(tree)
    shape = draws.rows.shape
    alone = torch.rand(shape, generator=generator) < 0.4
    others = torch.randint(draws.probs.shape[1], shape, generator=generator)
    draws = replace(
        draws,
        without_replacement=draws.without_replacement & ~alone,
        rows=torch.where(alone, others, draws.rows),
    )
    return replace(tree, draws=draws)


def suited(name: str, tree: TreeBatch) -> TreeBatch:
    """The same, or where a rule needs that with independent draws."""
    if name != "k_seq":
        return tree
    draws = draws_of(tree)
    independent = torch.zeros_like(draws.without_replacement)
    return replace(tree, draws=replace(draws, without_replacement=independent))


def repeated_draws(tree: TreeBatch, generator: torch.Generator) -> TreeBatch:
    """Some draws hit the node of the draw before them again, if it is a sibling."""
    draws = draws_of(tree)
    again = draws.without_replacement & (
        torch.rand(draws.nodes.shape, generator=generator) < 0.3
    )
    before = torch.nn.functional.pad(draws.nodes, (1, 0))[:, :-1]
    nodes = torch.where(again, before, draws.nodes)
    draws = replace(
        draws, nodes=nodes, without_replacement=draws.without_replacement & ~again
    )
    return replace(tree, draws=draws)


def cut_trees(tree: TreeBatch, generator: torch.Generator) -> TreeBatch:
    """What the scheduler may leave."""
    sizes = torch.randint(
        1, tree.max_nodes + 1, tree.num_nodes.shape, generator=generator
    )
    return tree.cut(sizes)


def unchanged(tree: TreeBatch, generator: torch.Generator) -> TreeBatch:
    return tree


CHANGES: list[Callable[[TreeBatch, torch.Generator], TreeBatch]] = [
    unchanged,
    mixed_draws,
    repeated_draws,
    cut_trees,
]
SAMPLINGS = ["plain float64", "plain", "top-k", "top-p", "both", "mixed"]


def sampling_of(
    kind: str, num_reqs: int, generator: torch.Generator
) -> SamplingTensors:
    """Sampling parameters of a batch."""
    if kind == "plain float64":
        return plain_sampling(num_reqs)
    temperature = 0.5 + torch.rand(num_reqs, generator=generator)
    if kind == "mixed":
        temperature *= torch.rand(num_reqs, generator=generator) < 0.5
    top_k = torch.randint(1, 20, (num_reqs,), generator=generator)
    top_p = 0.5 + 0.5 * torch.rand(num_reqs, generator=generator)
    return SamplingTensors(
        temperature,
        top_k=top_k if kind in ("top-k", "both", "mixed") else None,
        top_p=top_p if kind in ("top-p", "both", "mixed") else None,
        all_random=kind != "mixed",
    )


@cache
def batch(
    vocab_size: int, num_reqs: int, max_nodes: int, kind: str, seed: int
) -> tuple[TreeBatch, TargetLogits, Tensor]:
    """Random trees, a target that resembles their drafts, and uniforms.

    Requests without a tree lie between: their rows come before each request's own.
    Tests share a batch, and change none in place.
    """
    generator = torch.Generator().manual_seed(seed)
    tree = random_trees(num_reqs, max_nodes, vocab_size, generator)
    draws = draws_of(tree)
    noise = torch.randn(draws.probs.shape, generator=generator, dtype=torch.float64)
    noise *= torch.rand((*noise.shape[:2], 1), generator=generator) > 0.25
    logits = torch.nn.functional.pad(draws.probs.log() + noise, (0, 0, 1, 0))
    used = torch.nn.functional.pad(tree.is_node(), (1, 0), value=True)
    sampling = sampling_of(kind, num_reqs, generator)
    uniforms = torch.rand(
        (num_reqs, max_nodes + 1), generator=generator, dtype=torch.float64
    )
    logits = logits[used]
    before = tree.num_nodes.cumsum(0) - tree.num_nodes
    root_rows = before + torch.arange(num_reqs) + 1
    if kind == "plain float64":
        return tree, TargetLogits(logits.softmax(1), root_rows, sampling), uniforms
    tree = replace(tree, draws=replace(draws, probs=draws.probs.float()))
    return tree, TargetLogits(logits.float(), root_rows, sampling), uniforms


def walked(
    name: str, tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> ScorerOutput:
    """The walks, each request by its own."""
    matched = greedy_matching(tree, target, uniforms)
    drawn = RULES[name].walk(tree, target, numbers_of(RULES[name], uniforms))
    greedy = target.sampling.greedy
    return ScorerOutput(
        torch.where(greedy[:, None], matched.path, drawn.path),
        torch.where(greedy, matched.num_accepted, drawn.num_accepted),
        torch.where(greedy, matched.next_token_ids, drawn.next_token_ids),
    )


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(
    ("kind", "change"),
    grid(
        SAMPLINGS,
        CHANGES,
        quick=lambda kind, change: (
            kind == "mixed" or (kind, change) == ("plain float64", unchanged)
        ),
    ),
)
def test_equals_the_walk(
    name: str, kind: str, change: Callable[[TreeBatch, torch.Generator], TreeBatch]
) -> None:
    """Red when the batched form decides anything but what the walk decides.

    Or when greedy requests of a mixed batch are sampled, or the other way.
    """
    if name == "k_seq" and change is mixed_draws:
        pytest.skip("draws of a node come from one distribution")
    accepted = 0
    for seed, (vocab_size, max_nodes) in enumerate([(5, 12), (77, 24), (301, 64)]):
        tree, target, uniforms = batch(vocab_size, 30, max_nodes, kind, seed)
        tree = change(suited(name, tree), torch.Generator().manual_seed(seed))
        numbers = numbers_of(RULES[name], uniforms)
        expected = walked(name, tree, target, uniforms)
        found = score(tree, target, numbers, RULES[name], sizes_of(tree))
        assert_same(found, expected)
        if change is unchanged:
            assert_same(score(tree, target, numbers, RULES[name]), expected)
        accepted = max(accepted, int(found.num_accepted.max()))
    assert accepted > 1


def refuses(*_: object) -> ScorerOutput:
    """A form that must not run."""
    raise AssertionError


@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_bounds_choose_the_form(kind: str) -> None:
    """Red when a GPU's batch is walked over, a CPU's is not, or no form is found."""
    tree, target, uniforms = batch(77, 30, 24, kind, 1)
    sizes = tree_sizes(24, 24, 24)
    walk = Rule("walk", recursive_rejection, refuses)
    form = Rule("batched", refuses, recursive_rejection_batched)
    only = Rule("without a batched form", recursive_rejection)
    expected = walked("recursive_rejection", tree, target, uniforms)
    for rule, bounds in ((walk, None), (form, sizes), (only, sizes)):
        assert_same(score(tree, target, uniforms, rule, bounds), expected)


@pytest.mark.parametrize("rows_per_group", [1, 7, 40])
def test_groups_of_requests(rows_per_group: int) -> None:
    """Red when splitting a large batch mixes its requests up."""
    tree, target, uniforms = batch(77, 30, 24, "both", 1)
    with patch.object(rule_forms, "AT_ONCE", ("ROWS_PER_GROUP", rows_per_group)):
        found = rejection(tree, target, uniforms)
        drawn = by_position_batched(tree, target, uniforms)
    assert_same(found, recursive_rejection(tree, target, uniforms))
    assert_same(drawn, by_position(tree, target, uniforms))


@pytest.mark.parametrize("name", BATCHED)
def test_too_large_bounds_change_nothing(name: str) -> None:
    """Red when a result depends on how well the host knows the trees."""
    tree, target, uniforms = batch(77, 30, 24, "plain", 1)
    tree, uniforms = suited(name, tree), numbers_of(RULES[name], uniforms)
    expected = RULES[name].walk(tree, target, uniforms)
    for sizes in (tree_sizes(24, 24, 24), tree_sizes(63, 100, 100)):
        found = RULES[name].apply(tree, target, uniforms, sizes)
        assert_same(found, expected)


PARENTS = {
    "root only": [-1, 0],
    "chain of 64": list(range(-1, 63)),
    "63 children": [-1] + [0] * 63,
    "7 times 8": [-1] + [0] * 7 + [1 + i // 8 for i in range(56)],
}


@pytest.mark.parametrize("equal", [False, True], ids=["other law", "same law"])
@pytest.mark.parametrize("name", PARENTS)
def test_trees_at_the_limits(name: str, equal: bool) -> None:
    """Red when 64 nodes, or one, no longer fit into the bit masks."""
    parents, num_reqs, vocab_size = PARENTS[name], 20, 70
    generator = torch.Generator().manual_seed(0)
    with patch("tests.fast.random_trees.random_parents", lambda *_: parents):
        tree = random_trees(num_reqs, len(parents), vocab_size, generator)
    draws = draws_of(tree)
    tree = replace(tree, draws=replace(draws, probs=draws.probs.float()))
    if name == "root only":
        tree = tree.cut(torch.ones_like(tree.num_nodes))
    logits = draws_of(tree).probs.log()
    if not equal:
        logits = logits + torch.randn(logits.shape, generator=generator) / 4
    root_rows = torch.arange(num_reqs) * tree.max_nodes
    sampling = SamplingTensors(torch.ones(num_reqs), all_random=True)
    target = TargetLogits(logits.flatten(0, 1), root_rows, sampling)
    uniforms = torch.rand(
        (num_reqs, tree.max_nodes + 1), generator=generator, dtype=torch.float64
    )
    found = rejection(tree, target, uniforms)
    assert_same(found, recursive_rejection(tree, target, uniforms))
    drawn = by_position_batched(tree, target, uniforms)
    assert_same(drawn, by_position(tree, target, uniforms))
    assert_same(
        greedy_matching_batched(tree, target, uniforms, sizes_of(tree)),
        greedy_matching(tree, target, uniforms),
    )
    if equal:
        depth = int(tree.depths.max())
        assert found.num_accepted.tolist() == [depth] * num_reqs
        assert "64" not in name or found.path[0].tolist() == list(range(1, 64))


def test_part_of_the_vocabulary() -> None:
    """Red when the draft's columns are taken for tokens."""
    generator = torch.Generator().manual_seed(0)
    tree, target, uniforms = batch(40, 60, 24, "top-p", 0)
    vocabulary = torch.randperm(77, generator=generator)[:40].sort().values
    logits = torch.full((len(target.logits), 77), -5.0)
    logits[:, vocabulary] = target.logits
    target = replace(target, logits=logits)
    tree = replace(
        tree,
        token_ids=vocabulary[tree.token_ids],
        draws=replace(draws_of(tree), vocabulary=vocabulary),
    )
    found = rejection(tree, target, uniforms)
    assert_same(found, recursive_rejection(tree, target, uniforms))
    assert int(found.num_accepted.max()) > 1


def test_empty_residual() -> None:
    """Red when a rejection that only rounding can cause leaves no law, or NaN."""
    logits = torch.tensor([1.0, 2.0, -torch.inf])
    law = logits.softmax(0)
    nothing = torch.zeros((1, 1), dtype=torch.int64)
    tree = from_parents([[0, 2]], [[-1, 0]])
    draws = Draws(nothing + 1, nothing, nothing.bool(), law[None, None])
    tree = replace(tree, draws=draws)
    target = TargetLogits(logits.repeat(2, 1), nothing[0], ONE_RANDOM)
    for uniform, token in ((0.2, 0), (0.3, 1)):
        uniforms = torch.full((1, 2), uniform, dtype=torch.float64)
        found = rejection(tree, target, uniforms)
        assert found.num_accepted.tolist() == [0]
        assert found.next_token_ids.tolist() == [token]


def test_trees_without_a_draw() -> None:
    """Red when a step in which nobody has drafted breaks the rule."""
    tree, target, uniforms = batch(5, 3, 1, "plain", 0)
    assert draws_of(tree).nodes.shape == (3, 0)
    expected = by_position(tree, target, uniforms)
    for sizes in (sizes_of(tree), tree_sizes(3, 2, 2)):
        assert_same(
            recursive_rejection_batched(tree, target, uniforms, sizes), expected
        )


def test_entries_without_a_request() -> None:
    """Red when a padded request accepts something or touches another's result."""
    tree, target, uniforms = batch(77, 6, 12, "plain", 1)
    rows = torch.tensor([0, 1, 2, 0, 0])
    some, part = tree.select(rows), replace(target, root_rows=target.root_rows[rows])
    gone = some.cut(torch.tensor([64, 64, 64, 0, 0]))
    for rule in (rejection, by_position_batched):
        found = rule(gone, part, uniforms[rows])
        expected = rule(tree, target, uniforms)
        assert found.path[:3].equal(expected.path[:3, : found.path.shape[1]])
        assert found.next_token_ids[:3].equal(expected.next_token_ids[:3])
        assert found.num_accepted[3:].tolist() == [0, 0]
        assert found.path[3:].unique().tolist() == [-1]


# No waiting


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(
    ("kind", "hot"),
    grid(
        ["plain", "both", "mixed"],
        [False, True],
        quick=lambda *case: case in (("both", False), ("mixed", True)),
    ),
)
def test_the_host_never_waits(name: str, kind: str, hot: bool) -> None:
    """Red when a rule waits for the device, or makes a tensor on the host."""
    tree, target, uniforms = batch(77, 6, 24, kind, 1)
    tree = suited(name, tree)
    if hot:
        draws = replace(draws_of(tree), vocabulary=torch.arange(77))
        tree = replace(tree, draws=draws)
    sizes, numbers = sizes_of(tree), numbers_of(RULES[name], uniforms)
    # For top-k and top-p a CPU looks at what it found, which a GPU does not.
    on_a_device = patch.object(sampling, "is_on_cpu", return_value=False)
    with NoWaiting(), on_a_device:
        score(tree, target, numbers, RULES[name], sizes)
    there = on_meta(tree), on_meta(target), on_meta(numbers)
    with NoWaiting():
        found = score(*there, RULES[name], sizes)
    assert found.path.shape == (6, sizes.max_depth)


@pytest.mark.parametrize("name", BATCHED)
def test_waiting_is_noticed(name: str) -> None:
    """Red when the check above could no longer see a rule that waits."""
    tree, target, uniforms = batch(77, 6, 24, "plain", 1)
    tree = suited(name, tree)
    with NoWaiting(), pytest.raises(RuntimeError, match="makes the host wait"):
        RULES[name].walk(tree, target, numbers_of(RULES[name], uniforms))
    mask = uniforms > 0.5
    for waiting in (
        lambda: uniforms[mask],
        lambda: uniforms.masked_fill(mask, 0).index_put_((mask,), uniforms[0, 0]),
        lambda: bool(mask.any()),
        lambda: uniforms.to("meta")[torch.arange(2)],
    ):
        with NoWaiting(), pytest.raises(RuntimeError, match="makes the host wait"):
            waiting()
    nowhere = uniforms.to("meta")
    for reading in (nowhere.tolist, nowhere.cpu, lambda: nowhere * uniforms):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            reading()
