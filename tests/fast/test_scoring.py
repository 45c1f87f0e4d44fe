"""Which rule scores which request of a mixed batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.fast.random_trees import random_trees
from tests.fast.wrong_scorers import draws_of

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

from vllm_treespec.engine.scoring import score_trees
from vllm_treespec.sampling import SamplingTensors
from vllm_treespec.scorers import (
    ScorerOutput,
    TargetLogits,
    greedy_matching,
    recursive_rejection,
    target_draw,
)
from vllm_treespec.tree import TreeBatch, first_paths


def batch(
    temperatures: list[float], is_chain: list[bool]
) -> tuple[TreeBatch, Tensor, TargetLogits, Tensor]:
    generator = torch.Generator().manual_seed(3)
    num_reqs = len(temperatures)
    tree = random_trees(num_reqs, 9, 6, generator)
    chains = torch.tensor(is_chain)
    draws = draws_of(tree)
    tree = replace(tree, draws=replace(draws, probs=draws.probs.float()))
    tree = first_paths(tree, chains)
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
    return tree, chains, target, uniforms


def row(output: ScorerOutput, tree: TreeBatch, request: int) -> list[int]:
    return [t for t in output.emitted(tree)[request].tolist() if t >= 0]


@pytest.mark.parametrize(
    ("temperatures", "is_chain"),
    [
        ([0.0, 0.0], [False, True]),
        ([1.0, 0.7], [False, False]),
        ([1.0, 0.0, 1.0, 0.5, 0.0, 1.0], [False, True, True, False, False, True]),
    ],
)
def test_each_request_gets_its_rule(
    temperatures: list[float], is_chain: list[bool]
) -> None:
    """Red when a chain cut by its grammar is scored by its draws, which is lossy."""
    tree, chains, target, uniforms = batch(temperatures, is_chain)
    found = score_trees(tree, chains, target, uniforms, recursive_rejection)
    for request, temperature in enumerate(temperatures):
        if temperature == 0:
            expected = greedy_matching(tree, target)
        elif is_chain[request]:
            expected = target_draw(tree, target, uniforms)
        else:
            rows = torch.tensor([request])
            alone = TargetLogits(
                target.logits, target.first_row[rows], target.sampling.select(rows)
            )
            chosen = tree.select(rows)
            one = recursive_rejection(chosen, alone, uniforms[rows])
            assert row(found, tree, request) == row(one, chosen, 0)
            continue
        assert row(found, tree, request) == row(expected, tree, request)
