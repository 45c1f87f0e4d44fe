"""What a plan is made for: settings, target, drafters, and bytes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.checks import check_head_files, head_joins_groups
from vllm_treespec.config.draft_checks import check_positions
from vllm_treespec.layouts.base import ForkSpace, LayoutLimits
from vllm_treespec.layouts.kv_budget import BlockBytes
from vllm_treespec.layouts.node_masks import NodeMasks
from vllm_treespec.plugin import stock_arguments
from vllm_treespec.sources.feature_store import block_bytes
from vllm_treespec.tools.plan.drafters import Drafter, DraftModel, read_drafters
from vllm_treespec.tools.plan.groups import Group, Pool, group_layers
from vllm_treespec.tools.plan.models import DTYPES, Model, read_model
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import MAX_NODES

# vLLM's for attention in Triton.
GPU_BLOCK_SIZE = 16
# Cards for which vLLM has larger defaults.
LARGE_CARD, LARGEST_CARD = 70 * 2**30, 160 * 2**30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user said; None leaves it to vLLM's defaults.

    Attributes:
        memory: bytes of a card, on a CPU of a rank's memory node.
        allowance: bytes for what is not known beforehand, instead of the estimate.

    """

    num_ranks: int
    memory: int
    device: Literal["cuda", "cpu"] = "cuda"
    utilization: float = 0.92
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    dtype: str = "auto"
    allowance: int | None = None

    @property
    def num_seqs(self) -> int:
        """Most running requests; ``vllm serve`` decides by the card's memory."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        usual = 1024 if self.memory >= LARGE_CARD else 256
        if self.device == "cpu":
            usual = 128 * self.num_ranks
        return min(usual, self.num_batched_tokens)

    @property
    def num_batched_tokens(self) -> int:
        """Most tokens of a forward; ``vllm serve`` decides by the card's memory."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.device == "cpu":
            return 2048 * self.num_ranks
        if self.memory >= LARGEST_CARD:
            return 16384
        return 8192 if self.memory >= LARGE_CARD else 2048


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is planned for: the same on any number of ranks."""

    target: Model
    config: MethodConfig
    drafters: list[Drafter]
    sizes: TreeSizes
    dtype: torch.dtype
    max_model_len: int
    block_size: int


def read_parts(target: str, spec: dict[str, Any], settings: Settings) -> Parts:
    """Read target and drafters, and check that the engine would start with them.

    Raises:
        ValueError: one message that names the option or key and the remedy.

    """
    given = parse_spec_config(spec)
    check_head_files(given)
    model = read_model("TARGET", target)
    if settings.device == "cuda" and (settings.block_size or 0) % 16:
        raise SpecConfigError(
            f"--block-size {settings.block_size}: a GPU reads blocks of 16, 32, 48, "
            f"... tokens; pass a multiple of 16, or leave it out"
        )
    if settings.num_batched_tokens < settings.num_seqs:
        raise SpecConfigError(
            f"--max-num-batched-tokens {settings.num_batched_tokens} is less than "
            f"--max-num-seqs {settings.num_seqs}; pass as many tokens, or fewer "
            f"requests"
        )
    arguments = stock_arguments(given, settings.block_size, settings.device)
    # what the engine's drafter is made from
    config = parse_spec_config(arguments["additional_config"]["treespec"])
    max_model_len = checked_length(model, settings.max_model_len)
    drafters = read_drafters(config, model, max_model_len)
    for drafter in drafters:
        if isinstance(drafter, DraftModel):
            draft = drafter.model
            check_positions(draft.name, draft.config, max_model_len)
    trees = [tree.config.proposer().sizes for tree in config.scheduled_trees()]
    block_size = settings.block_size or arguments.get("block_size", GPU_BLOCK_SIZE)
    return Parts(
        target=model,
        config=config,
        drafters=drafters,
        sizes=TreeSizes.largest(trees),
        dtype=served_dtype(model, settings.dtype),
        max_model_len=max_model_len,
        block_size=block_size,
    )


def checked_length(target: Model, said: int | None) -> int:
    """Tokens of the longest request; None: as many as the target can read.

    Raises:
        SpecConfigError: the target reads fewer, or does not say how many.

    """
    most = target.max_positions
    length = most if said is None else said
    if length is None:
        raise SpecConfigError(
            f"the configuration of {target.name} does not say how long texts may be; "
            f"pass --max-model-len"
        )
    if most is not None and length > most:
        raise SpecConfigError(
            f"--max-model-len {length}: {target.name} reads at most {most} positions; "
            f"pass so many, or fewer"
        )
    return length


def served_dtype(model: Model, said: str) -> torch.dtype:
    """The dtype of weights and KV; vLLM serves float32 files in bfloat16."""
    if said != "auto":
        return DTYPES[said]
    found: torch.dtype | None = model.config.dtype
    return torch.bfloat16 if found in (None, torch.float32) else found


def layout_limits(parts: Parts) -> LayoutLimits:
    """What a layout must have room for, as the engine's drafter says it."""
    has_own_kv = any(drafter.kv_heads(1) for drafter in parts.drafters)
    return LayoutLimits(parts.sizes, parts.config.max_trees, has_own_kv)


def kv_block_bytes(
    heads: list[tuple[int, int]], block_size: int, dtype: torch.dtype
) -> int:
    """Keys and values of one block, of layers with these heads of this size."""
    return sum(2 * block_size * n * size * dtype.itemsize for n, size in heads)


def kv_pool(parts: Parts, settings: Settings) -> Pool:
    """The KV cache groups on one rank."""
    target, num_ranks = parts.target, settings.num_ranks
    own = [heads for d in parts.drafters for heads in d.kv_heads(num_ranks)]
    kinds = target.config.to_dict().get("layer_types") or ()
    if parts.config.needs_one_group and not head_joins_groups(
        parts.config, kinds, target.kv_heads(num_ranks)[0]
    ):
        groups = [Group(target.num_layers + len(own), None)]
    else:
        groups = group_layers([*target.windows, *[None] * len(own)])
    return Pool(groups, parts.block_size, settings.num_batched_tokens)


def rank_blocks(parts: Parts, settings: Settings) -> BlockBytes:
    """What KV blocks take on one rank."""
    size, dtype = parts.block_size, parts.dtype
    groups = kv_pool(parts, settings).groups
    layers = parts.target.kv_heads(settings.num_ranks)
    for drafter in parts.drafters:
        layers = layers + drafter.kv_heads(settings.num_ranks)
    if len(groups) > 1:
        layers = layers[: max(group.num_layers for group in groups)]
    limits = layout_limits(parts)
    if settings.device == "cuda":
        forks = ForkSpace.of_masks(limits, size).num_blocks(limits.max_trees)
    else:
        forks = ForkSpace.of_branches(limits, size).num_blocks(limits.max_trees)
        forks *= len(groups)
    return BlockBytes(
        kv=kv_block_bytes(layers, size, dtype),
        features=sum(block_bytes(size, d.feature_size, dtype) for d in parts.drafters),
        num_fork_blocks=forks,
    )


def mask_bytes(parts: Parts, settings: Settings) -> int:
    """Node masks of a GPU and the buffers of its attention kernel."""
    max_trees, num_ranks = parts.config.max_trees, settings.num_ranks
    masks = NodeMasks(
        max(settings.num_batched_tokens, max_trees * MAX_NODES),
        max(settings.num_seqs, max_trees),
        torch.device("meta"),
    )
    masks.workspace(parts.target.num_heads // num_ranks, parts.target.head_size)
    for drafter in parts.drafters:
        if shape := drafter.attention(num_ranks):
            masks.workspace(*shape)
    return masks.num_bytes()
