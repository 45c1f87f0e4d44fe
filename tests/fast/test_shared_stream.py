"""A random stream shared between drafting and verification must be caught."""

from __future__ import annotations

import pytest
import torch

from tests.fast.chi_square import drawn_level, first_tokens, p_value
from vllm_treespec.scorers import RULES

VOCAB_SIZE, NUM_DRAWS, NUM_REQS = 8, 2, 20_000


def measured(name: str, shared: bool) -> float:
    """p-value of the first tokens with or without numbers used twice."""
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.rand((2, VOCAB_SIZE), generator=generator) ** 2
    draft, target = draft / draft.sum(), target / target.sum()
    shape = (NUM_REQS, 1 + 2 * NUM_DRAWS)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float64)
    drafting, scoring = numbers[:, :NUM_DRAWS], numbers[:, NUM_DRAWS:].clone()
    if shared:
        scoring[:, 1:] = drafting
    tree = drawn_level(draft, drafting, name != "recursive_rejection")
    return p_value(first_tokens(RULES[name].walk, tree, target, scoring), target)


@pytest.mark.parametrize("name", ["recursive_rejection", "multi_round", "k_seq"])
def test_shared_numbers_are_caught(name: str) -> None:
    """Red when accepting a draft with the number that drew it would pass."""
    assert measured(name, shared=False) > 1e-4
    assert measured(name, shared=True) < 1e-6
