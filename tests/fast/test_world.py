"""The simulated world in which schedules are judged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.sim.best import Constant, Policy, best_of, policies
from tests.sim.costs import Costs
from tests.sim.drafting import Tree, draft
from tests.sim.replay import Counted, errors_of
from tests.sim.scenarios import HEAD, HYBRID, INDEX, MODEL
from tests.sim.table import SCENARIOS
from tests.sim.tape import Draw, Request, Tape, Text
from tests.sim.world import MAX_TREES, Record, World, run
from vllm_treespec.schedule.plan import StepPlan, StepResult, Work
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.schedule.step_log import log_step, read_steps
from vllm_treespec.trees.source import Source

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
TEXT = Text(repeats=0.4, rates=(0.5, 0.9), sureness=(0.3, 0.8), level_accepted=0.5)


def small(trees: Sequence[Tree], text: Text = TEXT, size: int = 4) -> World:
    """A short world in which rows, levels and looking up cost something."""
    tape = Tape(3)
    for _ in range(4):
        tape.run(50, tape.join(text, size))
    costs = Costs(row=0.03, free_rows=4, fixed=0.1, lookup=0.02, level=0.1)
    return World(costs, trees, tape.steps)


def adaptive(world: World) -> AdaptiveScheduler:
    """The adaptive scheduler, with nothing measured."""
    return AdaptiveScheduler(world.trees, MAX_TREES)


def share_of(world: World, policy: Policy) -> float:
    """Tokens a second over those of the best policy."""
    return best_of(world).share(world, run(world, Constant(world, policy)))


def test_a_world_follows_from_its_seed() -> None:
    """Red when two schedules are judged by different texts or clocks."""
    for name in ("fixed trees of a head", "drift, memory 30", "service"):
        worlds = [BY_NAME[name].world(number) for number in (1, 1, 7)]
        assert worlds[0] == worlds[1]
        assert worlds[0].steps != worlds[2].steps
    first, second = (run(small(HYBRID), adaptive(small(HYBRID)), 5) for _ in range(2))
    assert first == second


def test_a_text_does_not_depend_on_what_is_drafted() -> None:
    """Red when drafting takes a random number that verification, or a text, uses."""
    world = small(HYBRID)
    before = list(world.steps)
    for policy in policies(world):
        run(world, Constant(world, policy))
    assert world.steps == before == small(HYBRID).steps


def test_plain_steps_have_the_plain_speed() -> None:
    """Red when a plan that drafts nothing pays for drafts, or brings some."""
    world = small(HEAD)
    record = run(world, Constant(world, Policy()))
    assert record.tokens == (4,) * 200
    assert record.seconds == pytest.approx([world.costs.plain(4)] * 200)


@pytest.mark.parametrize("trees", [HEAD, (INDEX,), MODEL, HYBRID])
def test_no_constant_policy_is_far_better_than_the_best(trees: Sequence[Tree]) -> None:
    """Red when the policies that are compared leave a much better one out."""
    world = small(trees)
    best = best_of(world)
    for tree in range(len(trees)):
        others = [
            Policy(tree, row=0.7),
            Policy(tree, row=1.4),
            Policy(tree, level=1.4),
            Policy(tree, depth=4),
        ]
        records = [run(world, Constant(world, other)) for other in others]
        assert max(best.share(world, record) for record in records) < 1.02


def test_a_wrong_rule_is_seen() -> None:
    """Red when drafts that bring nothing cost nothing."""
    world = small(HEAD, Text())
    assert share_of(world, Policy()) == 1.0
    assert share_of(world, Policy(0)) < 0.6
    assert best_of(world).share(world, run(world, adaptive(world))) > 0.9


def test_the_best_policy_drafts_for_those_who_accept() -> None:
    """Red when one request that accepts trees gets none as three do not."""
    tape = Tape(0)
    edit, chats = tape.join(Text("edit", level_accepted=0.9)), Text("chat")
    tape.run(100, [*edit, *tape.join(chats, 3)])
    world = World(Costs(row=0.05, free_rows=4, fixed=0.2), HEAD, tape.steps)
    (best,) = best_of(world).by_phase.values()
    assert {tuple(plan.slots) for plan in best.plans} == {(0,)}


class Counting(AdaptiveScheduler):
    """Counts the steps of which it is told."""

    num_steps = num_results = 0

    def observe(self, result: StepResult) -> None:
        """Count them."""
        self.num_steps += result.num_steps
        self.num_results += 1
        super().observe(result)


def test_plain_steps_follow_without_a_plan() -> None:
    """Red when rested steps are lost, or a schedule plans each step."""
    world = small(HEAD, Text())
    schedule = Counting(world.trees, MAX_TREES)
    run(world, schedule)
    told = schedule.num_steps
    assert 196 <= told < 200, "the last ones are not told"
    assert schedule.num_results < told / 2


def drafted(
    plan: StepPlan, tree: Tree, *draws: Draw, can_sync: bool = True
) -> list[object]:
    """Drafts and levels of a plan, and the claims of its only source."""
    requests = [Request(slot, TEXT) for slot in range(len(draws))]
    found = draft(plan, tree, requests, draws, can_sync)
    (claims,) = found.claimed.values()
    return [found.num_drafts, found.num_accepted, found.levels, claims]


CHAIN = Draw(0.5, 0.0, 8, 2, 0, 0.5, 2, 0.9)
UNLIKELY = CHAIN._replace(rate=0.1, depth=1)


def test_an_index_drafts_what_is_worth_its_row() -> None:
    """Red when the world does not prune as the package does.

    Its shadow drafts are the likeliest tokens of trees that stay empty.
    """
    plan = StepPlan(
        0, [0, 1], lookup=True, prunes=True, row_cost=0.2, kept={Source.INDEX: [1, 1]}
    )
    assert drafted(plan, INDEX, CHAIN, UNLIKELY) == [[2, 0], [2, 0], 0, [0.75, 0.1]]
    costly = replace(plan, fixed_cost=0.4)
    assert drafted(costly, INDEX, CHAIN, UNLIKELY) == [[0, 0], [0, 0], 0, [0.5, 0.1]]
    both = CHAIN._replace(rival=0.4)
    assert drafted(plan, INDEX, both, both)[0] == [3, 3]
    chains = replace(plan, branch_cost=0.5)
    assert drafted(chains, INDEX, both, both)[0] == [2, 2]


def test_a_model_reads_levels_that_are_worth_a_forward() -> None:
    """Red when the world does not read as many levels as the package does."""
    plan = StepPlan(
        0, [0], model=True, prunes=True, row_cost=0.1, kept={Source.MODEL: [1.0]}
    )
    # below a node of claim c in level l is hoped for 0.9 x c x c^(1/l), less its row
    assert drafted(plan, MODEL[0], CHAIN)[:3] == [[3], [2], 3]
    assert drafted(replace(plan, level_cost=0.1), MODEL[0], CHAIN)[2] == 2
    assert drafted(replace(plan, level_cost=0.2), MODEL[0], CHAIN)[2] == 1
    assert drafted(plan, MODEL[0], CHAIN, can_sync=False)[:3] == [[3], [2], 8]
    fixed = replace(plan, max_levels=5)
    assert drafted(fixed, MODEL[0], CHAIN, can_sync=False)[:3] == [[3], [2], 5]


def test_rows_are_padded_to_graph_sizes() -> None:
    """Red when costs are a line where a GPU's are a staircase."""
    costs = Costs(row=0.1, free_rows=1, padded=True)
    assert [costs.forward(rows) for rows in (1, 3, 4, 5, 8, 9)] == pytest.approx(
        [1.0, 1.3, 1.3, 1.7, 1.7, 2.5]
    )


def test_a_cost_model_is_judged_by_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Red when a log is read otherwise than written, or untimed steps count."""
    caplog.set_level(logging.DEBUG, "vllm.treespec.steps")
    works = [Work(1), Work(1, rows=4.0, drafted=1.0), Work(1, rows=4.0, levels=2.0)]
    for work, seconds in zip(works * 30, [1.0, 1.2, 1.5] * 30, strict=True):
        log_step(StepResult(None, work, seconds=seconds, num_steps=1 + (not work.rows)))
        logging.getLogger("vllm.treespec.steps").debug("another line")
    log_step(StepResult(None, Work(1), claimed={Source.INDEX: [0.5]}))
    steps = list(read_steps(caplog.text.splitlines()))
    assert [step.work for step in steps] == [*works * 30, Work(1)]
    assert [step.num_steps for step in steps[:3]] == [2, 1, 1]
    errors = errors_of(Counted(), steps)
    assert {kind: len(of_kind) for kind, of_kind in errors.items()} == {
        "plain": 29,
        "drafts": 30,
        "levels": 30,
    }
    assert all(sum(of_kind[-5:]) / 5 < 0.05 for of_kind in errors.values())


def test_the_scenarios_have_names_of_their_own() -> None:
    """Red when a scenario hides another one in the table."""
    assert len(BY_NAME) == len(SCENARIOS)
    for scenario in SCENARIOS:
        assert isinstance(scenario.world(0), World)


def test_a_share_counts_each_phase_by_its_own_best() -> None:
    """Red when a schedule is compared with a policy of another phase."""
    world = BY_NAME["text gets worse"].world(0)
    best = best_of(world)
    assert list(best.by_phase) == ["after", "before"]
    whole = Record(
        *(
            [
                getattr(best.by_phase[step.phase], name)[number]
                for number, step in enumerate(world.steps)
            ]
            for name in ("tokens", "seconds", "plans")
        )
    )
    assert best.share(world, whole) == pytest.approx(1.0)
    assert best.share(world, whole, 200) == pytest.approx(1.0)
