"""What a decoder is given: the method, and the limits of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_treespec.proposers import Proposer
from vllm_treespec.schedule.base import Schedule
from vllm_treespec.scorers import Rule


@dataclass(frozen=True)
class Method:
    """How trees are drawn and verified."""

    schedule: Schedule
    # one a tree of the schedule
    proposers: Sequence[Proposer]
    # how sampled requests' trees are verified
    rule: Rule
    # whether rules run in their batched form, where the host never waits
    batched: bool
    # requests that may carry a tree in one step
    max_trees: int


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine, which are fixed when it starts."""

    device: torch.device
    # this process's number among tensor-parallel ranks
    rank: int
    # of the requests' shared random numbers, the same on every rank
    seed: int
    max_model_len: int
    # tokens of the largest forward
    max_num_tokens: int
