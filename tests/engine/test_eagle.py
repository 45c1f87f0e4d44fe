"""EAGLE heads in the engine: what they read is right in every kind of step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.eagle_models import VOCAB_SIZE, write_known_language
from tests.engine.head_jobs import ALONE, GREEDY, jobs_of_all_kinds, prompts
from tests.engine.sampled import assert_same_text, with_and_without_trees
from tests.engine.tiny_models import SIZES
from tests.published_heads import Form, PublishedHead

FORMS: dict[str, Form] = {
    "speculators": "speculators",
    "eagle3": "eagle3",
    "eagle1": "eagle",
}
BLOCK_SIZE = 32
DEPTH = 3


@pytest.fixture(scope="module")
def known_language(shared_folder: Path) -> tuple[str, str]:
    """Folders of a target and of a head that knows its language."""
    folder = shared_folder / "known"
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return str(folder / "target"), str(folder / "head")
        return write_known_language(folder)


def test_exact_features_are_always_accepted(
    log_drafts: Callable[..., dict[str, Any]], known_language: tuple[str, str]
) -> None:
    """Red when a pair is read with another token's feature, or with a stale one.

    After plain steps, from the prefix cache, and after preemption. Red, too, when a
    tree of a sampled request then changes its text.
    """
    target, head = known_language
    spec = {"method": "eagle_tree", "model": head, "top_k": 2, "depth": DEPTH}
    static = {**spec, "tree": "static", **ALONE}
    jobs = jobs_of_all_kinds(VOCAB_SIZE)
    sampled = with_and_without_trees(prompts(VOCAB_SIZE), 1, max_tokens=24)
    found = log_drafts(target, static, [*jobs, *sampled])
    for lengths in found["lengths"][: len(jobs)]:
        assert lengths.keys() == {DEPTH}
        assert lengths[DEPTH] >= 20
    cached = [answer["num_cached_tokens"] for answer in found["jobs"][2]]
    assert max(cached) >= 6 * BLOCK_SIZE
    assert_same_text(found, len(jobs))

    texts = prompts(VOCAB_SIZE, (90,) * 4)
    params = {**GREEDY, "max_tokens": 100}
    job = {"prompts": texts, "params": params, "max_in_flight": 4}
    sampled = with_and_without_trees(texts, 4, max_tokens=100)
    fixed = {**spec, "schedule": "fixed"}
    tight = log_drafts(target, fixed, [job, *sampled], num_gpu_blocks_override=16)
    assert tight["preemptions"] > 0
    assert tight["lengths"][0].keys() == {DEPTH}
    assert_same_text(tight, 1)


@pytest.fixture(scope="module", params=["speculators", "eagle3", "eagle1"])
def random_head(
    request: pytest.FixtureRequest, shared_folder: Path, tiny: dict[str, str]
) -> tuple[str, str, str]:
    """Folders of a target and of a head with random weights, and the form's name."""
    form = request.param
    return tiny["target"], write_random_head(shared_folder / form, form), form


def write_random_head(folder: Path, form: str) -> str:
    """Write a head with random weights for the tiny target; the folder."""
    head = PublishedHead(
        form=FORMS[form],
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["intermediate_size"],
        vocab_size=SIZES["vocab_size"],
        draft_vocab_size=None if form == "eagle1" else 200,
        head_dim=SIZES["head_dim"],
        layer_ids=(0, 1, 2),
        lm_head=form != "eagle1",
        norm_before_residual=form == "speculators",
        max_positions=MAX_MODEL_LEN,
    )
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            head.write(folder)
    return str(folder)


def test_chains_equal_stock_vllm(
    log_drafts: Callable[..., dict[str, Any]], random_head: tuple[str, str, str]
) -> None:
    """Red when positions, shifts, norms or layers differ from vLLM's own EAGLE."""
    target, head, form = random_head
    texts = prompts(SIZES["vocab_size"])
    job = {"prompts": texts, "params": GREEDY, "max_in_flight": 1}
    method = "eagle" if form == "eagle1" else "eagle3"
    stock = {"method": method, "model": head, "num_speculative_tokens": DEPTH}
    ours = {"method": "eagle_tree", "model": head, "top_k": 1, "depth": DEPTH}
    (expected,) = log_drafts(target, stock, [job])["drafts"]
    (found,) = log_drafts(target, {**ours, "schedule": "fixed"}, [job])["drafts"]
    # Each leaves out other drafts that no request has room for.
    both = expected.keys() & found.keys()
    assert len(both) > 0.9 * len(expected)
    # Rounding may decide between two tokens that are all but equally likely.
    assert sum(found[text] != expected[text] for text in both) <= 0.01 * len(both)


def test_drafts_follow_from_the_text(
    log_drafts: Callable[..., dict[str, Any]], random_head: tuple[str, str, str]
) -> None:
    """Red when drafts depend on how the text was computed, not on the text alone."""
    target, head, _ = random_head
    spec = {"method": "eagle_tree", "model": head, "top_k": 3, "depth": DEPTH}
    jobs = jobs_of_all_kinds(SIZES["vocab_size"])
    alone, mixed, cached = log_drafts(target, {**spec, **ALONE}, jobs)["drafts"]
    for drafts in (mixed, cached):
        both = alone.keys() & drafts.keys()
        assert len(both) > 30
        assert sum(drafts[text] != alone[text] for text in both) <= 0.01 * len(both)
