"""Chi-square tests of the rules' laws in float32 at a vocabulary of 4,096."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fast.chi_square import drawn_level, first_tokens, p_value
from tests.fast.enumeration import Scorer
from tests.fast.rule_forms import numbers_of
from tests.fast.wrong_rules import WRONG, only_likeliest
from vllm_treespec.scorers import RULES, ScorerOutput, TargetLogits, k_seq
from vllm_treespec.trees.tree import TreeBatch

VOCAB_SIZE, NUM_DRAWS, CHUNK, NUM_CHUNKS = 4096, 3, 250, 12


def distributions() -> tuple[Tensor, Tensor]:
    """A draft and a target that agree roughly, float32 [vocab_size]."""
    generator = torch.Generator().manual_seed(0)
    common, draft, target = torch.randn((3, VOCAB_SIZE), generator=generator)
    return (2.5 * common + draft).softmax(0), (2.5 * common + target).softmax(0)


def measured(rule: Scorer, with_replacement: bool) -> float:
    """p-value of the rule's first tokens, fixed seed."""
    draft, target = distributions()
    generator = torch.Generator().manual_seed(1)
    shape = (CHUNK, 1 + 2 * NUM_DRAWS)
    tokens = []
    for _ in range(NUM_CHUNKS):
        numbers = torch.rand(shape, generator=generator, dtype=torch.float64)
        tree = drawn_level(draft, numbers[:, :NUM_DRAWS], with_replacement)
        tokens.append(first_tokens(rule, tree, target, numbers[:, NUM_DRAWS:]))
    return p_value(torch.cat(tokens), target)


@pytest.mark.parametrize("name", RULES)
def test_law_at_a_large_vocabulary(name: str) -> None:
    """Red when float32 sums over many tokens bend a rule's law."""
    rule = RULES[name]

    def walk(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
        return rule.walk(tree, target, numbers_of(rule, uniforms))

    assert measured(walk, name != "recursive_rejection") > 1e-4


WRONG_RULES: dict[str, Scorer] = {
    "coupled_draw": only_likeliest,
    "k_seq": WRONG["k_seq"]["division factor 1"](k_seq),
    **{
        name: WRONG[name]["recovered from target"](RULES[name].walk)
        for name in ("recursive_rejection", "multi_round")
    },
}


@pytest.mark.parametrize("name", RULES)
def test_wrong_rules_are_noticed(name: str) -> None:
    """Red when so many samples could no longer see a lossy rule."""
    assert measured(WRONG_RULES[name], name != "recursive_rejection") < 1e-6
