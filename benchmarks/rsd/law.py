"""Is the output law the target's? Every method's answers against plain sampling's.

Answers to the same prompt are exchangeable when both samples have the same law. So
labels are permuted within each prompt; p-values are exact up to the number of draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness.plan import StoredCell
from benchmarks.harness.rescoring import Scores, name_of
from vllm_treespec.tools.sides import PLAIN

NUM_PERMUTATIONS = 4999
# How many are held in memory at a time.
BATCH = 500
# Rarer tokens say nothing about their share and add noise.
MIN_COUNT = 5
# Prefill samples an answer's first token, without a tree; the ones after it are
# compared at their places.
COMPARED = slice(1, 9)
# Standard deviations on each side of a 95% interval.
HALF_WIDTH = float(stats.norm.ppf(0.975))
Cells = Sequence[StoredCell]
# By prompt and answer.
Tokens = Sequence[Sequence[Sequence[int]]]


def comparisons(measured: Cells, scores: Scores) -> list[dict[str, Any]]:
    """Compare each method, pooled over trees and rounds, with plain sampling.

    The control compares plain sampling at the lowest and the highest temperature.
    """
    groups: dict[tuple[str, float], list[StoredCell]] = {}
    for stored in measured:
        if name_of(stored) in scores:
            key = (stored.side.family, stored.result.cell.temperature)
            groups.setdefault(key, []).append(stored)
    # one answer a prompt cannot be permuted
    samples = {key: cells for key, cells in groups.items() if len(cells) > 1}
    tests = [
        compare(cells, samples[PLAIN, temperature], scores)
        for (method, temperature), cells in samples.items()
        if method != PLAIN and (PLAIN, temperature) in samples
    ]
    plain = [samples[key] for key in sorted(samples) if key[0] == PLAIN]
    if len(plain) > 1:
        tests.append(compare(plain[0], plain[-1], scores, control=True))
    return tests


def compare(
    first: Cells, second: Cells, scores: Scores, control: bool = False
) -> dict[str, Any]:
    """Run both tests on the cells of two samples; of a control, the laws differ."""
    generator = np.random.default_rng(0)
    both = (first, second)
    ours, theirs = (np.array([scores[name_of(c)] for c in cells]).T for cells in both)
    tokens = [compared_tokens(cells) for cells in both]
    heads = [(cells[0].side.family, cells[0].result.cell) for cells in both]
    titles = [f"{family}, temperature {cell.temperature:g}" for family, cell in heads]
    return {
        "first": titles[0],
        "second": titles[1],
        "control": control,
        "num_answers": [ours.size, theirs.size],
        "first_mean": interval(float(ours.mean()), ours),
        "second_mean": interval(float(theirs.mean()), theirs),
        "difference": mean_difference(ours, theirs, generator),
        # None for too few answers
        "token_p_value": token_chi_square(tokens[0], tokens[1], generator),
    }


def compared_tokens(cells: Cells) -> Tokens:
    """Take the compared tokens of a sample."""
    prompts = zip(*(stored.result.token_ids for stored in cells), strict=True)
    return [[answer[COMPARED] for answer in answers] for answers in prompts]


def interval(mean: float, *samples: np.ndarray) -> dict[str, float]:
    """A mean of samples, [num_prompts, num_answers] each, with its 95% interval."""
    errors = [stats.sem(values, axis=1) / len(values) for values in samples]
    half = HALF_WIDTH * float(np.linalg.norm(errors))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def mean_difference(
    first: np.ndarray, second: np.ndarray, generator: np.random.Generator, **more: int
) -> dict[str, Any]:
    """Test values, [num_prompts, num_answers] each, by the difference of means."""
    size = first.shape[1]

    def difference(values: np.ndarray) -> np.ndarray:
        means = values[..., :size].mean(axis=-1) - values[..., size:].mean(axis=-1)
        return np.abs(means.mean(axis=0))

    both = np.concatenate([first, second], axis=1)
    return {
        "interval": interval(float(first.mean() - second.mean()), first, second),
        "p_value": p_value(both, difference, generator, **more),
    }


def token_chi_square(
    first: Tokens, second: Tokens, generator: np.random.Generator, **more: int
) -> float | None:
    """Test token lists by Pearson's chi-square, added up over prompts and positions.

    None when no token occurs MIN_COUNT times.
    """
    both = zip(first, second, strict=True)
    counts = [indicator([*ours, *theirs]) for ours, theirs in both]
    if not any(count.shape[1] for count in counts):
        return None

    def statistic(order: np.ndarray) -> np.ndarray:
        pairs = zip(counts, order < len(first[0]), strict=True)
        return np.sum([chi_square(count, labels) for count, labels in pairs], axis=0)

    order = np.tile(np.arange(len(counts[0])), (len(counts), 1))
    return p_value(order, statistic, generator, **more)


def p_value(
    strata: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    generator: np.random.Generator,
    permutations: int = NUM_PERMUTATIONS,
) -> float:
    """Share of the permutations within strata whose statistic is as large.

    ``statistic`` takes strata, [num_prompts, ..., num_answers], and returns [...].
    """

    def of(*rows: np.ndarray, axis: int) -> np.ndarray:
        return statistic(np.stack(rows))

    how = {"permutation_type": "pairings", "alternative": "greater", "vectorized": True}
    how |= {"n_resamples": permutations, "batch": BATCH, "rng": generator}
    return float(stats.permutation_test(tuple(strata), of, **how).pvalue)


def indicator(answers: Sequence[Sequence[int]]) -> np.ndarray:
    """Which frequent (position, token) an answer has: [num_answers, num_pairs]."""
    pairs = sorted({pair for answer in answers for pair in enumerate(answer)})
    held = [set(enumerate(answer)) for answer in answers]
    has = np.array([[float(pair in mine) for pair in pairs] for mine in held])
    return has[:, has.sum(axis=0) >= MIN_COUNT]


def chi_square(counts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Pearson's statistic of ``counts``, [num_answers, num_pairs], up to a factor.

    ``labels``, True for the first sample, are [..., num_answers].
    """
    expected = counts.sum(axis=0) * labels.mean(axis=-1, keepdims=True)
    return (((labels.astype(float) @ counts) - expected) ** 2 / expected).sum(axis=-1)
