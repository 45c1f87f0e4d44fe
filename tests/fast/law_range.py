"""The laws of all lossless rules from nearly greedy to nearly uniform distributions.

Many cases are measured at once. A case is a draft and a target, whose logits have a
span, and a temperature. It is a prefix of a language that holds all cases.

``python -m tests.fast.law_range`` prints the largest errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.fast.drafting import propose
from tests.fast.enumeration import (
    ALMOST_ONE,
    Branches,
    LawMeter,
    Scorer,
    Weighted,
    all_uniforms,
    bracketed,
    num_models,
)
from tests.fast.languages import Language, LanguageDraft
from tests.fast.rule_forms import FORMS
from tests.fast.wrong_rules import K_SEQ_JUDGE
from vllm_treespec.proposers import Proposer, RsdC, RsdS, Sd, SpecInfer, SpecTr
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import (
    TargetLogits,
)
from vllm_treespec.scorers.independent_draws import Judge
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

TEMPERATURES = (1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SPANS = (0.2, 2.0, 10.0, 40.0, 100.0, 200.0)
# Draft logits over the temperature. What the first draws leave of these float32
# distributions is denormal, or next to it.
THIN = [
    *[(0.0, -lead, -lead - 0.5, -lead - 0.8) for lead in (60, 80, 84, 87, 88, 95, 102)],
    (0.0, -30.0, -60.0, -85.0),
    (0.0, -40.0, -86.0, -88.0),
    (0.0, -1.0, -90.0, -91.0),
    (0.0, -45.0, -88.0, -88.5),
    (0.0, -80.0, -102.0, -103.0),
    (0.0, -1.0, -101.7, -102.4),
]
# Trees of less mass are left out.
UNSEEN = 1e-9
# Levels of the trees, and tokens whose joint law is compared.
DEPTH = 2


@dataclass(frozen=True)
class Cases:
    """Drafts and targets of several cases.

    The prefixes of ``case_tokens`` tokens are the cases, from ``first_case`` on.
    """

    vocab_size: int
    case_tokens: int
    # logits of every prefix, float32 [num_prefixes, vocab_size]; one per draft model
    drafts: tuple[Tensor, ...]
    target: Tensor
    # float32 [num_cases]
    temperature: Tensor

    @property
    def first_case(self) -> int:
        """The prefix of case 0."""
        return int(self._first_of(torch.tensor(self.case_tokens)))

    def _first_of(self, depths: Tensor) -> Tensor:
        """The first prefix of so many tokens."""
        return (self.vocab_size**depths - 1) // (self.vocab_size - 1)

    def sampling(self, cases: Tensor) -> SamplingTensors:
        """Sampling parameters of requests of these cases, int64 [num_reqs]."""
        return SamplingTensors(self.temperature[cases], all_random=True)

    def law(self, logits: Tensor) -> Tensor:
        """The float32 distributions of all prefixes, normalised in float64."""
        cases = torch.arange(len(logits))
        end = self.first_case + self.vocab_size**self.case_tokens
        while bool((cases >= end).any()):
            above = (cases - 1) // self.vocab_size
            cases = torch.where(cases >= end, above, cases)
        cases = (cases - self.first_case).clamp(0, len(self.temperature) - 1)
        probs = self.sampling(cases).probs(logits).double()
        return probs / probs.sum(1, keepdim=True)

    def prefixes(self, tree: TreeBatch, cases: Tensor) -> Tensor:
        """Number of the prefix that each node ends, int64 [num_reqs, max_nodes]."""
        below = Language(self.target).prefixes(tree) - self._first_of(tree.depths)
        width = self.vocab_size**tree.depths
        below += cases[:, None] * width
        return below + self._first_of(tree.depths + self.case_tokens)

    def of_case(self, law: Tensor, case: int) -> Language:
        """One case's part of ``law``, as far as trees are drawn from it."""
        levels = [law[self.first_case + case][None]]
        first, width = self.first_case + case, 1
        for _ in range(DEPTH - 1):
            first, width = first * self.vocab_size + 1, width * self.vocab_size
            levels.append(law[first : first + width])
        return Language(torch.cat(levels))


@lru_cache
def all_cases(vocab_size: int) -> Cases:
    """Every temperature with every span, and the thin distributions."""
    case_tokens = {3: 4, 4: 3}[vocab_size]
    generator = torch.Generator().manual_seed(vocab_size)
    temperature, rows = [], []
    for degrees, span in product(TEMPERATURES, SPANS):
        temperature.append(degrees)
        rows.append(("span", span))
    for place in range(len(THIN)):
        temperature.append(TEMPERATURES[place % len(TEMPERATURES)])
        rows.append(("thin", float(place)))
    num_cases = vocab_size**case_tokens
    assert len(rows) <= num_cases
    levels: list[list[Tensor]] = [[], [], []]
    num_above = (num_cases - 1) // (vocab_size - 1)
    for table in levels:
        table.append(torch.zeros(num_above, vocab_size))
    for depth in range(DEPTH + 1):
        width = vocab_size**depth
        drafts = torch.zeros(2, num_cases, width, vocab_size)
        target = torch.zeros(num_cases, width, vocab_size)
        for case, (kind, value) in enumerate(rows):
            shape = (3, width, vocab_size)
            noise = torch.rand(shape, generator=generator)
            if kind == "span":
                drafts[:, case], target[case] = value * noise[:2], value * noise[2]
            else:
                thin = torch.tensor(THIN[int(value)][:vocab_size])
                drafts[:, case] = temperature[case] * thin
                target[case] = temperature[case] * noise[2]
        for table, level in zip(levels, (*drafts, target), strict=True):
            table.append(level.flatten(0, 1))
    one, other, target = (torch.cat(table) for table in levels)
    return Cases(
        vocab_size, case_tokens, (one, other), target, torch.tensor(temperature)
    )


@dataclass(frozen=True)
class CaseTrees(Weighted):
    """Trees with their probabilities within their cases."""

    # int64 [num_reqs]
    cases: Tensor


class RangeMeter(LawMeter):
    """Measures the laws of all cases at once."""

    def __init__(
        self,
        scorer: Scorer,
        drawn: CaseTrees,
        cases: Cases,
        judge: Judge | None,
        width: float,
    ) -> None:
        super().__init__(scorer, drawn, Language(cases.law(cases.target)), judge=judge)
        self.cases, self.width, self.case_of = cases, width, drawn.cases
        self.prefixes = cases.prefixes(drawn.tree, drawn.cases)

    def errors(self) -> Tensor:
        """Largest error of each case's law, float64 [num_cases]."""
        cases, num_cases = self.cases, len(self.cases.temperature)
        num_tokens = cases.case_tokens + DEPTH
        reached = self.target.no_mass()
        reached[cases.first_case : cases.first_case + num_cases] = 1
        wrong = self.law(num_tokens) - self.target.joint_law(reached, num_tokens)
        return wrong.abs().view(-1, cases.vocab_size**DEPTH).amax(1)[:num_cases]

    def _run(self, trees: Tensor, uniforms: Tensor) -> Any:
        tree = self.tree.select(trees)
        logits = self.cases.target[self.prefixes[trees].flatten()]
        root_rows = torch.arange(len(trees)) * tree.max_nodes
        sampling = self.cases.sampling(self.case_of[trees])
        return self.scorer(tree, TargetLogits(logits, root_rows, sampling), uniforms)

    def _width(self, at: Branches) -> Tensor:
        return (self.width / at.mass).clamp(max=0.5)


# Vocabulary, proposer and rule.
RANGES: dict[str, tuple[int, Proposer, str]] = {
    "sd, recursive rejection": (4, Sd(2), "recursive_rejection"),
    "rsd_c [2], recursive rejection": (4, RsdC((2,)), "recursive_rejection"),
    "rsd_c [4], recursive rejection": (4, RsdC((4,)), "recursive_rejection"),
    "rsd_c [2, 2], recursive rejection": (3, RsdC((2, 2)), "recursive_rejection"),
    "rsd_s 3x1, recursive rejection": (4, RsdS(3, 1), "recursive_rejection"),
    "rsd_s 2x2, recursive rejection": (3, RsdS(2, 2), "recursive_rejection"),
    "spectr 3x1, multi-round": (4, SpecTr(3, 1), "multi_round"),
    "spectr 2x2, multi-round": (3, SpecTr(2, 2), "multi_round"),
    "specinfer, two models, multi-round": (
        3,
        SpecInfer(((1, 1), (1, 1))),
        "multi_round",
    ),
    "spectr 3x1, k_seq": (4, SpecTr(3, 1), "k_seq"),
    "spectr 2x2, k_seq": (3, SpecTr(2, 2), "k_seq"),
}
REJECTION, COUPLED_DRAW = FORMS["recursive_rejection"], FORMS["coupled_draw"]


def all_trees(proposer: Proposer, cases: Cases) -> CaseTrees:
    """Every tree of every case, drawn by the proposer itself."""
    laws = [cases.law(draft) for draft in cases.drafts]
    uniforms, weights, numbers = [], [], []
    for case in range(len(cases.temperature)):
        models = [cases.of_case(law, case) for law in laws]
        own, mass = all_uniforms(proposer, models)
        seen = mass > UNSEEN
        uniforms.append(own[seen])
        weights.append(mass[seen])
        numbers.append(torch.full((int(seen.sum()),), case))
    case_of = torch.cat(numbers)
    drafts = [LanguageDraft(Language(draft), len(case_of)) for draft in cases.drafts]
    for draft in drafts:
        draft.prefixes = cases.first_case + case_of[:, None]
    used = drafts[: num_models(proposer)]
    tree = propose(proposer, used, torch.cat(uniforms), cases.sampling(case_of))
    return CaseTrees(tree, torch.cat(weights), case_of)


def rule_errors(name: str, width: float) -> dict[str, float]:
    """Largest error of the law of the first tokens over all cases, by form.

    Args:
        name: of ``RANGES``.
        width: how closely the mass of every branch is measured.

    """
    vocab_size, proposer, rule = RANGES[name]
    cases = all_cases(vocab_size)
    drawn = all_trees(proposer, cases)
    judge = K_SEQ_JUDGE if rule == "k_seq" else None
    return {
        form: float(RangeMeter(scorer, drawn, cases, judge, width).errors().max())
        for form, scorer in FORMS[rule].items()
    }


def coupled_draw_error(scorer: Scorer, width: float) -> float:
    """Like ``rule_errors``, for a tree with all tokens below the root."""
    cases = all_cases(4)
    every = torch.arange(len(cases.temperature))
    tree = from_parents([[0, 0, 1, 2, 3]], [[-1, 0, 0, 0, 0]])
    tree = tree.select(torch.zeros_like(every))
    prefixes = cases.prefixes(tree, every)
    probs = cases.law(cases.target)[prefixes]

    def law(node: int, uniforms: Tensor, place: int) -> Tensor:
        """Law of the token of this place, drawn after ``node``."""
        above = []
        for token in range(cases.vocab_size):

            def at_most(rows: Tensor, numbers: Tensor, token: int = token) -> Tensor:
                drawn = uniforms[rows]
                drawn[:, place] = numbers
                chosen = tree.select(rows)
                logits = TargetLogits(
                    cases.target[prefixes[rows].flatten()],
                    torch.arange(len(rows)) * tree.max_nodes,
                    cases.sampling(rows),
                )
                emitted = scorer(chosen, logits, drawn).emitted(chosen)
                return emitted[:, place] <= token

            guess = probs[:, node, : token + 1].sum(1)
            above.append(bracketed(at_most, guess, width))
        return torch.stack(above, 1).diff(dim=1, prepend=torch.zeros(len(every), 1))

    uniforms = torch.full(tree.token_ids.shape, 0.5, dtype=torch.float64)
    first = law(0, uniforms, 0)
    error = float((first - probs[:, 0]).abs().max())
    for token in range(cases.vocab_size):
        middle = first[:, :token].sum(1) + first[:, token] / 2
        uniforms[:, 0] = middle.clamp(max=ALMOST_ONE)
        wrong = first[:, token, None] * (
            law(1 + token, uniforms, 1) - probs[:, 1 + token]
        )
        error = max(error, float(wrong.abs().max()))
    return error


@contextmanager
def flushing(on: bool) -> Iterator[None]:
    """Let this thread take denormal numbers for 0, as some GPU code does."""
    if not torch.set_flush_denormal(on):
        raise RuntimeError("this processor cannot flush denormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def print_table(width: float) -> None:
    """Print the largest errors as a Markdown table, ``width`` as above."""
    print("| draws and rule | form | largest error | denormals as 0 |")
    print("|---|---|---:|---:|")
    rows: dict[tuple[str, str], list[float]] = {}
    for on in (False, True):
        with flushing(on):
            for name in RANGES:
                for form, error in rule_errors(name, width).items():
                    rows.setdefault((name, form), []).append(error)
            for form, scorer in COUPLED_DRAW.items():
                error = coupled_draw_error(scorer, width)
                rows.setdefault(("any drafts, coupled_draw", form), []).append(error)
    for (name, form), (kept, flushed) in rows.items():
        print(f"| {name} | {form} | {kept:.0e} | {flushed:.0e} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_table(width=1e-9)
