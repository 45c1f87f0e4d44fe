"""Requests whose next token depends on the text before: trees leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig

from tests.v2.engines import Engine, engine
from tests.v2.prompts import PARAMS, PROMPTS
from tests.v2.test_trees import DRAWN, INDEX, accepted, spec_of
from vllm_treespec.trees.node_texts import NodeTexts
from vllm_treespec.trees.tree import TreeBatch

GREEDY, SAMPLED, NARROW = (PARAMS[kind] for kind in ("greedy", "sampled", "narrow"))
NUM_TOKENS = 12
# Token 7 begins the thinking, which 9 ends; where the budget is spent, 8 and 9 do.
BEGIN, END = 7, [8, 9]
THINKING = [[*prompt, BEGIN] for prompt in PROMPTS]
PENALTIES: list[dict[str, Any]] = [
    {**SAMPLED, "presence_penalty": -2.0},
    {**GREEDY, "frequency_penalty": 1.2},
    {**SAMPLED, "repetition_penalty": 1.6},
    {**NARROW, "presence_penalty": 0.3, "frequency_penalty": -2.0},
]
OTHERS: list[dict[str, Any]] = [
    {**SAMPLED, "thinking_token_budget": 4},
    {**GREEDY, "thinking_token_budget": 1, "repetition_penalty": 1.3},
    {**SAMPLED, "min_p": 0.02},
    {**SAMPLED, "logit_bias": dict.fromkeys(range(40, 60), 1.5)},
]


def bad_words(answers: list[list[int]]) -> list[dict[str, Any]]:
    """Parameters that forbid what the sampled answers hold, in words of 1 to 4 tokens.

    The last request may emit everything.
    """
    words = [
        [answer[begin : begin + length] for begin, length in ((1, 2), (4, 3), (7, 4))]
        for answer in answers[:3]
    ]
    words[2].append(answers[2][:1])
    return [*({**SAMPLED, "_bad_words_token_ids": each} for each in words), SAMPLED]


def reasoning() -> ReasoningConfig:
    """Markers of thinking, which vLLM makes of strings by a tokenizer."""
    config = ReasoningConfig()
    config._reasoning_start_token_ids = [BEGIN]
    config._reasoning_end_token_ids = END
    config._natural_reasoning_end_token_ids = END[-1:]
    return config


def no_paths(tree: TreeBatch, roots: Tensor, num_rows: int, depth: int) -> NodeTexts:
    """Let every row be a root."""
    paths = torch.full((num_rows, depth), -1)
    return NodeTexts(paths, torch.zeros(num_rows, dtype=torch.int64))


@pytest.fixture(scope="module", autouse=True)
def _pass_all_parameters() -> Iterator[None]:
    """Pass min_p and logit_bias on; vLLM's front end refuses them with drafts."""
    with patch.object(SamplingParams, "_validate_spec_decode", lambda *args: None):
        yield


@pytest.fixture(scope="module")
def batches(target: str) -> dict[str, Any]:
    """Parameters of each kind of batch, and what stock vLLM answers."""
    with engine(target, reasoning_config=reasoning()) as running:
        answers = running.generate(THINKING, SAMPLED, NUM_TOKENS)
        params = {
            "penalties": PENALTIES,
            "bad words": bad_words(answers),
            "others": OTHERS,
        }
        return {
            kind: (each, running.generate(THINKING, each, NUM_TOKENS))
            for kind, each in params.items()
        }


@pytest.fixture(scope="module")
def index(target: str, batches: object) -> Iterator[Engine]:
    """An engine with a suffix index; the one without drafts has ended."""
    with engine(target, INDEX, reasoning_config=reasoning()) as running:
        yield running


KINDS = ["penalties", "bad words", "others"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_plain(index: Engine, batches: dict[str, Any], kind: str) -> None:
    """Red when such requests have other text than without trees."""
    params, answers = batches[kind]
    assert index.generate(THINKING, params, NUM_TOKENS) == answers


@pytest.mark.parametrize("kind", KINDS)
def test_paths_matter(index: Engine, batches: dict[str, Any], kind: str) -> None:
    """Red when such requests have no trees, or a node has another path's penalties.

    The index has all answers by now, so that trees branch. Where nodes have no paths
    the text is another.
    """
    params, answers = batches[kind]
    accepted(index)
    assert index.generate(THINKING, params, NUM_TOKENS) == answers
    assert accepted(index) > NUM_TOKENS
    with patch.object(NodeTexts, "of_trees", no_paths):
        assert index.generate(THINKING, params, NUM_TOKENS) != answers


def test_thinking_ends(batches: dict[str, Any]) -> None:
    """Red when no budget is spent in these tests, so that they prove nothing."""
    long, short, *_ = batches["others"][1]
    assert long[4:6] == END
    assert short[1:3] == END


def test_drawn_trees(
    pair: tuple[str, str], batches: dict[str, Any], tmp_path: Path
) -> None:
    """Red when drawn drafts are verified by logits without their path's penalties."""
    params, answers = batches["penalties"]
    spec = spec_of("rsd_s", *DRAWN["rsd_s"], pair, tmp_path)
    with engine(pair[0], spec) as running:
        found = running.generate(THINKING[1:2], params[1], NUM_TOKENS)
        assert found == answers[1:2]
        assert accepted(running) > 0
