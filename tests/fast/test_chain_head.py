"""What a head of chains reads behind its pairs, and how often it reads logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.masked_reads import PAGE, bind_head, committed
from tests.fast.no_waiting import NoWaiting
from tests.fast.small_engine import engine_config
from tests.heads import write_head
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.engine.chain_head import ChainHead
from vllm_treespec.heads import load_lyanna_head
from vllm_treespec.layouts.base import LevelInputs
from vllm_treespec.sources.base import FINAL_LAYER, Roots
from vllm_treespec.sources.chain import ChainDraft, ChainMemory, Resample

HIDDEN_SIZE, DEPTH = 64, 3


class Recorded(ChainHead):
    """Notes what it reads; what it makes of a state is the state plus 100."""

    def __init__(
        self, device: torch.device, folder: Path, resample: Resample = "off"
    ) -> None:
        config = engine_config({"method": "suffix_tree"})
        model = write_head(folder, "lyanna", num_hot_tokens=20)
        memory = ChainMemory(resample, 1)
        super().__init__(config, model, "draft_head", memory, StepStats())
        self.head = load_lyanna_head(model)
        self.head.share(*torch.randn(2, 32, HIDDEN_SIZE))
        self.head.to(device)
        bind_head(self, HIDDEN_SIZE, device)
        self.steps: list[tuple[Tensor, LevelInputs]] = []

    def _run(self, metadata: Any, features: Tensor, *rest: Any) -> Tensor:
        return features + 100

    def _next_step(self, state: Tensor, inputs: LevelInputs) -> Tensor:
        self.steps.append((state, inputs))
        return state + 100


def begun(head: Recorded, accepted: tuple[int, int] = (-1, -1)) -> ChainDraft:
    """Begin the trees of two requests, whose roots lie at positions 5 and 8."""
    return head.begin(
        Roots(
            slots=np.array([3, 1]),
            positions=np.array([5, 8]),
            root_token_ids=torch.zeros(2, dtype=torch.int64, device=head.device),
            accepted=np.array(accepted),
            depth=DEPTH,
        )
    )


def test_steps_follow_the_last_pairs(tmp_path: Path) -> None:
    """Red when a step's slot, position or state is another, or one is read too many."""
    head = Recorded(torch.device("cpu"), tmp_path)
    assert head.reads.features == (FINAL_LAYER,)
    head.store.features += torch.arange(len(head.store.features))[:, None]
    tokens = committed(head.device)
    tokens.first[:] = 3, 7
    head.read(tokens)
    head_logits: list[Tensor] = []
    logits = head.head.logits
    head.head.logits = lambda s: head_logits.append(s) or logits(s)  # type: ignore
    draft = begun(head)
    assert len(head.steps) == DEPTH - 1
    roots = [2 * PAGE + 100, 4 * PAGE + 3 + 100]
    first, second = 10 * PAGE, 12 * PAGE + 3
    for step, (state, inputs) in enumerate(head.steps, start=1):
        assert state[:, 0].tolist() == [r + 100 * (step - 1) for r in roots]
        assert inputs.positions.tolist() == [4 + step, 7 + step]
        assert inputs.slots.tolist() == [first + step, second + step]
        assert inputs.seq_lens.tolist() == [5 + step, 8 + step]
    (states,) = head_logits
    assert states.shape == (2, DEPTH, HIDDEN_SIZE)
    assert draft.logits.shape == (2, DEPTH, 20)
    assert draft.vocabulary is head.head.hot_token_ids


def test_a_request_with_levels_left_runs_no_chain(tmp_path: Path) -> None:
    """Red when the head runs for a request that drafts from what is left."""
    head = Recorded(torch.device("cpu"), tmp_path, "replace")
    head.read(committed(head.device))
    begun(head)
    unread = head.drafts_unread(np.array([3, 1]), np.array([0, 1]))
    assert unread.tolist() == [True, True]
    head.steps.clear()
    draft = begun(head, (0, 1))
    assert not head.steps
    assert draft.levels_left is not None
    assert draft.levels_left.tolist() == [2, 1]
    # Both requests were read last, and one of them has levels left.
    with pytest.raises(AssertionError, match="others were read"):
        begun(head, (0, 2))


def test_the_host_never_waits(tmp_path: Path) -> None:
    """Red when a step of the chains waits for the device."""
    head = Recorded(torch.device("meta"), tmp_path)
    head.read(committed(head.device))
    with NoWaiting():
        assert head.run_chains(DEPTH).is_meta
