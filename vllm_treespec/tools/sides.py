"""Run stock vLLM and draft trees side by side, each in a fresh engine.

A *side* is a name and the engine arguments it stands for. A *cell* is what is measured
at once: a batch size, a temperature, a tree. :func:`side_events` starts one process
(``side_engine``) for one side and measures its cells there. Demo and benchmarks share
this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import not_
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_treespec.config import find_method, parse_spec_config
from vllm_treespec.config.base import DraftModelConfig
from vllm_treespec.config.checks import check_head_files
from vllm_treespec.config.heads import HeadMethodConfig
from vllm_treespec.config.hybrid import HybridConfig
from vllm_treespec.config.request_options import drafts_allowed
from vllm_treespec.tools.launch import EngineError, Event, events_of

PLAIN = "plain"
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
ENGINE = "vllm_treespec.tools.side_engine"
# Of engines that take turns: threads of Intel's OpenMP would spin for 200 ms while the
# next engine works. vLLM takes 5 ms where it starts workers.
TURNS = {"KMP_BLOCKTIME": "5"}


class Side(BaseModel):
    """One way to run vLLM."""

    model_config = ConfigDict(frozen=True)

    name: str
    # "plain", "ngram", "draft_model" or one of our methods
    family: str
    # arguments of vllm.LLM; they win over those that the job gives to all sides
    engine: dict[str, Any]
    # draft tokens per tree at most, 0 for plain
    budget: int = 0
    greedy_only: bool = False
    # False: scheduler and worker in processes of their own, vLLM's default
    one_process: bool = True
    # more variables of the engine process
    environment: dict[str, str] = Field(default={}, exclude_if=not_)


class Cell(BaseModel):
    """What is measured at once. Fields that are unset are not stored."""

    model_config = ConfigDict(frozen=True)

    batch_size: int
    temperature: float
    # of Job.workloads; "": Job.prompts
    workload: str = Field(default="", exclude_if=not_)
    # the first so many prompts, from the start again where there are fewer; None: all
    num_prompts: int | None = Field(default=None, exclude_if=not_)
    # of each answer; None: as the job says
    max_tokens: int | None = Field(default=None, exclude_if=not_)
    # keys of the spec-config that shape the tree, one of the side's schedule; None: as
    # the side's spec-config says
    tree: dict[str, Any] | None = Field(default=None, exclude_if=not_)
    # "module:function" called with engine and cell, returns the result; "": time the
    # answers to the prompts
    measure: str = Field(default="", exclude_if=not_)
    # more sampling parameters of its requests
    params: dict[str, Any] = Field(default={}, exclude_if=not_)
    # what that function needs to know
    options: dict[str, Any] = Field(default={}, exclude_if=not_)
    # name of its file; "": made from the other fields
    label: str = Field(default="", exclude_if=not_)

    def __hash__(self) -> int:
        """Trees and options are not hashable; equal cells have one name."""
        return hash(self.name)

    @property
    def name(self) -> str:
        """Name of its file: what tells it from the other cells of a side."""
        if self.label:
            return self.label
        tree = ["x".join(_words(value)) for value in (self.tree or {}).values()]
        work = "".join(_words(self.workload))
        parts = [work, "x".join(tree), f"t{self.temperature:g}"]
        parts += [f"b{self.batch_size}", self.measure.rpartition(":")[2]]
        parts += [f"n{self.max_tokens}"] if self.max_tokens else []
        parts += ["-".join(_words(value)) for value in self.options.values()]
        return "-".join(part for part in parts if part)


def _words(value: Any) -> list[str]:
    """Write a value, or each part of a list, as part of a file's name."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [str(part).replace("/", "_") for part in parts]


class Job(BaseModel):
    """What one engine process is told to do."""

    side: Side
    target: str
    prompts: list[str]
    # Prompts by workload. With them, a cell's prompts are read before it and stay in
    # the prefix cache: it measures decoding.
    workloads: dict[str, list[str]] = Field(default={}, exclude_if=not_)
    cells: list[Cell]
    max_tokens: int
    seed: int = 0
    dtype: str = "bfloat16"
    # whether requests are sampled as the target's generation_config.json says, as by
    # vllm serve; cells have their own temperatures and lengths
    model_defaults: bool = Field(default=False, exclude_if=not_)
    # of requests at temperatures above 0; None: all tokens may be drawn
    top_p: float | None = Field(default=None, exclude_if=not_)
    # of all requests; None: no penalty
    repetition_penalty: float | None = Field(default=None, exclude_if=not_)
    max_model_len: int = 2048
    # before the cells, stream the greedy answer to this prompt, in turns
    stream: str | None = None
    timeout_s: float = 3600.0
    # wait for the turn of each cell: other engines are in memory, too
    in_turns: bool = Field(default=False, exclude_if=not_)


class Acceptance(BaseModel):
    """What the target accepted; all counts are over the scored trees."""

    trees: int = 0
    # roots included
    nodes: int = 0
    # [d - 1]: trees of which at least d draft tokens were accepted
    at_least: list[int] = []

    @property
    def length(self) -> float:
        """Mean emitted tokens per target step of a request, bonus included."""
        return 1 + sum(self.at_least) / self.trees if self.trees else 1.0

    @classmethod
    def from_histogram(
        cls, trees: int, nodes: int, accepted: dict[int, int]
    ) -> Acceptance:
        """From the number of trees per number of accepted tokens."""
        deepest = max((d for d, count in accepted.items() if count), default=0)
        at_least = [
            sum(count for d, count in accepted.items() if d >= depth)
            for depth in range(1, deepest + 1)
        ]
        return cls(trees=trees, nodes=nodes, at_least=at_least)

    @classmethod
    def total(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """Add counts up."""
        parts = list(parts)
        deepest = max((len(part.at_least) for part in parts), default=0)
        return cls(
            trees=sum(part.trees for part in parts),
            nodes=sum(part.nodes for part in parts),
            at_least=[
                sum(part.at_least[d] for part in parts if d < len(part.at_least))
                for d in range(deepest)
            ],
        )


class CellResult(BaseModel):
    """One measured cell of one side in one round."""

    cell: Cell
    # wall time from the first request to the last token, prefill included
    seconds: float
    # CPU time of the engine's main thread within them
    cpu_seconds: float = Field(default=0.0, exclude_if=not_)
    # per request, in the order of the prompts
    num_tokens: list[int]
    # per request, (last token - first token) / (tokens - 1); None for one token
    tpot_ms: list[float | None]
    token_ids: list[list[int]]
    # of requests that had not ended
    unfinished_tokens: int = Field(default=0, exclude_if=not_)
    acceptance: Acceptance | None = None
    steps: int | None = None
    # seconds in each of STAGES, ours only
    stage_seconds: dict[str, float] = {}
    # what steps drafted with, a tree's name or "plain" -> steps; seconds of those that
    # only decoded; tokens emitted in them. Ours only
    mode_steps: dict[str, int] = Field(default={}, exclude_if=not_)
    mode_seconds: dict[str, float] = Field(default={}, exclude_if=not_)
    mode_tokens: dict[str, int] = Field(default={}, exclude_if=not_)
    # what the cell's own function found besides
    details: dict[str, Any] = Field(default={}, exclude_if=not_)


def plain_side(name: str, eager: bool, one_process: bool = True) -> Side:
    """Make a side of stock vLLM without speculative decoding."""
    return Side(
        name=name,
        family=PLAIN,
        engine={"enforce_eager": eager},
        one_process=one_process,
    )


def spec_side(spec: dict[str, Any], eager: bool) -> Side:
    """Make a side of stock speculative decoding, greedy cells only.

    Stock vLLM 0.32 and 0.33 sample wrongly above temperature 0 on the CPU: the kernel
    that spreads the temperature over the draft tokens writes into a copy.
    """
    return Side(
        name=f"{spec['method']}-{spec['num_speculative_tokens']}",
        family=spec["method"],
        engine={"enforce_eager": eager, "speculative_config": spec},
        budget=spec["num_speculative_tokens"],
        greedy_only=True,
    )


def tree_side(spec: dict[str, Any], eager: bool) -> Side:
    """Make a side of ours from its spec-config, named after method and tree.

    Without a schedule in the spec-config its tree is drawn in every step.

    Raises:
        SpecConfigError: when the spec-config cannot work.

    """
    schedule = "fixed" if spec.get("max_slowdown") is None else "measured"
    spec = {"schedule": schedule, **spec}
    config = parse_spec_config(spec)
    check_head_files(config)
    (tree, *_) = config.scheduled_trees()
    name = tree.name.replace(" ", "-")
    if config.schedule != "fixed":
        name += "-adaptive"
    if config.max_slowdown is not None:
        name += f"-{config.max_slowdown:g}"
    return Side(
        name=name,
        family=spec["method"],
        engine={"enforce_eager": eager, "speculative_config": spec},
        budget=config.proposer().sizes.max_nodes - 1,
    )


def side_of_trees(
    name: str, spec: dict[str, Any], trees: Sequence[dict[str, Any]], **engine: Any
) -> Side:
    """Make a side whose schedule holds these trees; each cell forces one.

    ``spec`` has no schedule; a tree, the keys that shape it, may stand there twice.

    Raises:
        SpecConfigError: when the spec-config cannot work.

    """
    shapes = {str(tree): tree for tree in trees}.values()
    schedule = [{"batch_size": i, **shape} for i, shape in enumerate(shapes, 1)]
    spec = {**spec, "schedule": schedule}
    sizes = [tree.config.sizes for tree in parse_spec_config(spec).scheduled_trees()]
    return Side(
        name=name,
        family=spec["method"],
        engine={**engine, "speculative_config": spec},
        budget=max(size.max_nodes - 1 for size in sizes),
    )


def seeded(drafts: bool) -> dict[str, Any]:
    """Sampling parameters of a request with a seed, with drafts or without."""
    return {"seed": 1, **drafts_allowed(drafts)}


# Starts a job's engine with a log; yields its events, and raises EngineError.
Start = Callable[[Job, Path], Generator[Event]]


def side_events(job: Job, log: Path) -> Generator[Event]:
    """Start one side's process, which prints to a log; closing the events ends it.

    They are ``{"event": "started", "seconds"}``, ``{"event": "cell", "result"}`` and
    ``{"event": "text", "text"}``, and with ``in_turns`` ``{"event": "ready"}`` before
    each cell, which is measured when the next event is taken.

    Raises:
        EngineError: one line that says why the side failed.

    """
    try:
        yield from events_of(
            ENGINE,
            job,
            log,
            one_process=job.side.one_process,
            environment={**(TURNS if job.in_turns else {}), **job.side.environment},
            timeout_s=job.timeout_s,
        )
    except EngineError as error:
        raise EngineError(f"{job.side.name}: {error}") from None


def results_of(events: Iterable[Event]) -> Iterator[CellResult]:
    """The measured cells among events."""
    for event in events:
        if event["event"] == "cell":
            yield CellResult.model_validate(event["result"])


def plain_sides(eager: Sequence[bool] = (True, False)) -> list[Side]:
    """Make the sides of vLLM in one process without speculative decoding."""
    return [plain_side(f"plain-{'eager' if e else 'compiled'}", e) for e in eager]


def stock_specs(draft: str | None) -> list[dict[str, Any]]:
    """Stock n-gram drafting, and with the draft model if there is one."""
    models = [{"method": "draft_model", "model": draft}] if draft else []
    return [NGRAM, *models]


def stock_sides(
    specs: Sequence[dict[str, Any]], depth: int, eager: Sequence[bool]
) -> list[Side]:
    """Make sides of stock speculative decoding with ``depth`` draft tokens."""
    return [
        named(spec_side({**spec, "num_speculative_tokens": depth}, mode))
        for mode in eager
        for spec in specs
    ]


def named(side: Side) -> Side:
    """Mark a compiled speculative side by its name."""
    if side.engine["enforce_eager"]:
        return side
    return side.model_copy(update={"name": f"{side.name}-compiled"})


def tree_sides(
    specs: Sequence[dict[str, Any]],
    draft: str | None,
    eager: Sequence[bool],
    heads: Mapping[str, str] | None = None,
) -> list[Side]:
    """Make the sides of spec-configs, with the draft model or head filled in.

    A side named twice is kept once. ValueError when a spec-config cannot work.
    """
    sides = [
        named(tree_side(with_model(spec, draft, heads or {}), mode))
        for mode in eager
        for spec in specs
    ]
    return list({side.name: side for side in sides}.values())


def with_model(
    spec: dict[str, Any], draft: str | None, heads: Mapping[str, str]
) -> dict[str, Any]:
    """Fill in the draft model or the head; ValueError names the missing option."""
    config = find_method(str(spec.get("method")))
    if config is None or "model" in spec:
        return spec
    if issubclass(config, DraftModelConfig):
        model, option = draft, "--draft"
    elif issubclass(config, HeadMethodConfig):
        model, option = heads.get(config.HEAD), "--head"
    elif issubclass(config, HybridConfig):
        kind = spec.get("drafter", "draft_model")
        model, option = heads.get(kind), "--head"
        if kind == "draft_model":
            model, option = draft, "--draft"
    else:
        return spec
    if model is None:
        raise ValueError(f"{json.dumps(spec)} needs a model; name one with {option}")
    return {"model": model, **spec}


def choose_sides(sides: Sequence[Side], names: Sequence[str]) -> list[Side]:
    """Keep the sides whose name or family is named; all when nothing is named."""
    for name in names:
        if not any(name in (side.name, side.family) for side in sides):
            known = ", ".join(dict.fromkeys(side.name for side in sides))
            raise ValueError(f"--sides: there is no side {name!r}; there are {known}")
    if not names:
        return list(sides)
    return [side for side in sides if side.name in names or side.family in names]
