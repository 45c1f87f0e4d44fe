"""``treespec doctor --target``: whether a model is supported, by its config alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.checks import check_head_files
from vllm_treespec.core.processor import slow_arithmetic
from vllm_treespec.engine.refusals import (
    check_platform,
    refuse_drafters,
    unsupported_features,
)
from vllm_treespec.engine.seams import SeamError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

NO = "[green]no[/]"
YES = "[red]yes: refused[/]"


@dataclass(frozen=True)
class TargetCheck:
    """What is to be checked."""

    # folder or hub id
    target: str
    # JSON text
    spec: str | None = None
    max_model_len: int | None = None
    num_ranks: int = 1


def check_target(check: TargetCheck, console: Console) -> bool:
    """Print what a target has of what draft trees do not support.

    No weights are loaded.

    Returns:
        whether an engine would start, as far as configs can say.

    """
    try:
        device = check_platform()
        target = read_target(check)
    except (SpecConfigError, SeamError) as error:
        console.print(f"[red]refused:[/] {escape(one_line(error))}")
        return False
    features = unsupported_features(target, device)
    table = Table(title=f"{escape(check.target)} on {device}", title_justify="left")
    table.add_column("what draft trees do not support")
    table.add_column("has it")
    for what, found in features.items():
        table.add_row(what, YES if found else NO)
    console.print(table)
    problem = spec_problem(check, target, device)
    if problem is not None:
        console.print(f"[red]refused:[/] {escape(problem)}")
    slow = slow_arithmetic(target.dtype) if device == "cpu" else None
    if slow is not None:
        console.print(f"[yellow]slow:[/] {escape(slow)}")
    refused = any(features.values()) or problem is not None
    if refused:
        console.print("[red]draft trees do not work here[/]")
    else:
        console.print("[green]draft trees work here[/]")
    return not refused


def read_target(check: TargetCheck) -> ModelConfig:
    """Make vLLM's config of the target.

    Raises:
        SpecConfigError: vLLM cannot read it.

    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(
            model=check.target,
            skip_tokenizer_init=True,
            max_model_len=check.max_model_len,
        ).create_model_config()
    except (OSError, ValueError, StrictDataclassError) as error:
        raise SpecConfigError(
            f"--target: vLLM cannot read {check.target} ({error}); name the folder, or "
            f"the hub id, of a model in Hugging Face format"
        ) from None


def spec_problem(check: TargetCheck, target: ModelConfig, device: str) -> str | None:
    """What would be refused of the spec-config; None: nothing, or there is none."""
    if check.spec is None:
        return None
    try:
        spec = json.loads(check.spec)
        if not isinstance(spec, dict):
            return "--speculative-config must be one JSON object"
        config = parse_spec_config(spec)
        check_head_files(config)
        refuse_drafters(config, target, check.num_ranks, device)
    except json.JSONDecodeError as error:
        return f"--speculative-config is not JSON: {error}"
    except SpecConfigError as error:
        return one_line(error)
    return None


def one_line(error: Exception) -> str:
    """The message of an error, on one line."""
    return " ".join(str(error).split())
