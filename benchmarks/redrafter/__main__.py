"""The evidence of the ReDrafter paper (arXiv 2403.09919), on vLLM.

    python -m benchmarks.redrafter --prompts FILE.jsonl --out DIR

benchmarks/README.md says what is measured and how.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.paper.metrics import num_parameters
from benchmarks.provenance import commit, model, provenance, sha256
from benchmarks.redrafter import plot, report
from benchmarks.redrafter.experiments import (
    Plan,
    execute,
    finished_runs,
    finished_scores,
)
from benchmarks.redrafter.parts import (
    PARTS,
    Beams,
    Run,
    Sizes,
    distinct,
    head_of,
)
from benchmarks.redrafter.report import Results
from benchmarks.redrafter.rows import Evidence
from benchmarks.run import (
    DryRun,
    MaxTokens,
    NumPrompts,
    Out,
    PromptsFile,
    Rounds,
    Target,
)
from vllm_treespec.heads import read_head_config
from vllm_treespec.tools.assets import AssetError, drafters, ensure_target
from vllm_treespec.tools.prompts import SHIPPED, load_prompts, spread

console = Console(stderr=True, soft_wrap=True)
ALL_PARTS = ",".join(PARTS)
SHIPPED_HEADS = {
    "redrafter": "redrafter-smollm2-135m",
    "medusa": "medusa-smollm2-135m",
}

Only = Annotated[str, typer.Option(help=f"Some of {ALL_PARTS}.")]
Tree = Annotated[
    str, typer.Option(help="Of the tables: beam width x length x draft tokens.")
]
Eager = Annotated[
    bool, typer.Option("--eager", help="Start engines faster; they are slower.")
]
Head = Annotated[str, typer.Option(help="Folder. Default: the shipped head.")]


def redrafter(
    only: Only = ALL_PARTS,
    prompts: PromptsFile = SHIPPED,
    num_prompts: NumPrompts = 8,
    max_tokens: MaxTokens = 64,
    tree: Tree = "4x4x15",
    rounds: Rounds = 1,
    redrafter: Head = "",
    medusa: Head = "",
    target: Target = "",
    eager: Eager = False,
    out: Out = Path("runs/redrafter"),
    dry_run: DryRun = False,
) -> None:
    """Reproduce tables 1 and 2 and figures 5 and 6: Markdown, JSON, plots."""
    try:
        entries = Sizes(beams_of(tree), max_tokens).entries(known_parts(only))
        target = target or str(ensure_target())
        heads = heads_of(distinct(entries), {"redrafter": redrafter, "medusa": medusa})
        models = {name: model(f) for name, f in {"target": target, **heads}.items()}
        plan = Plan(
            entries=entries,
            rounds=rounds,
            prompts=spread(load_prompts(prompts), num_prompts),
            target=target,
            heads=heads,
            eager=eager,
            out=out,
            models=models,
            commit=commit(),
        )
        finished_runs(plan)
        origin = origin_of(plan, prompts, models)
    except (AssetError, ValueError) as error:
        console.print(f"redrafter: {error}", markup=False)
        raise typer.Exit(1) from None
    print_plan(plan)
    if not dry_run and measure(plan, origin):
        raise typer.Exit(1)


def beams_of(text: str) -> Beams:
    """Read `--tree`."""
    try:
        return Beams(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise ValueError(
            f"--tree is {text!r}; write beam width x length x draft tokens, as 4x4x15"
        ) from None


def known_parts(text: str) -> list[str]:
    """Read `--only`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--only: there is no {part!r}; there are {ALL_PARTS}")
    return parts


def heads_of(runs: list[Run], named: dict[str, str]) -> dict[str, str]:
    """Folders of the heads that the runs need, by kind.

    Raises:
        ValueError: naming the option of a head that is missing or of another kind.

    """
    needed = {head_of(run.side) for run in runs}
    folders: dict[str, str] = {}
    for method, shipped in SHIPPED_HEADS.items():
        if method not in needed:
            continue
        folder = named[method] or str(drafters().get(shipped, ""))
        if not folder:
            raise ValueError(f"this package holds no {shipped}; pass --{method} FOLDER")
        found = read_head_config(Path(folder)).method
        if found != method:
            raise ValueError(f"--{method}: {folder} holds a {found} head")
        folders[method] = folder
    return folders


def origin_of(plan: Plan, prompts: Path, models: dict[str, Any]) -> dict[str, Any]:
    """Say where the results come from."""
    return {
        **provenance(sys.argv[1:], "benchmarks.redrafter"),
        "models": models,
        "prompts": f"{len(plan.prompts)} of {prompts.name} ({sha256(prompts)})",
        "engines": "eager" if plan.eager else "compiled",
    }


def print_plan(plan: Plan) -> None:
    """Print what is left to run and an estimate of the time."""
    todo = plan.todo()
    console.print(
        f"{sum(len(runs) for _, runs in todo)} runs to do in {len(todo)} engines, "
        f"{len(plan.unscored())} to rescore, {len(plan.prompts)} prompts each, "
        f"about {plan.seconds() / 60:.0f} minutes on two idle cores"
    )


def measure(plan: Plan, origin: dict[str, Any]) -> dict[str, str]:
    """Run the plan and write the reports; returns why engines failed, by name."""
    failed = execute(
        plan, after_task=lambda failed: write_reports(plan, origin, failed)
    )
    for reason in failed.values():
        console.print(f"failed: {reason}", markup=False)
    write_reports(plan, origin, failed)
    console.print(f"wrote results.json, results.md and plots to {plan.out}")
    return failed


def write_reports(plan: Plan, origin: dict[str, Any], failed: dict[str, str]) -> None:
    """Write results.json, results.md and a picture per part from finished runs."""
    runs = finished_runs(plan)
    scores = finished_scores(plan, runs)
    evidence = Evidence(runs, scores)
    results = Results(
        parameters={name: num_parameters(f) for name, f in plan.heads.items()},
        rows=evidence.rows(plan.entries),
        stretches=evidence.stretches(plan.entries),
        compressions=evidence.compressions(plan.entries),
        failed=failed,
    )
    origin = {**origin, "commits": sorted({str(run.commit) for run in runs})}
    content = {
        "provenance": origin,
        **results.model_dump(mode="json"),
        "scores": scores,
        "runs": [run.model_dump(mode="json") for run in runs],
    }
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "results.json").write_text(json.dumps(content) + "\n")
    (plan.out / "results.md").write_text(report.markdown(results, origin))
    plot.draw(results, plan.out)


if __name__ == "__main__":
    typer.run(redrafter)
