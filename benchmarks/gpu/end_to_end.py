"""End to end on a card: are answers the same, and how fast are trees at best?

    python -m benchmarks.gpu.end_to_end --out DIR

docs/gpu.md says what is measured and how.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import provenance
from benchmarks.gpu import end_to_end_report, lossless
from benchmarks.gpu.card import (
    NoCardError,
    describe_card,
    origin,
    require_card,
    versions,
)
from benchmarks.gpu.cells import CellFolder, settings_of
from benchmarks.gpu.engines import (
    EngineCell,
    EngineSide,
    Options,
    Work,
    our_side,
    plain_sides,
    run_tasks,
    tasks_of,
)
from benchmarks.gpu.kernel import Commit, Numbers, Out, Report, Shapes, numbers
from benchmarks.gpu.shapes import known_shapes
from benchmarks.gpu.step import Context, Extra, Smoke, known
from benchmarks.run import NumPrompts, PromptsFile, Target
from vllm_treespec.tools.assets import AssetError, ensure_target
from vllm_treespec.tools.prompts import SHIPPED, load_prompts, spread
from vllm_treespec.tools.sides import REDRAFTER, shipped_drafter

MODULE = "benchmarks.gpu.end_to_end"
PARTS = "lossless,speed"
METHODS = ",".join(lossless.METHODS)
console = Console(stderr=True, soft_wrap=True)

Only = Annotated[str, typer.Option(help=f"Some of {PARTS}.")]
Methods = Annotated[str, typer.Option(help="Of lossless, comma-separated.")]
Dtypes = Annotated[str, typer.Option(help="Of lossless, comma-separated.")]
Draft = Annotated[str, typer.Option(help="Default: the shipped draft model.")]
Head = Annotated[str, typer.Option(help="Default: the shipped ReDrafter head.")]
Tokens = Annotated[int, typer.Option(min=2, help="Of each answer.")]
Rates = Annotated[
    str, typer.Option(help="Probabilities to accept a node below an accepted one.")
]


def end_to_end(
    only: Only = PARTS,
    methods: Methods = METHODS,
    dtypes: Dtypes = "float32,bfloat16",
    prompts: PromptsFile = SHIPPED,
    num_prompts: NumPrompts = 8,
    target: Target = "",
    draft: Draft = "",
    redrafter: Head = "",
    shapes: Shapes = "8b",
    nodes: Numbers = "32",
    batches: Numbers = "1,8,32",
    rates: Rates = "0.6,0.8",
    context: Context = 512,
    max_tokens: Tokens = 256,
    extra: Extra = "{}",
    commit: Commit = "",
    out: Out = Path("runs/gpu-end-to-end"),
    report: Report = False,
    smoke: Smoke = False,
) -> None:
    """Compare answers and speed with plain vLLM: JSON, Markdown, plot."""
    failed: dict[str, str] = {}
    try:
        if smoke:
            try_on_cpu()
            return
        parts = known_parts(only)
        if not report:
            require_card()
        if "lossless" in parts and not report:
            plan = lossless.Plan(
                models=models_of(target, draft, redrafter),
                prompts=spread(load_prompts(prompts), num_prompts),
                batches=[1, 8],
                max_tokens=max_tokens,
                methods=lossless.known_methods(methods),
                dtypes=[dtype.strip() for dtype in dtypes.split(",")],
                extra=known(extra),
                device="cuda",
                commit=commit or provenance.commit(),
                out=out / "lossless",
            )
            failed |= lossless.measure(plan, plan.folder(machine()), console)
        if "speed" in parts and not report:
            options = Options(context, max_tokens, 0.0, known(extra))
            failed |= measure_speed(
                known_shapes(shapes),
                [*plain_sides(), *map(our_side, numbers(nodes, "--nodes"))],
                numbers(batches, "--batches"),
                known_rates(rates),
                options,
                speed_folder(out, options),
                commit or provenance.commit(),
            )
        write_reports(out, commit, failed)
    except (NoCardError, AssetError, ValueError) as error:
        console.print(f"end_to_end: {error}", markup=False)
        raise typer.Exit(1) from None
    raise typer.Exit(int(bool(failed)))


def speed_folder(out: Path, options: Options) -> CellFolder[EngineCell]:
    """Where finished cells of speed are."""
    told = settings_of(machine(), vars(options))
    return CellFolder(out / "speed", EngineCell, told)


def machine() -> dict[str, Any]:
    """Card and versions, which tell results apart."""
    return {"card": describe_card(), "versions": versions()}


def known_parts(text: str) -> list[str]:
    """Read `--only`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in PARTS.split(","):
            raise ValueError(f"--only: there is no {part!r}; there are {PARTS}")
    return parts


def known_rates(text: str) -> list[float]:
    """Read `--rates`."""
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"--rates: {text!r} is no list of numbers from 0 to 1")
    return rates


def models_of(target: str, draft: str, redrafter: str) -> lossless.Models:
    """Folders of the models: as named, else those that come with this project."""
    return lossless.Models(
        target=target or str(ensure_target()),
        draft=draft or shipped_drafter(),
        head=redrafter or shipped_drafter(REDRAFTER),
    )


def measure_speed(
    shapes: Sequence[str],
    sides: Sequence[EngineSide],
    batches: Sequence[int],
    rates: Sequence[float],
    options: Options,
    folder: CellFolder[EngineCell],
    commit: str | None,
) -> dict[str, str]:
    """Measure the cells that are not finished; returns why engines failed."""
    folder.read()
    tasks = []
    for shape in shapes:
        work = {s.name: work_of(shape, s, batches, rates, options) for s in sides}
        tasks += tasks_of(shape, work, sides, options, folder, commit)
    return run_tasks(tasks, console)


def work_of(
    shape: str,
    side: EngineSide,
    batches: Sequence[int],
    rates: Sequence[float],
    options: Options,
) -> list[Work]:
    """Cells of one side."""
    return [
        options.work(
            f"{shape}-{side.name}-b{batch}" + ("" if rate is None else f"-a{rate:g}"),
            "answers",
            batch,
            rate,
        )
        for batch in batches
        for rate in (rates if side.nodes else [None])
    ]


def try_on_cpu() -> None:
    """Run both parts on this machine's CPU with very little to do; nothing is kept.

    Raises:
        ValueError: when an engine failed or an answer differs.

    """
    with tempfile.TemporaryDirectory() as out:
        plan = lossless.Plan(
            models=models_of("", "", ""),
            prompts=spread(load_prompts(SHIPPED), 2),
            batches=[1, 2],
            max_tokens=12,
            methods=["rsd_s"],
            dtypes=["float32"],
            extra={"enforce_eager": True},
            device="cpu",
            commit=None,
            out=Path(out) / "lossless",
        )
        answers = plan.folder({})
        failed = lossless.measure(plan, answers, console)
        compared = lossless.comparisons(answers.read())
        options = Options(20, 12, 0.0, {"enforce_eager": True}, "float32", "cpu")
        speeds = CellFolder(Path(out) / "speed", EngineCell, "smoke")
        sides = [plain_sides()[0], our_side(8)]
        failed |= measure_speed(["tiny"], sides, [2], [0.8], options, speeds, None)
        cells = speeds.read()
    console.print(end_to_end_report.lossless_table(compared), markup=False)
    console.print(end_to_end_report.speed_table(cells), markup=False)
    if failed:
        raise ValueError("; ".join(failed.values()))
    if any(part.differences for part in compared):
        raise ValueError("answers differ")


def write_reports(out: Path, commit: str, failed: dict[str, str]) -> None:
    """Write results.json, results.md and results.png from finished cells."""
    answers = CellFolder(out / "lossless", lossless.LosslessCell, None).read()
    speeds = CellFolder(out / "speed", EngineCell, None).read()
    if not answers and not speeds:
        raise ValueError(f"{out} holds no finished cells")
    found = origin(MODULE, commit)
    end_to_end_report.write(answers, speeds, found, failed, out)
    console.print(f"wrote results.json, results.md and results.png to {out}")


if __name__ == "__main__":
    typer.run(end_to_end)
