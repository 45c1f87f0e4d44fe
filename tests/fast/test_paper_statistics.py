"""Two-sample tests of the output law, with samples of another law as control."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from benchmarks.paper.statistics import (
    chi_square,
    indicator,
    mean_difference,
    stratified_mean,
    token_chi_square,
)

PERMUTATIONS = 499


def normal(shift: float, count: int, seed: int) -> list[np.ndarray]:
    """Values around a mean that differs between prompts."""
    draws = np.random.default_rng(seed)
    return [draws.normal(10 * prompt + shift, 1, count) for prompt in range(8)]


def p_of_means(shift: float, seed: int) -> float:
    """p-value for a sample that is shifted against the other."""
    first, second = normal(shift, 20, 2 * seed), normal(0, 8, 2 * seed + 1)
    draws = np.random.default_rng(seed)
    return mean_difference(first, second, draws, PERMUTATIONS).p_value


def test_shifted_likelihoods_are_noticed_and_equal_ones_are_not() -> None:
    """Red when the test compares prompts, or no longer notices a wrong law."""
    same = [p_of_means(0, seed) for seed in range(40)]
    assert np.mean(np.array(same) < 0.05) < 0.2
    assert np.mean(same) == pytest.approx(0.5, abs=0.15)
    shifted = [p_of_means(0.8, seed) for seed in range(10)]
    assert max(shifted) < 0.02


def test_interval_covers_the_true_difference() -> None:
    """Red when the spread between prompts widens the interval, or it is too narrow."""
    covered = 0
    for seed in range(100):
        interval = stratified_mean(normal(0, 6, seed))
        covered += interval.low < 35 < interval.high
        assert interval.high - interval.low < 1
    assert covered >= 85


def tokens(law: list[float], count: int, seed: int) -> list[list[list[int]]]:
    """Per prompt and answer, three tokens of one law."""
    draws = np.random.default_rng(seed)
    shape = (6, count, 3)
    return draws.choice(len(law), p=law, size=shape).tolist()


def p_of_tokens(law: list[float], seed: int) -> float:
    """p-value for a sample of this law against one of a fixed law."""
    first, second = tokens(law, 30, 2 * seed), tokens([0.5, 0.3, 0.2], 10, 2 * seed + 1)
    draws = np.random.default_rng(seed)
    p_value = token_chi_square(first, second, draws, PERMUTATIONS)
    assert p_value is not None
    return p_value


def test_other_tokens_are_noticed_and_equal_ones_are_not() -> None:
    """Red when the token test loses its power or rejects the right law."""
    same = [p_of_tokens([0.5, 0.3, 0.2], seed) for seed in range(40)]
    assert np.mean(np.array(same) < 0.05) < 0.2
    assert max(p_of_tokens([0.2, 0.3, 0.5], seed) for seed in range(10)) < 0.02


def test_chi_square_is_pearsons() -> None:
    """Red when the statistic is no longer proportional to Pearson's."""
    first, second = [[0]] * 12 + [[1]] * 8, [[0]] * 9 + [[1]] * 21
    labels = np.arange(50)[None] < 20
    mine = chi_square(indicator([*first, *second]), labels)[0] * (1 + 20 / 30)
    table = [[12, 8], [9, 21]]
    assert mine == pytest.approx(chi2_contingency(table, correction=False).statistic)


def test_too_few_tokens_give_no_p_value() -> None:
    """Red when tokens seen once or twice are taken for evidence."""
    draws = np.random.default_rng(0)
    assert token_chi_square([[[1], [1]]], [[[1], [2]]], draws) is None
