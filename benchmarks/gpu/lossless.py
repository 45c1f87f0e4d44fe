"""Greedy answers of a real model with draft trees and without, token by token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.gpu.cells import CellFolder, StoredCell, settings_of
from benchmarks.provenance import model
from vllm_treespec.config import parse_spec_config
from vllm_treespec.plugin import GPU_ATTENTION, stock_arguments
from vllm_treespec.tools.launch import EngineError
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    CellResult,
    Job,
    Side,
    SideResult,
    run_side,
)

METHODS: dict[str, dict[str, Any]] = {
    "sd": {"method": "sd", "depth": 4},
    "rsd_c": {"method": "rsd_c", "branching_factors": [3, 2, 1]},
    "rsd_s": {"method": "rsd_s", "beam_width": 4, "depth": 4},
    "redrafter": {
        "method": "redrafter",
        "beam_width": 4,
        "length": 4,
        "num_drafts": 15,
    },
}
# Triton multiplies float32 matrices in TF32 unless it is told otherwise; torch and
# vLLM do not.
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


class LosslessCell(StoredCell):
    """All answers of one side in one dtype."""

    side: str
    dtype: str
    result: SideResult


@dataclass(frozen=True)
class Comparison:
    """One side's answers beside plain ones."""

    side: str
    dtype: str
    batch: int
    num_answers: int
    identical: int
    # tokens of the plain answers
    num_tokens: int
    # of each answer that differs: prompt and place of the first other token
    differences: tuple[tuple[int, int], ...]
    acceptance_length: float | None


@dataclass(frozen=True)
class Models:
    """Folders of the target and of what drafts for it."""

    target: str
    draft: str
    head: str


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    models: Models
    prompts: list[str]
    batches: list[int]
    max_tokens: int
    methods: list[str]
    dtypes: list[str]
    # more arguments of vLLM for all sides
    extra: dict[str, Any]
    device: str
    commit: str | None
    out: Path

    def sides(self) -> list[Side]:
        """Plain vLLM and our methods, with the same attention on a card."""
        engine = dict(self.extra)
        if self.device == "cuda":
            engine["attention_backend"] = GPU_ATTENTION
        plain = {**engine, "async_scheduling": False}
        found = [Side(name=PLAIN, family=PLAIN, engine=plain)]
        for name in self.methods:
            model = self.models.head if name == "redrafter" else self.models.draft
            spec = {"schedule": "fixed", **METHODS[name], "model": model}
            ours = stock_arguments(parse_spec_config(spec), None, self.device)
            found.append(Side(name=name, family=name, engine={**engine, **ours}))
        return found

    def job(self, side: Side, dtype: str) -> Job:
        """Work of one engine process."""
        return Job(
            side=side,
            target=self.models.target,
            prompts=self.prompts,
            cells=[Cell(batch_size=b, temperature=0.0) for b in self.batches],
            max_tokens=self.max_tokens,
            dtype=dtype,
        )

    def folder(self, machine: dict[str, Any]) -> CellFolder[LosslessCell]:
        """Where finished runs are; the machine tells them apart, too."""
        told = (self.prompts, self.batches, self.max_tokens, self.extra)
        models = [model(folder) for folder in vars(self.models).values()]
        return CellFolder(self.out, LosslessCell, settings_of(machine, models, *told))


def known_methods(text: str) -> list[str]:
    """Read a comma-separated list of methods; ValueError for an unknown one."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in METHODS:
            raise ValueError(
                f"--methods: there is no {name!r}; there are {', '.join(METHODS)}"
            )
    return names


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(
    plan: Plan, folder: CellFolder[LosslessCell], console: Console
) -> dict[str, str]:
    """Run the engines that are not finished; returns why some failed, by name."""
    folder.read()
    todo = [
        (f"{dtype}-{side.name}", side, dtype)
        for dtype in plan.dtypes
        for side in plan.sides()
    ]
    missing = folder.missing(name for name, _, _ in todo)
    failed: dict[str, str] = {}
    for name, side, dtype in track(
        [run for run in todo if run[0] in missing], "lossless", console=console
    ):
        told = V1_RUNNER | (IEEE if dtype == "float32" else {})
        try:
            with environment(told):
                log = plan.out / "logs" / f"{name}.log"
                result = run_side(plan.job(side, dtype), log)
        except EngineError as error:
            failed[name] = str(error)
            console.print(f"failed: {error}", markup=False)
            continue
        folder.add(
            LosslessCell(
                name=name,
                settings=str(folder.settings),
                commit=plan.commit,
                side=side.name,
                dtype=dtype,
                result=result,
            )
        )
    return failed


def comparisons(cells: Sequence[LosslessCell]) -> list[Comparison]:
    """Each side's answers beside plain ones of the same dtype and batch size.

    Plain answers of other batch sizes are compared with those of the first: what
    differs there is rounding.
    """
    found = []
    plain = {cell.dtype: cell.result.cells for cell in cells if cell.side == PLAIN}
    for cell in cells:
        if cell.dtype not in plain:
            continue
        by_batch = {part.cell.batch_size: part for part in plain[cell.dtype]}
        first = plain[cell.dtype][0]
        for part in cell.result.cells:
            true = by_batch[part.cell.batch_size]
            if cell.side == PLAIN:
                true = first
            if true is not part:
                found.append(compare(cell, true, part))
    return found


def compare(cell: LosslessCell, true: CellResult, found: CellResult) -> Comparison:
    """Compare answers token by token."""
    pairs = list(zip(true.token_ids, found.token_ids, strict=True))
    differences = tuple(
        (prompt, first_difference(want, have))
        for prompt, (want, have) in enumerate(pairs)
        if want != have
    )
    accepted = found.acceptance
    return Comparison(
        side=cell.side,
        dtype=cell.dtype,
        batch=found.cell.batch_size,
        num_answers=len(pairs),
        identical=len(pairs) - len(differences),
        num_tokens=sum(len(want) for want, _ in pairs),
        differences=differences,
        acceptance_length=accepted.length if accepted else None,
    )


def first_difference(want: Sequence[int], have: Sequence[int]) -> int:
    """First place at which two sequences differ, or the end of the shorter."""
    for place, (one, other) in enumerate(zip(want, have, strict=False)):
        if one != other:
            return place
    return min(len(want), len(have))
