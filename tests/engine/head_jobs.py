"""Jobs in which a head reads a text in every kind of step."""

from __future__ import annotations

import random
from typing import Any

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
# Shorter and longer than a block, and than a chunk of a prompt.
LENGTHS = (3, 31, 32, 100, 200)
# Trees are drawn while one request runs.
ALONE = {"schedule": [{"batch_size": 1}]}


def prompts(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(1)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


def jobs_of_all_kinds(vocab_size: int) -> list[dict]:
    """Jobs in which a pair is read long after its feature was kept.

    One request at a time; two of different lengths, of which the longer one drafts when
    the other has ended; all again, from the prefix cache.
    """
    texts = prompts(vocab_size)
    lengths = [{**GREEDY, "max_tokens": n} for n in (20, 60)]
    return [
        {"prompts": texts, "params": GREEDY, "max_in_flight": 1},
        {"prompts": texts[:4], "params": lengths * 2, "max_in_flight": 2},
        {"prompts": texts, "params": GREEDY, "max_in_flight": 1},
    ]
