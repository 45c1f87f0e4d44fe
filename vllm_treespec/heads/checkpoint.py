"""The files of a head: its folder or hub id, ``config.json``, names and shapes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from vllm_treespec.heads.config import HeadError
from vllm_treespec.heads.names import no_such_model
from vllm_treespec.heads.weights import (
    TensorHeader,
    tensor_headers,
    weights_problem,
)
from vllm_treespec.json_files import read_json_object

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Some DFlash heads pickle one vector beside their weights: fetched to say so.
MASK_FILE = "mask_embedding.pt"
# What is fetched of a head on the hub.
READ = ("config.json", "*.safetensors", "*.safetensors.index.json", MASK_FILE)
M = TypeVar("M", bound=BaseModel)


def head_folder(model: str | Path, files: tuple[str, ...] = READ) -> Path:
    """The folder of a head; one on the Hugging Face hub is fetched.

    Args:
        model: a folder, or a hub id.
        files: patterns of what is fetched.

    Raises:
        HeadError: there is no such folder, and it cannot be fetched.

    """
    if os.path.isdir(model):
        return Path(model)
    problem = no_such_model(str(model))
    if problem is None and os.path.exists(model):
        problem = f"{model} is no folder"
    if problem is not None:
        raise HeadError(
            f"{problem}; name the folder of a head, `treespec train` makes one"
        )
    return _fetched(str(model), files)


@cache
def _fetched(model: str, files: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    # answers of the hub and a missing network are OSErrors
    except OSError as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise HeadError(
            f"there is no folder {model}, and the hub gave no head of that name "
            f"({reason}); name the folder, or the hub id, of a head"
        ) from None


def read_config_file(folder: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        HeadError: there is none, or it is no JSON object.

    """
    path = folder / "config.json"
    if not path.is_file():
        raise HeadError(f"{folder} holds no config.json; name the folder of a head")
    return _read_object(path)


def not_a_head(path: Path, reason: str) -> HeadError:
    """The refusal of a ``config.json`` that is no head's."""
    return HeadError(
        f"{path} is not the configuration of a head ({reason}); name a folder made by "
        f"`treespec train redrafter` (or `medusa`, `eagle`, `lyanna`, `dflash`), or a "
        f"published EAGLE or DFlash head"
    )


def validated(kind: type[M], said: dict[str, Any], path: Path) -> M:
    """What a ``config.json`` says, as ``kind``.

    Raises:
        HeadError: it is not the configuration of a head.

    """
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise not_a_head(path, first_problem(error)) from None


def first_problem(error: ValueError) -> str:
    """The first thing that is wrong, and where."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    said = problem["msg"].removeprefix("Value error, ")
    return ": ".join([*map(str, problem["loc"]), said])


@dataclass(frozen=True)
class Checkpoint:
    """What the files of weights in a folder hold, read from their headers."""

    folder: Path
    files: list[Path]
    headers: dict[str, TensorHeader]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the headers of ``model.safetensors``, or of its shards.

        Raises:
            HeadError: a file is missing or broken.

        """
        files = _weight_files(folder)
        headers: dict[str, TensorHeader] = {}
        for path in files:
            if problem := weights_problem(path):
                raise HeadError(f"{problem}; copy the head again, or train it again")
            headers |= tensor_headers(path)
        return cls(folder, files, headers)

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors, in the dtypes of the files."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            tensors |= load_file(path)
        return tensors


def listed_files(index: Path) -> list[Path]:
    """The files of weights that an index lists; all lie beside it.

    Raises:
        HeadError: it lists none, one is missing, or one lies elsewhere.

    """
    listed = _read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise HeadError(
            f"{index} cannot be read: it lists no files; copy the folder again"
        )
    there = {path.name for path in index.parent.iterdir() if path.is_file()}
    for name in listed.values():
        if not isinstance(name, str) or name not in there:
            raise HeadError(
                f"{index} cannot be read: there is no file {shortened(name)} beside "
                f"it; copy the folder again"
            )
    return [index.parent / name for name in sorted(set(listed.values()))]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise HeadError(f"{error}; copy the folder again") from None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return listed_files(folder / INDEX)
    if not (folder / WEIGHTS).is_file():
        raise HeadError(
            f"{folder} holds no {WEIGHTS}; train it again, or copy it whole "
            f"(`treespec convert-head {folder} OUT` makes one of pytorch_model.bin)"
        )
    return [folder / WEIGHTS]
