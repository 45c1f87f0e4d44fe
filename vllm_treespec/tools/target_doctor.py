"""``treespec doctor --target``: whether a model is supported, by its config alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils import is_torchvision_available

from vllm_treespec.config import SpecConfigError, parse_spec_config, read_spec
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import check_head_files, check_weights
from vllm_treespec.config.draft_checks import check_target_shards
from vllm_treespec.config.reading import (
    A_MODEL,
    UNREADABLE,
    check_sizes,
    first_sentence,
    unreadable,
)
from vllm_treespec.engine.refusals import (
    check_platform,
    drafter_problems,
    feature_problems,
    unsupported_features,
)
from vllm_treespec.engine.seams import SeamError, SourceFiles, check_seams
from vllm_treespec.heads.names import no_such_model
from vllm_treespec.schedule.processor import slow_arithmetic

if TYPE_CHECKING:
    from vllm.config import ModelConfig

NO = "[green]no[/]"
YES = "[red]yes: refused[/]"

Made = TypeVar("Made")


@dataclass(frozen=True)
class TargetCheck:
    """What is to be checked."""

    # folder or hub id
    target: str
    # JSON text, or the name of a JSON file
    spec: str | None = None
    max_model_len: int | None = None
    num_ranks: int = 1
    # "cpu" or "cuda"; None: this machine's
    device: str | None = None


def check_target(check: TargetCheck, console: Console, verbose: bool = False) -> bool:
    """Print all that is in the way of draft trees for a target; loads no weights.

    ``verbose`` prints also what draft trees do not support and the target has not.
    Returns whether an engine would start, as far as configs can say.
    """
    problems: list[str] = []
    device = tried(problems, partial(checked_device, check.device))
    if device is not None:
        config, spec = None, check.spec
        if spec is not None:
            config = tried(problems, lambda: parse_spec_config(read_spec(spec)))
        target = tried(problems, partial(read_target, check))
        if target is None and check.max_model_len is not None:
            # what else is in the way
            without = replace(check, max_model_len=None)
            target = tried([], partial(read_target, without))
        if config is not None:
            problems += spec_problems(config, check, target, device)
        if target is not None:
            ranks = check.target, target.hf_text_config, check.num_ranks
            tried(problems, partial(check_target_shards, *ranks))
            problems += feature_problems(target, device)
            show_target(check, target, device, console, verbose)
    # a fault may be met twice: in a folder, and where its files are compared
    for problem in dict.fromkeys(problems):
        console.print(f"[red]refused:[/] {escape(problem)}")
    if problems:
        console.print("[red]draft trees do not work here[/]")
    else:
        console.print("[green]draft trees work here[/]")
    return not problems


def tried(problems: list[str], make: Callable[[], Made]) -> Made | None:
    """What a function makes; None, and the reason among the problems, if it fails."""
    try:
        return make()
    except (SpecConfigError, SeamError) as error:
        problems.append(one_line(error))
        return None


def checked_device(said: str | None) -> str:
    """The device for which this vLLM has all that draft trees need.

    This machine may lack the one that is said; None: its own.

    Raises:
        SpecConfigError: this is another platform.
        SeamError: this vLLM lacks something.

    """
    if said is None:
        return check_platform()
    sources = SourceFiles.installed()
    check_seams(said, lambda seam: sources.has(seam.module, seam.attribute))
    return said


def show_target(
    check: TargetCheck,
    target: ModelConfig,
    device: str,
    console: Console,
    verbose: bool,
) -> None:
    """Print what a target is checked for, and whether its arithmetic is slow."""
    console.print(f"{escape(check.target)} on {device}")
    if verbose:
        table = Table("what draft trees do not support", "has it")
        for what, found in unsupported_features(target, device).items():
            table.add_row(what, YES if found else NO)
        console.print(table)
    slow = slow_arithmetic(target.dtype) if device == "cpu" else None
    if slow is not None:
        console.print(f"[yellow]slow:[/] {escape(slow)}")


def read_target(check: TargetCheck) -> ModelConfig:
    """Make vLLM's config of the target.

    Raises:
        SpecConfigError: vLLM cannot read it.

    """
    from vllm.engine.arg_utils import EngineArgs

    if problem := no_such_model(check.target):
        raise SpecConfigError(f"--target: {problem}; name {A_MODEL}")
    check_sizes("--target", check.target)
    try:
        return EngineArgs(
            model=check.target,
            skip_tokenizer_init=True,
            max_model_len=check.max_model_len,
        ).create_model_config()
    except UNREADABLE as error:
        raise unreadable_target(check, error) from None


def unreadable_target(check: TargetCheck, error: Exception) -> SpecConfigError:
    """Say in one line why vLLM could not read a target."""
    reason = first_sentence(error)
    if check.max_model_len is not None and "max_model_len" in reason:
        return SpecConfigError(f"--max-model-len: {reason}; pass less, or leave it out")
    if "failed to be inspected" not in reason:
        return unreadable("--target", check.target, error)
    remedy = "its log says why"
    if not is_torchvision_available():
        remedy = (
            f"install torchvision, which models with images need, of the release for "
            f"torch {torch.__version__}"
        )
    return SpecConfigError(
        f"--target: vLLM cannot import the code of {check.target} ({reason}); {remedy}"
    )


def spec_problems(
    config: MethodConfig, check: TargetCheck, target: ModelConfig | None, device: str
) -> list[str]:
    """What would be refused of a valid spec-config."""
    problems: list[str] = []
    tried(problems, partial(check_head_files, config))
    if target is None:
        tried(problems, partial(check_weights, config))
    else:
        found = drafter_problems(config, target, check.num_ranks, device)
        problems += map(one_line, found)
    return problems


def one_line(error: Exception) -> str:
    """The message of an error, on one line."""
    return " ".join(str(error).split())
