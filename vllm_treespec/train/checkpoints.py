"""The Trainer's checkpoints: each with the sums of its files, the newest whole one."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from vllm_treespec.atomic_files import replaced, sync
from vllm_treespec.heads.weights import first_not_finite
from vllm_treespec.json_files import read_json_object

SUMS = "sums.json"


class SumWriter(TrainerCallback):
    """Seals a checkpoint once all of its files are on the disk."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Write the SHA-256 of each file of the newest checkpoint."""
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        files = sorted(checkpoint.iterdir())
        for path in files:
            sync(path)
        sums = {path.name: _sum_of(path) for path in files}
        with replaced(checkpoint / SUMS) as part:
            part.write_text(json.dumps(sums, indent=2) + "\n")
        sync(checkpoint.parent)


def check_finite(model: nn.Module, step: int) -> None:
    """Refuse to keep the weights of a training that diverged.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    if name := first_not_finite(dict(model.named_parameters())):
        raise ValueError(
            f"the training diverged: {name} holds NaN or infinity at step {step}, and"
            f" is not saved; lower --lr and pass another --out"
        )


def newest_complete_checkpoint(folder: Path) -> str | None:
    """Return the newest checkpoint whose files are as they were written, None without.

    Newer ones, which a kill left half written or a disk damaged, are removed and named
    on the console.
    """
    removed: list[tuple[str, str]] = []
    while (last := get_last_checkpoint(str(folder))) is not None:
        broken = _broken_file(Path(last))
        if broken is None:
            break
        shutil.rmtree(last)
        removed.append((last, broken))
    start = Path(last).name if last else "the start"
    for checkpoint, broken in removed:
        Console().print(
            f"{checkpoint} is not whole ({broken} is missing, or not as it was"
            f" written): removed, training goes on from {start}",
            soft_wrap=True,
        )
    return last


def _broken_file(checkpoint: Path) -> str | None:
    """Name the first file that is missing or not as it was written."""
    try:
        sums = read_json_object(checkpoint / SUMS)
    except ValueError:
        return SUMS
    for name, value in sums.items():
        path = checkpoint / name
        if not path.is_file() or _sum_of(path) != value:
            return name
    return None


def _sum_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
