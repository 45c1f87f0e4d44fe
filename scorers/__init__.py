"""Scorers: from a draft tree and the target's distributions to emitted tokens."""

from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.scorers.greedy import greedy_matching
from vllm_treespec.scorers.recursive_rejection import recursive_rejection

__all__ = ["ScorerOutput", "TargetLogits", "greedy_matching", "recursive_rejection"]
