"""DFlash heads compute what vLLM's own modules compute, of the same files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    get_eagle3_aux_layers_from_config,
)

from tests.fast.test_dflash_head import LENGTHS, ROOTS, BlockAttention
from tests.published_dflash import PublishedDFlash
from tests.v2.engines import ARGUMENTS
from vllm_treespec.heads import DFlashHead, load_dflash_head, save_head

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "vocab_size": 256,
    "mask_token_id": 255,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "target_layer_ids": (0, 1),
    "num_target_layers": 2,
    "embed_tokens": True,
    "lm_head": True,
}
SECOND: dict[str, Any] = {"selector_rank": 3, "selector_top_k": 5}
CONVOLUTIONS: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8}
HEADS = {
    "dflash": PublishedDFlash(**SIZES),
    "dflash2": PublishedDFlash("dflash2", **SIZES, **SECOND, **CONVOLUTIONS),
    "dspark": PublishedDFlash(
        "dspark", **SIZES, markov_rank=4, confidence_head=True, causal=True
    ),
    "speculators dspark": PublishedDFlash(
        "speculators", **SIZES, markov_rank=4, draft_vocab_size=20
    ),
    "one causal window": PublishedDFlash(
        **SIZES, sliding_layers=(0,), sliding_causal=True
    ),
    "windows": PublishedDFlash(
        "dflash2", **SIZES, **SECOND, **CONVOLUTIONS, sliding_layers=(0, 1)
    ),
    "dspark, one causal window": PublishedDFlash(
        "dspark", **SIZES, markov_rank=4, sliding_layers=(1,), sliding_causal=True
    ),
    "one window": PublishedDFlash(**SIZES, sliding_layers=(1,)),
    "windows by a switch": PublishedDFlash(
        **SIZES, sliding_layers=(0, 1), use_swa=True
    ),
    "speculators, windows": PublishedDFlash(
        "speculators", **SIZES, sliding_layers=(0, 1)
    ),
}
CLASSES = {
    "Qwen3DSparkModel": Qwen3DSparkForCausalLM,
    "DFlash2DraftModel": DFlash2Qwen3ForCausalLM,
    "DFlashDraftModel": DFlashQwen3ForCausalLM,
}


class Recorder(nn.Module):
    """Stands for vLLM's attention of one layer: keeps its context, reads blocks."""

    def __init__(
        self, layer: Any, number: int, causal: bool, window: int | None
    ) -> None:
        """Take the place of ``layer``."""
        super().__init__()
        self.shape = (-1, layer.num_kv_heads, layer.head_size)
        self.number, self.causal, self.window = number, causal, window
        self.impl, self.kv_cache = self, None
        self.contexts: list[tuple[Tensor, Tensor]] = []

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, cache: None, slots: Tensor
    ) -> None:
        """Keep a request's context."""
        self.contexts.append((key.clone(), value.clone()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the context and the block."""
        heads = query.unflatten(-1, (-1, self.shape[-1]))
        contexts = [[context] for context in self.contexts]
        attend = BlockAttention(contexts, [self.causal], [self.window])
        return attend(0, heads, key.view(self.shape), value.view(self.shape))


def stock_model(folder: Path, target: str, depth: int) -> tuple[Any, Any]:
    """vLLM's model of a head, with recorders for attention, and its config."""
    arguments = ARGUMENTS | {"disable_log_stats": True}
    kind = "dspark" if "markov_rank" in (folder / "config.json").read_text() else None
    spec = {
        "method": kind or "dflash",
        "model": str(folder),
        "num_speculative_tokens": depth,
    }
    config = EngineArgs(
        model=target, speculative_config=spec, **arguments
    ).create_engine_config()
    name = config.speculative_config.draft_model_config.hf_config.architectures[0]
    with set_current_vllm_config(config):
        model = CLASSES[name](vllm_config=config)
        model.load_weights(load_file(folder / "model.safetensors").items())
    causal = model.get_draft_attn_causal()
    recorders = []
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        window = attention.sliding_window
        attention.attn = Recorder(attention.attn, number, causal[number], window)
        recorders.append(attention.attn)
    model.model._attn_layers = recorders
    return model, config


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Distributed state that vLLM's layers look for; classes are inspected in here."""

    def inspect(self: _LazyRegisteredModel) -> _ModelInfo:
        return _ModelInfo.from_model_cls(self.load_model_cls())

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    with patch.object(_LazyRegisteredModel, "inspect_model_cls", inspect):
        yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("written", [False, True], ids=["published", "ours"])
@pytest.mark.parametrize("name", HEADS)
def test_modules_agree(name: str, written: bool, target: str, tmp_path: Path) -> None:
    """Red when a file's keys, numbers of layers or weights mean another thing to us."""
    published = HEADS[name]
    folder = published.write(tmp_path / "head")
    head = load_dflash_head(folder, published.num_target_layers)
    head.share(None, None)
    if written:
        folder = tmp_path / "ours"
        save_head(head, folder, torch.float32)
    depth, config = published.num_levels, head.config
    stock, vllm_config = stock_model(folder, target, depth)
    spec = vllm_config.speculative_config
    assert get_eagle3_aux_layers_from_config(spec) == config.layers
    assert stock.get_draft_attn_causal() == [*config.causality]
    windows = [layer.self_attn.sliding_window for layer in stock.model.layers]
    assert windows == [config.window(number) for number in range(config.num_layers)]
    if config.markov_rank:
        said = spec.draft_model_config.hf_config.to_dict()
        assert said.get("sample_from_anchor", True) == config.sample_from_anchor
    states, tokens = both_states(head, stock, depth)
    roots = torch.tensor(ROOTS)
    draft = head.begin(states, roots)
    parents = roots[:, None]
    for level in range(depth):
        below = (
            draft.extend(parents, parents) if level else draft.root_logits()[:, None]
        )
        wanted = stock_logits(stock, states, level, parents[:, 0], tokens)
        columns = head.hot_token_ids
        wanted = wanted if columns is None else wanted[:, columns]
        torch.testing.assert_close(below[:, 0], wanted, rtol=1e-4, atol=1e-4)
        parents = below[:, 0].argmax(-1, keepdim=True)
        parents = parents if columns is None else columns[parents]


def both_states(head: DFlashHead, stock: Any, depth: int) -> tuple[Tensor, Tensor]:
    """States of blocks that both agree on, and the blocks' tokens."""
    contexts = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        size = head.config.target_hidden_size * head.config.num_target_layers
        states = torch.randn(length, size, generator=generator)
        positions = torch.arange(length)
        contexts.append(head.context_kv(head.features(states), positions))
        stock.precompute_and_store_context_kv(
            stock.combine_hidden_states(states), positions, positions
        )
    for layer, recorder in enumerate(stock.model._attn_layers):
        for found, wanted in zip(contexts, recorder.contexts, strict=True):
            torch.testing.assert_close(found[layer], wanted, rtol=1e-4, atol=1e-4)
    tokens = head.block_tokens(torch.tensor(ROOTS), depth)
    positions = torch.tensor(LENGTHS)[:, None] + torch.arange(tokens.shape[1])
    windows = [head.config.window(number) for number in range(len(contexts[0]))]
    attend = BlockAttention(contexts, head.config.causality, windows)
    states = head.read_block(tokens, positions, attend)
    wanted = stock(tokens.flatten(), positions.flatten()).view(*tokens.shape, -1)
    torch.testing.assert_close(states, wanted[:, -depth:], rtol=1e-4, atol=1e-4)
    return states, tokens


def stock_logits(
    stock: Any, states: Tensor, level: int, parents: Tensor, tokens: Tensor
) -> Tensor:
    """What vLLM's speculator scores below one node a request, [num_reqs, vocab]."""
    if isinstance(stock, Qwen3DSparkForCausalLM):
        logits = stock.compute_draft_logits(states[:, level])
        logits = logits + stock.markov_bias(stock.markov_embed(parents))
        ids = stock.map_draft_to_target(torch.arange(logits.shape[1]))
        out = logits.new_full((len(logits), stock.config.vocab_size), -torch.inf)
        out[:, ids] = logits
        return out
    if isinstance(stock, DFlash2Qwen3ForCausalLM):
        ids, unary = stock.compute_candidates(states[:, level])
        selector = stock.model.candidate_selector
        # as the first level of a block whose anchor is the parent
        scores = selector(
            ids[:, None], unary[:, None], states[:, level : level + 1], parents
        )
        out = unary.new_full((len(unary), stock.config.vocab_size), -torch.inf)
        return out.scatter(1, ids, scores[:, 0, 0])
    logits = stock.compute_logits(states[:, level])
    assert isinstance(logits, Tensor)
    return logits
