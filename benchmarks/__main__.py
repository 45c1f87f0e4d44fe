"""``python -m benchmarks EXPERIMENT``: every experiment on one harness."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.options import console, one_line_errors
from benchmarks.harness.report import read_json

# Each module has a function of the experiment's name, and ``render`` for its results.
EXPERIMENTS = {
    "workloads": "benchmarks.workloads",
    "alternate": "benchmarks.alternate",
    "served": "benchmarks.served",
    "rsd": "benchmarks.rsd.experiment",
    "redrafter": "benchmarks.redrafter.experiment",
    "eagle": "benchmarks.eagle.experiment",
    "lyanna": "benchmarks.lyanna.experiment",
    "gpu-kernel": "benchmarks.gpu.kernel",
    "gpu-step": "benchmarks.gpu.step",
    "gpu-end-to-end": "benchmarks.gpu.end_to_end",
}
# What older results were made with.
FORMER = {
    "benchmarks.paper": "rsd",
    "benchmarks.redrafter": "redrafter",
    "compare": "workloads",
    "adaptive": "workloads",
}

app = typer.Typer(
    name="python -m benchmarks",
    help="Experiments on vLLM with draft trees. benchmarks/README.md explains them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Only the module of the experiment that is run is imported, if one is named.
named = [name for name in sys.argv[1:2] if name in EXPERIMENTS]
for name, module in EXPERIMENTS.items():
    if named and name not in named:
        continue
    app.command(name)(getattr(import_module(module), name.replace("-", "_")))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="It holds results.json.")],
) -> None:
    """Make table and plots again from stored results."""
    with one_line_errors("report"):
        content = read_json(folder)
        import_module(EXPERIMENTS[experiment_of(content)]).render(content, folder)
    console.print(f"wrote results.md and plots to {folder}")


def experiment_of(content: dict[str, Any]) -> str:
    """Name the experiment that results come from."""
    command: str = content["provenance"]["command"]
    _, _, module, first, *_ = command.split()
    made_with = first if module == "benchmarks" else module
    return FORMER.get(made_with, made_with)


if __name__ == "__main__":
    app()
