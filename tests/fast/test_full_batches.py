"""Timing of full batches, with an engine that only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from benchmarks.harness.full_batches import measure
from vllm_treespec.tools.rows import summarise
from vllm_treespec.tools.sides import Cell, CellResult, plain_side

CELL = Cell(batch_size=2, temperature=0.0, workload="chat", num_prompts=3)


class Core:
    """An engine whose requests get a token a step, as many as their prompt says."""

    def __init__(self) -> None:
        """Begin without requests."""
        self.left: dict[str, int] = {}
        self.sizes: list[int] = []
        self.aborted: list[str] = []

    def add_request(self, name: str, prompt: int, params: SamplingParams) -> None:
        """Take a request in."""
        assert params.output_kind is RequestOutputKind.DELTA
        self.left[name] = min(prompt, params.max_tokens or prompt)

    def step(self) -> list[RequestOutput]:
        """Give each request a token."""
        self.sizes.append(len(self.left))
        outputs = []
        for name in [*self.left]:
            self.left[name] -= 1
            ends = self.left[name] == 0
            text = CompletionOutput(0, "", [7], None, None)
            output = RequestOutput(name, None, [], None, [text], ends)
            output.metrics = SimpleNamespace(first_token_ts=0.0, last_token_ts=0.1)
            outputs.append(output)
            if ends:
                del self.left[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        """Drop requests."""
        self.aborted += names
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        """Whether a request is left."""
        return bool(self.left)


class Engine:
    """What a measuring function needs of a side's engine."""

    def __init__(self, prompts: list[int]) -> None:
        """Take prompts that say how many tokens their answer has."""
        self.core = Core()
        self.llm = SimpleNamespace(llm_engine=self.core)
        self.job = SimpleNamespace(max_tokens=64)
        self.prompts = prompts
        self.names = iter("abcdefgh")

    def warm_up(self, cell: Cell) -> None:
        """Be warm."""

    def prompts_of(self, cell: Cell) -> list[int]:
        """All prompts."""
        return self.prompts

    def params(self, temperature: float, max_tokens: int) -> SamplingParams:
        """Any."""
        return SamplingParams(temperature=temperature, max_tokens=max_tokens)

    def new_id(self) -> str:
        """Name a request."""
        return next(self.names)

    def read_counters(self) -> list[int]:
        """Count nothing."""
        return []

    def add_acceptance(self, result: CellResult, before: list[int]) -> None:
        """Accept nothing."""


def test_first_answers_end_one_after_the_other() -> None:
    """Red when all answers of plain decoding end together, and the next begin so."""
    engine: Any = Engine([99])
    engine.job.max_tokens = 6
    cell = CELL.model_copy(update={"batch_size": 3, "num_prompts": 5})
    result = measure(engine, cell)
    assert result.num_tokens == [2, 4, 6, 6, 6]
    assert result.unfinished_tokens == 4 + 2


def test_the_batch_stays_full() -> None:
    """Red when a place stays free at the end, or unfinished tokens are not counted."""
    engine: Any = Engine([1, 5, 2])
    result = measure(engine, CELL)
    # a: 1 token; b: 5; c: 2; then d begins as the first prompt anew: the third to end
    assert result.num_tokens == [1, 2, 1]
    assert result.unfinished_tokens == 4
    assert result.tpot_ms == [None, 100.0, None]
    assert engine.core.sizes == [2] * 4
    assert engine.core.aborted == ["b"]
    result.seconds = 2.0
    row = summarise(plain_side("plain-eager", eager=True), [result])
    assert row.tokens_per_s == (4 + 4) / 2.0
