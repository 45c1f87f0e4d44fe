"""Heads as folders: reading those of every kind, and writing our own kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from safetensors.torch import load_file, save_file

from vllm_treespec.heads.base import ContextHead, DraftHead, Head
from vllm_treespec.heads.checkpoint import (
    WEIGHTS,
    Checkpoint,
    head_folder,
    not_a_head,
    read_config_file,
)
from vllm_treespec.heads.config import (
    DecoderHeadConfig,
    DFlashHeadConfig,
    EagleHeadConfig,
    HeadError,
    LyannaHeadConfig,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
)
from vllm_treespec.heads.dflash import DFlashHead
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.kinds import HEADS
from vllm_treespec.heads.lyanna import LyannaHead
from vllm_treespec.heads.medusa import MedusaHead
from vllm_treespec.heads.published import (
    eagle_config,
    first_problem,
    read_published,
)
from vllm_treespec.heads.published_dflash import (
    dflash_checkpoint,
    dflash_config,
    is_dflash,
    read_published_dflash,
)
from vllm_treespec.heads.published_weights import check_weights_fit, load_weights
from vllm_treespec.heads.redrafter import ReDrafterHead
from vllm_treespec.heads.weights import (
    TensorHeader,
    first_misfit,
    first_not_finite,
    tensor_headers,
    weights_problem,
)

_OwnConfig = ReDrafterHeadConfig | MedusaHeadConfig | LyannaHeadConfig
_ADAPTER: TypeAdapter[_OwnConfig] = TypeAdapter(
    Annotated[_OwnConfig, Field(discriminator="method")]
)
_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(list[Annotated[int, Field(ge=0)]])


def read_head_config(
    model: str | Path, num_target_layers: int | None = None
) -> ReDrafterHeadConfig | MedusaHeadConfig | EagleHeadConfig | DFlashHeadConfig:
    """Read the configuration of a head of ours, or of a published EAGLE or DFlash head.

    Args:
        model: folder or hub id.
        num_target_layers: of the target; without it, ``target_layers`` of an EAGLE
            head may stay unknown, and are not checked.

    Raises:
        HeadError: there is none, or it is not a head's.

    """
    folder = head_folder(model)
    config = read_config_file(folder)
    if "method" not in config:
        published = _published_config(config, folder)
        if num_target_layers is None:
            return published
        return published.with_target(num_target_layers)
    try:
        return _ADAPTER.validate_python(config)
    except ValueError as error:
        raise not_a_head(folder / "config.json", first_problem(error)) from None


def _published_config(
    config: dict[str, Any], folder: Path
) -> EagleHeadConfig | DFlashHeadConfig:
    """Translate a published ``config.json``."""
    path = folder / "config.json"
    if is_dflash(config):
        said = read_published_dflash(config, path)
        return dflash_config(said, dflash_checkpoint(folder))
    return eagle_config(read_published(config, path), Checkpoint.read(folder))


def build_head(config: ReDrafterHeadConfig | MedusaHeadConfig) -> DraftHead:
    """Make a fresh head."""
    if isinstance(config, MedusaHeadConfig):
        return MedusaHead(config)
    return ReDrafterHead(config)


def check_head_weights(folder: Path) -> None:
    """Check by their headers that a head's weights are what its config.json says.

    Raises:
        HeadError: a file is missing, or its tensors are not those of the config.

    """
    config = read_head_config(folder)
    # without memory for weights
    with torch.device("meta"):
        head = HEADS[config.method](config)
    if isinstance(head, LyannaHead) or not isinstance(head, ContextHead):
        _check_own_weights(head, folder)
    elif isinstance(head, DFlashHead):
        check_weights_fit(head, dflash_checkpoint(folder))
    else:
        check_weights_fit(head, Checkpoint.read(folder))


def _check_own_weights(head: Head, folder: Path) -> None:
    """Check the weights of a head of our own form.

    Raises:
        HeadError: the file is missing, or its tensors are not those of the config.

    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise HeadError(f"{folder} holds no {WEIGHTS}; train it again")
    if problem := weights_problem(path):
        raise HeadError(f"{problem}; copy the head again, or train it again")
    wanted = {name: TensorHeader.of(own) for name, own in head.state_dict().items()}
    found = tensor_headers(path)
    problems = [
        *(f"{name} is missing" for name in wanted if name not in found),
        *(f"{name} is not known" for name in found if name not in wanted),
    ]
    if problem := next(iter(problems), None) or first_misfit(wanted, found):
        raise _unfit(path, problem)


def _unfit(path: Path, problem: str) -> HeadError:
    return HeadError(
        f"{path} does not fit its config.json: {problem}; copy the head again, or "
        f"train it again"
    )


def load_head(model: str | Path) -> DraftHead:
    """Load a head without context; shared weights are missing until ``share``.

    Args:
        model: folder or hub id.

    Raises:
        HeadError: a file is missing, or its tensors are not those of the config.

    """
    folder = head_folder(model)
    config = read_head_config(folder)
    if isinstance(config, DecoderHeadConfig):
        raise HeadError(
            f"{folder} holds a head of kind {config.method}; name a redrafter or medusa"
            f" head"
        )
    head = build_head(config)
    _load_weights(head, folder)
    return head


def load_lyanna_head(model: str | Path) -> LyannaHead:
    """Load a Lyanna head; shared weights are missing until ``share``.

    Args:
        model: folder or hub id.

    Raises:
        HeadError: it is no Lyanna head, or its files do not fit together.

    """
    folder = head_folder(model)
    config = read_head_config(folder)
    if not isinstance(config, LyannaHeadConfig):
        raise HeadError(
            f"{folder} holds a head of kind {config.method}; name a Lyanna head,"
            f" `treespec train lyanna` makes one"
        )
    head = LyannaHead(config)
    _load_weights(head, folder)
    return head


def _load_weights(head: Head, folder: Path) -> None:
    """Read the weights of a head of our own form, and freeze it.

    Raises:
        HeadError: the file is missing, or its tensors are not those of the config.

    """
    _check_own_weights(head, folder)
    path = folder / WEIGHTS
    found = load_file(path)
    if name := first_not_finite(found):
        raise _unfit(path, f"{name} holds NaN or infinity")
    head.load_state_dict(found)
    head.eval().requires_grad_(False)


def load_eagle_head(
    model: str | Path,
    num_target_layers: int | None = None,
    hot_tokens: Path | None = None,
) -> EagleHead:
    """Load a published EAGLE head, in the dtypes of its files.

    Shared weights are missing until ``EagleHead.share``.

    Args:
        model: folder or hub id.
        num_target_layers: of the target, see ``read_head_config``.
        hot_tokens: a JSON list of token ids, the only ones to draft.

    Raises:
        HeadError: it is no EAGLE head, or its files do not fit together.

    """
    folder = head_folder(model)
    config = read_head_config(folder, num_target_layers)
    if not isinstance(config, EagleHeadConfig) or isinstance(config, LyannaHeadConfig):
        raise HeadError(f"{folder} holds a {config.method} head; name an EAGLE head")
    head = EagleHead(config)
    checkpoint = Checkpoint.read(folder)
    check_weights_fit(head, checkpoint)
    load_weights(head, folder, checkpoint.tensors())
    if hot_tokens is not None:
        head.restrict(read_heads_hot_tokens(hot_tokens, config))
    return head.eval().requires_grad_(False)


def load_dflash_head(
    model: str | Path, num_target_layers: int | None = None
) -> DFlashHead:
    """Load a published DFlash head, in the dtypes of its files.

    Shared weights are missing until ``DFlashHead.share``.

    Args:
        model: folder or hub id.
        num_target_layers: of the target, see ``read_head_config``.

    Raises:
        HeadError: it is no DFlash head, or its files do not fit together.

    """
    folder = head_folder(model)
    config = read_head_config(folder, num_target_layers)
    if not isinstance(config, DFlashHeadConfig):
        raise HeadError(f"{folder} holds a {config.method} head; name a DFlash head")
    head = DFlashHead(config)
    checkpoint = dflash_checkpoint(folder)
    check_weights_fit(head, checkpoint)
    load_weights(head, folder, checkpoint.tensors())
    return head.eval().requires_grad_(False)


def read_heads_hot_tokens(path: Path, config: DecoderHeadConfig) -> torch.Tensor:
    """Read which tokens a head is to draft, ascending.

    Raises:
        HeadError: they cannot be those of this head.

    """
    if config.num_hot_tokens is not None:
        raise HeadError(
            f"'hot_tokens' is {path}, and the head has a draft vocabulary of its own "
            f"({config.num_hot_tokens} tokens); remove 'hot_tokens'"
        )
    return read_hot_tokens(path, config.vocab_size)


def read_hot_tokens(path: Path, vocab_size: int | None) -> torch.Tensor:
    """Read which tokens are to be drafted, ascending.

    Args:
        path: a JSON list of token ids.
        vocab_size: tokens of the vocabulary, if it is known.

    Raises:
        HeadError: it is no list of tokens of this vocabulary.

    """
    try:
        ids = _TOKEN_IDS.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_problem(error)
        raise HeadError(
            f"'hot_tokens': {path} is no JSON list of token ids ({reason})"
        ) from None
    hot = torch.tensor(sorted(set(ids)), dtype=torch.int64)
    if len(hot) == 0 or (vocab_size is not None and hot[-1] >= vocab_size):
        below = vocab_size and f" below {vocab_size}, the size of the vocabulary"
        raise HeadError(
            f"'hot_tokens': {path} must name tokens{below or ''}, and at least one"
        )
    return hot


def save_head(
    head: Head,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Write a head's folder; return the size of the weights in MB (10^6 bytes)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    path = folder / WEIGHTS
    save_file(tensors, path)
    (folder / "config.json").write_text(head.config.model_dump_json(indent=2) + "\n")
    return path.stat().st_size / 1e6
