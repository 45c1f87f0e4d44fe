"""The step table: what a step with draft trees costs beside a plain one.

Its engines have random weights; ``end_to_end`` shares them. docs/dev/gpu.md says what
is measured and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.gpu import card, heads, timeline
from benchmarks.gpu.shapes import SHAPES
from benchmarks.harness import options, plan, plot, report
from vllm_treespec.config import parse_spec_config
from vllm_treespec.engine.adapters import GPU_V2
from vllm_treespec.plugin import stock_arguments
from vllm_treespec.tools.sides import PLAIN, Cell, Side, choose_sides
from vllm_treespec.trees.tree import MAX_NODES

Row = dict[str, Any]

DRAFTER = "benchmarks.gpu.oracle.OracleDrafter"
V2_WORKER = "benchmarks.gpu.oracle_v2.OracleWorker"
# needs no draft model; the oracle draws in its place
FAMILY = "suffix_tree"
WARM_UP_STEPS = 20
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
PLAIN_DEFAULT, PLAIN_SYNC = "plain-default", "plain-v1-sync"
# vLLM's own drafts: their names, and drafts a step
STOCK_NGRAM, STOCK_EAGLE = "stock-ngram", "stock-eagle3"
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 7, "prompt_lookup_max": 3}
EAGLE_DRAFTS = 5
STAGES = ("tree_build", "score", "commit", "draft")


CARD_SHAPES = "8b,70b-tp8"
Rate = Annotated[
    float, typer.Option(min=0, max=1, help="Of a node whose parent is accepted.")
]


@dataclass(frozen=True)
class Work:
    """What the engines of random weights measure."""

    # "steps": a window of steps in which all requests decode; "answers": all of it
    measure: Literal["steps", "answers"]
    batches: Sequence[int]
    # probabilities to accept a node once its parent is accepted; ours only
    rates: Sequence[float]
    # tokens of each prompt
    context: int
    # timed steps, or tokens of each answer
    count: int
    temperature: float
    # more arguments of vLLM
    extra: dict[str, Any]
    dtype: str = "bfloat16"
    device: str = "cuda"
    # steps behind them of which the profiler makes a timeline
    traced: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no probability, and too short a timeline."""
        if max(self.rates) > 1:
            raise ValueError(f"--rates: {self.rates} are not all from 0 to 1")
        # a step more or less is in the trace
        least = timeline.LEAST_STEPS + 2
        if 0 < self.traced < least:
            raise ValueError(f"--traced: {self.traced}; write 0, or {least} and more")

    def settings(self) -> dict[str, Any]:
        """What must not change in a folder; batch sizes and rates may be added."""
        added = {"batches", *(["rates"] if self.measure == "answers" else [])}
        # so that older results can be added to
        added |= set() if self.traced else {"traced"}
        return {key: value for key, value in asdict(self).items() if key not in added}

    def cells(self, shape: str, side: Side) -> list[Cell]:
        """Cells of one side; a plain one accepts nothing."""
        shared = {"shape": shape, "context": self.context, "count": self.count}
        shared |= {"traced": self.traced} if self.traced else {}
        ours = [{"acceptance": rate} for rate in self.rates]
        return [
            Cell(
                batch_size=batch,
                temperature=self.temperature,
                measure=f"benchmarks.gpu.engine:{self.measure}",
                options=shared | accepted,
            )
            for batch in self.batches
            for accepted in (ours if side.family == FAMILY else [{}])
        ]

    def side(self, side: Side, shape: str, models: Path) -> Side:
        """Give a side a model of random weights, and ours its drafter."""
        nodes, most = side.budget + 1, max(self.batches)
        tokens = self.count
        if self.measure == "steps":
            # steps while prompts are still read, then all others
            steps = most + WARM_UP_STEPS + self.count + self.traced
            tokens = steps * (1 + default_depth(nodes))
        v2 = side.environment == V2_RUNNER
        ours = oracle_arguments(nodes, most, self.device, v2)
        engine = {
            "model": SHAPES[shape].write(models / shape),
            "dtype": self.dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            # the scheduler lets no tree reach beyond it
            "max_model_len": self.context + 2 * MAX_NODES + tokens,
            # so many that vLLM has CUDA graphs of every size of tree
            "max_num_seqs": max(most, 8),
            "max_num_batched_tokens": 8192,
            "seed": 0,
            **(ours if side.family == FAMILY else {}),
            **side.engine,
            **self.stock_head(side, shape, models),
            **(
                heads.tree_arguments(
                    side.family, models, shape, side.budget, most, self.device
                )
                if side.family in heads.TREES
                else {}
            ),
            **(timeline.profiler_arguments(models / "traces") if self.traced else {}),
            **self.extra,
        }
        named = {"name": f"{shape}-{side.name}", "engine": engine}
        return side.model_copy(update=named)

    def stock_head(self, side: Side, shape: str, models: Path) -> dict[str, Any]:
        """The spec-config of vLLM's own EAGLE-3; nothing for other sides."""
        if side.family != STOCK_EAGLE:
            return {}
        head = SHAPES[shape].write_head(models / f"{shape}-eagle3")
        spec = {"method": "eagle3", "model": head}
        return {"speculative_config": spec | {"num_speculative_tokens": EAGLE_DRAFTS}}


def default_depth(num_nodes: int) -> int:
    """Levels of the oracle's trees below the root: about as many as nodes a level."""
    return round((num_nodes - 1) ** 0.5)


def oracle_arguments(
    num_nodes: int, max_trees: int, device: str, v2: bool = False
) -> dict[str, Any]:
    """Stock vLLM arguments of an engine that drafts through ``OracleDrafter``.

    Args:
        num_nodes: of every tree, root included; 1: steps without drafts.
        max_trees: in a step.
        device: ``"cpu"`` or ``"cuda"``.
        v2: whether on vLLM's V2 runner.

    """
    depth = default_depth(num_nodes)
    spec = {
        "method": FAMILY,
        "num_drafts": max(num_nodes - 1, 1),
        "depth": max(depth, 1),
        "max_trees": max_trees,
        "schedule": "fixed",
    }
    adapter = GPU_V2 if v2 else None
    arguments = stock_arguments(parse_spec_config(spec), None, device, adapter)
    if v2:
        arguments["worker_cls"] = V2_WORKER
    else:
        arguments["speculative_config"]["model"] = DRAFTER
    size = {"num_nodes": num_nodes, "depth": depth}
    arguments["additional_config"]["oracle"] = size
    return arguments


def named_sides(nodes: str, chosen: str) -> list[Side]:
    """Plain decoding, vLLM's own drafts, and trees of so many nodes; what is chosen.

    Engines on the V2 runner have processes of their own, as users have them.
    """
    sync = {"async_scheduling": False}
    counts = options.numbers(nodes, "--nodes", int, 1)
    every = [
        Side(name=PLAIN_SYNC, family=PLAIN, engine=sync, environment=V1_RUNNER),
        Side(name=PLAIN_DEFAULT, family=PLAIN, engine={}, one_process=False),
        Side(
            name=STOCK_NGRAM,
            family=STOCK_NGRAM,
            engine={"speculative_config": NGRAM},
            one_process=False,
        ),
        Side(name=STOCK_EAGLE, family=STOCK_EAGLE, engine={}, one_process=False),
        *(
            Side(
                name=f"{name}-{count}",
                family=FAMILY,
                engine={},
                environment=environment,
                budget=count - 1,
                one_process=environment != V2_RUNNER,
            )
            for name, environment in (("ours", {}), ("ours-v2", V2_RUNNER))
            for count in counts
        ),
        *(
            Side(
                name=f"{family}-{count}",
                family=family,
                engine={},
                environment=V2_RUNNER,
                budget=count - 1,
                one_process=False,
            )
            for family in heads.TREES
            for count in counts
            if count > 1
        ),
    ]
    return choose_sides(every, options.words(chosen))


def random_plan(
    shapes: str, sides: Sequence[Side], work: Work, out: Path, fresh: bool
) -> plan.Plan:
    """Plan the engines of some shapes; ValueError for results of another card."""
    engines = [
        plan.Engine(work.side(side, shape, out / "models"), work.cells(shape, side))
        for shape in options.words(shapes, "--shapes", list(SHAPES))
        for side in sides
    ]
    deciding = [card.card_and_versions(), work.settings()]
    job = plan.base_job("", [], work.count)
    # engine arguments grow with the batch sizes, which may be added later
    return plan.make_plan(job, engines, out, deciding, fresh, lambda side: side.name)


def gpu_step(
    nodes: card.Numbers = "32,8,16,64,1",
    batches: card.Numbers = "1,8,32",
    shapes: card.Shapes = CARD_SHAPES,
    context: card.Context = 512,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a cell.")] = 100,
    acceptance: Rate = 0.7,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    sides: options.Names = "",
    extra: card.Extra = "{}",
    traced: Annotated[
        int, typer.Option(min=0, help="Steps of a timeline; 0: there is none.")
    ] = 0,
    commit: card.Commit = "",
    out: options.Out = Path("runs/gpu-step"),
    fresh: options.Fresh = False,
    smoke: card.Smoke = False,
) -> None:
    """Time engine steps of trees and of plain decoding, on a card."""
    with options.one_line_errors("gpu-step"), card.results_folder(out, smoke) as folder:
        if smoke:
            nodes, shapes, sides = "8,1", "tiny", f"{PLAIN_SYNC},ours-8,ours-1"
            eager = {"enforce_eager": True}
            work = Work("steps", [1, 3], [0.7], 20, 5, 0.0, eager, "float32", "cpu")
        else:
            card.require_card()
            sizes = options.numbers(batches, "--batches", int, 1)
            more = options.json_object(extra, "--extra")
            given = [acceptance], context, steps, temperature, more
            work = Work("steps", sizes, *given, traced=traced)
        chosen = named_sides(nodes, sides)
        made = random_plan(shapes, chosen, work, folder, fresh)
        if any(side.family in heads.TREES for side in chosen):
            for shape in options.words(shapes):
                heads.write_weights(folder / "models", shape, SHAPES[shape])
        origin = card.origin("gpu-step", commit)
        made = replace(made, commit=origin["commit"])
        plan.run_plan(made, origin, contents, render)


def contents(finished: Sequence[plan.StoredCell]) -> report.Content:
    """Make rows of the finished cells."""
    return {"cells": rows_of(finished, "step_ms")}


def render(content: report.Content, out: Path) -> None:
    """Write one table per shape, what vLLM chose, and the plot."""
    rows = content["cells"]
    report.write_markdown(out, "Engine step", tables(rows), content)
    draw(rows, "ms per step", {"step_ms": "step", "forward_ms": "forward"}, out)
    timeline.draw(rows, out / timeline.PICTURE)


def row_of(stored: plan.StoredCell) -> Row:
    """Describe a measured cell; times are milliseconds per step."""
    side, result = stored.side, stored.result
    cell, accepted = result.cell, result.acceptance
    # None: steps were not counted
    per_step = 1 / result.steps if result.steps else None
    forward_ms = per_step and (sum(result.details["forward_ms"].values()) * per_step)
    step_ms = per_step and 1000 * result.seconds * per_step
    return {
        "shape": cell.options["shape"],
        "side": side.name.removeprefix(f"{cell.options['shape']}-"),
        "nodes": side.budget + 1 if side.family in (FAMILY, *heads.TREES) else 0,
        "batch": cell.batch_size,
        "temperature": cell.temperature,
        "context": cell.options["context"],
        "acceptance": cell.options.get("acceptance"),
        "seconds": result.seconds,
        "steps": result.steps,
        "num_tokens": sum(result.num_tokens),
        "tokens_per_s": sum(result.num_tokens) / result.seconds,
        "step_ms": step_ms,
        # of the target's layers and its output layer, by the device's own clock
        "forward_ms": forward_ms or None,
        "outside_ms": step_ms - forward_ms if step_ms and forward_ms else None,
        # by the host's clock; ours only
        "stage_ms": {
            stage: 1000 * seconds * (per_step or 0)
            for stage, seconds in result.stage_seconds.items()
        },
        # mean emitted tokens per step of a request that had a tree
        "acceptance_length": accepted.length if accepted and accepted.trees else None,
        "chosen": result.details["chosen"],
        "timeline": result.details.get("timeline"),
    }


def rows_of(stored: Sequence[plan.StoredCell], measure: str) -> list[Row]:
    """Rows in the order of the table, ``over`` each plain side in a measure."""
    rows = [row_of(cell) for cell in stored]
    values = {(row["shape"], row["batch"], row["side"]): row[measure] for row in rows}
    for row in rows:
        row["over"] = {}
        for plain in (PLAIN_SYNC, PLAIN_DEFAULT):
            base = values.get((row["shape"], row["batch"], plain))
            row["over"][plain] = row[measure] / base if base and row[measure] else None
    keys = ("shape", "batch", "nodes", "side")
    return sorted(rows, key=lambda r: (*(r[k] for k in keys), r["acceptance"] or 0))


COLUMNS: report.Columns = {
    "side": "{side}",
    "batch": "{batch}",
    "acceptance": "{acceptance:g}",
    "tokens/s": "{tokens_per_s:.0f}",
    "step ms": "{step_ms:.2f}",
    "/ v1-sync": f"{{over[{PLAIN_SYNC}]:.2f}}×",
    "/ default": f"{{over[{PLAIN_DEFAULT}]:.2f}}×",
    "forward ms": "{forward_ms:.2f}",
    "outside ms": "{outside_ms:.2f}",
    **{f"{stage} ms": f"{{stage_ms[{stage}]:.2f}}" for stage in STAGES},
    "tokens/step": "{acceptance_length:.2f}",
}


def tables(rows: Sequence[Row]) -> list[str]:
    """Write one table per shape, and runner, scheduling, graphs and attention."""
    parts = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        here = [row for row in rows if row["shape"] == shape]
        parts += [f"## {shape}", report.table_of(here, COLUMNS)]
        parts += timeline.tables(here)
    chosen = report.listing({row["side"]: row["chosen"] for row in rows})
    return [*parts, "![](results.png)", "## What vLLM chose", chosen]


def draw(rows: Sequence[Row], y: str, values: dict[str, str], out: Path) -> None:
    """Save bars: a panel per shape and batch size, a group per side.

    ``values`` names what the bars show, by the row's key.
    """

    def bar(row: Row, key: str, name: str) -> Row:
        rate = f", accepts {row['acceptance']:g}" if row["nodes"] else ""
        return {**row, "of": name + rate, y: row[key]}

    bars = [bar(row, key, name) for key, name in values.items() for row in rows]
    axes: Any = {"x": "side", "y": y, "hue": "of", "col": "batch", "row": "shape"}
    plot.bar_panels(bars, out / "results.png", aspect=1.6, **axes)
