"""Heads published as ``pytorch_model.bin``, written as safetensors."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_treespec.heads.checkpoint import (
    WEIGHTS,
    head_folder,
    listed_files,
    read_config_file,
)
from vllm_treespec.heads.config import HeadError

INDEX = "pytorch_model.bin.index.json"
FILES = ("config.json", "pytorch_model*.bin", INDEX)


def convert_head(model: str, out: Path, dtype: torch.dtype | None = None) -> float:
    """Write a head of ``pytorch_model*.bin`` as ``OUT/model.safetensors``.

    Args:
        model: folder or hub id.
        out: a folder that is empty, or does not exist yet.
        dtype: of the weights; None: as they are.

    Returns:
        Size of the weights in MB (10^6 bytes).

    Raises:
        HeadError: there is no such head, or OUT is not empty.

    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise HeadError(f"{out} exists and is not empty; name a new folder")
    folder = head_folder(model, FILES)
    read_config_file(folder)
    tensors: dict[str, Tensor] = {}
    for path in _bin_files(folder):
        tensors |= _read_bin(path)
    for name, tensor in tensors.items():
        as_is = dtype is None or not tensor.is_floating_point()
        # safetensors holds no memory twice, which pickled tensors may share
        tensors[name] = tensor.to(tensor.dtype if as_is else dtype).clone().contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    shutil.copyfile(folder / "config.json", out / "config.json")
    return (out / WEIGHTS).stat().st_size / 1e6


def _bin_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return listed_files(folder / INDEX)
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise HeadError(
            f"{folder} holds no pytorch_model.bin; heads with model.safetensors need "
            f"no conversion"
        )
    return files


def _read_bin(path: Path) -> dict[str, Tensor]:
    """Read tensors by name; nothing else of a pickle is run."""
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise HeadError(
            f"{path} cannot be read ({''.join(reason)}); get the head again"
        ) from None
    if not isinstance(read, dict) or not all(
        isinstance(tensor, Tensor) for tensor in read.values()
    ):
        raise HeadError(f"{path} holds more than tensors; get the head again")
    return read
