"""Scorers: from a draft tree and the target's distributions to emitted tokens."""

from collections.abc import Callable

from torch import Tensor

from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.scorers.at_once import AT_ONCE, TreeShape, score_at_once
from vllm_treespec.scorers.base import ScorerOutput, TargetLogits
from vllm_treespec.scorers.greedy import greedy_matching
from vllm_treespec.scorers.k_seq import k_seq
from vllm_treespec.scorers.multi_round import multi_round
from vllm_treespec.scorers.recursive_rejection import recursive_rejection
from vllm_treespec.scorers.target_draw import target_draw
from vllm_treespec.scorers.typical_acceptance_lossy import TypicalAcceptance

# From trees, the target's logits at their nodes and uniform numbers, float64
# [num_reqs, at least 1 + max_draws], to accepted paths and one more token each.
Rule = Callable[[TreeBatch, TargetLogits, Tensor], ScorerOutput]

# The lossless rules at temperature above 0, by the names used in spec-configs.
SCORERS: dict[str, Rule] = {
    "recursive_rejection": recursive_rejection,
    "multi_round": multi_round,
    "k_seq": k_seq,
    "target_draw": target_draw,
}

__all__ = [
    "AT_ONCE",
    "SCORERS",
    "Rule",
    "ScorerOutput",
    "TargetLogits",
    "TreeShape",
    "TypicalAcceptance",
    "greedy_matching",
    "k_seq",
    "multi_round",
    "recursive_rejection",
    "score_at_once",
    "target_draw",
]
