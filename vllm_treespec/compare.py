"""Run stock vLLM and draft trees side by side, each in a fresh engine.

A *side* is a name and the engine arguments it stands for; a *cell* is a batch size and
a temperature. :func:`run_side` starts one process for one side and measures all cells
in it; :func:`summarise` makes one table row of the rounds of a side in a cell. The demo
and the benchmark share this module; ``compare_engine`` is what runs in the process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_treespec.assets import AssetError, drafters
from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.checks import check_head_files
from vllm_treespec.core.stats import STAGES

DRAFTER = "smollm2-135m-draft"
REDRAFTER, MEDUSA = "redrafter-smollm2-135m", "medusa-smollm2-135m"
PLAIN = "plain"
# A speed-up below this is not worth a method.
WORTH_IT = 1.05


class CompareError(RuntimeError):
    """A side that gave no result; the message is one line."""


def _is_unset(value: Any) -> bool:
    """Tell a field that stands at its empty default."""
    return not value


class Side(BaseModel):
    """One way to run vLLM."""

    model_config = ConfigDict(frozen=True)

    name: str
    # "plain", "ngram", "draft_model" or one of our methods
    family: str
    # arguments of vllm.LLM besides model, dtype, max_model_len and seed
    engine: dict[str, Any]
    # draft tokens per tree at most, 0 for plain
    budget: int = 0
    greedy_only: bool = False
    # False: scheduler and worker in processes of their own, vLLM's default
    one_process: bool = True


class Cell(BaseModel):
    """What is measured at once."""

    model_config = ConfigDict(frozen=True)

    batch_size: int
    temperature: float
    # of Job.workloads; "": Job.prompts. Both are left out when unset, so that what
    # was stored without them is still told to be the same.
    workload: str = Field(default="", exclude_if=_is_unset)
    # the first so many prompts; None: all
    num_prompts: int | None = Field(default=None, exclude_if=_is_unset)


class Job(BaseModel):
    """What one engine process is told to do."""

    side: Side
    target: str
    prompts: list[str]
    # Prompts by workload. With them, all prompts are read once before the cells and
    # stay in the prefix cache: the cells measure decoding.
    workloads: dict[str, list[str]] = Field(default={}, exclude_if=_is_unset)
    cells: list[Cell]
    max_tokens: int
    seed: int = 0
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    # after the cells, stream the greedy answer to this prompt
    stream: str | None = None
    timeout_s: float = 3600.0


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
    # per request, in the order of the prompts
    num_tokens: list[int]
    # per request, (last token - first token) / (tokens - 1); None for one token
    tpot_ms: list[float | None]
    token_ids: list[list[int]]
    acceptance: Acceptance | None = None
    steps: int | None = None
    # seconds in each of STAGES, ours only
    stage_seconds: dict[str, float] = {}


class SideResult(BaseModel):
    """One run of a side: all cells of one round."""

    start_seconds: float
    cells: list[CellResult]


class Row(BaseModel):
    """A table row: one side in one cell, all rounds."""

    side: str
    family: str
    budget: int
    cell: Cell
    rounds: int
    num_tokens: int
    # median, lowest and highest over the rounds
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    tpot_ms: float | None
    # against the fastest plain side of this cell, set by with_speedups
    speedup: float | None = None
    acceptance_length: float | None = None
    # [d - 1]: share of the trees of which at least d draft tokens were accepted
    acceptance_by_depth: list[float] = []
    mean_nodes: float | None = None
    # shares of the wall time, STAGES and "other", ours only
    stage_shares: dict[str, float] = {}
    # milliseconds per step, STAGES and the part of draft in forwards, ours only
    stage_ms: dict[str, float] = {}


def shipped_drafter(name: str = DRAFTER) -> str:
    """Folder of a shipped draft model or head for the demo's target.

    Raises:
        AssetError: when the package holds none of that name.

    """
    found = drafters()
    if name not in found:
        raise AssetError(f"this package holds no {name}; name your own")
    return str(found[name])


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
    spec = {"schedule": "fixed", **spec}
    config = parse_spec_config(spec)
    check_head_files(config)
    (tree, *_) = config.scheduled()
    name = tree.name.replace(" ", "-")
    return Side(
        name=name if config.schedule == "fixed" else f"{name}-adaptive",
        family=spec["method"],
        engine={"enforce_eager": eager, "speculative_config": spec},
        budget=config.proposer().sizes.max_nodes - 1,
    )


def run_side(
    job: Job, log: Path, on_event: Callable[[dict[str, Any]], None] = lambda _: None
) -> SideResult:
    """Run one side in a fresh process.

    Args:
        job: what to run.
        log: receives all that the process prints.
        on_event: called with ``{"event": "started", "seconds"}``, ``{"event": "cell",
            "result"}`` and ``{"event": "text", "text"}`` as they happen.

    Raises:
        CompareError: one line that says why the side failed.

    """
    log.parent.mkdir(parents=True, exist_ok=True)
    result = SideResult(start_seconds=0.0, cells=[])
    done = False
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen(
            [sys.executable, "-m", "vllm_treespec.compare_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=engine_environment(job.side.one_process),
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(job.timeout_s, _kill_group, [process])
        timer.start()
        try:
            process.stdin.write(job.model_dump_json())
            process.stdin.close()
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "started":
                    result.start_seconds = event["seconds"]
                elif event["event"] == "cell":
                    result.cells.append(CellResult.model_validate(event["result"]))
                elif event["event"] == "done":
                    done = True
                on_event(event)
        except BrokenPipeError:
            done = False
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
            if not done:
                _kill_group(process)
    if not done:
        raise CompareError(
            f"{job.side.name}: no result within {job.timeout_s:.0f} s"
            if timed_out
            else f"{job.side.name}: {failure(process.returncode, log)}"
        )
    return result


def _kill_group(process: subprocess.Popen[str]) -> None:
    """End the process and all it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def engine_environment(one_process: bool) -> dict[str, str]:
    """Environment of an engine process, the same for every side."""
    env = dict(os.environ)
    env["VLLM_CPU_KVCACHE_SPACE"] = "2"
    env["VLLM_LOGGING_LEVEL"] = "WARNING"
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if one_process else "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    # vLLM's CPU guide asks for Intel's OpenMP to be preloaded.
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():
        earlier = [env["LD_PRELOAD"]] if env.get("LD_PRELOAD") else []
        env["LD_PRELOAD"] = ":".join([*earlier, str(openmp)])
    return env


# A traceback's last line; where nothing follows the colon, the paragraph below it.
ERROR = re.compile(
    r"^(?:\([^)]*\) *)*((?:\w+\.)*\w*(?:Error|Exception): (?:.*\S.*|\n\n(?:.+\n)+))",
    re.MULTILINE,
)
NO_CAUSE = "Engine core initialization failed"


def failure(returncode: int, log: Path) -> str:
    """Say in one line why an engine process ended without a result."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [" ".join(error.split()) for error in ERROR.findall(text)]
    errors = [error for error in found if NO_CAUSE not in error]
    if errors:
        return errors[-1]
    if returncode == -signal.SIGKILL:
        return f"the engine process was killed, perhaps for memory (log: {log})"
    return f"the engine process ended with status {returncode} (log: {log})"


def summarise(side: Side, results: Sequence[CellResult]) -> Row:
    """Make one table row of the rounds of a side in a cell."""
    speeds = [sum(result.num_tokens) / result.seconds for result in results]
    tpots = [
        statistics.fmean(known)
        for result in results
        if (known := [ms for ms in result.tpot_ms if ms is not None])
    ]
    row = Row(
        side=side.name,
        family=side.family,
        budget=side.budget,
        cell=results[0].cell,
        rounds=len(results),
        num_tokens=sum(sum(result.num_tokens) for result in results),
        tokens_per_s=statistics.median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        tpot_ms=statistics.median(tpots) if tpots else None,
    )
    acceptance = Acceptance.total(r.acceptance for r in results if r.acceptance)
    if acceptance.trees:
        row.acceptance_length = acceptance.length
        row.acceptance_by_depth = [n / acceptance.trees for n in acceptance.at_least]
        row.mean_nodes = acceptance.nodes / acceptance.trees
    stages: Counter[str] = Counter()
    for result in results:
        stages.update(result.stage_seconds)
    if stages:
        seconds = sum(result.seconds for result in results)
        steps = sum(result.steps or 0 for result in results)
        shares = {name: stages[name] / seconds for name in STAGES}
        row.stage_shares = {**shares, "other": 1 - sum(shares.values())}
        row.stage_ms = {
            name: 1000 * stages[name] / max(steps, 1)
            for name in (*STAGES, "draft_forward")
        }
    return row


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Set each row's speed-up against the fastest plain side of its cell."""
    fastest: dict[Cell, float] = {}
    for row in rows:
        if row.family == PLAIN:
            known = fastest.get(row.cell, 0.0)
            fastest[row.cell] = max(known, row.tokens_per_s)
    return [
        row.model_copy(update={"speedup": row.tokens_per_s / fastest[row.cell]})
        if row.cell in fastest
        else row
        for row in rows
    ]
