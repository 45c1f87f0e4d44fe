"""Whether a model is asked beside an index: by what it adds where the index fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fast.test_index_beside_model import BOTH, TREES
from tests.fast.test_measured_schedule import running
from vllm_treespec.proposers.base import ProposerInputs
from vllm_treespec.proposers.hybrid import Hybrid
from vllm_treespec.proposers.worth import Worth
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.base import StepOutcome
from vllm_treespec.schedule.measured import MeasuredSchedule
from vllm_treespec.schedule.prices import Prices
from vllm_treespec.sources.continuations import Continuation, Continuations

# One token matches, or eight: the next one is right with 0.95 (1 - 0.8 ** match).
SHORT: list[Continuation] = [(1, [7, 8, 9])]
LONG: list[Continuation] = [(8, [1, 2, 3])]
NONE: list[Continuation] = []


def needs_model(
    found: list[list[Continuation]],
    prices: Prices | None,
    first_shares: tuple[float, ...] = (),
) -> bool:
    """Ask a proposer whose index and model draft up to 16 tokens."""
    proposer = Hybrid(16, 12, top_k=4, model_depth=3, min_probability=0.1)
    shares = np.array(first_shares or [0.5] * len(found))
    return proposer.needs_model(Continuations(found), shares, prices)


def prices(level: float, num_reqs: int, kept: float = 1.0) -> Prices:
    """A row costs little; a model's first level adds 0.6 where nothing was found."""
    ones = [1.0] * num_reqs
    return Prices(0.05, 0.0, [kept] * num_reqs, level, [0.6] * num_reqs, ones)


@pytest.mark.parametrize(
    ("found", "kept", "level", "is_asked"),
    [
        (NONE, 1.0, 0.5, True),
        (NONE, 1.0, 0.7, False),
        # 0.6 x 0.81
        (SHORT, 1.0, 0.45, True),
        (SHORT, 1.0, 0.5, False),
        # 0.6 x 0.21 = 0.126
        (LONG, 1.0, 0.12, True),
        (LONG, 1.0, 0.13, False),
        # of what such a match promises half is kept: 0.6 x 0.6
        (LONG, 0.5, 0.33, True),
        # what is not worth its row is not drafted, so it is not found either
        (SHORT, 0.2, 0.55, True),
    ],
)
def test_a_model_is_asked_for_what_an_index_lacks(
    found: list[Continuation], kept: float, level: float, is_asked: bool
) -> None:
    """Red when a level of the model is paid for tokens that the index has."""
    assert needs_model([found], prices(level, 1, kept)) == is_asked


def test_requests_pay_together() -> None:
    """Red when each request must be worth a forward of the model alone."""
    assert not needs_model([NONE], prices(0.7, 1))
    assert needs_model([NONE, NONE], prices(0.75, 2))
    assert not needs_model([NONE, LONG], prices(0.77, 2))


def test_a_sure_index_drafts_alone() -> None:
    """Red when the model is asked for requests whose trees have no place for it."""
    assert not needs_model([NONE], prices(0.1, 1), (1.0,))
    assert not needs_model([NONE], None, (1.0,))
    assert needs_model([LONG], None, (0.5,)), "without prices shares alone decide"


def test_levels_add_nothing_where_the_index_is_right() -> None:
    """Red when a model reads on for tokens that the index has."""

    def ends(found: list[float] | None) -> bool:
        inputs = ProposerInputs(
            torch.zeros(1, dtype=torch.int64),
            SamplingTensors(torch.zeros(1), all_greedy=True),
            torch.zeros(1, 0, dtype=torch.float64),
            prices=Prices(0.05, 0.0, [1.0], level=0.3),
            host_may_wait=True,
            found=found,
        )
        return Worth(0.1, inputs).ends(1, torch.tensor([[0.8]], dtype=torch.float64))

    assert not ends(None)
    assert not ends([0.1])
    assert ends([0.8])


@pytest.mark.parametrize(("min_probability", "kept"), [(None, 1), (0.05, 2), (0.0, 3)])
def test_a_model_without_prices_leaves_out_what_is_unlikely(
    min_probability: float | None, kept: int
) -> None:
    """Red when the model's part of a fixed tree holds all that it drafted."""
    inputs = ProposerInputs(
        torch.zeros(1, dtype=torch.int64),
        SamplingTensors(torch.zeros(1), all_greedy=True),
        torch.zeros(1, 0, dtype=torch.float64),
    )
    drafts = torch.tensor([[[0.3, 0.07, 0.01]]], dtype=torch.float64).log()
    left = Worth(min_probability, inputs).of_drafts(drafts)
    assert int(left.isfinite().sum()) == kept


def test_promises_of_index_and_model_are_judged_apart() -> None:
    """Red when an index that promises too much makes its model's levels dear."""
    schedule = MeasuredSchedule(TREES, 64)
    schedule.forced_index = BOTH
    for _ in range(40):
        schedule.choose(running([0]))
        schedule.observe(
            StepOutcome(
                BOTH,
                1,
                slots=[0],
                num_drafts=[12],
                num_accepted=[3],
                limits=[63],
                promised=[8.0],
                num_kept=[1],
                num_found=[1],
                model_promised=[3.0],
                model_kept=[3],
                num_levels=3,
            )
        )
    schedule.chosen, schedule.plain_seconds = schedule.by_index[BOTH], 0.1
    schedule.forced_index = None
    prices = schedule.prices([0])
    assert prices is not None
    assert prices.kept[0] < 0.2
    assert prices.of_model().kept == pytest.approx([1.0])
    schedule.forget([0])
    schedule.sampled[0] = True
    again = schedule.prices([0])
    assert again is not None
    assert list(again.model_kept) == [1.0] == list(again.kept), "of sampled requests"


def test_what_a_model_adds_is_learned() -> None:
    """Red when it is learned of steps in which the model was not asked."""
    schedule = MeasuredSchedule(TREES, 64)
    schedule.forced_index = BOTH
    for num_levels, accepted in ((3, 3), (0, 9)) * 40:
        schedule.choose(running([0]))
        outcome = StepOutcome(
            BOTH, 1, [0], [6], [accepted], [63], [2.0], 1.0, num_levels, (), 0, [1]
        )
        schedule.observe(outcome)
    added = schedule.acceptance.added[False]
    assert added.total / added.weight == pytest.approx(2.0)
    both = schedule.by_index[BOTH]
    assert 0.6 < schedule.acceptance.first_level(0, both, sampled=False) < 0.8
    with_guess_alone = schedule.acceptance.first_level(1, both, sampled=True)
    assert with_guess_alone == pytest.approx(both.guess / (1 + both.guess))
