"""Draft sources: what proposers draw from, and what it reads of the target."""

from vllm_treespec.sources.base import (
    CommittedTokens,
    Continuations,
    DraftModel,
    DraftSource,
    Reads,
    Roots,
)

__all__ = [
    "CommittedTokens",
    "Continuations",
    "DraftModel",
    "DraftSource",
    "Reads",
    "Roots",
]
