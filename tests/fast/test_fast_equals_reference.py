"""The batched walk against the readable one, greedy limits, and any batch alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.drafting import Path, at_temperature, draws_of, propose, token_paths
from tests.fast.enumeration import Scorer
from tests.fast.languages import BigramDraft, PlainSampling, plain_sampling
from tests.fast.test_batched_rules import batch, walked
from tests.fast.wrong_rules import WRONG_REJECTION
from tests.reference.scorers import recursive_rejection_reference, verify
from vllm_treespec.proposers import Proposer, RsdC, RsdS, Sd
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sampling.uniforms import (
    DRAFTING,
    SCORING,
    keyed_uniforms,
    seeded_key,
)
from vllm_treespec.scorers import (
    TargetLogits,
    greedy_matching,
    recursive_rejection,
)
from vllm_treespec.trees.tree import TreeBatch

# vocabulary, trees, nodes of the largest
SIZES = [(5, 60, 16), (77, 40, 24), (1001, 20, 64), (49_152, 3, 8), (128_256, 2, 6)]


def differing(
    scorer: Scorer, tree: TreeBatch, target: TargetLogits, uniforms: Tensor
) -> int:
    """How many requests are scored differently from the reference."""
    found = scorer(tree, target, uniforms)
    expected = recursive_rejection_reference(tree, target, uniforms)
    differs = (found.path != expected.path).any(1)
    differs |= found.num_accepted != expected.num_accepted
    differs |= found.next_token_ids != expected.next_token_ids
    differs |= (found.emitted(tree) != expected.emitted(tree)).any(1)
    return int(differs.sum())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"vocab{size[0]}")
def test_walk_equals_reference(size: tuple[int, int, int]) -> None:
    """Red when batching, padding or a large vocabulary changes a walk."""
    for with_replacement in (False, True):
        tree, target, uniforms = batch(*size, "plain float64", 0)
        if with_replacement:
            draws = draws_of(tree)
            none = torch.zeros_like(draws.without_replacement)
            tree = replace(tree, draws=replace(draws, without_replacement=none))
        assert differing(recursive_rejection, tree, target, uniforms) == 0


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"vocab{size[0]}")
def test_float32_walk_equals_reference_but_for_ties(size: tuple[int, int, int]) -> None:
    """Red when float32 moves a decision by more than its rounding.

    A tie is a uniform that lies within rounding of the edge of its token's interval
    in the reference's float64 distribution.
    """
    tree, target, uniforms = batch(*size, "plain", 0)
    output = recursive_rejection(tree, target, uniforms)
    for req in range(tree.num_reqs):
        accepted, residual = verify(tree, target, req, uniforms[req])
        found = output.path[req][output.path[req] >= 0].tolist()
        assert found == accepted
        token = int(output.next_token_ids[req])
        above = float(residual[: token + 1].sum())
        below = above - float(residual[token])
        uniform = float(uniforms[req, 0])
        assert below - 1e-5 < uniform < above + 1e-5
        assert residual[token] > 0


@pytest.mark.parametrize("name", WRONG_REJECTION)
def test_wrong_scorers_differ_from_the_reference(name: str) -> None:
    """Red when the comparison could no longer see another walk."""
    tree, target, uniforms = batch(77, 40, 24, "plain float64", 0)
    assert (
        differing(WRONG_REJECTION[name](recursive_rejection), tree, target, uniforms)
        > 0
    )


# Greedy


def test_greedy_matching_equals_naive_loop() -> None:
    """Red when greedy matching leaves the path that plain greedy decoding takes."""
    tree, target, uniforms = batch(5, 200, 12, "plain", 0)
    output = greedy_matching(tree, target, uniforms)
    for req in range(tree.num_reqs):
        path, node = [], 0
        while True:
            wanted = int(target.logits[target.root_rows[req] + node].argmax())
            matching = [
                i
                for i in range(1, int(tree.num_nodes[req]))
                if tree.parents[req, i] == node and tree.token_ids[req, i] == wanted
            ]
            if not matching:
                break
            node = matching[0]
            path.append(node)
        assert output.path[req][output.path[req] >= 0].tolist() == path
        assert output.num_accepted[req] == len(path)
        assert output.next_token_ids[req] == wanted
        assert output.last_node()[req] == node
    assert int(output.num_accepted.max()) >= 2


def greedy_tree(proposer: Proposer, table: Tensor) -> list[list[Path]]:
    """Sequences of each level that the proposer keeps at temperature 0."""
    roots = torch.zeros(1, dtype=torch.int64)
    draft = BigramDraft(table, torch.zeros(1, len(table)), roots)
    uniforms = torch.rand(1, proposer.sizes.num_uniforms, dtype=torch.float64)
    tree = propose(proposer, draft, uniforms, at_temperature(0.0))
    assert tree.draws is None
    levels: list[list[Path]] = [[] for _ in range(1 + proposer.sizes.max_depth)]
    for path in token_paths(tree):
        levels[len(path)].append(path)
    return levels


def log_prob(table: Tensor, path: Path) -> float:
    last, total = 0, 0.0
    for token in path:
        total += float(table[last].double().log_softmax(0)[token])
        last = token
    return total


@pytest.mark.parametrize(("beam_width", "depth"), [(1, 4), (3, 3), (6, 4)])
def test_greedy_rsd_s_is_beam_search(beam_width: int, depth: int) -> None:
    """Red when temperature 0 stops to be the deterministic limit of RSD-S."""
    table = torch.randn((13, 13), generator=torch.Generator().manual_seed(0))
    levels = greedy_tree(RsdS(beam_width, depth), table)
    beam: list[Path] = [()]
    for level in levels[1:]:
        candidates = [(*path, token) for path in beam for token in range(13)]
        candidates.sort(key=lambda path: -log_prob(table, path))
        beam = candidates[:beam_width]
        assert set(level) == set(beam)


def test_greedy_rsd_c_takes_the_likeliest_tokens() -> None:
    """Red when temperature 0 stops to be the deterministic limit of RSD-C."""
    table = torch.randn((13, 13), generator=torch.Generator().manual_seed(1))
    levels = greedy_tree(RsdC((3, 2, 1)), table)
    expected: list[Path] = [()]
    for level, count in zip(levels[1:], (3, 2, 1), strict=True):
        expected = [
            (*path, token)
            for path in expected
            for token in table[path[-1] if path else 0].topk(count).indices.tolist()
        ]
        assert level == expected


# Independence of the batch

TEMPERATURE = [1.0, 0.0, 0.7, 1.0, 0.0, 1.5, 0.3, 1.0]
TOP_K = [0, 0, 5, 0, 3, 2, 0, 4]
TOP_P = [1.0, 1.0, 0.9, 0.6, 1.0, 1.0, 1.0, 0.95]
KEYS = [seeded_key(seed) for seed in (7, 8, 9, 7, 11, 2**63, 0, 14)]
POSITIONS = [3, 900, 41, 42, 0, 77, 5, 5]


def batch_sampling(requests: list[int], vocab_size: int) -> SamplingTensors:
    """Parameters of these requests, made as small as the engine makes them."""
    temperature = [TEMPERATURE[r] for r in requests]
    top_k = [TOP_K[r] or vocab_size for r in requests]
    top_p = [TOP_P[r] for r in requests]
    return SamplingTensors(
        torch.tensor(temperature),
        torch.tensor(top_k) if any(TOP_K[r] for r in requests) else None,
        torch.tensor(top_p) if min(top_p) < 1 else None,
        all_greedy=not any(temperature),
        all_random=all(temperature),
    )


def step(
    proposer: Proposer, requests: list[int], vocab_size: int
) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """Draft and score a batch once; tokens, parents and emitted tokens of each."""
    generator = torch.Generator().manual_seed(vocab_size)
    table = 2 * torch.randn((vocab_size, vocab_size), generator=generator)
    offsets = torch.randn((8, vocab_size), generator=generator)
    change = torch.randn((vocab_size,), generator=generator)
    rows = torch.tensor(requests)
    sampling, roots = batch_sampling(requests, vocab_size), rows * 3 % vocab_size
    keys, positions = (np.array(of)[requests] for of in (KEYS, POSITIONS))
    tree = propose(
        proposer,
        BigramDraft(table, offsets[rows], roots),
        keyed_uniforms(keys, positions, DRAFTING, proposer.sizes.num_uniforms),
        sampling,
        root_token_ids=roots,
    )
    logits = table[tree.token_ids] + offsets[rows, None] + change
    root_rows = torch.arange(len(requests)) * tree.max_nodes
    target = TargetLogits(logits.flatten(0, 1), root_rows, sampling)
    uniforms = keyed_uniforms(keys, positions, SCORING, tree.max_nodes + 1)
    scored = (
        greedy_matching(tree, target, uniforms)
        if tree.draws is None
        else walked("recursive_rejection", tree, target, uniforms)
    )
    emitted = scored.emitted(tree).tolist()
    return {
        request: (
            tree.token_ids[row, : tree.num_nodes[row]].tolist(),
            tree.parents[row, : tree.num_nodes[row]].tolist(),
            emitted[row],
        )
        for row, request in enumerate(requests)
    }


@pytest.mark.parametrize("vocab_size", [77, 1001])
@pytest.mark.parametrize(
    "proposer", [Sd(4), RsdC((3, 2, 1)), RsdS(4, 3)], ids=lambda p: type(p).__name__
)
def test_batch_does_not_change_a_seeded_request(
    proposer: Proposer, vocab_size: int
) -> None:
    """Red when order, size or company in a batch changes what a request gets."""
    alone = {r: step(proposer, [r], vocab_size)[r] for r in range(8)}
    assert len({str(result) for result in alone.values()}) == 8
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 1, 7, 0, 3, 6, 4, 2], [6, 1, 0]):
        assert step(proposer, order, vocab_size) == {r: alone[r] for r in order}


def test_stub_keeps_its_type_in_a_selection() -> None:
    """Red when exact tests silently fall back to float32 distributions."""
    chosen = plain_sampling(3).select(torch.tensor([1]))
    assert isinstance(chosen, PlainSampling)
