"""An engine whose attention was chosen by another one refuses to start."""

from dataclasses import dataclass

import pytest

from vllm_treespec.engine.attention_check import check_attention


class Ours:
    """Our attention."""


@dataclass
class Layer:
    """A layer with its attention."""

    impl: object


def test_attention_chosen_before_is_noticed() -> None:
    """Red when stock attention reads trees as chains, because it was chosen before."""

    layers = {"a": Layer(Ours()), "b": Layer(object())}
    check_attention(layers, ["a"], Ours)
    with pytest.raises(ValueError, match="in a process of its own"):
        check_attention(layers, ["a", "b"], Ours)
