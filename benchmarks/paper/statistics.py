"""Two-sample tests that need no law of the statistic: labels are permuted.

Answers to the same prompt are exchangeable when both samples have the same law, so the
labels are permuted within each prompt. p-values are exact up to the number of draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

NUM_PERMUTATIONS = 4999
# Rarer tokens say nothing about their share and add noise.
MIN_COUNT = 5


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Mean of the first sample minus mean of the second, and its p-value."""

    interval: Interval
    p_value: float


def stratified_mean(strata: Sequence[np.ndarray], confidence: float = 0.95) -> Interval:
    """Mean over the prompts of the mean over a prompt's answers, prompts fixed.

    Args:
        strata: one array of values per prompt, two or more values each.
        confidence: of the interval, from the normal law.

    """
    mean = float(np.mean([values.mean() for values in strata]))
    return around(mean, variance_of_mean(strata), confidence)


def variance_of_mean(strata: Sequence[np.ndarray]) -> float:
    """Variance of the stratified mean, from the spread within each prompt."""
    parts = [values.var(ddof=1) / len(values) for values in strata]
    return float(np.sum(parts)) / len(strata) ** 2


def around(mean: float, variance: float, confidence: float = 0.95) -> Interval:
    """Interval of a mean, from the normal law."""
    half = float(stats.norm.ppf(0.5 + confidence / 2)) * variance**0.5
    return Interval(mean, mean - half, mean + half)


def mean_difference(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    generator: np.random.Generator,
    permutations: int = NUM_PERMUTATIONS,
) -> Difference:
    """Test that two samples of values have one law, by the difference of their means.

    Args:
        first: one array of values per prompt.
        second: the same of the other sample, prompts in the same order.
        generator: draws the permutations.
        permutations: how many.

    """
    observed = 0.0
    permuted = np.zeros(permutations)
    for ours, theirs in zip(first, second, strict=True):
        values = np.concatenate([ours, theirs])
        labels = permuted_labels(len(ours), len(theirs), permutations, generator)
        weights = np.where(labels, 1 / len(ours), -1 / len(theirs))
        observed += float(ours.mean() - theirs.mean())
        permuted += weights @ values
    variance = variance_of_mean(first) + variance_of_mean(second)
    return Difference(
        around(observed / len(first), variance),
        share_at_least(np.abs(permuted), abs(observed)),
    )


def token_chi_square(
    first: Sequence[Sequence[Sequence[int]]],
    second: Sequence[Sequence[Sequence[int]]],
    generator: np.random.Generator,
    permutations: int = NUM_PERMUTATIONS,
) -> float | None:
    """Test that two samples of token lists have one law; returns the p-value.

    None when there are too few answers for any token to occur MIN_COUNT times.

    The statistic is Pearson's chi-square of the table (sample × token at a position),
    added up over positions, prompts and the tokens that occur MIN_COUNT times.

    Args:
        first: per prompt, per answer, the tokens to compare.
        second: the same of the other sample, prompts in the same order.
        generator: draws the permutations.
        permutations: how many.

    """
    observed = 0.0
    permuted = np.zeros(permutations)
    num_tokens = 0
    for ours, theirs in zip(first, second, strict=True):
        counts = indicator([*ours, *theirs])
        labels = permuted_labels(len(ours), len(theirs), permutations, generator)
        actual = np.arange(len(counts))[None] < len(ours)
        observed += float(chi_square(counts, actual)[0])
        permuted += chi_square(counts, labels)
        num_tokens += counts.shape[1]
    return share_at_least(permuted, observed) if num_tokens else None


def indicator(answers: Sequence[Sequence[int]]) -> np.ndarray:
    """Which frequent (position, token) an answer has: [num_answers, num_pairs]."""
    pairs: dict[tuple[int, int], int] = {}
    for answer in answers:
        for pair in enumerate(answer):
            pairs.setdefault(pair, len(pairs))
    found = np.zeros((len(answers), len(pairs)))
    for row, answer in enumerate(answers):
        found[row, [pairs[pair] for pair in enumerate(answer)]] = 1
    return found[:, found.sum(axis=0) >= MIN_COUNT]


def chi_square(counts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Pearson's statistic of the first sample's counts, one per row of labels.

    Both samples' terms of a column are proportional to the squared deviation of the
    first one's count, so the first sample's term is enough.
    """
    expected = counts.sum(axis=0) * labels[0].mean()
    return (((labels.astype(float) @ counts) - expected) ** 2 / expected).sum(axis=1)


def permuted_labels(
    num_first: int, num_second: int, permutations: int, generator: np.random.Generator
) -> np.ndarray:
    """Random assignments to the first sample: bool [permutations, num_answers]."""
    total = num_first + num_second
    order = generator.random((permutations, total)).argsort(axis=1)
    return order < num_first


def share_at_least(permuted: np.ndarray, observed: float) -> float:
    """p-value: share of the statistics, the observed one included, as large as it."""
    slack = 1e-9 * abs(observed)
    return float((1 + np.sum(permuted >= observed - slack)) / (1 + len(permuted)))
