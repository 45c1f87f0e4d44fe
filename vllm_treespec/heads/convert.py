"""Heads published as ``pytorch_model.bin``, written as safetensors."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_treespec.atomic_files import atomic_writes
from vllm_treespec.heads.checkpoint import (
    WEIGHTS,
    Checkpoint,
    head_folder,
    listed_files,
    read_config_file,
)
from vllm_treespec.heads.config import HeadError
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.published import eagle_config, read_published
from vllm_treespec.heads.tensors import check_weights_fit, load_weights
from vllm_treespec.heads.weights import TensorHeader, first_not_finite

INDEX = "pytorch_model.bin.index.json"
FILES = ("config.json", "pytorch_model*.bin", INDEX)


def convert_head(model: str, out: Path, dtype: torch.dtype | None = None) -> float:
    """Write an EAGLE head of ``pytorch_model*.bin`` as ``OUT/model.safetensors``.

    Args:
        model: folder or hub id.
        out: a folder that is empty, or does not exist yet.
        dtype: of the weights; None: as they are.

    Returns:
        Size of the weights in MB (10^6 bytes).

    Raises:
        HeadError: there is no such head, its files do not fit together, or OUT is not
            empty. Nothing is written then.

    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise HeadError(f"{out} exists and is not empty; name a new folder")
    folder = head_folder(model, FILES)
    said = read_published(read_config_file(folder), folder / "config.json")
    tensors: dict[str, Tensor] = {}
    for path in _bin_files(folder):
        tensors |= _read_bin(path)
    headers = {name: TensorHeader.of(tensor) for name, tensor in tensors.items()}
    checkpoint = Checkpoint(folder, [], headers)
    head = EagleHead(eagle_config(said, checkpoint))
    check_weights_fit(head, checkpoint)
    load_weights(head, folder, tensors)
    for name, tensor in tensors.items():
        if dtype is not None and tensor.is_floating_point():
            tensors[name] = tensor.to(dtype)
    if beyond := first_not_finite(tensors):
        raise HeadError(
            f"{beyond} in {folder} holds numbers beyond those of {dtype}; leave out "
            f"--dtype, or give bfloat16"
        )
    with atomic_writes(out) as partial:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        shutil.copyfile(folder / "config.json", partial / "config.json")
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
        if not isinstance(read, dict):
            raise HeadError("it holds no tensors by name")
        return {name: _plain(name, tensor) for name, tensor in read.items()}
    except HeadError as error:
        reason = str(error)
    except pickle.UnpicklingError:
        # torch's own words advise to run what the file holds
        reason = "it is damaged, or holds more than tensors"
    # what torch raises besides depends on which byte of a file is wrong
    except Exception as error:
        said = " ".join(str(error).split())
        reason = f"it is damaged ({type(error).__name__}{said and ': '}{said})"
    raise HeadError(f"{path} cannot be read: {reason}; get the head again")


def _plain(name: Any, tensor: Any) -> Tensor:
    """A copy that shares no memory, as safetensors files need it.

    Raises:
        HeadError: it is no tensor with a name and numbers.

    """
    if (
        not isinstance(name, str)
        or not isinstance(tensor, Tensor)
        or tensor.layout != torch.strided
        or tensor.is_meta
        or tensor.is_quantized
    ):
        raise HeadError(f"{name!r} is no tensor with a name and numbers")
    return tensor.detach().clone().contiguous()
