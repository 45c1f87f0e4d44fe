"""Draft sources: what proposers draw from, and what it reads of the target."""

from vllm_treespec.sources.base import (
    CommittedTokens,
    DraftModel,
    ModelSource,
    Reads,
    Roots,
    Sources,
    TextSource,
)
from vllm_treespec.sources.continuations import Continuations

__all__ = [
    "CommittedTokens",
    "Continuations",
    "DraftModel",
    "ModelSource",
    "Reads",
    "Roots",
    "Sources",
    "TextSource",
]
