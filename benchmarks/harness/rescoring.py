"""Log-likelihoods of stored answers under the target, by a plain engine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.plan import Engine, Plan, StoredCell
from vllm_treespec.tools.sides import Cell, CellResult, plain_side

if TYPE_CHECKING:
    from vllm_treespec.tools.side_engine import SideEngine

RESCORING = "rescoring"
# Log-likelihoods per token of a cell's answers, by name of the cell.
Scores = Mapping[str, Sequence[float]]


def name_of(stored: StoredCell) -> str:
    """Name a finished cell among all sides and rounds."""
    return f"{stored.side.name}.{stored.result.cell.name}.{stored.round}"


def rescoring_plan(plan: Plan, answered: Iterable[StoredCell]) -> Plan:
    """Plan the engine that scores the answers of finished cells."""
    cells = [
        Cell(
            batch_size=8,
            temperature=0.0,
            label=name_of(stored),
            measure="benchmarks.harness.rescoring:score",
            options={
                "file": str(plan.file(stored.side, stored.result.cell, stored.round))
            },
        )
        for stored in answered
    ]
    return replace(plan, engines=[Engine(plain_side(RESCORING, eager=True), cells)])


def split_scores(
    plan: Plan, finished: Iterable[StoredCell]
) -> tuple[list[StoredCell], dict[str, list[float]]]:
    """Tell a plan's cells, in its order, from scores, by name of the cell."""
    measured: dict[tuple[str, str], list[StoredCell]] = {
        (engine.side.name, cell.name): []
        for engine in plan.engines
        for cell in engine.cells
    }
    scores = {}
    for stored in finished:
        key = (stored.side.name, stored.result.cell.name)
        if stored.side.name == RESCORING:
            scores[key[1]] = stored.result.details["mean_logprobs"]
        elif key in measured:
            measured[key].append(stored)
    return [stored for group in measured.values() for stored in group], scores


def score(engine: SideEngine, cell: Cell) -> CellResult:
    """Mean log-likelihood per token of a cell's answers, at temperature 1."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    text = Path(cell.options["file"]).read_text(encoding="utf-8")
    answers = StoredCell.model_validate_json(text).result.token_ids
    prompts = [prompt["prompt_token_ids"] for prompt in engine.prompts]
    prompts = [prompts[number % len(prompts)] for number in range(len(answers))]
    both = zip(prompts, answers, strict=True)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.llm.generate(
        [tokens_input(prompt + list(answer)) for prompt, answer in both],
        params,
        use_tqdm=False,
    )
    means = []
    for output, answer in zip(outputs, answers, strict=True):
        found: Any = output.prompt_logprobs
        steps = zip(found[-len(answer) :], answer, strict=True)
        means.append(statistics.fmean(step[token].logprob for step, token in steps))
    return CellResult(
        cell=cell,
        seconds=0.0,
        num_tokens=[],
        tpot_ms=[],
        token_ids=[],
        details={"mean_logprobs": means},
    )
