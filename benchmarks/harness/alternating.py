"""One engine that changes how it drafts, from answer to answer or inside answers.

Engines side by side differ in speed for no reason of ours: where their memory lies,
what the machine does at the time. Inside one engine both fall on all variants alike.
"""

from __future__ import annotations

import copy
import pkgutil
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from benchmarks.harness import full_batches
from vllm_treespec.schedule.base import Schedule, ScheduledTree
from vllm_treespec.schedule.listed import REST_STEPS
from vllm_treespec.schedule.plan import (
    PLAIN_PLAN,
    RunningRequests,
    StepPlan,
    StepResult,
)
from vllm_treespec.tools.side_engine import SideEngine, tpot_ms
from vllm_treespec.tools.sides import Cell, CellResult

# no trees; the trees that the spec-config's schedule chooses; the largest tree in
# every step
PLAIN, SCHEDULE, FIXED = "plain", "schedule", "fixed"


class Alternation(BaseModel):
    """What alternates, and how often."""

    # of PLAIN, SCHEDULE and FIXED
    variants: list[str]
    # tokens of each request after which the next variant comes; 0: whole answers, to
    # the same prompts with each variant
    block_tokens: int
    # "module:name" of a number in our code; the last variant then comes once for each
    # of its values
    number: str = ""
    values: list[float] = []

    @property
    def num_variants(self) -> int:
        """How many alternate."""
        return len(self.variants) + max(len(self.values) - 1, 0)


class Block(BaseModel):
    """Steps of one variant, one after the other.

    Of a part of an answer those steps count that read no prompt.
    """

    variant: str
    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    # that draft models read
    levels: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Variant:
    """One way to draft."""

    name: str
    # learns from the steps of this variant alone
    schedule: Schedule
    # of the number that changes; None: it stays
    value: float | None = None


class PlainSchedule(Schedule):
    """Decodes plainly."""

    def _rest_steps(self) -> int:
        """As many as other schedules have."""
        return REST_STEPS

    def _plan(self, requests: RunningRequests) -> StepPlan:
        """Plan no tree."""
        return PLAIN_PLAN

    def observe(self, result: StepResult) -> None:
        """Learn nothing."""

    def forget(self, slots: Sequence[int]) -> None:
        """Know nothing of requests."""


class AlternatingSchedule(Schedule):
    """Lets variants choose in turn, each for whole answers, or for some tokens of them.

    Each of them comes once in a *cycle*, in an order of its own that is the same on
    every rank. A block ends after tokens, not after steps: a variant whose steps bring
    more would see less of the text in which they do, and others more.
    """

    def __init__(
        self, variants: Sequence[Variant], block_tokens: int, number: str = ""
    ) -> None:
        """Take the variants; ``number``: see ``Alternation``."""
        super().__init__(variants[0].schedule.trees)
        self.variants = variants
        self.block_tokens = block_tokens
        self.number = number
        self.random = random.Random(0)
        # of the cycle
        self.left: list[Variant] = []
        self.blocks: list[Block] = []
        # of the block, of all requests
        self.num_emitted = 0
        # of the latest plan of the block's variant; 0: it has not planned yet
        self.num_reqs = 0
        # number of a block, and what it was before the latest step with a tree
        self.before: tuple[int, Block] | None = None
        self._begin_block()

    def begin(self) -> None:
        """Forget the blocks, and begin a cycle."""
        self.blocks.clear()
        self.left.clear()
        self.before = None
        self._begin_block()

    def end_answers(self, num_tokens: int, seconds: float) -> None:
        """End a block of whole answers: what they emitted, and how long they took."""
        self.blocks[-1].tokens = num_tokens
        self.blocks[-1].seconds = seconds
        self._begin_block()

    def _begin_block(self) -> None:
        if not self.left:
            self.left = self.random.sample(self.variants, len(self.variants))
        self.variant = self.left.pop()
        self.blocks.append(Block(variant=self.variant.name))
        self.num_emitted = self.num_reqs = 0
        if self.variant.value is not None:
            module, _, name = self.number.partition(":")
            setattr(pkgutil.resolve_name(module), name, self.variant.value)

    def _rest_steps(self) -> int:
        return self.variant.schedule.rest_steps

    def _plan(self, requests: RunningRequests) -> StepPlan:
        """Let the block's variant plan, or the next one's."""
        if 0 < self.block_tokens * requests.num_reqs <= self.num_emitted:
            self._begin_block()
        self.num_reqs = requests.num_reqs
        return self.variant.schedule.plan(requests)

    def observe(self, result: StepResult) -> None:
        """Count the steps that the last plan held for; its variant learns."""
        if not self.num_reqs:
            # It was another variant's, and its trees did not come back.
            return
        num_tokens = self.num_reqs * result.num_steps + sum(result.num_accepted)
        self.num_emitted += num_tokens
        self.variant.schedule.observe(result)
        self.before = None
        seconds = result.seconds
        if not self.block_tokens:
            self._count(result, num_tokens, seconds or 0.0)
        elif seconds is not None:
            if result.tree is not None:
                self.before = len(self.blocks) - 1, self.blocks[-1].model_copy()
            self._count(result, num_tokens, seconds)

    def _count(self, result: StepResult, num_tokens: int, seconds: float) -> None:
        """Add steps to the block; ``seconds`` are those of each."""
        block = self.blocks[-1]
        block.steps += result.num_steps
        block.tokens += num_tokens
        block.drafts += sum(result.num_drafts)
        block.levels += int(result.work.levels)
        block.seconds += seconds * result.num_steps

    def forget(self, slots: Sequence[int]) -> None:
        """Let all variants forget these requests, whose answers have ended."""
        if slots:
            self.leave_out_last()
        for variant in self.variants:
            variant.schedule.forget(slots)

    def leave_out_last(self) -> None:
        """Leave the latest step out if it had a tree, and an answer ended with it.

        What the tree brought behind the end is of no use.
        """
        if self.before is not None:
            number, block = self.before
            self.blocks[number] = block
            self.before = None


def variants_of(schedule: Schedule, alternation: Alternation) -> list[Variant]:
    """Make the variants, each with a copy of what the schedule knows so far."""
    *others, last = [
        Variant(name, schedule_of(name, schedule)) for name in alternation.variants
    ]
    if not alternation.number:
        return [*others, last]
    _, _, number = alternation.number.partition(":")
    return others + [
        Variant(f"{number} {value:g}", copy.deepcopy(last.schedule), value)
        for value in alternation.values
    ]


def schedule_of(variant: str, schedule: Schedule) -> Schedule:
    """Make the schedule of a variant."""
    if variant == PLAIN:
        return PlainSchedule(schedule.trees)
    own = copy.deepcopy(schedule)
    if variant == FIXED:
        own.forced_index = largest(schedule.trees)
    return own


def largest(trees: Sequence[ScheduledTree]) -> int:
    """Index of the tree of the most nodes, of equal ones that of the most levels that
    models draft."""
    sizes = [(tree.sizes.max_nodes, tree.sizes.draft_depth) for tree in trees]
    return sizes.index(max(sizes))


def measure(engine: SideEngine, cell: Cell) -> CellResult:
    """Answer the prompts while variants alternate; ``details`` are the blocks.

    ``cell.options`` are those of ``Alternation``. What variants learn stays for the
    next cell.
    """
    engine.llm.collective_rpc(begin, args=(cell.options,))
    engine.warm_up(cell)
    engine.llm.collective_rpc(begin, args=(cell.options,))
    alternation = Alternation.model_validate(cell.options)
    if not alternation.block_tokens:
        result = whole_answers(engine, cell, alternation.num_variants)
    elif cell.batch_size > 1:
        result = full_batches.measure(engine, cell)
    else:
        result = engine.time_answers(cell)
    [found] = engine.llm.collective_rpc(blocks)
    result.details = {"blocks": found}
    return result


def whole_answers(engine: SideEngine, cell: Cell, num_variants: int) -> CellResult:
    """Answer each batch of prompts with one variant after the other."""
    prompts = engine.prompts_of(cell)
    params = engine.params(cell.temperature, cell.max_tokens or engine.job.max_tokens)
    result = CellResult(cell=cell, seconds=0.0, num_tokens=[], tpot_ms=[], token_ids=[])
    for first in range(0, len(prompts), cell.batch_size):
        batch = prompts[first : first + cell.batch_size]
        for _ in range(num_variants):
            start = time.perf_counter()
            outputs = engine.generate(batch, params, cell.batch_size)
            seconds = time.perf_counter() - start
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            result.seconds += seconds
            result.num_tokens += map(len, answers)
            result.tpot_ms += map(tpot_ms, outputs)
            result.token_ids += answers
            num_tokens = sum(map(len, answers))
            engine.llm.collective_rpc(end_answers, args=(num_tokens, seconds))
    return result


def begin(worker: Any, options: Mapping[str, Any]) -> None:
    """Let a worker's schedule alternate, if it does not, and begin anew."""
    decoder = worker.model_runner.decoder
    schedule = decoder.method.schedule
    if not isinstance(schedule, AlternatingSchedule):
        alternation = Alternation.model_validate(options)
        variants = variants_of(schedule, alternation)
        schedule = AlternatingSchedule(
            variants, alternation.block_tokens, alternation.number
        )
        decoder.method = replace(decoder.method, schedule=schedule)
        decoder.drafter.method = decoder.method
        decoder.clock.schedule = schedule
    schedule.begin()


def end_answers(worker: Any, num_tokens: int, seconds: float) -> None:
    """Tell a worker that answers have ended; the next ones are another variant's."""
    schedule = worker.model_runner.decoder.method.schedule
    schedule.end_answers(num_tokens, seconds)


def blocks(worker: Any) -> list[dict[str, Any]]:
    """What a worker's blocks were, when all answers have ended."""
    schedule = worker.model_runner.decoder.method.schedule
    schedule.leave_out_last()
    return [block.model_dump() for block in schedule.blocks]
