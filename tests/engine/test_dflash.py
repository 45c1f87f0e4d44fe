"""One-pass heads in the engine: a block sees the right rows in every kind of step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from transformers import LlamaConfig, LlamaForCausalLM

from tests.dense_dflash import DenseDFlash
from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.head_jobs import ALONE, jobs_of_all_kinds, prompts
from tests.engine.sampled import assert_same_text, with_and_without_trees
from tests.engine.tiny_models import SIZES, write_random, write_windowed
from tests.heads import write_head

DEPTH = 5
NUM_LAYERS = 4
# The target's layers in the words of the published forms: outputs of these.
LAYER_IDS = (0, 2)
# Blocks of as many levels, causal or not, with and without edges between tokens.
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"form": "dflash", "block_size": 1 + DEPTH, "markov_rank": 0},
    "jetspec": {
        "form": "jetspec",
        "block_size": 1 + DEPTH,
        "markov_rank": 0,
        "causal": True,
    },
    "dspark": {"form": "dspark", "block_size": DEPTH, "markov_rank": 16},
    "dflash2": {
        "form": "dflash2",
        "block_size": 1 + DEPTH,
        "markov_rank": 0,
        "selector_rank": 16,
        "selector_top_k": 8,
        "conv_kernel_size": 3,
        "conv_group_size": 32,
    },
    # shorter than most texts, and than the target's
    "causal window": {
        "form": "dflash",
        "block_size": 1 + DEPTH,
        "markov_rank": 0,
        "sliding_layers": (0,),
        "sliding_window": 12,
        "sliding_causal": True,
    },
    "windows": {
        "form": "dspark",
        "block_size": DEPTH,
        "markov_rank": 16,
        "sliding_layers": (0, 1),
        "sliding_window": 20,
    },
}
TARGET_WINDOW = 40


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, shared_folder: Path) -> tuple[str, str]:
    """Folders of a target and of a one-pass head, both with random weights."""
    folder = shared_folder / f"{request.param}-pair"
    target, head = folder / "target", folder / "head"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            sizes = {**SIZES, "num_hidden_layers": NUM_LAYERS}
            if request.param == "causal window":
                write_windowed(target, TARGET_WINDOW, **sizes)
            else:
                write_random(LlamaForCausalLM(LlamaConfig(**sizes)), target)
            write_head(
                head,
                "dflash",
                hidden_size=SIZES["hidden_size"],
                vocab_size=SIZES["vocab_size"],
                layer_ids=LAYER_IDS,
                max_positions=MAX_MODEL_LEN,
                **KINDS[request.param],
            )
    return str(target), str(head)


def test_chains_follow_from_the_text(
    log_drafts: Callable[..., dict[str, Any]], pair: tuple[str, str]
) -> None:
    """Red when a block misses a token of the context, or sees one at a wrong place.

    Red, too, when a window is another one, or a layer has another's causality.

    After plain steps, beside others, from the prefix cache: drafts must be what the
    head makes of the text alone.
    """
    target, head = pair
    spec = {"method": "dflash_tree", "model": head, "top_k": 1, "depth": DEPTH}
    jobs = jobs_of_all_kinds(SIZES["vocab_size"])
    reference = DenseDFlash(target, head)
    wrong = total = 0
    for drafts in log_drafts(target, {**spec, **ALONE}, jobs)["drafts"]:
        assert len(drafts) > 30
        for text, found in list(drafts.items())[::3]:
            total += 1
            wrong += found != reference.chain(json.loads(text), DEPTH)
    # Rounding may decide between two tokens that are all but equally likely.
    assert wrong <= 0.02 * total


SPECS: dict[str, dict[str, Any]] = {
    "alone": {"method": "dflash_tree", "depth": DEPTH, "top_k": 3},
    "beside an index": {
        "method": "hybrid",
        "drafter": "dflash",
        "num_drafts": 12,
        "depth": 6,
        "model_depth": DEPTH,
        "min_probability": 0.0,
    },
}


@pytest.mark.parametrize("spec", SPECS)
def test_answers_equal_plain(
    spec: str, log_drafts: Callable[..., dict[str, Any]], pair: tuple[str, str]
) -> None:
    """Red when trees of a preempted or sampled request change its text."""
    target, head = pair
    texts = prompts(SIZES["vocab_size"], (90,) * 4)
    greedy = with_and_without_trees(texts, 4, max_tokens=60, temperature=0.0)
    sampled = with_and_without_trees(texts, 4, max_tokens=60)
    fixed = {**SPECS[spec], "model": head, "schedule": "fixed"}
    jobs = [*greedy, *sampled]
    found = log_drafts(target, fixed, jobs, num_gpu_blocks_override=16)
    assert found["preemptions"] > 0
    assert_same_text(found, 0, min_accepted=0)
    assert_same_text(found, 2)
