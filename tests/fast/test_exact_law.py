"""The emitted law of the chain and of RSD-C, by enumeration of every draw and branch."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.enumeration import (
    Language,
    LawMeter,
    Scorer,
    Weighted,
    all_trees,
    plain_sampling,
    propose,
    token_uniforms,
)
from tests.fast.wrong_scorers import RSD_C, WRONG_SCORERS, siblings_by_probability
from vllm_treespec.proposers import RsdC, RsdS, Sd
from vllm_treespec.sampling import SamplingTensors
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.scorers.recursive_rejection import drop, subtract
from vllm_treespec.scorers.reference import recursive_rejection_reference

EXACT = 1e-12


def random_tables(
    kind: str, vocab_size: int, depth: int, seed: int = 0
) -> tuple[Language, Language]:
    """A draft and a target language for prefixes of at most ``depth`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(vocab_size**d for d in range(depth + 1)), vocab_size)

    def rand() -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def masked(mass: Tensor, keep: Tensor) -> Tensor:
        """Zero entries, but never the largest of a row."""
        keep = keep | (mass == mass.amax(1, keepdim=True))
        return mass * keep

    draft, target = rand() ** 2, rand() ** 2
    half = torch.arange(vocab_size) < (vocab_size + 1) // 2
    if kind == "equal":
        draft = target
    elif kind == "zeros":
        draft, target = masked(draft, rand() < 0.6), masked(target, rand() < 0.6)
    elif kind == "disjoint":
        draft, target = draft * half, target * ~half
    elif kind == "two_tokens":
        few = torch.arange(vocab_size) < 2
        draft, target = draft * few, target * few
    elif kind == "one_token":
        draft, target = masked(draft, rand() < 0), masked(target, rand() < 0.5)
    elif kind == "top_k":
        draft, target = largest(draft, 2), largest(target, 2)
    else:
        assert kind == "random"
    return Language(draft / draft.sum(1, True)), Language(target / target.sum(1, True))


def largest(mass: Tensor, count: int) -> Tensor:
    return torch.zeros_like(mass).scatter(1, mass.topk(count).indices, 1.0) * mass


def law_error(
    scorer: Scorer, drawn: Weighted, target: Language, num_tokens: int
) -> float:
    """Largest error of the emitted law; the one check of this file."""
    law = LawMeter(scorer, drawn, target).law(num_tokens)
    return float((law - target.true_law(num_tokens)).abs().max())


KINDS = ["random", "zeros", "equal", "disjoint", "two_tokens", "one_token", "top_k"]
SHAPES = [
    (3, Sd(2)),
    (5, Sd(3)),
    (3, Sd(5)),
    (4, RsdC((3,))),
    (5, RsdC((4,))),
    (5, RsdC((2, 1))),
    (3, RsdC((2, 2))),
    (4, RsdC((3, 1))),
    (3, RsdC((2, 1, 1))),
    (4, RsdC((1, 2, 1))),
]
