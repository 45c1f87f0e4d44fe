"""Which of the target's hidden states a head drafts from."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_treespec.engine.tree_step import TreeStep, check_attention, last_rows
from vllm_treespec.scorers import ScorerOutput

NOTHING: Any = None


def test_last_rows() -> None:
    """Red when a head gets the hidden state of another node, or of another request.

    Four requests: no drafts, a tree of 4 nodes, a chain that is read as no tree, a
    tree of 3 nodes of which no draft was accepted.
    """
    metadata = SimpleNamespace(cu_num_sampled_tokens=torch.tensor([1, 5, 8, 11]))
    scored = ScorerOutput(
        path=torch.tensor([[2, 3], [-1, -1]]),
        num_accepted=torch.tensor([2, 0]),
        next_token_ids=torch.tensor([7, 8]),
    )
    step = TreeStep(
        torch.tensor([1, 3]),
        NOTHING,
        0,
        NOTHING,
        host_reqs=NOTHING,
        host_num_nodes=NOTHING,
        host_roots=NOTHING,
        scored=scored,
    )
    reqs = torch.tensor([0, 1, 2, 3])
    assert last_rows(step, metadata, reqs).tolist() == [0, 1 + 3, 5, 8]
    assert last_rows(step, metadata, reqs[1::2]).tolist() == [4, 8]
    assert last_rows(None, metadata, reqs).tolist() == [0, 1, 5, 8]
    assert last_rows(None, None, reqs[2:]).tolist() == [2, 3]


def test_attention_chosen_before_is_noticed() -> None:
    """Red when stock attention reads trees as chains, because it was chosen before."""

    class Ours:
        pass

    layers = {"a": SimpleNamespace(impl=Ours()), "b": SimpleNamespace(impl=object())}
    config = SimpleNamespace(static_forward_context=layers)
    runner = SimpleNamespace(compilation_config=config)
    check_attention(runner, ["a"], Ours)
    with pytest.raises(ValueError, match="in a process of its own"):
        check_attention(runner, ["a", "b"], Ours)
