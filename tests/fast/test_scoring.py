"""Which rule scores which request of a mixed batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.fast.random_trees import random_trees
from tests.fast.wrong_scorers import draws_of

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

from vllm_treespec.core.sampling import SamplingTensors
from vllm_treespec.core.tree import TreeBatch
from vllm_treespec.engine.scoring import score_trees
from vllm_treespec.scorers import (
    ScorerOutput,
    TargetLogits,
    greedy_matching,
    recursive_rejection,
)


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


@pytest.mark.parametrize(
    "temperatures", [[0.0, 0.0], [1.0, 0.7], [1.0, 0.0, 1.0, 0.5, 0.0, 1.0]]
)
def test_each_request_gets_its_rule(temperatures: list[float]) -> None:
    """Red when greedy requests of a mixed batch are sampled, or the other way."""
    tree, target, uniforms = batch(temperatures)
    found = score_trees(tree, target, uniforms, recursive_rejection)
    for request, temperature in enumerate(temperatures):
        if temperature == 0:
            expected, alone, place = greedy_matching(tree, target), tree, request
        else:
            rows = torch.tensor([request])
            part = TargetLogits(
                target.logits, target.first_row[rows], target.sampling.select(rows)
            )
            alone, place = tree.select(rows), 0
            expected = recursive_rejection(alone, part, uniforms[rows])
        assert row(found, tree, request) == row(expected, alone, place)
