"""Is the output law the target's? Every method's answers against plain sampling's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel

from benchmarks.paper.experiments import StoredRun
from benchmarks.paper.statistics import (
    Difference,
    Interval,
    mean_difference,
    stratified_mean,
    token_chi_square,
)
from vllm_treespec.tools.sides import PLAIN

# Prefill samples an answer's first token, without a tree; the ones after it are
# compared at their places.
COMPARED = slice(1, 9)


class Sample(BaseModel):
    """Answers of one method at one temperature, per prompt."""

    method: str
    temperature: float
    # [prompt][answer]
    mean_logprobs: list[list[float]] = []
    token_ids: list[list[list[int]]] = []

    @property
    def strata(self) -> list[np.ndarray]:
        """Mean log-likelihoods as arrays."""
        return [np.array(values) for values in self.mean_logprobs]

    @property
    def early_tokens(self) -> list[list[list[int]]]:
        """The tokens that are compared."""
        return [[answer[COMPARED] for answer in answers] for answers in self.token_ids]

    @property
    def title(self) -> str:
        """Name in tables."""
        return f"{self.method}, temperature {self.temperature:g}"

    @property
    def num_answers(self) -> int:
        """All answers."""
        return sum(map(len, self.token_ids))


class Comparison(BaseModel):
    """Two samples and what the tests say."""

    first: str
    second: str
    # a pair of different laws, which the tests have to notice
    control: bool
    num_answers: tuple[int, int]
    first_mean: Interval
    second_mean: Interval
    difference: Difference
    # None for too few answers
    token_p_value: float | None


def samples_of(
    runs: Sequence[StoredRun], scores: Mapping[str, list[float]]
) -> list[Sample]:
    """Pool the scored runs of each method and temperature over trees and rounds."""
    samples: dict[tuple[str, float], Sample] = {}
    for stored in runs:
        run = stored.run
        if run.name not in scores:
            continue
        empty = Sample(method=run.method, temperature=run.temperature)
        sample = samples.setdefault((run.method, run.temperature), empty)
        answers = zip(scores[run.name], stored.result.token_ids, strict=True)
        for prompt, (mean, token_ids) in enumerate(answers):
            if prompt == len(sample.mean_logprobs):
                sample.mean_logprobs.append([])
                sample.token_ids.append([])
            sample.mean_logprobs[prompt].append(mean)
            sample.token_ids[prompt].append(token_ids)
    return list(samples.values())


def comparisons(samples: Sequence[Sample]) -> list[Comparison]:
    """Compare each method with plain sampling at its temperature.

    The control compares plain sampling at the lowest and the highest temperature. A
    sample with fewer than two answers a prompt is left out.
    """
    known = {
        (sample.method, sample.temperature): sample
        for sample in samples
        if all(len(answers) > 1 for answers in sample.token_ids)
    }
    found = [
        compare(sample, known[PLAIN, temperature])
        for (method, temperature), sample in known.items()
        if method != PLAIN and (PLAIN, temperature) in known
    ]
    plain = sorted(t for method, t in known if method == PLAIN)
    if len(plain) > 1:
        ends = (known[PLAIN, plain[0]], known[PLAIN, plain[-1]])
        found.append(compare(*ends, control=True))
    return found


def compare(first: Sample, second: Sample, control: bool = False) -> Comparison:
    """Run both tests on two samples of answers to the same prompts."""
    generator = np.random.default_rng(0)
    return Comparison(
        first=first.title,
        second=second.title,
        control=control,
        num_answers=(first.num_answers, second.num_answers),
        first_mean=stratified_mean(first.strata),
        second_mean=stratified_mean(second.strata),
        difference=mean_difference(first.strata, second.strata, generator),
        token_p_value=token_chi_square(
            first.early_tokens, second.early_tokens, generator
        ),
    )


def smallest_p_value(found: Sequence[Comparison]) -> float | None:
    """Smallest p-value of all tests but the control's, times their number."""
    values = [
        p
        for comparison in found
        if not comparison.control
        for p in (comparison.difference.p_value, comparison.token_p_value)
        if p is not None
    ]
    return min(1.0, len(values) * min(values)) if values else None
