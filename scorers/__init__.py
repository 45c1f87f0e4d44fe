"""Scorers: from a draft tree and the target's distributions to emitted tokens."""

from vllm_treespec.scorers.base import Rule, ScorerOutput, TargetLogits
from vllm_treespec.scorers.coupled_draw import coupled_draw
from vllm_treespec.scorers.greedy import greedy_matching
from vllm_treespec.scorers.k_seq import k_seq
from vllm_treespec.scorers.multi_round import multi_round
from vllm_treespec.scorers.recursive_rejection import recursive_rejection
from vllm_treespec.scorers.rules import RULES, score
from vllm_treespec.scorers.typical_acceptance_lossy import TypicalAcceptance

__all__ = [
    "RULES",
    "Rule",
    "ScorerOutput",
    "TargetLogits",
    "TypicalAcceptance",
    "coupled_draw",
    "greedy_matching",
    "k_seq",
    "multi_round",
    "recursive_rejection",
    "score",
]
