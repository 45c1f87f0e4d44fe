"""JSON, Markdown and plots of the kernel table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from pydantic import Field

from benchmarks.gpu.cells import StoredCell, write_json
from benchmarks.gpu.kernel_sides import CHAIN, FA3, SIDES, STOCK, TREE
from benchmarks.markdown import table
from benchmarks.plot import plt
from benchmarks.report import listing, number

NOTES = (
    "One layer's attention in bfloat16, median of CUDA-event times; the sides are "
    "called in turn, and before each call a 1 GiB buffer is overwritten, so that the "
    "L2 cache is cold and no launch waits for the host. Nodes: query tokens per "
    "request; all sides have the same queries and the same paged KV cache. GB/s: keys "
    "and values read once over the time; copy: the card's measured copy bandwidth, "
    "bytes read and written. Error: largest difference from float64, over the largest "
    "true value; float32 of our kernel, bfloat16 of the timed calls."
)
COLOURS = {
    TREE: "tab:red",
    CHAIN: "tab:orange",
    STOCK: "tab:blue",
    FA3: "tab:green",
}


class KernelCell(StoredCell):
    """One cell of the kernel table."""

    shape: str
    nodes: int
    context: int
    batch: int
    # keys and values that have to be read once
    kv_bytes: int
    copy_gb_per_s: float
    # by side, milliseconds
    ms: dict[str, float]
    best_ms: dict[str, float]
    # by dtype and side, relative to the largest true value
    errors: dict[str, dict[str, float]]
    # sides whose error is above what their dtype explains
    wrong: list[str] = Field(default_factory=list)
    # sides that this machine does not have, and why
    missing: dict[str, str] = Field(default_factory=dict)

    def gb_per_s(self, side: str) -> float | None:
        """Keys and values over time."""
        ms = self.ms.get(side)
        return None if ms is None else self.kv_bytes / ms / 1e6

    def ratio(self, side: str, to: str) -> float | None:
        """Time of one side over that of another."""
        if side not in self.ms or to not in self.ms:
            return None
        return self.ms[side] / self.ms[to]

    def error(self, dtype: str) -> float | None:
        """Error of our kernel on trees."""
        return self.errors.get(dtype, {}).get(TREE)


def write(cells: Sequence[KernelCell], origin: dict[str, Any], out: Path) -> None:
    """Write results.json, results.md and one plot per shape."""
    cells = sorted(cells, key=lambda c: (c.shape, c.batch, c.nodes, c.context))
    write_json(out / "results.json", origin, cells)
    (out / "results.md").write_text(markdown(cells, origin), encoding="utf-8")
    for shape in dict.fromkeys(cell.shape for cell in cells):
        draw([cell for cell in cells if cell.shape == shape], out / f"{shape}.png")


def markdown(cells: Sequence[KernelCell], origin: Mapping[str, Any]) -> str:
    """Write one table per shape and batch, and where the numbers come from."""
    parts = ["# Attention kernel", NOTES]
    parts.append("\n".join(f"- {side}: {what}" for side, what in SIDES.items()))
    for shape, batch in dict.fromkeys((cell.shape, cell.batch) for cell in cells):
        here = [c for c in cells if (c.shape, c.batch) == (shape, batch)]
        parts += [f"## {shape}, batch {batch}", cell_table(here), f"![]({shape}.png)"]
    missing = {side: why for cell in cells for side, why in cell.missing.items()}
    if missing:
        parts += ["## Missing", listing(missing)]
    wrong = [f"- {cell.name}: {', '.join(cell.wrong)}" for cell in cells if cell.wrong]
    if wrong:
        parts += ["## Wrong results", "\n".join(wrong)]
    parts += ["## Provenance", listing(origin)]
    return "\n\n".join(parts) + "\n"


def cell_table(cells: Sequence[KernelCell]) -> str:
    """Write the cells of one shape and batch."""
    headings = ["nodes", "context", *(f"{side} µs" for side in SIDES)]
    headings += ["tree / stock", "tree / fa3", "tree / chain", "tree GB/s"]
    headings += ["of copy", "float32 error", "bfloat16 error"]
    lines = []
    for cell in cells:
        speed = cell.gb_per_s(TREE)
        lines.append(
            [
                str(cell.nodes),
                str(cell.context),
                *(number(micro(cell.ms.get(side)), "{:.1f}") for side in SIDES),
                *(
                    number(cell.ratio(TREE, to), "{:.2f}×")
                    for to in (STOCK, FA3, CHAIN)
                ),
                number(speed, "{:.0f}"),
                number(speed and 100 * speed / cell.copy_gb_per_s, "{:.0f} %"),
                number(cell.error("float32"), "{:.0e}"),
                number(cell.error("bfloat16"), "{:.0e}"),
            ]
        )
    return table(headings, lines)


def micro(ms: float | None) -> float | None:
    """Milliseconds in microseconds."""
    return None if ms is None else 1000 * ms


def draw(cells: Sequence[KernelCell], path: Path) -> None:
    """Save the times of one shape: a panel per batch size and number of nodes."""
    batches = sorted({cell.batch for cell in cells})
    nodes = sorted({cell.nodes for cell in cells})
    figure, axes = plt.subplots(
        len(batches),
        len(nodes),
        figsize=(3.2 * len(nodes), 2.8 * len(batches)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for row, batch in zip(axes, batches, strict=True):
        for axis, count in zip(row, nodes, strict=True):
            here = [c for c in cells if (c.batch, c.nodes) == (batch, count)]
            panel(axis, here)
            axis.set_title(f"batch {batch}, {count} nodes", fontsize=9)
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(f"attention of one layer, {cells[0].shape}, µs over context")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def panel(axis: Axes, cells: Sequence[KernelCell]) -> None:
    """Draw the time of each side over the context."""
    for side, colour in COLOURS.items():
        points = [(c.context, 1000 * c.ms[side]) for c in cells if side in c.ms]
        if points:
            axis.plot(*zip(*points, strict=True), marker=".", color=colour, label=side)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
