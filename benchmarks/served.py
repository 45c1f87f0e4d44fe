"""Speed under load: ``vllm serve``, and vLLM's own benchmark client beside it."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import options, plot, report
from benchmarks.harness.experiment import Run, WorkOptions, experiment
from benchmarks.harness.plan import Plan, StoredCell, base_job, execute
from benchmarks.harness.report import Columns, Content
from benchmarks.harness.rows import engines_of
from vllm_treespec.tools.launch import EngineError, Event, engine_environment, failure
from vllm_treespec.tools.sides import (
    PLAIN,
    Cell,
    CellResult,
    Job,
    choose_sides,
    plain_sides,
    tree_sides,
)

START_TIMEOUT_S = 600.0
POLL_S = 1.0
VLLM = str(Path(sys.executable).with_name("vllm"))
KEYS = ("workload", "clients", "rate", "temperature", "side")
# Requests at a time, at most, where they come at a rate.
MOST_CLIENTS = 16
# Columns of a row, and what vLLM's client calls them.
MEASURED = {
    "tokens_per_s": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "itl_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "acceptance_length": "spec_decode_acceptance_length",
}
# Columns of a row that are over plain's, and of what.
OF_PLAIN = {
    "speedup": "tokens_per_s",
    "ttft_ratio": "ttft_ms",
    "itl_p99_ratio": "itl_p99_ms",
}
NOTES = (
    "Load of `vllm bench serve`: so many clients, each with one chat request at a "
    "time; or requests that come at random, so many a second on the average. TTFT: "
    "time to the first token; TPOT: time per token after it; ITL: time between two "
    "pieces of an answer, which hold all tokens of a step; of all requests median and "
    "99th percentile, then median of the rounds. Beside the speed-up stand the time to "
    "the first token and the longest times between pieces, over plain's."
)
SPECS = [{"method": "suffix_tree", "schedule": how} for how in ("measured", "fixed")]


@dataclass(frozen=True)
class Options(WorkOptions):
    """Options of ``served``."""

    num_prompts: options.NumPrompts = 16
    temperatures: options.Temperatures = "0"
    clients: Annotated[
        str, typer.Option(help="Requests at a time, comma-separated.")
    ] = "1,4"
    rates: Annotated[
        str,
        typer.Option(
            help=f"Also requests a second, comma-separated; at most {MOST_CLIENTS} run."
        ),
    ] = ""
    serve_arguments: Annotated[
        str, typer.Option(help="More arguments of vllm serve.")
    ] = ""

    def loads(self) -> list[dict[str, Any]]:
        """Fields of a cell for each load: of clients, then of rates."""
        counts = options.numbers(self.clients, "--clients", int, 1)
        rates = (
            options.numbers(self.rates, "--rates", float, 0.001) if self.rates else []
        )
        most = {"batch_size": MOST_CLIENTS}
        return [
            *({"batch_size": count} for count in counts),
            *({**most, "options": {"rate": rate}} for rate in rates),
        ]


@experiment
def served(asked: Options) -> Run:
    """Load servers with and without draft trees by vLLM's own client.

    Without --spec: the suffix tree with its measured schedule, and in every step.
    """
    models = asked.models()
    modes = options.EAGER_MODES[asked.engines]
    specs = asked.specs(models) if asked.spec else SPECS
    sides = [
        *plain_sides(modes),
        *tree_sides(specs, models.draft, modes, models.heads),
    ]
    work = asked.work(asked.num_prompts)
    cells = [
        Cell(temperature=temperature, workload=name, **load)
        for name in work
        for load in asked.loads()
        for temperature in asked.warmths()
    ]
    start = partial(serve_side, asked.serve_arguments.split(), asked.out / "client")
    return Run(
        job=base_job(models.target, [], workloads=work, **asked.requests()),
        engines=engines_of(
            choose_sides(sides, options.words(asked.sides)), cells, asked.rounds
        ),
        models=models,
        prompts=asked.asked(work),
        contents=contents,
        render=render,
        deciding=asked.serve_arguments,
        measure=partial(execute, start=start),
    )


def serve_side(
    arguments: Sequence[str], folder: Path, job: Job, log: Path
) -> Generator[Event]:
    """Serve one side, and let the client put it under the load of each cell.

    Raises:
        EngineError: one line that says why server or client failed.

    """
    with serving(job, arguments, log) as url:
        for cell in job.cells:
            measured = put_under_load(cell, job, url, folder)
            result = CellResult(
                cell=cell,
                seconds=measured["duration"],
                num_tokens=[],
                tpot_ms=[],
                token_ids=[],
                details=measured,
            )
            yield {"event": "cell", "result": result.model_dump(mode="json")}


@contextmanager
def serving(job: Job, arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run ``vllm serve`` while the body runs; yields the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [VLLM, "serve", job.target, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", job.dtype, "--max-model-len", str(job.max_model_len)]
    command += ["--max-num-seqs", str(max(cell.batch_size for cell in job.cells))]
    if job.side.engine["enforce_eager"]:
        command.append("--enforce-eager")
    if job.side.family != PLAIN:
        spec = json.dumps(job.side.engine["speculative_config"])
        command += ["--speculative-config", spec]
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen(
            [*command, *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=engine_environment(one_process=False),
        ) as server,
    ):
        try:
            wait_until_healthy(url, server, log)
            yield url
        finally:
            server.terminate()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; EngineError when it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise EngineError(f"{failure(server.returncode, log)} (log: {log})")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(POLL_S)
    raise EngineError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")


def put_under_load(cell: Cell, job: Job, url: str, folder: Path) -> dict[str, Any]:
    """Run vLLM's client; returns what it measured, without its lists.

    Raises:
        EngineError: when the client fails or a request is not answered.

    """
    asked = job.workloads[cell.workload]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{cell.workload}.jsonl"
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in asked]
    file.write_text("".join(lines), encoding="utf-8")
    arguments: dict[str, Any] = {
        "backend": "openai-chat",
        "base-url": url,
        "endpoint": "/v1/chat/completions",
        "model": job.target,
        "dataset-name": "custom",
        "dataset-path": file,
        "custom-output-len": job.max_tokens,
        "num-prompts": len(asked),
        "max-concurrency": cell.batch_size,
        "request-rate": cell.options.get("rate", "inf"),
        "num-warmups": cell.batch_size,
        "seed": job.seed,
        "temperature": cell.temperature,
        **({"top-p": job.top_p} if job.top_p and cell.temperature else {}),
        **(
            {"repetition-penalty": job.repetition_penalty}
            if job.repetition_penalty
            else {}
        ),
        "result-dir": folder,
        "result-filename": "result.json",
    }
    flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm"]
    command = [VLLM, "bench", "serve", *flags, "--save-result"]
    command += [text for k, v in arguments.items() for text in (f"--{k}", str(v))]
    env = engine_environment(one_process=False)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise EngineError(f"vllm bench serve ended early: {reason}")
    measured: dict[str, Any] = json.loads((folder / "result.json").read_text())
    if measured["completed"] != len(asked):
        raise EngineError(f"{measured['completed']} of {len(asked)} requests answered")
    return {key: v for key, v in measured.items() if not isinstance(v, list)}


def contents(_: Plan, finished: Sequence[StoredCell]) -> Content:
    """Make a row for each side under each load: medians of the rounds."""
    groups: dict[tuple[Any, ...], list[StoredCell]] = {}
    for stored in finished:
        cell = stored.result.cell
        rate = cell.options.get("rate", 0.0)
        load = (cell.workload, cell.batch_size, rate, cell.temperature)
        groups.setdefault((*load, stored.side.name), []).append(stored)
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, group in sorted(groups.items()):
        row: dict[str, Any] = dict(zip(KEYS, key, strict=True))
        rows.append({**row, "rounds": len(group), **medians(group)})
        if group[0].side.family == PLAIN:
            best = plain.get(key[:-1], rows[-1])
            plain[key[:-1]] = max(best, rows[-1], key=lambda row: row["tokens_per_s"])
    for row in rows:
        base = plain.get(tuple(row[name] for name in KEYS[:-1]), {})
        for ratio, column in OF_PLAIN.items():
            both = row[column], base.get(column)
            row[ratio] = both[0] / both[1] if all(both) else None
    runs = [stored.model_dump(mode="json") for stored in finished]
    return {"rows": rows, "runs": runs}


def medians(group: Sequence[StoredCell]) -> dict[str, float | None]:
    """Take what the client measured in the rounds of one side under one load."""
    row: dict[str, float | None] = {}
    for column, name in MEASURED.items():
        values = [stored.result.details.get(name) for stored in group]
        present = [value for value in values if value is not None]
        row[column] = statistics.median(present) if present else None
    return row


COLUMNS: Columns = {
    "side": "{side}",
    "tokens/s": "{tokens_per_s:.1f}",
    "speed-up": "{speedup:.2f}×",
    "TTFT": "{ttft_ratio:.2f}×",
    "ITL p99": "{itl_p99_ratio:.2f}×",
    "TTFT ms": "{ttft_ms:.0f}",
    "TTFT p99 ms": "{ttft_p99_ms:.0f}",
    "TPOT ms": "{tpot_ms:.1f}",
    "TPOT p99 ms": "{tpot_p99_ms:.1f}",
    "ITL ms": "{itl_ms:.1f}",
    "ITL p99 ms": "{itl_p99_ms:.1f}",
    "acceptance length": "{acceptance_length:.2f}",
    "rounds": "{rounds}",
}


def load_name(row: dict[str, Any]) -> str:
    """Say what load a row is of; rows of earlier results have no rate."""
    rate = row.get("rate")
    return f"{rate:g} requests/s" if rate else f"{row['clients']} clients"


def render(content: Content, out: Path) -> None:
    """Write one table per load, and the plot."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        row["load"] = load_name(row)
        title = f"{row['workload']}, {row['load']}, temperature"
        groups.setdefault(f"{title} {row['temperature']:g}", []).append(row)
    parts = report.sections({title: (r, COLUMNS) for title, r in groups.items()})
    report.write_markdown(out, "Served", [*parts, "## Reading it", NOTES], content)
    plot.bar_panels(
        content["rows"],
        out / "results.png",
        x="load",
        y="speedup",
        hue="side",
        col="workload",
        row="temperature",
        level=1,
        aspect=1.3,
    )
