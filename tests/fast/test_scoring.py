"""Which rule, in which form, scores which request of a mixed batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import draws_of
from tests.fast.random_trees import random_trees
from tests.fast.rule_forms import sizes_of, tree_sizes
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    RULES,
    Rule,
    ScorerOutput,
    TargetLogits,
    greedy_matching,
    recursive_rejection,
    score,
)
from vllm_treespec.scorers.recursive_rejection import recursive_rejection_batched
from vllm_treespec.trees.tree import TreeBatch


def batch(temperatures: list[float]) -> tuple[TreeBatch, TargetLogits, Tensor]:
    generator = torch.Generator().manual_seed(3)
    num_reqs = len(temperatures)
    tree = random_trees(num_reqs, 9, 6, generator)
    draws = draws_of(tree)
    tree = replace(tree, draws=replace(draws, probs=draws.probs.float()))
    temperature = torch.tensor(temperatures)
    target = TargetLogits(
        torch.randn(num_reqs * 9, 6, generator=generator),
        torch.arange(num_reqs) * 9,
        SamplingTensors(
            temperature,
            all_greedy=not any(temperatures),
            all_random=all(temperatures),
        ),
    )
    uniforms = torch.rand(num_reqs, 10, generator=generator, dtype=torch.float64)
    return tree, target, uniforms


def row(output: ScorerOutput, tree: TreeBatch, request: int) -> list[int]:
    return [t for t in output.emitted(tree)[request].tolist() if t >= 0]


TEMPERATURES = [[0.0, 0.0], [1.0, 0.7], [1.0, 0.0, 1.0, 0.5, 0.0, 1.0]]


@pytest.mark.parametrize("form", ["walk", "batched"])
@pytest.mark.parametrize("temperatures", TEMPERATURES)
def test_each_request_gets_its_rule(temperatures: list[float], form: str) -> None:
    """Red when greedy requests of a mixed batch are sampled, or the other way."""
    tree, target, uniforms = batch(temperatures)
    sizes = sizes_of(tree) if form == "batched" else None
    found = score(tree, target, uniforms, RULES["recursive_rejection"], sizes)
    for request, temperature in enumerate(temperatures):
        if temperature == 0:
            expected = greedy_matching(tree, target, uniforms)
            alone, place = tree, request
        else:
            rows = torch.tensor([request])
            part = TargetLogits(
                target.logits, target.root_rows[rows], target.sampling.select(rows)
            )
            alone, place = tree.select(rows), 0
            expected = recursive_rejection(alone, part, uniforms[rows])
        assert row(found, tree, request) == row(expected, alone, place)


def refuses(*arguments: object) -> ScorerOutput:
    raise AssertionError("this form must not run")


@pytest.mark.parametrize("temperatures", TEMPERATURES[1:])
def test_bounds_choose_the_form(temperatures: list[float]) -> None:
    """Red when a GPU's batch is walked over, a CPU's is not, or no form is found."""
    tree, target, uniforms = batch(temperatures)
    sizes = tree_sizes(9, 9, 9)
    walk = Rule("walk", recursive_rejection, refuses)
    form = Rule("batched", refuses, recursive_rejection_batched)
    only = Rule("without a batched form", recursive_rejection)
    walked = score(tree, target, uniforms, walk, None)
    for found in (
        score(tree, target, uniforms, form, sizes),
        score(tree, target, uniforms, only, sizes),
    ):
        for request in range(len(temperatures)):
            assert row(found, tree, request) == row(walked, tree, request)
