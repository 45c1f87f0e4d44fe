"""Two-sample tests of the output law, with samples of another law as control."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from benchmarks.rsd.law import (
    chi_square,
    indicator,
    interval,
    mean_difference,
    token_chi_square,
)

PERMUTATIONS = 499


def normal(shift: float, count: int, seed: int) -> np.ndarray:
    """Values around a mean that differs between prompts."""
    means = 10 * np.arange(8)[:, None] + shift
    return np.random.default_rng(seed).normal(means, 1, (8, count))


def p_of_means(shift: float, seed: int) -> float:
    """p-value for a sample that is shifted against the other."""
    first, second = normal(shift, 20, 2 * seed), normal(0, 8, 2 * seed + 1)
    draws = np.random.default_rng(seed)
    return float(
        mean_difference(first, second, draws, permutations=PERMUTATIONS)["p_value"]
    )


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
        values = normal(0, 6, seed)
        found = interval(float(values.mean()), values)
        covered += found["low"] < 35 < found["high"]
        assert found["high"] - found["low"] < 1
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
    p_value = token_chi_square(first, second, draws, permutations=PERMUTATIONS)
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


def test_small_samples_are_permuted_in_all_ways_within_their_prompts() -> None:
    """Red when p-values are not exact, or labels move between prompts.

    Of the 6 x 6 labellings of two answers each, the one seen and its mirror image
    differ most. The prompts' own means are far apart.
    """
    first, second = np.array([[3.0, 4], [103, 104]]), np.array([[1.0, 2], [101, 102]])
    draws = np.random.default_rng(0)
    assert mean_difference(first, second, draws)["p_value"] == pytest.approx(2 / 36)
