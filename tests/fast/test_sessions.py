"""Sessions, requests whose prompt comes in parts, are as without trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.fast.small_engine import (
    BLOCK_SIZE,
    PROMPT_LEN,
    engine_config,
    make_scheduler,
)
from tests.fast.toy_workloads import make_engine
from vllm_treespec.batch.stats import StepCounts
from vllm_treespec.engine.scheduler import TreeDraftTokenIds, TreeScheduler
from vllm_treespec.engine.v1.runner import TreeRunnerMixin
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.sources.suffix_index import END, SuffixIndex
from vllm_treespec.testing.fake_scheduler import Habits

DRAFTS, PARENTS = [5, 6, 7, 8, 5, 6, 7], [0, 0, 1, 2, 2, 3, 4]


def part(req_id: str, token_ids: list[int], max_tokens: int, more: bool) -> Request:
    """A request, or a part of a session's prompt, with hashes of its blocks."""
    init_none_hash(sha256)
    return Request(
        req_id,
        [*token_ids],
        SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        resumable=more,
    )


def accept_all(scheduler: TreeScheduler, token: int) -> int:
    """A step of the only request, which counts on from a token; the next to come."""
    output = scheduler.schedule()
    (req_id,) = output.num_scheduled_tokens
    num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
    sampled = list(range(token, token + 1 + num_drafts))
    scheduler.update_from_output(
        output, ModelRunnerOutput([req_id], {req_id: 0}, [sampled])
    )
    drafts = TreeDraftTokenIds([req_id], [DRAFTS], {req_id: PARENTS}, StepCounts())
    scheduler.update_draft_token_ids(drafts)
    return token + 1 + num_drafts


@pytest.mark.parametrize("early", [True, False], ids=["queued", "waited for"])
@pytest.mark.parametrize("max_tokens", [1, 2, 13, 17])
def test_a_session_goes_on_behind_its_text(max_tokens: int, early: bool) -> None:
    """Red when drafts accepted behind the end of a turn count as computed.

    As in plain vLLM, the next turn does without the last token of the turn before.
    Hashes of blocks are those of an ordinary request with the same text.
    """
    scheduler = make_scheduler(engine_config({"method": "suffix_tree"}))
    first, second, token = [1] * PROMPT_LEN, [2] * 20, 10
    scheduler.add_request(part("session", first, max_tokens, more=True))
    if early:
        scheduler.add_request(part("session", second, max_tokens, more=True))
    while token < 10 + max_tokens:
        token = accept_all(scheduler, token)
    session = scheduler.requests["session"]
    assert session.spec_token_ids == [], "drafts of the turn before"
    if not early:
        scheduler.add_request(part("session", second, max_tokens, more=True))
    kept = first + list(range(10, 9 + max_tokens))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == len(kept)
    assert new.prompt_token_ids == kept + second
    ordinary = part("ordinary", kept + second, max_tokens, more=False)
    assert session.block_hashes == ordinary.block_hashes


class StockRunner:
    """As much of vLLM's runner as takes in requests."""

    def _update_states(self, _: SchedulerOutput) -> None:
        """Add requests."""


class Runner(TreeRunnerMixin, StockRunner):  # type: ignore[misc]
    """Our runner, without a model."""

    def __init__(self) -> None:
        params = SimpleNamespace(sampling_params=SamplingParams(max_tokens=9))
        vocabulary = SimpleNamespace(get_vocab_size=lambda: 9)
        self.requests: Any = {"session": params}
        self.model_config: Any = vocabulary
        self.device = torch.device("cpu")
        self.decoder = make_engine("suffix_tree", Habits()).decoder

    def make_layout(self, limits: LayoutLimits) -> TreeLayout:
        raise NotImplementedError

    def connect_attention(self, kv_caches: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _is_supported(self, req_id: str) -> bool:
        return True


def test_only_outputs_of_a_session_are_kept() -> None:
    """Red when other requests draft from the prompts of a session's later turns."""
    runner: Any = Runner()
    index = runner.decoder.sources.text
    assert isinstance(index, SuffixIndex)
    for *text, output in ([1, 2, 3], [1, 2, 3, 7, 7, 4], [1, 2, 3, 7, 7, 4, 7, 5]):
        step = SchedulerOutput.make_empty()
        new: Any = SimpleNamespace(req_id="session")
        step.scheduled_new_reqs = [new]
        runner._update_states(step)
        slots = runner.decoder.slots.lookup(["session"])
        index.note_texts(slots, [np.array([*text, output])])
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = {"session"}
    runner._update_states(step)
    assert index.cache.text.tolist() == [3, END, 4, END, 5, END]
    assert not runner.decoder.slots.names()
