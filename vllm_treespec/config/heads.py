"""What the spec-configs of all methods share that draft with a head."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vllm_treespec.config.base import MethodConfig


class HeadMethodConfig(MethodConfig):
    """What all methods share that draft from the target's hidden state."""

    # the kind of head
    HEAD: ClassVar[str]

    model: str = Field(min_length=1, description="folder or hub id of the head")

    @property
    def head(self) -> str:
        """The folder or hub id of the head."""
        return self.model

    @property
    def rule(self) -> str:
        """Drafts that were not drawn have no distribution to reject by."""
        return "target_draw"
