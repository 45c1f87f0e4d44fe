"""JSON, Markdown and plot of the end-to-end benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import write_json
from benchmarks.gpu.engines import PLAIN_DEFAULT, PLAIN_SYNC, SIDES_NOTE, EngineCell
from benchmarks.gpu.lossless import Comparison, LosslessCell, comparisons
from benchmarks.gpu.step_report import choices, place, ratio, same_place
from benchmarks.markdown import table
from benchmarks.plot import plt
from benchmarks.report import listing, number
from vllm_treespec.tools.sides import PLAIN

LOSSLESS_NOTES = (
    "Greedy answers, token by token, beside plain vLLM (V1 model runner, the same "
    "attention backend) at the same batch size; rows of plain compare its own batch "
    "sizes with each other. float32 with IEEE products is the gate: all answers have "
    "to be identical. In bfloat16 another number of rows rounds differently, in plain "
    "vLLM too, so that its share of identical answers is a rate and no gate."
)
SPEED_NOTES = (
    "Random weights and a drafter that costs nothing, whose nodes are accepted by "
    "coins at the rate given: what draft trees would bring with a drafter of that "
    "quality, before its own cost. The text is nonsense. Tokens/s: all emitted tokens "
    "over wall time, prompts included. " + SIDES_NOTE
)
SHOWN_DIFFERENCES = 4


def write(
    answers: Sequence[LosslessCell],
    speeds: Sequence[EngineCell],
    origin: dict[str, Any],
    failed: Mapping[str, str],
    out: Path,
) -> None:
    """Write results.json, results.md and results.png."""
    write_json(out / "results.json", origin, [*answers, *speeds], failed=dict(failed))
    text = markdown(comparisons(answers), speeds, origin, failed)
    (out / "results.md").write_text(text, encoding="utf-8")
    if speeds:
        draw(speeds, out / "results.png")


def markdown(
    compared: Sequence[Comparison],
    speeds: Sequence[EngineCell],
    origin: Mapping[str, Any],
    failed: Mapping[str, str],
) -> str:
    """Write what is finished of both parts, and where it comes from."""
    parts = ["# End to end"]
    if compared:
        parts += ["## Are answers the same?", LOSSLESS_NOTES, lossless_table(compared)]
    if speeds:
        parts += ["## Speed at fixed acceptance", SPEED_NOTES, speed_table(speeds)]
        parts += ["![](results.png)", listing(choices(speeds))]
    if failed:
        parts += ["## Failed", listing(failed)]
    parts += ["## Provenance", listing(origin)]
    return "\n\n".join(parts) + "\n"


def lossless_table(compared: Sequence[Comparison]) -> str:
    """Write how many answers are identical, and where others begin to differ."""
    headings = ["side", "dtype", "batch", "identical", "tokens", "tokens/step"]
    headings += ["first difference (prompt:token)"]
    lines = []
    for part in compared:
        shown = [f"{prompt}:{at}" for prompt, at in part.differences]
        more = ["…"] if len(shown) > SHOWN_DIFFERENCES else []
        lines.append(
            [
                "plain, other batch" if part.side == PLAIN else part.side,
                part.dtype,
                str(part.batch),
                f"{part.identical} of {part.num_answers}",
                str(part.num_tokens),
                number(part.acceptance_length, "{:.2f}"),
                " ".join(shown[:SHOWN_DIFFERENCES] + more) or "none",
            ]
        )
    return table(headings, lines)


def speed_table(cells: Sequence[EngineCell]) -> str:
    """Write tokens per second and what they are over both plain sides."""
    headings = ["side", "batch", "acceptance", "tokens/s", "/ v1-sync", "/ default"]
    headings += ["tokens/step"]
    lines = [
        [
            cell.side,
            str(cell.work.batch),
            number(cell.work.acceptance, "{:g}"),
            f"{cell.tokens_per_s:.0f}",
            *(
                number(
                    ratio(cell.tokens_per_s, plain_speed(cells, cell, side)), "{:.2f}×"
                )
                for side in (PLAIN_SYNC, PLAIN_DEFAULT)
            ),
            number(cell.acceptance_length, "{:.2f}"),
        ]
        for cell in sorted(cells, key=place)
    ]
    return table(headings, lines)


def plain_speed(
    cells: Sequence[EngineCell], like: EngineCell, side: str
) -> float | None:
    """Tokens per second of a plain side of the same shape and batch size."""
    for cell in cells:
        if cell.side == side and same_place(cell, like):
            return cell.tokens_per_s
    return None


def label(cell: EngineCell) -> str:
    """Name of a bar."""
    if cell.work.acceptance is None:
        return cell.side
    return f"{cell.side}\naccepts {cell.work.acceptance:g}"


def draw(cells: Sequence[EngineCell], path: Path) -> None:
    """Save tokens per second: a panel per batch size, a bar per side."""
    batches = sorted({cell.work.batch for cell in cells})
    figure, axes = plt.subplots(
        1,
        len(batches),
        figsize=(4.4 * len(batches), 3.8),
        layout="constrained",
        squeeze=False,
    )
    for axis, batch in zip(axes[0], batches, strict=True):
        here = [c for c in sorted(cells, key=place) if c.work.batch == batch]
        colours = ["tab:red" if cell.nodes else "tab:blue" for cell in here]
        axis.bar(
            [label(cell) for cell in here],
            [cell.tokens_per_s for cell in here],
            color=colours,
        )
        axis.tick_params(axis="x", labelsize=7, rotation=30)
        axis.set_title(f"tokens/s, {here[0].shape}, batch {batch}", fontsize=9)
        axis.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=120)
    plt.close(figure)
