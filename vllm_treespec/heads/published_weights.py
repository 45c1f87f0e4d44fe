"""The tensors of published heads, EAGLE's and DFlash's: read, checked, written."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_treespec.heads.base import ContextHead
from vllm_treespec.heads.checkpoint import WEIGHTS, Checkpoint
from vllm_treespec.heads.config import DecoderHeadConfig, HeadError
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.published import FIRST_LAYER, MIDDLE_LAYER, plain_key
from vllm_treespec.heads.published_names import (
    NOT_READ,
    NOT_READ_DFLASH,
    names_of,
    published_names,
)
from vllm_treespec.heads.weights import (
    TensorHeader,
    first_misfit,
    first_not_finite,
    listed,
)
from vllm_treespec.heads.written_config import written_config

# Those whose rows are tokens of the draft vocabulary.
ROWS = ("output.weight", "markov.output.weight")


def check_weights_fit(head: ContextHead, checkpoint: Checkpoint) -> None:
    """Check by their headers that weights are those of a head.

    Raises:
        HeadError: a tensor is missing, left over, of another shape, or no
            floating-point number.

    """
    config, folder = head.config, checkpoint.folder
    wanted: dict[str, TensorHeader] = {}
    for name, keys in names_of(head).items():
        own = head.state_dict()[name]
        parts = own.split(_row_counts(config, len(keys)) or len(own))
        wanted |= dict(zip(keys, map(TensorHeader.of, parts), strict=True))
    found = {plain_key(key): key for key in checkpoint.headers}
    not_read = NOT_READ_DFLASH
    if isinstance(head, EagleHead):
        not_read = NOT_READ
        if head.config.version == 3 and not head.config.combines:
            # as vLLM: the combining layer of a head that combines nothing
            found.pop("fc.weight", None)
    lost = wanted.keys() - found.keys()
    left = {found[k] for k in found.keys() - wanted.keys() if not not_read.fullmatch(k)}
    left |= _spelled_twice(checkpoint.headers.keys())
    if left or lost:
        raise HeadError(
            f"the weights in {folder} do not fit its config.json: "
            f"missing {listed(lost)}, not known {listed(left)}; "
            f"get the whole head, or one of a form that docs/drafters.md lists"
        )
    problem = first_misfit(
        {found[key]: header for key, header in wanted.items()}, checkpoint.headers
    )
    if problem:
        raise _unfit(folder, problem)


def _unfit(folder: Path, problem: str) -> HeadError:
    return HeadError(
        f"the weights in {folder} do not fit its config.json: {problem}; correct it, "
        f"or get the head again"
    )


def load_weights(head: ContextHead, folder: Path, published: dict[str, Tensor]) -> None:
    """Take the published tensors of a head that was made for them, in their dtypes.

    Args:
        head: made from the folder's config.json.
        folder: for messages.
        published: by published name; they passed ``check_weights_fit``.

    Raises:
        HeadError: a weight is NaN or infinite, or ids of tokens are not the target's.

    """
    names = names_of(head)
    used = {key for keys in names.values() for key in keys}
    weights = {k: tensor for k, tensor in published.items() if plain_key(k) in used}
    if name := first_not_finite(weights):
        raise _unfit(folder, f"{name} holds NaN or infinity")
    read = {plain_key(key): tensor for key, tensor in published.items()}
    tensors = {name: _joined(read, keys) for name, keys in names.items()}
    if "d2t" in read:
        ids, order = _target_ids(read, head.config, folder).sort()
        if head.hot_token_ids is not None:
            tensors["hot_token_ids"] = ids
        for name in tensors.keys() & set(ROWS):
            if not order.equal(torch.arange(len(order))):
                tensors[name] = tensors[name][order]
    head.load_state_dict(tensors, assign=True)


def _spelled_twice(keys: Set[str]) -> set[str]:
    """Tensors of ``layers.0.`` that ``midlayer.`` has, too."""
    return {
        key for key in keys if key.replace(FIRST_LAYER, MIDDLE_LAYER, 1) in keys - {key}
    }


def _joined(read: dict[str, Tensor], keys: tuple[str, ...]) -> Tensor:
    if len(keys) == 1:
        return read[keys[0]]
    return torch.cat([read[key] for key in keys])


def _target_ids(
    read: dict[str, Tensor], config: DecoderHeadConfig, folder: Path
) -> Tensor:
    """The target's id of each row of the output layer, from its offsets ``d2t``."""
    for key in {"d2t", "t2d"} & read.keys():
        if read[key].ndim != 1 or read[key].is_floating_point():
            raise HeadError(
                f"{key!r} in {folder} is {read[key].dtype} {list(read[key].shape)}, no "
                f"list of whole numbers; get the head again"
            )
    ids = torch.arange(len(read["d2t"])) + read["d2t"].long()
    if not (ids.min() >= 0 and ids.max() < config.vocab_size):
        raise HeadError(
            f"'d2t' in {folder} leads to tokens {ids.min()} to {ids.max()}, and the "
            f"vocabulary has {config.vocab_size}; get the head again"
        )
    if len(ids.unique()) < len(ids):
        raise HeadError(f"'d2t' in {folder} names a token twice; get the head again")
    if "t2d" in read and not read["t2d"].nonzero()[:, 0].equal(ids.sort().values):
        raise HeadError(
            f"'t2d' in {folder} marks other tokens than 'd2t' names; get the head again"
        )
    return ids


def save_published(
    head: ContextHead, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Write a head as SafeAILab or DeepSeek publish theirs; return its size in MB.

    Stock vLLM serves what this writes of EAGLE's version 3 (``{"method": "eagle3"}``),
    of version 1 without biases and hot tokens (``{"method": "eagle"}``), of DFlash
    heads with ``markov_rank`` (``{"method": "dspark"}``) and of those whose root's row
    predicts nothing (``{"method": "dflash"}``), all with the mask of the vocabulary.
    Weights that are the target's are left out, but for rows of a draft vocabulary.

    Raises:
        HeadError: the form has no words for such a head.

    """
    text = json.dumps(written_config(head.config, dtype), indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _written(head).items():
        names = published_names(head, name)
        parts = tensor.split(_row_counts(head.config, len(names)) or len(tensor))
        for key, part in zip(names, parts, strict=True):
            # parts of one tensor must not share memory in a file
            tensors[key] = part.to(dtype).clone()
    if isinstance(head, EagleHead) and head.config.version == 3:
        tensors = {
            key.replace(FIRST_LAYER, MIDDLE_LAYER): tensor
            for key, tensor in tensors.items()
        }
    if head.hot_token_ids is not None:
        ids = head.hot_token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(text + "\n")
    return (folder / WEIGHTS).stat().st_size / 1e6


def _written(head: ContextHead) -> dict[str, Tensor]:
    """The tensors that are written, by our names."""
    tensors: dict[str, Tensor] = dict(head.state_dict())
    ids = tensors.pop("hot_token_ids", None)
    rows = not isinstance(head, EagleHead) or head.config.version == 3
    if head.config.share_output and rows and ids is not None:
        if len(head.output.weight) != len(ids):
            raise HeadError("the head's output layer is missing; call share() first")
        tensors["output.weight"] = head.output.weight
    return tensors


def _row_counts(config: DecoderHeadConfig, num_parts: int) -> list[int]:
    """Rows of each part of a tensor that is published in parts; [] for one."""
    counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    return {
        1: [],
        2: [config.intermediate_size] * 2,
        3: [count * config.head_size for count in counts],
    }[num_parts]
