"""How few tokens make most of a text: the paper's figure 7."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

# Shares of the vocabulary in the table; a sixth of SmolLM2's are 8,192.
SHARES = (0.01, 0.05, 1 / 6, 0.25, 0.5)


def coverage_of(text: Path, target: str) -> list[dict[str, Any]]:
    """Count the tokens of a text's answers.

    Args:
        text: JSONL, as ``treespec train --text`` reads it.
        target: folder of the model that wrote it.

    Returns:
        The table's points, then the figure's: ``tokens``, how many of the most
        frequent ones; their share of all tokens, and of all ``occurrences``.

    Raises:
        ValueError: the file is missing, or holds what is no such row.

    """
    from vllm_treespec.train.text import read_rows  # it imports torch

    if not text.is_file():
        raise ValueError(f"--text: there is no file {text}")
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    rows = read_rows(text, config["vocab_size"])
    answers = itertools.chain.from_iterable(r.token_ids[r.prompt_len :] for r in rows)
    counts = np.bincount(list(answers), minlength=config["vocab_size"])
    covered = np.sort(counts)[::-1].cumsum() / counts.sum()
    shares = [*SHARES, *np.geomspace(1 / len(counts), 1, 60)]
    sizes = [max(round(share * len(counts)), 1) for share in shares]
    return [
        {"tokens": n, "share": n / len(counts), "occurrences": float(covered[n - 1])}
        for n in sizes
    ]
