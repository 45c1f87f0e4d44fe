"""Distributions and draws: against naive code, and exactly, interval by interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import at_temperature
from tests.fast.enumeration import ALMOST_ONE, rand
from tests.fast.languages import naive_probs
from vllm_treespec.sampling import laws as sampling
from vllm_treespec.sampling.draws import draw, draw_without_replacement
from vllm_treespec.sampling.laws import SamplingTensors, likeliest

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# Distributions


@pytest.mark.parametrize("vocab_size", [5, 77, 1001])
def test_probs_equal_naive_top_k_and_top_p(vocab_size: int) -> None:
    """Red when temperature, top-k or top-p change order, ties or the row they fit."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn((7, 4, vocab_size), generator=generator)
    logits[1] = logits[1].round()
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.7, 1.0, 1.3, 1.0])
    top_k = torch.tensor([vocab_size, 3, 1, 2, vocab_size, 4, vocab_size])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 0.5, 0.9, 0.01])
    expected = torch.stack(
        [
            naive_probs(logits[r].double() / temperature[r], int(k), float(p))
            for r, (k, p) in enumerate(zip(top_k, top_p, strict=True))
        ]
    )
    found = SamplingTensors(temperature, top_k, top_p).probs(logits)
    assert found.dtype == torch.float32
    assert found.gt(0).equal(expected.gt(0))
    assert torch.allclose(found.double(), expected, atol=1e-6, rtol=0)


# of a large vocabulary that is a whole number of blocks, and of one that is not
BLOCKS = [64 * sampling.BLOCK * 4, 5003]


# of nine requests: top-k of all, of some, and of none
FEW_K = [1, 2, 5, 20, 20, 20, 100, 127, 20]
SOME_K = [1, 10**9, 5, 10**9, 20, 10**9, 100, 10**9, 4000]


@pytest.mark.parametrize("vocab_size", BLOCKS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("top_k", "has_top_p"),
    [(FEW_K, False), (SOME_K, False), (FEW_K, True), (SOME_K, True), (None, True)],
)
def test_few_tokens_have_the_same_law(
    vocab_size: int, tied: bool, top_k: list[int] | None, has_top_p: bool
) -> None:
    """Red when tokens that are found without the others are other ones.

    Tied logits are those of bfloat16: of equal ones at the end of top-p the first are
    inside, of those at the end of top-k all.
    """
    random = torch.Generator().manual_seed(vocab_size)
    logits = 6 * torch.randn((9, vocab_size), generator=random)
    if tied:
        logits = logits.bfloat16().float()
    top_p = torch.tensor([0.01, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0])
    limits = None if top_k is None else torch.tensor(top_k).clamp(max=vocab_size)
    parameters = SamplingTensors(torch.ones(9), limits, top_p if has_top_p else None)
    with patch.object(sampling, "_restrict", wraps=sampling._restrict) as restrict:
        found = parameters.probs(logits)
    assert sum(len(call.args[0]) for call in restrict.call_args_list) <= 6
    with patch.object(sampling, "MANY_TOKENS", 1):
        expected = parameters.probs(logits)
    assert found.gt(0).equal(expected.gt(0))
    assert torch.allclose(found, expected, rtol=1e-5, atol=0)
    alone = [parameters.select(torch.tensor([r])).probs(logits[[r]]) for r in range(9)]
    assert torch.cat(alone).equal(found)


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 151_936])
def test_tokens_within_limits_are_vllms(vocab_size: int) -> None:
    """Red when a token that ties with the k-th place is forgotten, or counts twice.

    Logits are those of bfloat16. Of few tokens also two are likelier than all others,
    which tie: of so many vLLM's sums are rough. vLLM leaves open which of equal tokens
    at the end of top-p are inside.
    """
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    limits = [(k, p) for k in (3, 100, 120, 128, 150, 300) for p in (0.1, 0.9, 1.0)]
    top_k, top_p = map(torch.tensor, zip(*limits, strict=True))
    random = torch.Generator().manual_seed(vocab_size)
    logits = 2.5 * torch.randn((len(limits), vocab_size), generator=random)
    kinds = [logits.bfloat16().float()]
    if vocab_size == 1000:
        kinds += [
            torch.tensor([likelier, likelier] + [0.0] * 998).repeat(len(limits), 1)
            for likelier in (3.0, 7.0)
        ]
    for logits in kinds:
        found = SamplingTensors(torch.ones(len(limits)), top_k, top_p).probs(logits)
        stock = apply_top_k_top_p(logits.clone(), top_k, top_p).softmax(1)
        assert found.gt(0).sum(1).equal(stock.gt(0).sum(1))
        highest, expected = (law.topk(150, dim=1).values for law in (found, stock))
        assert torch.allclose(highest, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("logit", [torch.nan, -torch.inf, torch.inf])
def test_logits_without_a_softmax_give_token_0(logit: float) -> None:
    """Red when few tokens of a row are found whose probabilities are NaN."""
    logits = torch.arange(5003.0).repeat(2, 1)
    logits[1] = logit
    if logit == torch.inf:
        logits[1, 1:] = 0.0
    for top_k, top_p in product((None, 3), (None, 0.9)):
        probs = at_temperature(1.0, 2, top_k, top_p).probs(logits)
        assert probs[1].tolist() == [1.0] + [0.0] * 5002
        assert float(probs[0].sum()) == pytest.approx(1.0)


def test_the_likeliest_tokens_are_found_in_blocks() -> None:
    """Red when blocks are left out that hold one of them."""
    for vocab_size, count in product(BLOCKS, (1, 64)):
        random = torch.Generator().manual_seed(count)
        logits = torch.randn((3, vocab_size), generator=random)
        # all in one block, ties among them
        logits[0, 128:256] = (9 * torch.rand(128, generator=random)).round()
        logits[1] = 0.0
        mass, tokens = sampling.most_likely(logits, count)
        assert mass.equal(logits.topk(count, dim=1).values)
        assert mass.equal(logits.gather(1, tokens))
        assert all(len(set(row)) == count for row in tokens.tolist())


@pytest.mark.parametrize("vocab_size", BLOCKS)
def test_no_requests_have_no_laws(vocab_size: int) -> None:
    """Red when a step fails in which no request asks for a law.

    Rules ask for what the requests have left whose drafts are accepted: often none.
    """
    nobody = torch.empty(0, dtype=torch.int64)
    for limits in product((None, 20, 4000), (None, 0.9)):
        parameters = at_temperature(1.0, 2, *limits).select(nobody)
        for shape in ((0, vocab_size), (0, 4, vocab_size)):
            assert parameters.probs(torch.zeros(shape)).shape == shape


LIMITS = {
    "top-k": (torch.tensor([40, 1, 1001]), None),
    "top-p": (None, torch.tensor([0.9, 0.3, 1.0])),
    "both": (torch.tensor([40, 1001, 200]), torch.tensor([0.9, 0.5, 0.99])),
}


@pytest.mark.parametrize("name", LIMITS)
def test_tokens_are_found_without_sorting_all(name: str) -> None:
    """Red when a CPU sorts a vocabulary for its likeliest tokens, or finds others."""
    random = torch.Generator().manual_seed(1)
    for scale, tied in product((0.3, 1.0, 4.0, 12.0), (False, name == "top-k")):
        logits = scale * torch.randn((3, 1001), generator=random)
        if tied:
            logits = logits.round()
        found = sampling._restrict_unsorted(logits, *LIMITS[name])
        assert found is not None
        with patch.object(sampling, "_restrict_unsorted", return_value=None):
            assert found.equal(sampling._restrict(logits, *LIMITS[name])), scale


def test_a_nucleus_is_summed_in_float64() -> None:
    """Red when ranks of a GPU may find other tokens: it sums a row in any order."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randn((1, 2000), generator=random)
    mass = logits.sort().values.softmax(1).double().cumsum(1)
    # limits that a token's sum just reaches, or does not
    top_p = (1 - mass[0, 500:1950]).float()
    with patch.object(sampling, "is_on_cpu", return_value=False):
        found = sampling._restrict(logits.expand(len(top_p), -1), None, top_p)
    exact = (mass > 1 - top_p[:, None].double()).sum(1)
    assert found.isfinite().sum(1).equal(exact)
    rounded = (mass.float() > 1 - top_p[:, None]).sum(1)
    assert int((rounded != exact).sum()) > 10, "float32 would not differ"


def test_as_many_of_equal_tokens_are_found() -> None:
    """Red when a flat distribution is cut, or not cut where its sum is reached."""
    for top_p in (1e-6, 0.25, 0.5, 0.9, 1 - 1e-6):
        vocab_size, limit = 1024, torch.tensor([top_p])
        found = sampling._restrict_unsorted(torch.zeros(1, vocab_size), None, limit)
        assert found is not None
        assert int(found.isfinite().sum()) == math.ceil(top_p * vocab_size)


def test_equal_tokens_are_found_alike_in_any_batch() -> None:
    """Red when it depends on other requests which of equal tokens are cut."""
    random = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn((16, 4096), generator=random)).bfloat16().float()
    logits[::4] = 0.0
    limits = torch.rand(16, generator=random)
    limits[::4] = torch.tensor([0.25, 0.5, 0.75, 0.125])
    together = sampling._restrict_unsorted(logits, None, limits)
    assert together is not None
    for row in range(16):
        alone = sampling._restrict_unsorted(logits[[row]], None, limits[[row]])
        assert alone is not None
        assert together[row].equal(alone[0])


def test_logits_without_a_softmax_are_left_alone() -> None:
    """Red when logits without a softmax are cut as if they had one."""
    for top_k, logit in product((None, 9), (torch.nan, -torch.inf, torch.inf)):
        logits = torch.zeros((2, 1001))
        logits[1] = logit
        top_ks = None if top_k is None else torch.tensor([top_k, top_k])
        limits = torch.tensor([0.9, 0.9])
        assert sampling._restrict_unsorted(logits, top_ks, limits) is None


def test_greedy_rows_are_ranked_at_temperature_one() -> None:
    """Red when a temperature of 0 divides by zero or touches other requests."""
    logits = torch.randn((2, 9), generator=torch.Generator().manual_seed(0))
    sampling = SamplingTensors(torch.tensor([0.0, 0.5]))
    assert sampling.greedy.tolist() == [True, False]
    found = sampling.probs(logits)
    assert torch.allclose(found, (logits * torch.tensor([[1.0], [2.0]])).softmax(1))
    alone = SamplingTensors(torch.zeros(1), all_greedy=True)
    assert alone.probs(logits[:1]).equal(found[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_likeliest_tokens_are_those_of_torch(dtype: torch.dtype) -> None:
    """Red when numbers of 16 bits are compared wrongly, or another of equals is it."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn((12, 300), generator=random).to(dtype)
    logits[0] = -logits[0].abs() - 1
    logits[1] = 0.0
    logits[1, :9] = -0.0
    logits[2] = -torch.inf
    logits[3, ::7] = -torch.inf
    logits[4, 5:] = torch.inf
    logits[5, 7] = torch.nan
    logits[6, [20, 40]] = 9.0
    rows = [*range(12), 6]
    assert likeliest(logits, rows) == logits.float().argmax(-1)[rows].tolist()


def test_select_takes_whole_rows() -> None:
    """Red when a sampling parameter is forgotten in a selection."""
    sampling = SamplingTensors(
        torch.tensor([0.5, 1.0]),
        torch.tensor([5, 7]),
        torch.tensor([0.3, 0.4]),
        False,
        True,
    )
    chosen = sampling.select(torch.tensor([1, 1, 0]))
    assert chosen.temperature.tolist() == [1.0, 1.0, 0.5]
    assert chosen.top_k is not None
    assert chosen.top_k.tolist() == [7, 7, 5]
    assert chosen.top_p is not None
    assert torch.allclose(chosen.top_p, torch.tensor([0.4, 0.4, 0.3]))
    assert (chosen.all_greedy, chosen.all_random) == (False, True)


# Draws


def intervals(weights: list[int]) -> list[tuple[int, float, float]]:
    """Each token's interval of uniforms under inversion, in token order."""
    total, below, found = sum(weights), 0, []
    for token, weight in enumerate(weights):
        if weight:
            found.append((token, below / total, (below + weight) / total))
        below += weight
    return found


def ordered_intervals(
    weights: list[int], count: int
) -> list[list[tuple[int, float, float]]]:
    """Every ordered outcome of ``count`` draws without replacement."""
    if count == 0:
        return [[]]
    return [
        [first, *rest]
        for first in intervals(weights)
        for rest in ordered_intervals(
            [0 if t == first[0] else w for t, w in enumerate(weights)], count - 1
        )
    ]


def misdrawn(function: Draw, weights: list[int], count: int) -> int:
    """How many corners of the outcomes' boxes of uniforms give another outcome.

    The boxes fill [0, 1) ** count, and a box's volume is its outcome's probability:
    if none is misdrawn, the law is exact to the distance kept from the edges.
    """
    corners, expected = [], []
    for outcome in ordered_intervals(weights, count):
        ends = []
        for _, low, high in outcome:
            edge = min(1e-13, (high - low) / 4)
            ends.append((low + edge, high - edge))
        for corner in product(*ends):
            corners.append(corner)
            expected.append([token for token, _, _ in outcome])
    uniforms = torch.tensor(corners, dtype=torch.float64)
    probs = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    tokens, valid = function(probs.expand(len(corners), -1), uniforms)
    wrong = (tokens != torch.tensor(expected)).any(1) | ~valid.all(1)
    return int(wrong.sum())


WEIGHTS = [
    [3, 1, 4, 1, 5],
    [0, 0, 7, 1, 1],
    [2, 0, 3, 0, 5, 0, 0],
    [1, 1, 1, 1],
    [1, 10**6, 1, 10**9],
    [3, 5, 10**15, 4, 10**4],
    [0, 0, 0, 2, 9],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_draws_without_replacement_are_exact(weights: list[int]) -> None:
    """Red when any draw's map from uniforms to tokens loses its law."""
    support = sum(weight > 0 for weight in weights)
    for count in range(1, support + 1):
        assert misdrawn(draw_without_replacement, weights, count) == 0


def test_wrong_draws_are_noticed() -> None:
    """Red when draws with replacement, or unnormalised ones, would pass."""

    def with_replacement(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.stack([draw(probs, column) for column in uniforms.T], dim=1)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def by_probability(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens, valid = draw_without_replacement(probs, uniforms)
        return tokens.sort(dim=1).values, valid

    assert misdrawn(with_replacement, WEIGHTS[0], 2) > 0
    assert misdrawn(by_probability, WEIGHTS[0], 2) > 0


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_uniforms_stay_in_the_support(
    weights: list[int], dtype: torch.dtype
) -> None:
    """Red when rounding at either end draws a token without mass, or one twice."""
    probs = torch.tensor(weights, dtype=torch.float64)
    probs = (probs / probs.sum()).to(dtype)[None]
    support = int((probs > 0).sum())
    numbers = torch.tensor([0.0, 1e-300, 0.5, ALMOST_ONE], dtype=torch.float64)
    corners = torch.cartesian_prod(*[numbers] * min(support, 4))
    tokens, valid = draw_without_replacement(probs.expand(len(corners), -1), corners)
    assert bool(valid.all())
    assert bool((probs[0, tokens] > 0).all())
    assert all(len({*row}) == corners.shape[1] for row in tokens.tolist())
    end = [draw(probs, torch.tensor([u]).double()).item() for u in (0.0, ALMOST_ONE)]
    positive = probs[0].nonzero()[:, 0].tolist()
    assert end == [positive[0], positive[-1]]


def test_exhausted_support_gives_invalid_draws() -> None:
    """Red when a draw from nothing counts as a draft token."""
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7], [0.0, 0.0, 1.0, 0.0]])
    tokens, valid = draw_without_replacement(probs, rand(2, 5))
    assert valid.tolist() == [[True, True, False, False, False], [True] + [False] * 4]
    assert sorted(tokens[0, :2].tolist()) == [1, 3]
    assert tokens[1, 0] == 2


def test_scale_of_the_mass_does_not_matter() -> None:
    """Red when a draw needs normalised probabilities."""
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand((200, 30), generator=generator)
    uniforms = torch.rand((200, 4), generator=generator, dtype=torch.float64)
    tokens, _ = draw_without_replacement(probs, uniforms)
    for scale in (2.0**-60, 2.0**20):
        assert draw_without_replacement(probs * scale, uniforms)[0].equal(tokens)


def test_every_token_of_a_flat_distribution_is_reached() -> None:
    """Red when the cumulative sum is too coarse for a large vocabulary."""
    for vocab_size in (5, 77, 1001, 49_152, 128_256):
        probs = torch.full((1, vocab_size), 1 / vocab_size)
        tokens = torch.arange(0, vocab_size, max(vocab_size // 64, 1))
        uniforms = ((tokens + 0.5).double() / vocab_size)[:, None]
        found, _ = draw_without_replacement(probs.expand(len(tokens), -1), uniforms)
        assert found[:, 0].equal(tokens)


def test_draws_equal_naive_draws() -> None:
    """Red when skipping drawn tokens is not the same as setting them to zero."""
    for vocab_size in (77, 1001, 49_152, 128_256):
        rows, count = 3, 4
        generator = torch.Generator().manual_seed(vocab_size)
        logits = 3 * torch.randn(
            (rows, vocab_size), generator=generator, dtype=torch.float64
        )
        uniforms = torch.rand((rows, count), generator=generator, dtype=torch.float64)
        probs = logits.softmax(1)
        tokens, valid = draw_without_replacement(probs, uniforms)
        assert bool(valid.all())
        for row in range(rows):
            left = probs[row].clone()
            for k in range(count):
                cumulative = left.cumsum(0)
                point = uniforms[row, k] * cumulative[-1]
                assert int((cumulative <= point).sum()) == tokens[row, k]
                left[tokens[row, k]] = 0
