"""Requests without a tree: drawn as trees' tokens are, where the engine need not."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.fake_scheduler import Habits, Request
from tests.fast.toy_workloads import make_engine
from vllm_treespec.core import decoder
from vllm_treespec.core.plain_draw import draw_plainly
from vllm_treespec.core.sampling import SamplingTensors, draw

VOCAB_SIZE, NUM_ROWS = 9, 6


def logits_of(seed: int) -> Tensor:
    """Logits of some rows."""
    return torch.randn(
        (NUM_ROWS, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(
    "temperature", [(0.0, 0.0, 0.0), (0.7, 1.0, 2.0), (0.7, 0.0, 1.3)]
)
def test_each_request_is_drawn_by_its_own_parameters(
    temperature: tuple[float, ...],
) -> None:
    """Red when rows, parameters or numbers of requests are mixed up."""
    logits, rows = logits_of(0), torch.tensor([4, 0, 5])
    greedy = [value == 0 for value in temperature]
    sampling = SamplingTensors(
        torch.tensor(temperature),
        top_p=torch.tensor([0.9, 1.0, 0.8]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
    )
    uniforms = torch.tensor([[0.2], [0.6], [0.95]], dtype=torch.float64)
    tokens = draw_plainly(logits, rows, sampling, uniforms)
    for place, is_greedy in enumerate(greedy):
        row = logits[rows[place]]
        own = torch.tensor([place])
        probs = sampling.select(own).probs(row[None])
        drawn = draw(probs, uniforms[place])
        assert int(tokens[place]) == int(row.argmax() if is_greedy else drawn)


def test_the_law_is_the_targets() -> None:
    """Red when a request without a tree follows another law."""
    logits, count = logits_of(1)[:1], 4000
    uniforms = (torch.arange(count, dtype=torch.float64)[:, None] + 0.5) / count
    sampling = SamplingTensors(torch.full((count,), 0.8), all_random=True)
    rows = torch.zeros(count, dtype=torch.int64)
    tokens = draw_plainly(logits, rows, sampling, uniforms)
    shares = torch.bincount(tokens, minlength=VOCAB_SIZE) / count
    assert torch.allclose(shares, (logits[0] / 0.8).softmax(0), atol=1 / count)


def sampled(number: int, drafts: bool = True, seed: int | None = None) -> Request:
    """A sampled request."""
    prompt = [number, 3]
    return Request(f"r{number}", prompt, 12, temperature=0.9, seed=seed, drafts=drafts)


def test_an_odd_request_is_drawn_by_the_engine() -> None:
    """Red when parameters that trees cannot follow are left out of a draw."""
    rows: list[int] = []

    def noting(
        logits: Tensor, rows_: Tensor, sampling: SamplingTensors, uniforms: Tensor
    ) -> Tensor:
        rows.extend(rows_.tolist())
        return draw_plainly(logits, rows_, sampling, uniforms)

    with patch.object(decoder, "draw_plainly", side_effect=noting):
        engine = make_engine("suffix_tree", Habits())
        engine.run(sampled(0, drafts=False), sampled(1, seed=1))
        assert not rows, "nor one with a seed: its numbers are the engine's"
        make_engine("suffix_tree", Habits()).run(sampled(0), sampled(1, drafts=False))
        assert set(rows) == {0}


def test_greedy_requests_without_trees_are_the_engines() -> None:
    """Red when a step in which nothing is drawn pays for our draw."""
    engine = make_engine("suffix_tree", Habits())
    with_trees: list[bool] = []

    def noting(
        logits: Tensor, rows: Tensor, sampling: SamplingTensors, uniforms: Tensor
    ) -> Tensor:
        with_trees.append(engine.decoder.trees is not None)
        return draw_plainly(logits, rows, sampling, uniforms)

    with patch.object(decoder, "draw_plainly", side_effect=noting):
        engine.run(*[Request(f"r{n}", [n, 3], 12, temperature=0.0) for n in range(3)])
    assert with_trees
    assert all(with_trees)


def test_an_odd_request_changes_no_other_ones_text() -> None:
    """Red when it depends on the batch who draws for a request with a seed."""
    alone = make_engine("suffix_tree", Habits()).run(sampled(0, seed=0))
    odd = [sampled(1, drafts=False), sampled(2)]
    together = make_engine("suffix_tree", Habits()).run(sampled(0, seed=0), *odd)
    assert together[0] == alone[0]


def test_each_token_has_a_number_of_its_own() -> None:
    """Red when a token is drawn by a number that an earlier one was drawn by."""
    used: list[float] = []

    def noting(
        logits: Tensor, rows: Tensor, sampling: SamplingTensors, uniforms: Tensor
    ) -> Tensor:
        used.extend(uniforms.flatten().tolist())
        return draw_plainly(logits, rows, sampling, uniforms)

    with patch.object(decoder, "draw_plainly", side_effect=noting):
        make_engine("suffix_tree", Habits()).run(sampled(0), sampled(1))
    assert len(used) == len(set(used)) > 2
