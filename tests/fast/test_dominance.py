"""Acceptance rates at one level: as enumerated, and which rule beats which."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks.rsd.toy import (
    k_seq_rate,
    multi_round_rate,
    recursive_rejection_rate,
    two_token_transport_rate,
)
from tests.fast.enumeration import LawMeter, Scorer, all_trees
from tests.fast.languages import Language
from tests.fast.wrong_rules import K_SEQ_JUDGE
from tests.reference.optimal_transport import (
    judge,
    optimal_transport,
    optimal_transport_rate,
)
from vllm_treespec.proposers import Proposer, RsdC, SpecTr
from vllm_treespec.scorers import k_seq, multi_round, recursive_rejection

ROUNDING = 1e-9
RATES = {
    "multi_round": multi_round_rate,
    "k_seq": k_seq_rate,
    "optimal_transport": optimal_transport_rate,
    "recursive_rejection": recursive_rejection_rate,
}
RULES: dict[str, Scorer] = {
    "multi_round": multi_round,
    "k_seq": k_seq,
    "optimal_transport": optimal_transport,
    "recursive_rejection": recursive_rejection,
}
JUDGES = {"k_seq": K_SEQ_JUDGE, "optimal_transport": judge}


def random_pair(seed: int, vocab_size: int) -> tuple[Language, Language]:
    """A draft and a target of one prefix, from flat to peaked."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 1, vocab_size)
    mass = torch.rand(shape, generator=generator, dtype=torch.float64) ** (
        1 + 5 * torch.rand((2, 1, 1), generator=generator, dtype=torch.float64)
    )
    draft, target = mass / mass.sum(2, keepdim=True)
    return Language(draft), Language(target)


SIZES = [(2, 2), (3, 2), (3, 3), (4, 2)]


@pytest.mark.parametrize("rule_name", RATES)
def test_rates_are_those_of_the_rules(rule_name: str) -> None:
    """Red when a plotted rate is not what the rule does, branch by branch."""
    for (vocab_size, num_draws), seed in product(SIZES, range(2)):
        draft, target = random_pair(seed, vocab_size)
        proposer: Proposer = SpecTr(num_draws, 1)
        if rule_name == "recursive_rejection":
            proposer = RsdC((num_draws,))
        # Prefixes of one token, so that leaves have a row; what it says is not used.
        drawn = all_trees(proposer, draft)
        below = Language(target.table.expand(1 + vocab_size, -1))
        meter = LawMeter(RULES[rule_name], drawn, below, judge=JUDGES.get(rule_name))
        rate = RATES[rule_name](draft.table[0], target.table[0], num_draws)
        # The rule's division factor is at most 2**-20 too large; the plot's is exact.
        tolerance = 3e-6 if rule_name == "k_seq" else ROUNDING
        assert meter.first_accepted() == pytest.approx(rate, abs=tolerance)


def test_rules_dominate_each_other() -> None:
    """Red when a better rule accepts less than a worse one for the same draws."""
    for vocab_size, num_draws, seed in product((2, 3, 4), (2, 3), range(25)):
        draft, target = (side.table[0] for side in random_pair(seed, vocab_size))
        rate = {name: of(draft, target, num_draws) for name, of in RATES.items()}
        one_draw = multi_round_rate(draft, target, 1)
        assert rate["recursive_rejection"] >= rate["multi_round"] - ROUNDING
        assert rate["optimal_transport"] >= rate["k_seq"] - ROUNDING
        assert rate["k_seq"] >= rate["multi_round"] - ROUNDING
        assert rate["multi_round"] >= one_draw - ROUNDING


@pytest.mark.parametrize("rule_name", RATES)
def test_one_draw_is_speculative_decoding(rule_name: str) -> None:
    """Red when a rule with one draw is not plain speculative decoding."""
    draft, target = (side.table[0] for side in random_pair(0, 4))
    expected = float(torch.minimum(draft, target).sum())
    rate = RATES[rule_name](draft, target, 1)
    assert rate == pytest.approx(expected, abs=1e-12)


def test_two_draws_of_two_tokens_are_always_accepted() -> None:
    """Red when recursive rejection loses the toy example of arXiv 2402.14160."""
    for p, q in [(0.1, 0.9), (0.5, 0.5), (0.99, 0.01)]:
        draft, target = torch.tensor([[p, 1 - p], [q, 1 - q]], dtype=torch.float64)
        rate = recursive_rejection_rate(draft, target, 2)
        assert rate == pytest.approx(1, abs=1e-6)


def test_recursive_rejection_does_not_dominate_optimal_transport() -> None:
    """Red when the limit of the ranking is forgotten: more draws can be distinct."""
    draft = torch.tensor([0.2202, 0.3272, 0.3767, 0.0759], dtype=torch.float64)
    target = torch.tensor([0.3989, 0.1473, 0.3841, 0.0697], dtype=torch.float64)
    recursive = recursive_rejection_rate(draft, target, 2)
    assert recursive < optimal_transport_rate(draft, target, 2) - 0.1


def test_two_tokens_have_a_closed_form() -> None:
    """Red when the linear programme loses mass it could accept, or the toy figure's
    formula is another optimum.

    Of two tokens, y cannot be emitted where it was not drawn; nothing else forbids
    acceptance, so each token's accepted mass is bounded by that of being drawn.
    """
    for p, q in product((0.1, 0.3, 0.5, 0.8), (0.1, 0.5, 0.75, 1.0)):
        draft, target = torch.tensor([[p, 1 - p], [q, 1 - q]], dtype=torch.float64)
        for num_draws in (1, 2, 3):
            expected = two_token_transport_rate(draft, target, num_draws)
            rate = optimal_transport_rate(draft, target, num_draws)
            assert rate == pytest.approx(expected, abs=1e-12), (p, q, num_draws)
