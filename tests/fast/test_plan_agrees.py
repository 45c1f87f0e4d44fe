"""The plan's blocks are those of the worker, and its weights those of vLLM's layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from vllm.config import ModelConfig, ParallelConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.fast.plan_models import TINY_LLAMA, write_config
from tests.fast.small_engine import BLOCK_SIZE, engine_config, model_config
from tests.fast.window_layers import (
    GEMMA,
    GPT_OSS,
    WITH_HEAD,
    grouping_config,
    layers,
)
from tests.heads import write_head
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.engine.drafter import TreeDrafter
from vllm_treespec.engine.eagle_head import PagedEagleHead
from vllm_treespec.engine.worker import TreeWorkerMixin
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.layouts.branches import BranchLayout
from vllm_treespec.layouts.masks import MaskLayout
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.step.decoder import TreeDecoder
from vllm_treespec.step.method import EngineLimits
from vllm_treespec.tools.plan.groups import Pool, group_layers
from vllm_treespec.tools.plan.memory import make_plan
from vllm_treespec.tools.plan.models import Model, read_model
from vllm_treespec.tools.plan.parts import Settings, read_parts

AVAILABLE = 64 * 2**20
SPEC = {"schedule": "fixed", "max_trees": 3}


class Runner:
    """A runner's part in what a worker reports, of vLLM's own numbers."""

    def __init__(self, spec: dict[str, Any], device: str) -> None:
        self.vllm_config = engine_config(spec)
        self.max_model_len = self.vllm_config.model_config.max_model_len
        self.drafter = TreeDrafter(self.vllm_config)
        cpu = torch.device("cpu")
        limits = EngineLimits(cpu, 0, 0, 64, 64)

        def make_layout(limits: LayoutLimits) -> TreeLayout:
            if device == "cpu":
                return BranchLayout(limits)
            return MaskLayout(limits, NodeMasks(64, 4, cpu))

        self.decoder: TreeDecoder = self.drafter.make_decoder(
            make_layout, PagedDraftModel, False, limits
        )

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        parallel = self.vllm_config.parallel_config
        dtype = self.vllm_config.model_config.dtype
        models = [self.vllm_config.model_config]
        layers = []
        for source in self.drafter.paged:
            if isinstance(source, PagedDraftModel):
                models.append(source.model_config)
            if isinstance(source, PagedEagleHead):
                head = source.config
                layers += [(head.num_kv_heads, head.head_size)] * head.num_layers
        for model in models:
            heads = model.get_num_kv_heads(parallel), model.get_head_size()
            layers += [heads] * model.get_num_layers(parallel)
        return {
            str(number): FullAttentionSpec(
                block_size=BLOCK_SIZE, num_kv_heads=heads, head_size=size, dtype=dtype
            )
            for number, (heads, size) in enumerate(layers)
        }


@dataclass
class StockWorker:
    """vLLM's."""

    model_runner: Any
    cache_config: Any
    vllm_config: Any

    def determine_available_memory(self) -> int:
        return AVAILABLE


class Worker(TreeWorkerMixin, StockWorker):
    """Ours."""


def drafting_specs(folder: Path) -> dict[str, dict[str, Any]]:
    """A spec-config of each kind of drafter, for the small engine's target."""
    draft = model_config()
    draft.num_hidden_layers, draft.num_key_value_heads = 3, 1
    head = write_head(folder / "eagle", "eagle", hidden_size=256, layer_ids=(0, 1))
    return {
        "none": {"method": "suffix_tree"},
        "draft model": {"method": "rsd_s", "model": write_config(folder / "d", draft)},
        "head": {"method": "eagle_tree", "model": head},
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["none", "draft model", "head"])
def test_blocks_are_the_workers(
    kind: str, device: Literal["cpu", "cuda"], tmp_path: Path
) -> None:
    """Red when the engine allocates for a block, a fork or a feature what no plan says.

    Blocks of the plan are those that vLLM makes of what the worker reports.
    """
    spec = drafting_specs(tmp_path)[kind] | SPEC
    runner = Runner(spec, device)
    page = sum(s.page_size_bytes for s in runner.get_kv_cache_spec().values())
    config = runner.vllm_config
    worker = Worker(runner, config.cache_config, config)
    assert worker.cache_config.block_size == BLOCK_SIZE
    num_blocks = worker.determine_available_memory() // page

    target = write_config(tmp_path / "target", model_config())
    settings = Settings(
        num_ranks=1,
        memory=2**40,
        utilization=1.0,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        device=device,
        allowance=0,
    )
    parts = read_parts(target, spec, settings)
    assert parts.dtype == runner.vllm_config.model_config.dtype
    rows = make_plan(parts, settings).rows
    fixed = {"target", "drafter_0", "copies_0", "node_masks"}
    before = sum(row.num_bytes for row in rows if row.key in fixed)
    exact = Settings(**{**vars(settings), "memory": before + AVAILABLE})
    assert make_plan(parts, exact).num_blocks == num_blocks


@pytest.mark.parametrize("length", [40, 64])
@pytest.mark.parametrize("windows", [GEMMA, GPT_OSS, WITH_HEAD, (None, None)])
def test_groups_are_vllms(windows: tuple[int | None, ...], length: int) -> None:
    """Red when vLLM makes other groups of layers, or counts other tokens in them."""
    windows = tuple(window and 20 for window in windows)
    config = grouping_config()
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = length
    config.scheduler_config.max_num_batched_tokens = 24
    (made,) = get_kv_cache_configs(config, [layers(*windows)], [AVAILABLE])
    pool = Pool(group_layers(list(windows)), BLOCK_SIZE, num_batched=24)
    found = [
        (len(group.layer_names), getattr(group.kv_cache_spec, "sliding_window", None))
        for group in made.kv_cache_groups
    ]
    assert found == [(group.num_layers, group.window) for group in pool.groups]
    num_tokens, _ = get_kv_cache_capacity(config, made)
    # where there is one group whole blocks are counted
    whole = BLOCK_SIZE if len(found) == 1 else 1
    assert (
        abs(pool.num_tokens(made.num_blocks, length) / num_tokens - 1)
        < 0.25 * (whole > 1) + 1e-3
    )


def test_windows_are_read(tmp_path: Path) -> None:
    """Red when a target's windows are not found, or one window counts as several."""
    mixed = Gemma3TextConfig(
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=20,
    )
    folder = write_config(tmp_path / "mixed", mixed)
    assert Model(folder, mixed, {}, from_files=False).windows == [20, None, 20]
    assert Model(folder, TINY_LLAMA, {}, from_files=False).windows == [None] * 22


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_heads_are_vllms(num_ranks: int, tmp_path: Path) -> None:
    """Red when vLLM divides or copies key-value heads in another way."""
    folder = write_config(tmp_path / "tiny", TINY_LLAMA)
    config = ModelConfig(model=folder, skip_tokenizer_init=True)
    parallel = ParallelConfig(tensor_parallel_size=num_ranks)
    model = read_model("TARGET", folder)
    heads = config.get_num_kv_heads(parallel), config.get_head_size()
    assert model.kv_heads(num_ranks) == [heads] * config.get_num_layers(parallel)
    assert model.num_heads == config.get_num_attention_heads(parallel) * num_ranks


@dataclass
class Group:
    """Stands for the processes of vLLM that share a model; this is the first."""

    world_size: int
    rank_in_group: int = 0
    is_first_rank: bool = True
    is_last_rank: bool = True


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_vllms(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when vLLM divides, copies or pads another part of a model's weights."""
    # vocab_size is padded, and 8 ranks hold copies of 4 KV heads
    changed = {"num_hidden_layers": 2, "vocab_size": 32001, "tie_word_embeddings": tied}
    config = LlamaConfig(**{**TINY_LLAMA.to_dict(), **changed})
    folder = write_config(tmp_path / "target", config)
    model = read_model("TARGET", folder)
    vllm_config = EngineArgs(
        model=folder, skip_tokenizer_init=True
    ).create_engine_config()
    monkeypatch.setattr(parallel_state, "_PP", Group(1))
    for num_ranks in (1, 2, 4, 8):
        monkeypatch.setattr(parallel_state, "_TP", Group(num_ranks))
        vllm_config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(vllm_config), torch.device("meta"):
            rank = LlamaForCausalLM(vllm_config=vllm_config)
        held = sum(weight.numel() for weight in rank.parameters())
        assert model.num_parameters(num_ranks) == held
