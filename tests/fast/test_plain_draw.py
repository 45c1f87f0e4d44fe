"""Requests without a tree: drawn by the noise of their positions, as trees are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.interpreted import interpreted
from tests.fast.rule_forms import random_keys
from tests.fast.toy_workloads import NOT_DRAWN, make_engine
from tests.tiers import grid
from vllm_treespec.kernels import kv_move
from vllm_treespec.sampling.coupling import draw_coupled
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import TargetLogits
from vllm_treespec.step import plain_draw, verifier
from vllm_treespec.step.plain_draw import draw_plainly
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.workloads import HABITS, workload

VOCAB_SIZE, NUM_ROWS = 9, 6


def logits_of(seed: int) -> Tensor:
    """Logits of some rows."""
    return torch.randn(
        (NUM_ROWS, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "temperature", [(0.0, 0.0, 0.0), (0.7, 1.0, 2.0), (0.7, 0.0, 1.3)]
)
def test_each_request_is_drawn_by_its_own_parameters(
    temperature: tuple[float, ...], batched: bool
) -> None:
    """Red when rows, parameters or keys of requests are mixed up."""
    logits, rows, keys = logits_of(0), torch.tensor([4, 0, 5]), random_keys(3, 1)
    greedy = [value == 0 for value in temperature]
    sampling = SamplingTensors(
        torch.tensor(temperature),
        top_p=torch.tensor([0.9, 1.0, 0.8]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
    )
    tokens = draw_plainly(TargetLogits(logits, rows, sampling), keys, batched)
    for place, is_greedy in enumerate(greedy):
        row = logits[rows[place]]
        own = torch.tensor([place])
        drawn = draw_coupled(sampling.select(own).probs(row[None]), keys[place])
        assert int(tokens[place]) == int(row.argmax() if is_greedy else drawn)


def sampled(number: int, drafts: bool = True, seed: int | None = None) -> Request:
    """A sampled request."""
    prompt = [number, 3]
    return Request(f"r{number}", prompt, 12, temperature=0.9, seed=seed, drafts=drafts)


def test_an_odd_request_is_drawn_by_the_engine() -> None:
    """Red when parameters that trees cannot follow are left out of a draw."""
    rows: list[int] = []

    def noting(target: TargetLogits, keys: Tensor, batched: bool) -> Tensor:
        rows.extend(target.root_rows.tolist())
        return draw_plainly(target, keys, batched)

    with patch.object(plain_draw, "draw_plainly", side_effect=noting):
        make_engine("suffix_tree", Habits()).run(sampled(0, drafts=False))
        assert not rows
        make_engine("suffix_tree", Habits()).run(sampled(0), sampled(1, drafts=False))
        assert set(rows) == {0}


def test_greedy_requests_without_trees_are_the_engines() -> None:
    """Red when a step in which nothing is drawn pays for our draw."""
    engine = make_engine("suffix_tree", Habits())
    with_trees: list[bool] = []

    def noting(target: TargetLogits, keys: Tensor, batched: bool) -> Tensor:
        with_trees.append(engine.decoder.trees is not None)
        return draw_plainly(target, keys, batched)

    with patch.object(plain_draw, "draw_plainly", side_effect=noting):
        engine.run(*[Request(f"r{n}", [n, 3], 12, temperature=0.0) for n in range(3)])
    assert with_trees
    assert all(with_trees)


# The text is that of plain decoding


def sampled_workload(seed: int, seeded: bool) -> list[Request]:
    """Requests at temperature 1."""
    return [
        replace(
            request,
            temperature=1.0,
            seed=100 + number if seeded else None,
        )
        for number, request in enumerate(workload(seed))
    ]


@cache
def plain_answers(seed: int, seeded: bool) -> list[list[int]]:
    """What requests get that may have no draft."""
    requests = [replace(r, max_drafts=0) for r in sampled_workload(seed, seeded)]
    engine = make_engine("suffix_tree", Habits(), seed)
    answers = engine.run(*requests)
    assert not sum(engine.num_trees)
    return answers


@pytest.mark.parametrize(
    ("name", "habits"),
    grid(
        [name for name in NOT_DRAWN if name != "head"],
        ["whole", "all", "few blocks"],
        quick=lambda name, habits: (
            habits == "all"
            and name not in ("hybrid_alone", "hybrid_head", "hybrid_chains")
        ),
    ),
)
def test_sampled_text_is_that_of_plain_decoding(name: str, habits: str) -> None:
    """Red when a token is drawn by noise that is not its position's.

    Whatever the tree, and whether it was cut, lost, late or preempted.
    """
    engine = make_engine(name, HABITS[habits], seed=1)
    assert engine.run(*sampled_workload(1, seeded=True)) == plain_answers(1, True)
    assert sum(engine.num_trees) > 20
    assert sum(count for depth, count in engine.accepted.items() if depth) > 10


def test_so_it_is_without_seeds() -> None:
    """Red when a request without a seed has no key of its own for good."""
    engine = make_engine("hybrid", HABITS["all"], seed=2)
    assert engine.run(*sampled_workload(2, seeded=False)) == plain_answers(2, False)
    assert sum(engine.num_trees) > 20


def test_noise_by_steps_is_noticed() -> None:
    """Negative control: red when noise that belongs to a step would pass."""
    engine = make_engine("dynamic_tree", HABITS["all"], seed=1)

    def by_step(keys: object, positions: object, count: int) -> Tensor:
        return random_keys(len(list(positions)), count, seed=engine.decoder.step)  # type: ignore[call-overload]

    plain = plain_answers(1, True)
    with patch.object(verifier, "noise_keys", side_effect=by_step):
        assert engine.run(*sampled_workload(1, True)) != plain


@pytest.mark.parametrize("masks", [False, True])
def test_an_answer_does_not_depend_on_the_batch(masks: bool) -> None:
    """Red when other requests, or the form of the rule, reach a seeded answer."""
    alone = make_engine("hybrid", Habits()).run(sampled(0, seed=5))
    others = [sampled(1, drafts=False), sampled(2), sampled(3, seed=5)]
    with interpreted(kv_move):
        engine = make_engine("hybrid", Habits(), masks=masks)
        assert engine.run(*others, sampled(0, seed=5))[-1] == alone[0]
