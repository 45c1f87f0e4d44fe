"""The tensors of heads in their files: checked, read, written."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_treespec.heads.base import Head
from vllm_treespec.heads.checkpoint import INDEX, WEIGHTS, Checkpoint
from vllm_treespec.heads.config import DecoderHeadConfig, HeadConfig, HeadError
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


def check_weights_fit(head: Head, checkpoint: Checkpoint) -> None:
    """Check by their headers that weights are those of a head.

    Raises:
        HeadError: a tensor is missing, left over, of another shape, or no
            floating-point number.

    """
    folder, own = checkpoint.folder, head.state_dict()
    wanted: dict[str, TensorHeader] = {}
    for name, keys in names_of(head).items():
        parts = _parts(head.config, own[name], len(keys))
        wanted |= dict(zip(keys, map(TensorHeader.of, parts), strict=True))
    found = {plain_key(key): key for key in checkpoint.headers}
    not_read = NOT_READ_DFLASH
    if isinstance(head, EagleHead):
        not_read = NOT_READ
        if head.config.version == 3 and not head.config.combines:
            # as vLLM: the combining layer of a head that combines nothing
            found.pop("fc.weight", None)
    lost = wanted.keys() - found.keys()
    surplus = found.keys() - wanted.keys()
    if head.published:
        surplus = {key for key in surplus if not not_read.fullmatch(key)}
    left = {found[key] for key in surplus} | _spelled_twice(checkpoint.headers.keys())
    if left or lost:
        raise _unfit(folder, f"missing {listed(lost)}, not known {listed(left)}")
    named = {found[key]: header for key, header in wanted.items()}
    if problem := first_misfit(named, checkpoint.headers):
        raise _unfit(folder, problem)


def _unfit(folder: Path, problem: str) -> HeadError:
    return HeadError(
        f"the weights in {folder} do not fit its config.json: {problem}; correct it, "
        f"train or get the whole head again, or use one of a form that "
        f"docs/drafters.md lists"
    )


def load_weights(head: Head, folder: Path, read: dict[str, Tensor]) -> None:
    """Take the tensors of a head's files, in their dtypes, and freeze it.

    Args:
        head: made from the folder's config.json.
        folder: for messages.
        read: by their names; they passed ``check_weights_fit``.

    Raises:
        HeadError: a weight is NaN or infinite, or ids of tokens are not the target's.

    """
    names = names_of(head)
    used = {key for keys in names.values() for key in keys}
    weights = {k: tensor for k, tensor in read.items() if plain_key(k) in used}
    if name := first_not_finite(weights):
        raise _unfit(folder, f"{name} holds NaN or infinity")
    read = {plain_key(key): tensor for key, tensor in read.items()}
    tensors = {
        name: read[keys[0]] if len(keys) == 1 else torch.cat([read[k] for k in keys])
        for name, keys in names.items()
    }
    if "d2t" in read:
        ids, order = _target_ids(read, head.config, folder).sort()
        if head.hot_token_ids is not None:
            tensors["hot_token_ids"] = ids
        for name in tensors.keys() & set(ROWS):
            if not order.equal(torch.arange(len(order))):
                tensors[name] = tensors[name][order]
    if head.hot_token_ids is not None:
        tensors["hot_token_ids"] = tensors["hot_token_ids"].long()
    head.load_state_dict(tensors, assign=True)
    head.eval().requires_grad_(False)


def _spelled_twice(keys: Set[str]) -> set[str]:
    """Tensors of ``layers.0.`` that ``midlayer.`` has, too."""
    return {
        key for key in keys if key.replace(FIRST_LAYER, MIDDLE_LAYER, 1) in keys - {key}
    }


def _target_ids(read: dict[str, Tensor], config: HeadConfig, folder: Path) -> Tensor:
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


def save_head(head: Head, folder: Path, dtype: torch.dtype = torch.bfloat16) -> float:
    """Write a head's folder; return the size of the weights in MB (10^6 bytes).

    EAGLE and DFlash heads are written as SafeAILab and DeepSeek publish theirs. Stock
    vLLM serves EAGLE's version 3 (``{"method": "eagle3"}``), version 1 without biases
    and hot tokens (``{"method": "eagle"}``), DFlash heads with ``markov_rank``
    (``{"method": "dspark"}``) and those whose root's row predicts nothing
    (``{"method": "dflash"}``), all with the mask of the vocabulary. Weights that are
    the target's are left out, but for published rows of a draft vocabulary.

    Raises:
        HeadError: the form has no words for such a head.

    """
    text = head.config.model_dump_json(indent=2)
    tensors: dict[str, Tensor] = dict(head.state_dict())
    if head.published:
        assert isinstance(head.config, DecoderHeadConfig)
        text = json.dumps(written_config(head.config, dtype), indent=2)
        tensors = _published(head, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        # tensors in a file must not share memory
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone()
        for name, tensor in tensors.items()
    }
    # shards of another head would be read in its place
    (folder / INDEX).unlink(missing_ok=True)
    save_file(written, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(text + "\n")
    return (folder / WEIGHTS).stat().st_size / 1e6


def _published(head: Head, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors by their published names."""
    ids = own.pop("hot_token_ids", None)
    rows = not isinstance(head, EagleHead) or head.config.version == 3
    if head.config.share_output and rows and ids is not None:
        if len(head.output.weight) != len(ids):
            raise HeadError("the head's output layer is missing; call share() first")
        own["output.weight"] = head.output.weight
    tensors: dict[str, Tensor] = {}
    for name, tensor in own.items():
        names = published_names(head, name)
        parts = _parts(head.config, tensor, len(names))
        tensors |= dict(zip(names, parts, strict=True))
    if isinstance(head, EagleHead) and head.config.version == 3:
        tensors = {k.replace(FIRST_LAYER, MIDDLE_LAYER): t for k, t in tensors.items()}
    if ids is not None:
        ids = ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def _parts(config: HeadConfig, tensor: Tensor, number: int) -> tuple[Tensor, ...]:
    """The parts, rows of a tensor, in which it is published: one, two, or q, k, v."""
    if number == 1:
        return (tensor,)
    assert isinstance(config, DecoderHeadConfig)
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    rows = [config.intermediate_size] * 2
    if number == 3:
        rows = [count * config.head_size for count in heads]
    return tensor.split(rows)
