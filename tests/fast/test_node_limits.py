"""Whether a draw counts must not depend on what was drawn when vLLM cuts trees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tests.fast.small_engine import (
    PROMPT_LEN,
    engine_config,
    make_request,
    make_scheduler,
)
from vllm_treespec.batch.views import scheduler_room
from vllm_treespec.config import SpecConfigError
from vllm_treespec.engine.refusals import refuse_short_chunks
from vllm_treespec.engine.v1.views import token_budget

# Six draws; equal ones are one node, so a tree has one to six drafts.
SPEC = {"method": "spectr", "model": "some/draft", "num_paths": 3, "depth": 2}
NUM_DRAFTS = 6
REQS = ["a", "b", "c"]


@pytest.fixture
def config() -> VllmConfig:
    """The config of an engine that drafts such trees."""
    return engine_config(SPEC)


def scheduled(
    config: VllmConfig,
    num_drafts: list[int],
    arrange: Callable[[Scheduler], None] = lambda _: None,
) -> SchedulerOutput:
    """What vLLM's scheduler takes of trees with so many drafts."""
    scheduler = make_scheduler(config)
    for req_id in REQS:
        scheduler.add_request(make_request(req_id))
    first = ModelRunnerOutput(
        req_ids=REQS,
        req_id_to_index={req_id: row for row, req_id in enumerate(REQS)},
        sampled_token_ids=[[1]] * len(REQS),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(scheduler.schedule(), first)
    drafts = [[2] * count for count in num_drafts]
    scheduler.update_draft_token_ids(DraftTokenIds(REQS, drafts))
    arrange(scheduler)
    return scheduler.schedule()


def rooms(config: VllmConfig, row: int, *arrange: Callable[[Scheduler], None]) -> set:
    """For how many nodes a request's tree has room, over the sizes it may have.

    0: for none, its drafts are read as a chain.
    """
    runner: Any = SimpleNamespace(
        scheduler_config=config.scheduler_config,
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
    )
    found = set()
    for own in range(1, NUM_DRAFTS + 1):
        num_drafts = [5, 3, 4]
        num_drafts[row] = own
        output = scheduled(config, num_drafts, *arrange)
        in_turn = list(output.num_scheduled_tokens)
        (room,) = scheduler_room(
            np.array(list(output.num_scheduled_tokens.values())),
            np.full(len(in_turn), PROMPT_LEN),
            token_budget(runner, output),
            config.model_config.max_model_len,
        )[[in_turn.index(REQS[row])]]
        num_sent = len(output.scheduled_spec_decode_tokens.get(REQS[row], []))
        kept = room if num_sent == own else num_sent + 1
        found.add(int(min(kept, 1 + NUM_DRAFTS)) if num_sent < room else 0)
    return found


@pytest.mark.parametrize(
    ("what", "value", "expected"),
    [
        ("nothing", 0, [7, 7, 7]),
        ("token budget", 13, [7, 7, 3]),
        ("input budget", 13, [7, 7, 3]),
        ("max_model_len", 9, [4, 4, 4]),
        ("long_prefill_token_threshold", 7, [7, 7, 7]),
    ],
)
def test_room_does_not_depend_on_the_tree(
    what: str,
    value: int,
    expected: list[int],
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when vLLM's scheduler finds a reason to cut trees that we do not count."""
    limit(config, what, value, monkeypatch)
    refuse_short_chunks(config)
    assert [rooms(config, row) for row in range(3)] == [{n} for n in expected]


def give_way(scheduler: Scheduler) -> None:
    """Let the second request find no block, until the first one is preempted."""
    manager = scheduler.kv_cache_manager
    stock = manager.allocate_slots
    scheduler.requests["a"].priority = 1

    def allocate_slots(request: Request, *args: Any, **options: Any) -> Any:
        if request.request_id == "b" and scheduler.requests["a"] in scheduler.running:
            return None
        return stock(request, *args, **options)

    manager.allocate_slots = allocate_slots


def test_room_after_a_preemption(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when tokens count as room that a preempted request had taken at that time.

    The first request takes 6 of 12 tokens, and the second one the others. Then the
    first is preempted, and its tokens are in no output of the scheduler.
    """
    monkeypatch.setattr(config.scheduler_config, "policy", "priority")
    limit(config, "token budget", 12, monkeypatch)
    output = scheduled(config, [5, NUM_DRAFTS, 4], give_way)
    assert output.preempted_req_ids == {"a"}
    assert output.num_scheduled_tokens == {"b": 6, "c": 5}
    assert rooms(config, 1, give_way) == rooms(config, 2, give_way) == {0}


def test_short_chunks_are_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when chunks may be shorter than a tree: its room would depend on its draws.

    The workers cannot know whether the scheduler cut at the threshold, because that
    depends on requests that wait.
    """
    limit(config, "long_prefill_token_threshold", NUM_DRAFTS, monkeypatch)
    assert rooms(config, 0) == {NUM_DRAFTS, 1 + NUM_DRAFTS}
    with pytest.raises(SpecConfigError, match="leave it at 0, or pass 7 or more"):
        refuse_short_chunks(config)


def limit(
    config: VllmConfig, what: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give the scheduler one more reason to cut."""
    if what == "token budget":
        monkeypatch.setattr(config.scheduler_config, "max_num_scheduled_tokens", value)
    elif what == "input budget":
        monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", value)
    elif what == "max_model_len":
        monkeypatch.setattr(config.model_config, "max_model_len", value)
    elif what == "long_prefill_token_threshold":
        monkeypatch.setattr(
            config.scheduler_config, "long_prefill_token_threshold", value
        )
