"""Which batches the GPU's attention backend gives masks, and what it refuses."""

from typing import Any

import pytest
import torch
import triton
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from tests.fast.small_engine import KV_CACHE_SPEC, engine_config
from vllm_treespec.engine.tree_attention import (
    TreeAttentionImpl,
    TreeAttentionMetadata,
    TreeAttentionMetadataBuilder,
)
from vllm_treespec.engine.warm_up import batches, form
from vllm_treespec.layouts.node_masks import NodeMasks

NOTHING: Any = None
NUM_DRAFTS = 7
LAYER: dict[str, Any] = {
    "num_heads": 4,
    "head_size": 64,
    "scale": 0.125,
    "num_kv_heads": 2,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
}


@pytest.fixture
def builder() -> TreeAttentionMetadataBuilder:
    """A builder as vLLM makes it, which the runner has given its masks."""
    config = engine_config({"method": "suffix_tree", "num_drafts": NUM_DRAFTS})
    device = torch.device("cpu")
    made = TreeAttentionMetadataBuilder(KV_CACHE_SPEC, ["layer"], config, device)
    made.masks = NodeMasks(32, 4, device)
    return made


def build(
    builder: TreeAttentionMetadataBuilder, max_query_len: int, capture: bool = False
) -> TreeAttentionMetadata:
    """Metadata of two requests, of which the longer has so many query rows."""
    starts = torch.tensor([0, 1, 1 + max_query_len], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([9, 30], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=1 + max_query_len,
        max_query_len=max_query_len,
        max_seq_len=30,
        block_table_tensor=torch.zeros((2, 2), dtype=torch.int32),
        slot_mapping=torch.arange(1 + max_query_len),
    )
    if capture:
        return builder.build_for_cudagraph_capture(common)
    return builder.build(0, common)


def test_batches_without_trees_stay_stock(builder: Any) -> None:
    """Red when plain decoding or a prompt leaves vLLM's own kernel."""
    for max_query_len in (1, 5, 12):
        assert build(builder, max_query_len).masks is None


def test_trees_get_masks(builder: Any) -> None:
    """Red when a batch with trees is attended to as if they were chains."""
    builder.masks.set_masks(
        torch.tensor([1]), torch.tensor([1]), torch.tensor([1]), torch.tensor([25])
    )
    metadata = build(builder, 5)
    assert metadata.masks is builder.masks
    masks = metadata.masks
    assert masks is not None
    assert metadata.workspace is masks.workspace(4, 64)


@pytest.mark.parametrize("max_query_len", [8, 1 + NUM_DRAFTS])
def test_captured_graphs_hold_tree_attention(builder: Any, max_query_len: int) -> None:
    """Red when a graph of several rows a request holds the stock kernel."""
    captured, graphs = build(builder, max_query_len, capture=True), builder.masks.graphs
    assert captured.masks is builder.masks
    assert captured.seq_lens.tolist() == [1, 1]
    assert (2, 1 + max_query_len) in graphs


def test_graphs_of_plain_steps_stay_stock(builder: Any) -> None:
    """Red when plain decoding's graph leaves vLLM's own kernel."""
    assert build(builder, 1, capture=True).masks is None
    assert not builder.masks.graphs


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_layers_that_are_taken(head_size: int) -> None:
    """Red when a supported layer is refused, or queries are quantised."""
    impl = TreeAttentionImpl(**{**LAYER, "head_size": head_size})
    assert not impl.supports_quant_query_input
    assert not impl.fused_output_quant_supported(NOTHING)


def test_forms_of_layers() -> None:
    """Red when layers of other kernels are not warmed up, or windows one by one."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"sliding_window": 1},
        {"sliding_window": 512},
        {"sinks": torch.zeros(4)},
        {"sinks": torch.zeros(4), "sliding_window": 128},
    )
    forms = [form(TreeAttentionImpl(**{**LAYER, **kind})) for kind in kinds]
    assert forms[1] == forms[2]
    assert len(set(forms)) == 4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"head_size": 72}, "head size 72"),
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"chunk_lookback": 2}, "chunked local attention"),
        ({"kv_sharing_target_layer_name": "layer"}, "shared between layers"),
    ],
)
def test_layers_that_are_refused(changed: dict[str, Any], says: str) -> None:
    """Red when the kernel would leave something out without a message."""
    TritonAttentionImpl(**{**LAYER, **changed})
    with pytest.raises(ValueError, match=says):
        TreeAttentionImpl(**{**LAYER, **changed})


@pytest.mark.parametrize("max_tree_nodes", [4, 8, 33, 64])
def test_every_form_is_warmed_up(max_tree_nodes: int) -> None:
    """Red when a request's longest tree, or a batch's size, waits for a compiler."""
    found = set(batches(32, max_tree_nodes, 8192))
    for query_len in range(1, max_tree_nodes + 1):
        block = triton.next_power_of_2(query_len)
        rows = {triton.next_power_of_2(length) for _, length in found}
        assert block in rows
    assert {num_reqs for num_reqs, _ in found} == {1, 32}
    assert all(num_reqs * length <= 8192 for num_reqs, length in found)
    assert all(num_reqs * length <= 100 for num_reqs, length in batches(8, 33, 100))
