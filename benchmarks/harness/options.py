"""Options that experiments share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from vllm_treespec.tools.assets import AssetError

# experiments read their options' texts by these
from vllm_treespec.tools.options import json_object as json_object
from vllm_treespec.tools.options import numbers as numbers
from vllm_treespec.tools.options import words as words

console = Console(stderr=True, soft_wrap=True)

PromptsFile = Annotated[
    Path, typer.Option(help="JSONL with prompt, question, instruction or turns.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts, of each workload.")]
Data = Annotated[
    Path,
    typer.Option(
        help="Folder with the data sets' files, or JSONL with prompts, also with "
        "workload and prompt."
    ),
]
Workloads = Annotated[
    str, typer.Option(help="all, or some of chat,code,mathematics,editing,reading.")
]
Waves = Annotated[
    int,
    typer.Option(
        min=1,
        help="A batch larger than 1 asks this many times its size, one of 1 "
        "--num-prompts; from 2 on it stays full.",
    ),
]
Trainings = Annotated[
    Path | None,
    typer.Option(
        help="Folder with trained heads: training.json, and beside it evaluation.json "
        "of `treespec train evaluate --json`, if there is one."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=2, help="Per answer.")]
BatchSizes = Annotated[str, typer.Option(help="Requests at a time, comma-separated.")]
Temperatures = Annotated[str, typer.Option(help="Comma-separated.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="top_p of requests at temperatures above 0."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="repetition_penalty of all requests; many models ask for one."),
]
Dtype = Annotated[
    str, typer.Option(help="Of weights and KV, as in vllm serve: bfloat16, float32.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of every engine, in turn.")]
Names = Annotated[
    str, typer.Option(help="Only these names or methods, comma-separated.")
]
Specs = Annotated[
    list[str] | None,
    typer.Option(
        help="A spec-config as JSON; its model is filled in. May be repeated."
    ),
]
Engines = Annotated[
    Literal["eager", "compiled", "both"],
    typer.Option(help="How speculative sides run."),
]
# Values of enforce_eager.
EAGER_MODES = {"eager": [True], "compiled": [False], "both": [True, False]}
StockDepth = Annotated[
    int, typer.Option(min=1, help="Draft tokens of stock ngram and draft_model.")
]
Target = Annotated[str, typer.Option(help="Folder. Default: the demo's target model.")]
Draft = Annotated[
    str,
    typer.Option(
        help="Folder; none: no draft model. Default: the shipped one, for the demo's "
        "target only."
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(help="Folder of a head. May be repeated. Default: the shipped ones."),
]
Head = Annotated[str, typer.Option(help="Folder. Default: the shipped head.")]
Sides = Annotated[
    str,
    typer.Option(help="Only these names or methods, comma-separated; none: no engine."),
]
NONE = "none"
# Methods that are measured unless spec-configs are given: those that draft from an
# index, with a draft model, and with each kind of head.
INDEXES = ("suffix_tree", "hybrid")
DRAFT_METHODS = ("sd", "rsd_c", "rsd_s")
HEAD_METHODS = {
    "redrafter": "redrafter",
    "medusa": "medusa_tree",
    "eagle": "eagle_tree",
}
Eager = Annotated[bool, typer.Option("--eager", help="Start faster, run slower.")]
Out = Annotated[
    Path, typer.Option(help="For results; what is finished there is not run again.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what is finished.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")]


@contextmanager
def one_line_errors(experiment: str) -> Iterator[None]:
    """Print an error that the user can mend as one line, and exit with status 1."""
    try:
        yield
    except (AssetError, ValueError) as error:
        console.print(f"{experiment}: {error}", markup=False)
        raise typer.Exit(1) from None


def usual_specs(draft: str | None, heads: Mapping[str, str]) -> list[dict[str, Any]]:
    """The methods that have their model, each with its default tree."""
    methods = [
        INDEXES[0],
        *(DRAFT_METHODS if draft else ()),
        *(method for kind, method in HEAD_METHODS.items() if kind in heads),
    ]
    return [{"method": method} for method in methods]


def of_own_text(specs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let indexes know no earlier answers: prompts repeat between cells."""
    return [
        {**spec, "max_cached_tokens": 0} if spec.get("method") in INDEXES else spec
        for spec in specs
    ]
