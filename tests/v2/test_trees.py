"""Draft trees on the V2 runner: text equals stock vLLM's token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.heads import write_head
from tests.v2.engines import Engine, engine
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS
from tests.v2.two_devices import two_devices

# for methods: chunks and waiting requests are the same for all of them
SHORT = PROMPTS[:2]
FEW = 10
INDEX: dict[str, Any] = {
    "method": "suffix_tree",
    "num_drafts": 11,
    "depth": 8,
    "min_probability": 0.0,
    "schedule": "fixed",
}
HYBRID = {"num_drafts": 7, "depth": 4, "min_probability": 0.0}
# method, what it needs beside the target, further keys; trees that are not drawn
RANKED: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("draft model", HYBRID),
    "redrafter": ("redrafter", {"beam_width": 3, "length": 3, "num_drafts": 7}),
    "medusa_tree": ("medusa", {"num_drafts": 7}),
    "eagle_tree": ("eagle", {"num_drafts": 7, "depth": 3}),
    "dflash_tree": ("dflash", {"num_drafts": 7, "depth": 3}),
    "lyanna": ("lyanna", {"num_drafts": 7}),
}
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("draft model", {"depth": 3}),
    "rsd_s": ("draft model", {"beam_width": 3, "depth": 2}),
    "spectr": ("draft model", {"num_paths": 2, "depth": 2}),
    "rsd_c": ("draft model", {"branching_factors": [2, 2]}),
    "specinfer": ("draft models", {"branching_factors": ([2, 1], [2])}),
}


@pytest.fixture(scope="module")
def index(target: str, expected: object) -> Iterator[Engine]:
    """An engine with a suffix index; the one without drafts has ended."""
    with engine(target, INDEX) as running:
        yield running


def accepted(running: Engine) -> int:
    """Draft tokens that were accepted since the last call."""
    stats = running.runner.decoder.stats
    found = stats.as_dict()["accepted"]
    stats.reset()
    return sum(drafts * trees for drafts, trees in found.items())


def test_runs_on_the_v2_runner(index: Engine) -> None:
    """Red when draft trees turn off vLLM's V2 runner or its async scheduling."""
    assert index.config.scheduler_config.async_scheduling
    assert type(index.scheduler).__name__ == "TreeAsyncScheduler"
    assert index.core.batch_queue_size == 2


@pytest.mark.parametrize("turn", ["first", "answers are in the index"])
@pytest.mark.parametrize("kind", PARAMS)
def test_text_equals_plain(
    index: Engine, expected: dict[str, list[list[int]]], kind: str, turn: str
) -> None:
    """Red when positions, masks, commit, noise or the host's texts are off."""
    assert index.generate(PROMPTS, PARAMS[kind], NUM_TOKENS) == expected[kind]
    if turn != "first":
        assert accepted(index) > NUM_TOKENS


def spec_of(
    method: str, needs: str, keys: dict[str, Any], pair: tuple[str, str], folder: Path
) -> dict[str, Any]:
    """A spec-config with draft models, or with a head of random weights."""
    if needs == "draft models":
        # the target is the second one, so that its draws are accepted, too
        factors = zip(pair[::-1], keys["branching_factors"], strict=True)
        drafts = [{"model": m, "branching_factors": each} for m, each in factors]
        return {"method": method, "drafts": drafts, "schedule": "fixed"}
    model = pair[1]
    if needs != "draft model":
        model = write_head(folder / "head", needs, hidden_size=128, vocab_size=256)
    return {"method": method, "model": model, "schedule": "fixed", **keys}


@pytest.mark.parametrize("method", RANKED)
def test_ranked_trees(
    method: str,
    pair: tuple[str, str],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    """Red when drafts change a text, or what drafts reads another request's state.

    Or when a card would refuse an operation, or let the host wait for it.
    """
    spec = spec_of(method, *RANKED[method], pair, tmp_path)
    with two_devices() as devices, engine(pair[0], spec) as running:
        for kind in ("greedy", "sampled"):
            answers = running.generate(SHORT, PARAMS[kind], NUM_TOKENS)
            assert answers == expected[kind][: len(SHORT)]
        found = running.runner.decoder.stats.as_dict()
        assert found["trees"] > NUM_TOKENS
        if method == "hybrid":
            assert accepted(running) > NUM_TOKENS // 2
    assert not devices.found


# test_unseen.py has the others
@pytest.mark.parametrize("method", ["spectr", "rsd_c"])
def test_drawn_trees(
    method: str,
    pair: tuple[str, str],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    """Red when greedy text changes, or a seed gives another text in the same batch."""
    spec = spec_of(method, *DRAWN[method], pair, tmp_path)
    with two_devices() as devices, engine(pair[0], spec) as running:
        answers = running.generate(SHORT, PARAMS["greedy"], FEW)
        assert answers == [answer[:FEW] for answer in expected["greedy"][: len(SHORT)]]
        assert accepted(running) > FEW // 4
        answers = running.generate(SHORT, PARAMS["sampled"], FEW)
        assert accepted(running) > 0
        assert running.generate(SHORT, PARAMS["sampled"], FEW) == answers
    assert not devices.found
