"""Variants that alternate inside one engine, and how they are compared. No engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm.outputs import CompletionOutput, RequestOutput

from benchmarks import alternate
from benchmarks.__main__ import app
from benchmarks.harness import alternating
from benchmarks.harness.alternating import (
    AlternatingSchedule,
    Alternation,
    Block,
    variants_of,
)
from tests.fast.scheduled_trees import result_of, running
from tests.fast.stored_cells import measured, rendered
from tests.fast.toy_workloads import make_method
from vllm_treespec.proposers import RsdS
from vllm_treespec.schedule import listed as schedules
from vllm_treespec.schedule.base import Schedule
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.sources.base import Sources
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language, ToyDraftModel
from vllm_treespec.testing.workloads import check_greedy
from vllm_treespec.tools.sides import Cell, CellResult

ALL = ["plain", "schedule", "fixed"]
OPTIONS = {"variants": ALL, "block_tokens": 8}
CELL = Cell(batch_size=1, temperature=0.0, workload="chat", options=OPTIONS)
METHOD = make_method([RsdS(1, 2), RsdS(2, 2)], "recursive_rejection", [9, 9])


def adaptive() -> Schedule:
    """An adaptive scheduler of two trees."""
    return AdaptiveScheduler(METHOD.schedule.trees, 16)


def alternating_schedule(number: str = "", *values: float) -> AlternatingSchedule:
    """All three variants, or the adaptive one with values of a number."""
    how = Alternation(
        variants=["schedule"] if number else ALL,
        block_tokens=8,
        number=number,
        values=list(values),
    )
    return AlternatingSchedule(variants_of(adaptive(), how), 8, number)


def step(schedule: Schedule, accepted: int, num_reqs: int = 2) -> int | None:
    """Plan for some requests, and tell what was accepted of each tree."""
    requests = running(range(num_reqs), limits=[9] * num_reqs)
    plan = schedule.plan(requests)
    trees = len(plan.slots)
    schedule.observe(
        result_of(
            plan,
            requests,
            0.5,
            [accepted] * trees,
            [4] * trees,
            levels=2 if trees else 0,
        )
    )
    return plan.tree


def test_each_variant_comes_once_a_cycle_for_as_many_tokens() -> None:
    """Red when a variant whose steps bring more sees more of the text, or ranks draw
    other orders."""
    ranks = [alternating_schedule() for _ in range(2)]
    for _ in range(300):
        chosen = {step(schedule, accepted=3) for schedule in ranks}
        assert len(chosen) == 1
    one, other = ranks
    assert one.blocks == other.blocks
    names = [block.variant for block in one.blocks]
    cycles = [names[i : i + 3] for i in range(0, len(names) - 3, 3)]
    assert all(sorted(cycle) == sorted(ALL) for cycle in cycles)
    assert len(set(map(tuple, cycles))) > 1, "the order is always the same"
    for block in one.blocks[:-1]:
        # 8 tokens of 2 requests; a step has at most 4 of each
        assert 16 <= block.tokens < 16 + 8
        if block.variant == "fixed":
            assert (block.steps, block.drafts, block.seconds) == (2, 16, 1.0)
            assert block.levels == 4
        if block.variant == "plain":
            assert (block.steps, block.drafts, block.seconds) == (8, 0, 4.0)


def test_the_largest_tree_is_fixed_and_whole() -> None:
    """Red when `fixed` draws another tree, or prices leave drafts of it out."""
    schedule = alternating_schedule()
    while schedule.variant.name != "fixed":
        step(schedule, accepted=0)
    assert step(schedule, accepted=0) == 1
    assert not schedule.plan(running([0, 1])).prunes
    assert schedule.rest_steps == 0


def test_variants_learn_apart() -> None:
    """Red when a variant knows what the trees of another brought."""
    schedule = alternating_schedule("vllm_treespec.schedule.listed:REST_STEPS", 3, 3)
    one, other = (variant.schedule for variant in schedule.variants)
    assert isinstance(one, AdaptiveScheduler)
    assert isinstance(other, AdaptiveScheduler)
    first = schedule.variant.schedule
    step(schedule, accepted=3)
    assert {one.step, other.step} == {0, 1}
    assert isinstance(first, AdaptiveScheduler)
    assert first.step == 1
    assert one.maker.lives.begun.keys() != other.maker.lives.begun.keys()
    schedule.forget([0, 1])
    assert not one.maker.lives.begun
    assert not other.maker.lives.begun


def test_the_last_step_of_an_answer_is_left_out() -> None:
    """Red when tokens behind the end of an answer count, or a plain step does not."""
    schedule = alternating_schedule()
    seen = set()
    for _ in range(40):
        total = sum(block.tokens for block in schedule.blocks)
        has_tree = step(schedule, accepted=3) is not None
        schedule.forget([1])
        after = sum(block.tokens for block in schedule.blocks)
        assert after == total + (0 if has_tree else 2)
        seen.add((has_tree, schedule.variant.name))
    assert seen >= {(True, "fixed"), (False, "plain")}


def test_a_number_changes_with_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a block runs with another variant's number."""
    monkeypatch.setattr(schedules, "REST_STEPS", 3)
    number = "vllm_treespec.schedule.listed:REST_STEPS"
    schedule = alternating_schedule(number, 5, 7)
    seen = Counter[tuple[str, float]]()
    for _ in range(60):
        step(schedule, accepted=0)
        seen[schedule.variant.name, schedules.REST_STEPS] += 1
    assert set(seen) == {("REST_STEPS 5", 5), ("REST_STEPS 7", 7)}


class Engine:
    """A side's engine whose worker is a fake one."""

    def __init__(self, fake: FakeEngine) -> None:
        """Let functions run on the fake engine's decoder."""
        self.fake = fake
        worker = SimpleNamespace(model_runner=SimpleNamespace(decoder=fake.decoder))
        self.llm = SimpleNamespace(
            collective_rpc=lambda call, args=(): [call(worker, *args)]
        )
        self.num_answers = 0

    def warm_up(self, cell: Cell) -> None:
        """Answer once."""
        self.answer(20)

    def answer(self, num_tokens: int) -> list[int]:
        """Answer greedily, and compare with plain decoding."""
        self.num_answers += 1
        request = Request(str(self.num_answers), [1, 2, 3], num_tokens)
        check_greedy(self.fake, [request])
        return request.output

    def time_answers(self, cell: Cell) -> CellResult:
        """Answer with as many tokens as fit."""
        self.answer(90)
        return measured(cell)

    def prompts_of(self, cell: Cell) -> list[int]:
        """Tokens that answers have."""
        return [30, 40, 50]

    def params(self, temperature: float, max_tokens: int) -> None:
        """Need none."""

    def generate(
        self, prompts: list[int], params: None, batch_size: int
    ) -> list[RequestOutput]:
        """Answer prompts of one batch one by one."""
        assert len(prompts) <= batch_size
        outputs = []
        for num_tokens in prompts:
            answer = CompletionOutput(0, "", self.answer(num_tokens), None, None)
            output = RequestOutput("", None, [], None, [answer], finished=True)
            output.metrics = SimpleNamespace(first_token_ts=0.0, last_token_ts=1.0)
            outputs.append(output)
        return outputs


@pytest.fixture
def engine() -> Any:
    """An engine whose steps take a second."""
    language = Language(0)
    method = replace(METHOD, schedule=adaptive())
    fake = FakeEngine(language, method, Sources([ToyDraftModel(language)]), Habits())
    fake.decoder.clock.clock = lambda: float(fake.decoder.step)
    return Engine(fake)


def test_answers_stay_while_variants_alternate(engine: Any) -> None:
    """Red when a variant changes greedy answers, is not drawn by, or is not timed."""
    result = alternating.measure(engine, CELL)
    blocks = [Block.model_validate(block) for block in result.details["blocks"]]
    by_name = {block.variant: block for block in blocks if block.steps}
    assert by_name.keys() == set(ALL)
    # Less the steps that read the prompt and what it had drafted, and the last one.
    assert 80 <= sum(block.tokens for block in blocks) < 90
    assert all(block.seconds == block.steps for block in blocks)
    assert by_name["plain"].drafts == 0
    assert by_name["fixed"].drafts > 0
    again = alternating.measure(engine, CELL)
    assert again.details["blocks"] != result.details["blocks"]


@pytest.mark.thorough
def test_whole_answers_are_given_by_each_variant(engine: Any) -> None:
    """Red when a variant is not asked the same prompts, or answers with another's."""
    options = {**OPTIONS, "block_tokens": 0}
    cell = CELL.model_copy(update={"batch_size": 2, "options": options})
    engine.job = SimpleNamespace(max_tokens=64)
    result = alternating.measure(engine, cell)
    assert result.num_tokens == [30, 40] * 3 + [50] * 3
    found = [Block.model_validate(block) for block in result.details["blocks"]]
    blocks = [block for block in found if block.steps]
    assert [block.tokens for block in blocks] == [70] * 3 + [50] * 3
    for cycle in (blocks[:3], blocks[3:]):
        by_name = {block.variant: block for block in cycle}
        assert by_name.keys() == set(ALL)
        plain = by_name["plain"]
        assert plain.drafts == plain.levels == 0
        assert plain.steps > by_name["fixed"].steps
        assert by_name["fixed"].drafts > 0
    assert sum(block.seconds for block in blocks) == pytest.approx(result.seconds)
    again = alternating.measure(engine, cell)
    names = [block["variant"] for block in again.details["blocks"]]
    assert sorted(names[:3]) == sorted(ALL), "a cell begins inside a cycle"


def in_turn(seconds: dict[str, float], count: int) -> list[Block]:
    """Blocks of 8 tokens; the first variant becomes slower, the second faster."""
    changes = dict(zip(seconds, (0.1, -0.1), strict=True))
    return [
        Block(
            variant=name,
            steps=4,
            tokens=8,
            drafts=2,
            seconds=time * (1 + changes[name] * (2 * n / (count - 1) - 1)),
        )
        for n in range(count)
        for name, time in seconds.items()
    ]


def test_variants_are_compared_with_the_first() -> None:
    """Red when speeds are mean ratios of blocks, or an interval leaves its ratio
    out, or chance shows none."""
    blocks = [*in_turn({"fixed": 2.0, "plain": 4.0}, 5), Block(variant="schedule")]
    plain, fixed = alternate.outcomes("side", CELL, blocks)
    assert (plain.variant, plain.ratio, plain.low, plain.high) == ("plain", 1, 1, 1)
    assert (fixed.variant, fixed.steps, fixed.tokens, fixed.drafts) == (
        *("fixed", 20),
        *(40, 10),
    )
    assert fixed.ratio == pytest.approx(2.0)
    assert plain.tokens_per_s == pytest.approx(2.0)
    assert fixed.low is not None
    assert fixed.high is not None
    assert 1.5 < fixed.low < 2.0 < fixed.high < 2.6
    assert alternate.interval(blocks[:-1:2], blocks[:-1:2]) == (1.0, 1.0)
    few = alternate.outcomes("side", CELL, in_turn({"plain": 1.0, "fixed": 2.0}, 4))
    assert few[1].ratio == pytest.approx(0.5)
    assert few[1].low is None


def test_the_report_shows_ratios(tmp_path: Path) -> None:
    """Red when ratios land in another column, or what is unknown looks certain."""
    cells = [
        CELL.model_copy(update={"workload": work, "temperature": temperature})
        for work in ("chat", "code")
        for temperature in (0.0, 1.0)
    ]
    rows = [
        outcome
        for cell, count in zip(cells, (4, 6, 6, 6), strict=True)
        for outcome in alternate.outcomes(
            "side", cell, in_turn({"plain": 1.0, "fixed": 0.5}, count)
        )
    ]
    text = rendered(alternate.render, rows, tmp_path)
    assert "| side | variant | chat 1 | code 1 |" in text
    assert "| side | fixed | 2.00 / 2.00 | 2.00 / 2.00 |" in text
    assert "| chat | 1 | 0 | side | fixed |" in text
    assert "| 2.00× | 16 |" in text
    assert "| 2.00× (1." in text


def test_the_command_plans(tmp_path: Path) -> None:
    """Red when a cell is planned twice, or numbers that vary need several variants."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"workload": "mine", "prompt": "hello"}\n' * 8)
    common = ["alternate", "--data", str(data), "--target", "t", "--draft", "none"]
    common += ["--spec", '{"method": "suffix_tree"}', "--out", str(tmp_path / "o")]
    common += ["--dry-run", "--batch-sizes", "1,2"]
    done = CliRunner().invoke(app, [*common, "--variants", "plain,fixed"])
    assert done.exit_code == 0, done.output
    assert "sides: suffix_tree-32x28-adaptive-compiled\n" in done.output
    assert "4 cells to measure in 1 engines" in done.output
    vary = "vllm_treespec.sources.continuations:MOST_SURE=0.9,0.95"
    done = CliRunner().invoke(app, [*common, "--variants", "schedule", "--vary", vary])
    assert done.exit_code == 0, done.output
