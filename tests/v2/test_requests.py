"""Requests of all kinds with draft trees on the V2 runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tests.v2.engines import Engine, engine
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS
from tests.v2.test_trees import INDEX, accepted
from vllm_treespec.batch.views import TargetInputs
from vllm_treespec.kernels.kv_move import KvMover
from vllm_treespec.layouts.node_masks import NodeMasks

SAMPLED = PARAMS["sampled"]


@pytest.fixture(scope="module")
def index(target: str, expected: dict[str, list[list[int]]]) -> Iterator[Engine]:
    """An engine whose index has the sampled answers: most drafts are accepted."""
    with engine(target, INDEX) as running:
        answers = running.generate(PROMPTS, SAMPLED, NUM_TOKENS)
        assert answers == expected["sampled"]
        accepted(running)
        yield running


def set_no_masks(self: NodeMasks, *args: Any) -> None:
    """Leave all rows causal."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [(NodeMasks, "set_masks"), (TargetInputs, "place_nodes"), (KvMover, "move")],
    ids=["no masks", "positions of a chain", "keys and values stay"],
)
def test_each_part_matters(
    index: Engine, expected: dict[str, list[list[int]]], owner: type, name: str
) -> None:
    """Red when trees are chains here, so that equal texts prove nothing."""
    with patch.object(owner, name, set_no_masks):
        answers = index.generate(PROMPTS, SAMPLED, NUM_TOKENS)
    assert answers != expected["sampled"]
    assert index.generate(PROMPTS, SAMPLED, NUM_TOKENS) == expected["sampled"]


def test_what_limits_tokens(
    index: Engine, expected: dict[str, list[list[int]]]
) -> None:
    """Red when a stop token within a tree, or a limit on tokens, acts elsewhere."""
    answers = expected["sampled"]
    params = [
        {**SAMPLED, "stop_token_ids": [answers[0][5]], "ignore_eos": False},
        {**SAMPLED, "max_tokens": 3},
        {**SAMPLED, "max_tokens": 1},
        SAMPLED,
    ]
    first, *rest = index.generate(PROMPTS, params, NUM_TOKENS)
    assert first == answers[0][: 1 + answers[0].index(answers[0][5])]
    assert rest == [answers[1][:3], answers[2][:1], answers[3]]


def test_requests_without_trees(
    index: Engine, expected: dict[str, list[list[int]]]
) -> None:
    """Red when a request that asks for no trees gets one."""
    off = {**SAMPLED, "extra_args": {"treespec": {"enabled": False}}}
    del index.steps[:]
    assert index.generate(PROMPTS, off, NUM_TOKENS) == expected["sampled"]
    assert not any(step.num_drafts for step in index.steps)


def test_placeholders_leave_room_for_prompts(index: Engine) -> None:
    """Red when placeholders of running requests take all tokens of a step."""
    del index.steps[:]
    index.generate(PROMPTS, SAMPLED, NUM_TOKENS)
    most = max(sum(step.num_drafts.values()) for step in index.steps)
    assert 0 < most <= 24


def test_metrics_count_no_placeholders(index: Engine) -> None:
    """Red when vLLM's own metrics count what the scheduler only reserved.

    They leave out the last steps of requests that have ended meanwhile.
    """
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    before = [index.count(name) for name in names]
    accepted(index)
    index.generate(PROMPTS, SAMPLED, NUM_TOKENS)
    drafts, kept = (
        index.count(name) - count for name, count in zip(names, before, strict=True)
    )
    found = index.runner.decoder.stats.as_dict()
    assert 0 < drafts <= found["nodes"] - found["trees"]
    assert 0 < kept <= accepted(index)


def test_logprobs(target: str, index: Engine) -> None:
    """Red when a log probability is read at another node than its token.

    Or when the tokens that a request names are lost, or those of one beside it.
    """
    accepted(index)
    chosen = {**SAMPLED, "logprob_token_ids": [5, 250, 17]}
    params = [{**SAMPLED, "logprobs": 2}, chosen]
    with_trees = logprobs(index, params)
    assert accepted(index) > NUM_TOKENS
    off = [{**one, "extra_args": {"treespec": {"enabled": False}}} for one in params]
    assert {5, 250, 17} <= with_trees[1][0].keys()
    for found, want in zip(with_trees, logprobs(index, off), strict=True):
        for ours, plain in zip(found, want, strict=True):
            assert ours.keys() == plain.keys()
            for token, logprob in plain.items():
                assert ours[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)
                assert ours[token].rank == logprob.rank


def logprobs(running: Engine, params: list[dict[str, Any]]) -> list[Any]:
    """Log probabilities of two answers."""
    outputs = running.outputs(PROMPTS[:2], params, NUM_TOKENS)
    return [output.outputs[0].logprobs for output in outputs]


@pytest.mark.parametrize("method", ["measured", "fixed"])
def test_preemption(
    target: str, expected: dict[str, list[list[int]]], method: str
) -> None:
    """Red when a preempted request goes on with another's text, or an old tree.

    A measured schedule rests: then several steps are in flight.
    """
    spec = {**INDEX, "schedule": method, "schedule_cache": False}
    blocks = {"num_gpu_blocks_override": 10, "max_model_len": 96}
    with engine(target, spec, **blocks) as running:
        for kind in ("greedy", "sampled", "sampled"):
            answers = running.generate(PROMPTS, PARAMS[kind], NUM_TOKENS)
            assert answers == expected[kind]
        assert running.count("num_preemptions") > 0
        if method == "fixed":
            assert accepted(running) > NUM_TOKENS
