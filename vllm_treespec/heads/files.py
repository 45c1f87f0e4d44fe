"""Heads as folders: reading those of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from vllm_treespec.heads.base import DraftHead, Head
from vllm_treespec.heads.checkpoint import (
    Checkpoint,
    first_problem,
    head_folder,
    not_a_head,
    read_config_file,
)
from vllm_treespec.heads.config import (
    AnyHeadConfig,
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
from vllm_treespec.heads.lyanna import LyannaHead
from vllm_treespec.heads.medusa import MedusaHead
from vllm_treespec.heads.names import a_head
from vllm_treespec.heads.published import eagle_config, read_published
from vllm_treespec.heads.published_dflash import (
    dflash_config,
    is_dflash,
    read_published_dflash,
)
from vllm_treespec.heads.redrafter import ReDrafterHead
from vllm_treespec.heads.tensors import check_weights_fit, load_weights

# By the ``method`` of their config; each takes that config.
HEADS: dict[str, Callable[[Any], Head]] = {
    "redrafter": ReDrafterHead,
    "medusa": MedusaHead,
    "eagle": EagleHead,
    "lyanna": LyannaHead,
    "dflash": DFlashHead,
}
_OwnConfig = ReDrafterHeadConfig | MedusaHeadConfig | LyannaHeadConfig
_ADAPTER: TypeAdapter[_OwnConfig] = TypeAdapter(
    Annotated[_OwnConfig, Field(discriminator="method")]
)
_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(list[Annotated[int, Field(ge=0)]])


def read_head_config(
    model: str | Path, num_target_layers: int | None = None
) -> AnyHeadConfig:
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
        return dflash_config(said, Checkpoint.read(folder))
    return eagle_config(read_published(config, path), Checkpoint.read(folder))


def build_head(config: AnyHeadConfig) -> Any:
    """Make a fresh head of the config's kind."""
    return HEADS[config.method](config)


def check_head_weights(folder: Path) -> None:
    """Check by their headers that a head's weights are what its config.json says.

    Raises:
        HeadError: a file is missing, or its tensors are not those of the config.

    """
    config = read_head_config(folder)
    # without memory for weights
    with torch.device("meta"):
        head = build_head(config)
    check_weights_fit(head, Checkpoint.read(folder))


def load_any_head(
    model: str | Path,
    num_target_layers: int | None = None,
    kinds: tuple[str, ...] = tuple(HEADS),
) -> Any:
    """Load a head, in its files' dtypes; shared weights are missing until ``share``.

    Args:
        model: folder or hub id.
        num_target_layers: of the target, see ``read_head_config``.
        kinds: that it may be of.

    Raises:
        HeadError: it is of another kind, or its files do not fit together.

    """
    folder = head_folder(model)
    config = read_head_config(folder, num_target_layers)
    if config.method not in kinds:
        raise HeadError(
            f"{folder} holds {a_head(config.method)}; name "
            f"{' or '.join(map(a_head, kinds))}, or train one"
        )
    head = build_head(config)
    checkpoint = Checkpoint.read(folder)
    check_weights_fit(head, checkpoint)
    load_weights(head, folder, checkpoint.tensors())
    return head


def load_head(model: str | Path) -> DraftHead:
    """Load a head without context; see ``load_any_head``."""
    head: DraftHead = load_any_head(model, kinds=("redrafter", "medusa"))
    return head


def load_lyanna_head(model: str | Path) -> LyannaHead:
    """Load a Lyanna head; see ``load_any_head``."""
    head: LyannaHead = load_any_head(model, kinds=("lyanna",))
    return head


def load_eagle_head(
    model: str | Path,
    num_target_layers: int | None = None,
    hot_tokens: Path | None = None,
) -> EagleHead:
    """Load a published EAGLE head; see ``load_any_head``.

    Args:
        model: folder or hub id.
        num_target_layers: of the target.
        hot_tokens: a JSON list of token ids, the only ones to draft.

    """
    head: EagleHead = load_any_head(model, num_target_layers, ("eagle",))
    if hot_tokens is not None:
        head.restrict(read_heads_hot_tokens(hot_tokens, head.config))
        head.requires_grad_(False)
    return head


def load_dflash_head(
    model: str | Path, num_target_layers: int | None = None
) -> DFlashHead:
    """Load a published DFlash head; see ``load_any_head``."""
    head: DFlashHead = load_any_head(model, num_target_layers, ("dflash",))
    return head


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
