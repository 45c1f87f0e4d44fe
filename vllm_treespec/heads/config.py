"""The ``config.json`` of a head: one validated type per kind of head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

# true is no size
Size = Annotated[int, Field(strict=True, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]


class HeadError(ValueError):
    """A head's folder that cannot be used; the message names file, key and remedy."""


class HeadConfig(BaseModel):
    """What all heads share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: Size = Field(description="of the target's hidden state")
    vocab_size: Size = Field(description="of the target")
    num_hot_tokens: Size | None = Field(
        default=None, description="tokens the head can draft; null: the vocabulary"
    )
    depth: Size = Field(default=5, description="levels it was trained on")
    num_blocks: NonNegativeInt = Field(
        default=2, strict=True, description="ResNet blocks"
    )
    share_embedding: bool = Field(
        default=True, description="read tokens through the target's embedding"
    )
    share_output: bool = Field(
        default=True, description="take the target's output layer, frozen"
    )

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the head can draft."""
        return self.num_hot_tokens or self.vocab_size


class ReDrafterHeadConfig(HeadConfig):
    """One recurrent head for all levels."""

    method: Literal["redrafter"] = "redrafter"
    inner_size: Size | None = Field(
        default=None, description="width of the ResNet blocks; null: 2 x hidden_size"
    )


class MedusaHeadConfig(HeadConfig):
    """One head a level."""

    method: Literal["medusa"] = "medusa"
    rank_accuracies: tuple[tuple[Share, ...], ...] = Field(
        default=(),
        description="by level and rank, how often that guess is the target's token",
    )


_ADAPTER: TypeAdapter[ReDrafterHeadConfig | MedusaHeadConfig] = TypeAdapter(
    Annotated[ReDrafterHeadConfig | MedusaHeadConfig, Field(discriminator="method")]
)


def read_head_config(folder: Path) -> ReDrafterHeadConfig | MedusaHeadConfig:
    """Read the ``config.json`` of a head's folder.

    Raises:
        HeadError: there is none, or it is not a head's.

    """
    path = folder / "config.json"
    if not path.is_file():
        raise HeadError(f"{folder} holds no config.json; name the folder of a head")
    try:
        return _ADAPTER.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise HeadError(
            f"{path} is not the configuration of a head ({_first_problem(error)}); "
            f"name a folder made by `treespec train redrafter` (or `medusa`)"
        ) from None


def _first_problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    return ": ".join([*map(str, problem["loc"]), problem["msg"]])
