"""Numbers of the tables and figures from finished runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from benchmarks.paper.metrics import standard_error
from benchmarks.redrafter.experiments import StoredRun, file_name
from benchmarks.redrafter.parts import FIGURE5_STRETCHES, TABLES, Entry, Run
from vllm_treespec.tools.sides import PLAIN, Acceptance


class Mean(BaseModel):
    """A mean with its standard error."""

    mean: float
    error: float


class Row(BaseModel):
    """A row of a table, or a point of figure 6: all rounds of a run."""

    part: str
    label: str
    side: str
    temperature: float
    batch_size: int
    rounds: int
    num_tokens: int
    # all requests together: median, lowest and highest over the rounds
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    # medians over the rounds, against plain decoding of the same round: at this
    # temperature and batch size, and greedy one by one
    speedup: float | None = None
    speedup_over_greedy: float | None = None
    # mean emitted tokens per target step of a drafting request, bonus included
    tokens_per_step: Mean | None = None
    mean_drafts: float | None = None
    # mean log-likelihood per token under the target at temperature 1; error over
    # prompts
    quality: Mean | None = None
    # minus that of the greedy plain answers to the same prompts
    quality_gain: Mean | None = None


class Stretch(BaseModel):
    """Steps of one beam width that begin in one stretch of the answers."""

    beam_width: int
    # first and last output token
    first: int
    last: int
    num_steps: int
    tokens_per_step: Mean


class Compression(BaseModel):
    """Draft tokens to verify with one beam width, with tree attention."""

    beam_width: int
    length: int
    # without tree attention
    num_candidates: int
    num_trees: int
    mean: float
    # percentiles over trees
    low: int
    high: int


class Evidence:
    """Finished runs and scores, by run and round."""

    def __init__(
        self, runs: Sequence[StoredRun], scores: Mapping[str, Sequence[float]]
    ) -> None:
        """Take finished runs, and log-likelihoods by the name of the run's file."""
        self.scores = scores
        self.runs: dict[str, dict[int, StoredRun]] = {}
        for stored in runs:
            self.runs.setdefault(stored.run.name, {})[stored.round] = stored

    def rows(self, entries: Sequence[Entry]) -> list[Row]:
        """Rows of the entries whose runs are finished; traced runs have none."""
        return [
            self.row(entry)
            for entry in entries
            if entry.run.name in self.runs and not entry.run.traced
        ]

    def row(self, entry: Entry) -> Row:
        """Pool the rounds of a run."""
        run, stored = entry.run, self.runs[entry.run.name]
        speeds = {number: speed(one) for number, one in stored.items()}
        row = Row(
            part=entry.part,
            label=entry.label,
            side=run.side,
            temperature=run.temperature,
            batch_size=run.batch_size,
            rounds=len(speeds),
            num_tokens=sum(sum(one.result.num_tokens) for one in stored.values()),
            tokens_per_s=statistics.median(speeds.values()),
            tokens_per_s_min=min(speeds.values()),
            tokens_per_s_max=max(speeds.values()),
            speedup=self.ratio(speeds, plain_of(run)),
            speedup_over_greedy=self.ratio(speeds, greedy_plain(run)),
        )
        found = [one.result.acceptance for one in stored.values()]
        acceptance = Acceptance.total(part for part in found if part)
        if acceptance.trees:
            row.tokens_per_step = Mean(
                mean=acceptance.length, error=standard_error(acceptance)
            )
            row.mean_drafts = acceptance.nodes / acceptance.trees - 1
        if entry.part in TABLES and (qualities := self.qualities(run)):
            row.quality = mean_of(qualities)
            if greedy := self.qualities(greedy_plain(run)):
                pairs = zip(qualities, greedy, strict=True)
                row.quality_gain = mean_of([mine - plain for mine, plain in pairs])
        return row

    def ratio(self, speeds: Mapping[int, float], plain: Run) -> float | None:
        """Median over the rounds of the speed against plain decoding's."""
        base = self.runs.get(plain.name, {})
        ratios = [speeds[r] / speed(base[r]) for r in speeds if r in base]
        return statistics.median(ratios) if ratios else None

    def qualities(self, run: Run) -> list[float]:
        """Mean log-likelihood of each prompt's answers over the scored rounds."""
        names = (file_name(run, r) for r in self.runs.get(run.name, {}))
        rounds = [self.scores[name] for name in names if name in self.scores]
        return [statistics.fmean(values) for values in zip(*rounds, strict=True)]

    def traced(self, entries: Sequence[Entry]) -> Iterator[tuple[Run, list[StoredRun]]]:
        """Runs of figure 5 with their rounds."""
        for entry in entries:
            if entry.run.traced and entry.run.name in self.runs:
                yield entry.run, list(self.runs[entry.run.name].values())

    def stretches(self, entries: Sequence[Entry]) -> list[Stretch]:
        """Figure 5a."""
        return [
            stretch
            for run, stored in self.traced(entries)
            for stretch in stretches_of(
                run, [steps for one in stored for steps in one.step_tokens]
            )
        ]

    def compressions(self, entries: Sequence[Entry]) -> list[Compression]:
        """Figure 5b."""
        found = []
        for run, stored in self.traced(entries):
            counts: Counter[int] = Counter()
            for one in stored:
                counts.update({n - 1: k for n, k in one.node_counts.items()})
            if counts and run.tree:
                found.append(compression_of(run, counts))
        return found


def speed(stored: StoredRun) -> float:
    """Tokens per second of all requests together."""
    return sum(stored.result.num_tokens) / stored.result.seconds


def plain_of(run: Run) -> Run:
    """Plain decoding at the same temperature and batch size."""
    return Run(
        side=PLAIN,
        temperature=run.temperature,
        batch_size=run.batch_size,
        max_tokens=run.max_tokens,
    )


def greedy_plain(run: Run) -> Run:
    """Greedy plain decoding of one request at a time."""
    return Run(side=PLAIN, max_tokens=run.max_tokens)


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and standard error, values taken as independent; one value has error 0."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return Mean(mean=statistics.fmean(values), error=spread / len(values) ** 0.5)


def stretches_of(run: Run, answers: Sequence[Sequence[int]]) -> list[Stretch]:
    """Tokens per step by where in the answer the step begins.

    An answer's first token comes from the prompt, and its last step may be cut off by
    the end; both are left out.

    Args:
        run: with a tree.
        answers: per answer, tokens that each step emitted.

    """
    size = -(-run.max_tokens // FIGURE5_STRETCHES)
    emitted: list[list[float]] = [[] for _ in range(FIGURE5_STRETCHES)]
    for steps in answers:
        position = 0
        for number, tokens in enumerate(steps[:-1]):
            if number:
                emitted[position // size].append(float(tokens))
            position += tokens
    assert run.tree is not None
    return [
        Stretch(
            beam_width=run.tree["beam_width"],
            first=index * size + 1,
            last=min((index + 1) * size, run.max_tokens),
            num_steps=len(values),
            tokens_per_step=mean_of(values),
        )
        for index, values in enumerate(emitted)
        if values
    ]


def compression_of(run: Run, counts: Counter[int]) -> Compression:
    """Mean and percentiles of the draft tokens of a run's trees.

    Args:
        run: with a tree that keeps all tokens of its beams.
        counts: trees by number of draft tokens.

    """
    assert run.tree is not None
    return Compression(
        beam_width=run.tree["beam_width"],
        length=run.tree["length"],
        num_candidates=run.num_candidates,
        num_trees=counts.total(),
        mean=sum(n * k for n, k in counts.items()) / counts.total(),
        low=percentile(counts, 0.01),
        high=percentile(counts, 0.99),
    )


def percentile(counts: Counter[int], share: float) -> int:
    """Smallest value that at least this share of the counted values does not exceed."""
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= share * counts.total():
            return value
    raise ValueError("nothing was counted")
