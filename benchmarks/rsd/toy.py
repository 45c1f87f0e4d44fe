"""The toy figure: acceptance rates for Bernoulli laws and two draft tokens.

The rates are exact. They take the draft's and the target's laws, float64 [vocab_size],
and the number of draws K, and return the probability that one draw is accepted. Draws
are independent, but for recursive rejection without replacement.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from benchmarks.harness import plot
from benchmarks.harness.report import table
from vllm_treespec.scorers.base import normalised
from vllm_treespec.scorers.k_seq import expected_tries, optimal_division_factor

NUM_DRAWS = 2
GRID = 41
CURVES = (0.1, 0.3, 0.5)
SHOWN = (0.1, 0.5, 0.9)
LINES = (":", "--", "-.", "-")


def multi_round_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """One minus the chance that all rounds reject; rounds do not know the tokens."""
    rejected = 1.0
    for _ in range(num_draws):
        rejected *= 1 - float(torch.minimum(draft, target).sum())
        target = normalised(target - draft, target)
    return 1 - rejected


def k_seq_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """The chance of K draws that each have the same chance."""
    draft, target, counts = draft[None], target[None], torch.tensor([num_draws])
    factor = optimal_division_factor(draft, target, counts, halvings=60)
    rate = torch.minimum(draft, target / factor[:, None]).sum(dim=1)
    return float(rate * expected_tries(rate, counts))


def two_token_transport_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """The optimum of OTM (arXiv 2310.15141) where the vocabulary has two tokens.

    A token cannot be emitted where it was not drawn; nothing else limits two tokens.
    """
    drawn = 1 - (1 - draft) ** num_draws
    return float(torch.minimum(target, drawn).sum())


def recursive_rejection_rate(draft: Tensor, target: Tensor, num_draws: int) -> float:
    """Sum over all draws without replacement, one level of recursion a draw."""
    if num_draws == 0 or float(draft.sum()) == 0:
        return 0.0
    accepted = torch.minimum(draft, target)
    rate = float(accepted.sum())
    residual = normalised(target - draft, target)
    for token in (draft > accepted).nonzero()[:, 0].tolist():
        rest = normalised(draft.index_fill(0, torch.tensor([token]), 0.0))
        rejected = float(draft[token] - accepted[token])
        rate += rejected * recursive_rejection_rate(rest, residual, num_draws - 1)
    return rate


# in the order of the figure of arXiv 2402.14160
RULES = {
    "multi_round": multi_round_rate,
    "k_seq": k_seq_rate,
    "optimal_transport": two_token_transport_rate,
    "recursive_rejection": recursive_rejection_rate,
}
TITLES = ("multi-round", "K-SEQ", "OTM", "recursive rejection")


def rate(rule: str, draft: float, target: float) -> float:
    """Probability that one of two draft tokens is accepted."""
    laws = torch.tensor([[1 - p, p] for p in (draft, target)], dtype=torch.float64)
    return RULES[rule](laws[0], laws[1], NUM_DRAWS)


def compute(grid: int = GRID) -> dict[str, Any]:
    """Compute every rule's rates on a ``grid`` of cell centres, by draft and target."""
    at = [(i + 0.5) / grid for i in range(grid)]
    rates = {rule: [[rate(rule, p, q) for q in at] for p in at] for rule in RULES}
    return {"grid": at, "rates": rates}


def write(toy: dict[str, Any], folder: Path) -> None:
    """Write toy.json, toy.md and toy.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.json").write_text(json.dumps(toy) + "\n")
    maps = list(toy["rates"].values())
    rows = {
        ("mean of the grid", ""): [np.mean(rates) for rates in maps],
        ("lowest of the grid", ""): [np.min(rates) for rates in maps],
    } | {(p, q): [rate(rule, p, q) for rule in RULES] for p in SHOWN for q in SHOWN}
    lines = [[*map(str, at), *map("{:.4f}".format, row)] for at, row in rows.items()]
    text = table(["draft p", "target q", *TITLES], lines)
    (folder / "toy.md").write_text(text + "\n")
    upper = [partial(draw_map, *one) for one in zip(TITLES, maps, strict=True)]
    lower = [partial(draw_curves, draft) for draft in CURVES]
    plot.side_by_side(folder / "toy.png", *upper, *lower, columns=len(RULES))


def draw_map(title: str, rates: list[list[float]], axis: Axes) -> None:
    """Draw a rule's rates over target and draft."""
    image = axis.imshow(rates, origin="lower", extent=(0, 1, 0, 1), vmin=0, vmax=1)
    axis.set(title=title, xlabel="target q", ylabel="draft p")
    axis.grid(visible=False)
    axis.figure.colorbar(image, ax=axis)


def draw_curves(draft: float, axis: Axes) -> None:
    """Draw all rules over the target's probability."""
    points = np.linspace(0, 1, GRID)
    for rule, title, line in zip(RULES, TITLES, LINES, strict=True):
        axis.plot(points, [rate(rule, draft, q) for q in points], line, label=title)
    axis.set(title=f"draft p = {draft:g}", xlabel="target q", ylim=(0, 1.05))
    axis.set_ylabel("acceptance rate")
    axis.legend()
