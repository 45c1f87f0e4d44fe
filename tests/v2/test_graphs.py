"""Draft trees in full CUDA graphs, of which each holds one number of rows a request."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

from tests.v2.engines import engine
from tests.v2.graphs import Graph
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS
from tests.v2.test_trees import FEW, INDEX, accepted
from vllm_treespec.engine.tree_attention import TreeAttentionMetadataBuilder

# at once
THREE = PROMPTS[:3]
WITH_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "custom_ops": ["none"],
        "cudagraph_capture_sizes": [1, 2, 3, 8, 16, 24, 32, 48],
    },
}


def rows_of_requests() -> set[int]:
    """Rows a request of the graphs that were replayed; forgets them."""
    found = {rows // requests for requests, rows in Graph.replays}
    Graph.replays.clear()
    return found


def test_text_equals_plain(target: str, expected: dict[str, list[list[int]]]) -> None:
    """Red when filling rows count as drafts, or a graph reads a step's own tensors."""
    with engine(target, INDEX, **WITH_GRAPHS) as running:
        for kind in ("greedy", "sampled", "sampled"):
            answers = running.generate(THREE, PARAMS[kind], FEW)
            assert answers == [answer[:FEW] for answer in expected[kind][: len(THREE)]]
        assert accepted(running) > FEW
        assert rows_of_requests() == {1, 8, 16}
        running.runner.masks.graphs.clear()
        with pytest.raises(AssertionError, match="has no masks"):
            running.generate(THREE, PARAMS["sampled"], FEW)


def without_masks(
    self: TreeAttentionMetadataBuilder, metadata: CommonAttentionMetadata
) -> TritonAttentionMetadata:
    """Build a graph's metadata for the stock kernel, and note it as one of ours."""
    assert self.masks is not None
    self.masks.graphs.add((metadata.num_reqs, metadata.num_actual_tokens))
    return super(TreeAttentionMetadataBuilder, self).build_for_cudagraph_capture(
        metadata
    )


def test_graphs_need_masks(target: str, expected: dict[str, list[list[int]]]) -> None:
    """Red when a graph here does not hold the kernel that it was captured with."""
    with (
        patch.object(
            TreeAttentionMetadataBuilder, "build_for_cudagraph_capture", without_masks
        ),
        engine(target, INDEX, **WITH_GRAPHS) as running,
    ):
        running.generate(PROMPTS, PARAMS["sampled"], NUM_TOKENS)
        answers = running.generate(PROMPTS, PARAMS["sampled"], NUM_TOKENS)
    assert answers != expected["sampled"]
