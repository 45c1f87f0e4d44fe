"""An engine whose attention was chosen by another one refuses to start."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_treespec.engine.v1.attention_check import check_attention


def test_attention_chosen_before_is_noticed() -> None:
    """Red when stock attention reads trees as chains, because it was chosen before."""

    class Ours:
        pass

    layers = {"a": SimpleNamespace(impl=Ours()), "b": SimpleNamespace(impl=object())}
    config = SimpleNamespace(static_forward_context=layers)
    runner: Any = SimpleNamespace(compilation_config=config)
    check_attention(runner, ["a"], Ours)
    with pytest.raises(ValueError, match="in a process of its own"):
        check_attention(runner, ["a", "b"], Ours)
