"""How an experiment is declared: a dataclass of its options, and what it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.harness import options
from benchmarks.harness.models import Models, find_models
from benchmarks.harness.plan import (
    Engine,
    Measure,
    Plan,
    StoredCell,
    make_plan,
    run_plan,
)
from benchmarks.harness.provenance import model, provenance
from benchmarks.harness.report import Content
from benchmarks.harness.work_prompts import find_workloads
from vllm_treespec.tools.prompts import SHIPPED
from vllm_treespec.tools.sides import Job, Side, choose_sides
from vllm_treespec.tools.store import settings_of


@dataclass(frozen=True)
class Common:
    """Options of every experiment with engines."""

    target: options.Target = ""
    draft: options.Draft = ""
    # in a folder of the experiment's name
    out: options.Out = Path("runs")
    fresh: options.Fresh = False
    dry_run: options.DryRun = False


@dataclass(frozen=True)
class PaperOptions(Common):
    """Options of the papers' experiments."""

    prompts: options.PromptsFile = SHIPPED
    num_prompts: options.NumPrompts = 8
    max_tokens: options.MaxTokens = 64
    rounds: options.Rounds = 1


@dataclass(frozen=True)
class HeadOptions(PaperOptions):
    """Options of experiments that compare heads with other drafters."""

    head: options.Head = ""
    sides: options.Sides = ""
    stock_depth: options.StockDepth = 6
    trainings: options.Trainings = None
    eager: options.Eager = False

    def chosen(self, every: Sequence[Side]) -> list[Side]:
        """Keep the named sides."""
        names = options.words(self.sides)
        return [] if names == [options.NONE] else choose_sides(every, names)

    def origin(self) -> Content:
        """Say how engines ran."""
        return {"engines": "eager" if self.eager else "compiled"}


@dataclass(frozen=True)
class WorkOptions(Common):
    """Options of experiments that measure methods on kinds of work."""

    data: options.Data = SHIPPED
    workloads: options.Workloads = "all"
    num_prompts: options.NumPrompts = 4
    max_tokens: options.MaxTokens = 64
    temperatures: options.Temperatures = "0,1"
    top_p: options.TopP = None
    repetition_penalty: options.RepetitionPenalty = None
    dtype: options.Dtype = "bfloat16"
    spec: options.Specs = None
    head: options.Heads = None
    sides: options.Names = ""
    engines: options.Engines = "compiled"
    rounds: options.Rounds = 1

    def models(self) -> Models:
        """Find the models, and shipped heads of the methods that are usual."""
        return find_models(
            self.target, self.draft, self.head or [], list(options.HEAD_METHODS)
        )

    def specs(self, models: Models) -> list[dict[str, Any]]:
        """The spec-configs, or the methods that have their model."""
        given = [options.json_object(text, "--spec") for text in self.spec or []]
        return given or options.usual_specs(models.draft, models.heads)

    def work(self, count: int) -> dict[str, list[str]]:
        """Find so many prompts of each workload."""
        names = [] if self.workloads == "all" else options.words(self.workloads)
        return find_workloads(self.data, names, count)

    def warmths(self) -> list[float]:
        """Read the temperatures."""
        return options.numbers(self.temperatures, "--temperatures", float, 0)

    def requests(self) -> dict[str, Any]:
        """What the job says of all requests."""
        names = ("max_tokens", "dtype", "top_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names}

    def asked(self, work: dict[str, list[str]]) -> str:
        """Write what is asked, for the provenance."""
        counts = ", ".join(f"{len(texts)} {name}" for name, texts in work.items())
        asked = f"{counts} of {self.data.name} ({settings_of(work)})"
        asked += f", top_p {self.top_p:g}" if self.top_p else ""
        if self.repetition_penalty:
            asked += f", repetition_penalty {self.repetition_penalty:g}"
        return asked


@dataclass(frozen=True)
class Run:
    """What an experiment runs, and what is made of it."""

    job: Job
    engines: Sequence[Engine]
    models: Models
    # what is asked, for the provenance
    prompts: str
    # makes what results.json holds of the plan and its finished cells
    contents: Callable[[Plan, list[StoredCell]], Content]
    # makes tables and plots of that
    render: Callable[[Content, Path], None]
    # more that decides all results
    deciding: Any = None
    # more for the provenance
    origin: Content = field(default_factory=dict)
    # folders of heads of which each decides the results of its own side only; None:
    # all models decide all results
    own_heads: Sequence[str] | None = None
    # plans what comes after the finished cells
    then: Callable[[Plan, list[StoredCell]], Plan] | None = None
    measure: Measure | None = None

    def plan(self, asked: Common) -> Plan:
        """Make the plan; ValueError for results of other settings."""
        named, identify = self.models.named(), Side.model_dump
        deciding: list[Any] = [named, self.deciding]
        if self.own_heads is not None:
            deciding[0] = [named["target"], named.get("draft")]
            weights = {folder: model(folder) for folder in self.own_heads}
            identify = partial(identity, weights)
        return make_plan(
            self.job, self.engines, asked.out, deciding, asked.fresh, identify
        )


def identity(weights: dict[str, dict[str, str]], side: Side) -> dict[str, Any]:
    """Name a side and the weights of its head, by folder: others may come later."""
    head = side.engine.get("speculative_config", {}).get("model")
    return {**side.model_dump(), "head": weights.get(head)}


def experiment(function: Callable[[Any], Run | None]) -> Callable[..., None]:
    """Make a command of what plans an experiment.

    Args:
        function: of the experiment's name; takes one dataclass, whose fields are the
            command's options; returns None if there is nothing to run.

    """
    name = function.__name__
    (options_of,) = inspect.signature(function, eval_str=True).parameters.values()
    kind: Any = options_of.annotation

    def command(**given: Any) -> None:
        asked = kind(**given)
        with options.one_line_errors(name):
            run = function(asked)
            if run is None:
                return
            plan = run.plan(asked)
            then = None if run.then is None else partial(run.then, plan)
        named = run.models.named()
        origin = provenance(name, models=named, prompts=run.prompts) | run.origin
        contents = partial(run.contents, plan)
        run_plan(plan, origin, contents, run.render, asked.dry_run, then, run.measure)

    command.__name__, command.__doc__ = name, function.__doc__
    signature = inspect.Signature(parameters_of(kind, name))
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def parameters_of(kind: Any, name: str) -> list[inspect.Parameter]:
    """Make a keyword of each field of an experiment's options; all have defaults."""
    hints = get_type_hints(kind, include_extras=True)
    defaults: dict[str, Any] = {option.name: option.default for option in fields(kind)}
    defaults["out"] /= name
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(option, keyword, default=default, annotation=hints[option])
        for option, default in defaults.items()
    ]
