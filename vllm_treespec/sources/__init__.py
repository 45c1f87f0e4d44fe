"""Draft sources: what proposers draw from, and what it reads of the target."""

from vllm_treespec.sources.base import (
    CommittedTokens,
    DraftModel,
    DraftSource,
    Reads,
    Roots,
)
from vllm_treespec.sources.continuations import Continuations

__all__ = [
    "CommittedTokens",
    "Continuations",
    "DraftModel",
    "DraftSource",
    "Reads",
    "Roots",
]
