"""From a spec-config to a decoder: the object that vLLM's runners make once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from vllm_treespec.batch.matching import Proposal
from vllm_treespec.batch.stats import StepStats
from vllm_treespec.batch.views import EmittedBatch
from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.eagle_tree import EagleTreeConfig
from vllm_treespec.config.lyanna import LyannaConfig
from vllm_treespec.engine.chain_head import ChainHead, EngineChainSource
from vllm_treespec.engine.dflash_head import PagedDFlashHead
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.engine.eagle_head import PagedEagleHead
from vllm_treespec.engine.head_source import EngineHeadSource
from vllm_treespec.engine.kv_cache import check_groups, own_group_first
from vllm_treespec.engine.paged_source import PagedSource
from vllm_treespec.engine.schedule_cache import ScheduleCache, cache_folder, origin_of
from vllm_treespec.heads import (
    DFlashHeadConfig,
    EagleHeadConfig,
    LyannaHeadConfig,
    read_head_config,
)
from vllm_treespec.layouts.base import LayoutLimits, TreeLayout
from vllm_treespec.proposers.specinfer import shared_vocabulary
from vllm_treespec.schedule.base import Schedule, ScheduledTree
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.schedule.plan import MAX_SLOWDOWN, StepPlan
from vllm_treespec.schedule.scheduler import AdaptiveScheduler
from vllm_treespec.scorers import Rule, TypicalAcceptance
from vllm_treespec.sources.base import FINAL_LAYER, Sources
from vllm_treespec.sources.chain import ChainMemory
from vllm_treespec.step.decoder import RanksDiffer, TreeDecoder
from vllm_treespec.step.method import EngineLimits, Method
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_treespec.engine.v1.vllm_types import V1Runner
    from vllm_treespec.engine.v2.vllm_types import V2Runner


EngineModel = PagedSource | EngineHeadSource | EngineChainSource


class TreeDrafter:
    """Makes and loads what a spec-config names; vLLM makes one per worker."""

    decoder: TreeDecoder

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read our settings, which travel in vLLM's ``additional_config``."""
        self.vllm_config = vllm_config
        self.config = parse_spec_config(vllm_config.additional_config["treespec"])
        self.stats = StepStats()
        # draft models and heads
        self.models: list[EngineModel] = []
        # None: nothing is kept for the next start
        self.cache: ScheduleCache | None = None
        grammars = vllm_config.structured_outputs_config
        # whether a grammar begins at the end of some reasoning only
        self.grammar_after_reasoning = bool(grammars.reasoning_parser)
        self.grammar_after_reasoning &= not grammars.enable_in_reasoning

    def make_decoder(
        self,
        make_layout: Callable[[LayoutLimits], TreeLayout],
        draft_model_class: type[PagedDraftModel],
        batched_rules: bool,
        limits: EngineLimits,
    ) -> TreeDecoder:
        """Make the decoder for a device, with sources that are not loaded yet.

        Args:
            make_layout: makes the device's layout with room for this much.
            draft_model_class: how draft models run on the device.
            batched_rules: whether rules run in their batched form.
            limits: of the engine.

        """
        method = self.make_method(batched_rules)
        if self.config.schedule_cache and isinstance(
            method.schedule, AdaptiveScheduler
        ):
            origin = origin_of(self.vllm_config, method.schedule)
            self.cache = ScheduleCache(cache_folder(), origin, method.schedule)
            self.cache.load()
        self.models = self._models(draft_model_class)
        sources = Sources(self.models, self.config.text_source())
        layout = make_layout(layout_limits(method, bool(self.paged)))
        self.decoder = TreeDecoder(method, sources, layout, limits, self.stats)
        return self.decoder

    @property
    def paged(self) -> list[PagedSource]:
        """Draft models and heads with context."""
        return [model for model in self.models if isinstance(model, PagedSource)]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Before which layers vLLM hands hidden states out, ascending."""
        return tuple(sorted(self.decoder.committed_reader.features - {FINAL_LAYER}))

    def num_fork_blocks(self, groups: Sequence[KVCacheGroupSpec]) -> int:
        """How many blocks the KV cache needs behind the scheduler's.

        Raises:
            ValueError: see ``check_groups``.

        """
        check_groups(groups)
        block_size = groups[0].kv_cache_spec.block_size
        return self.decoder.layout.num_fork_blocks(block_size, len(groups))

    def bind(
        self,
        groups: Sequence[KVCacheGroupSpec],
        kv_caches: dict[str, Tensor],
        size: tuple[int, int],
        attn_groups: Sequence[Sequence[AttentionGroup]],
    ) -> list[int]:
        """Give the layout and the sources the KV caches of their layers.

        Args:
            groups: of the KV cache.
            kv_caches: by layer.
            size: number of the scheduler's blocks, and tokens of a block, as attention
                counts blocks.
            attn_groups: by group of the KV cache.

        Returns:
            vLLM's numbers of the groups in our order: that of draft sources first.

        """
        layout = self.decoder.layout
        ours = {name for source in self.paged for name in source.layer_names}
        order = own_group_first(groups, ours)
        of_target = [
            [kv_caches[name] for name in groups[number].layer_names if name not in ours]
            for number in order
        ]
        layout.bind(of_target, *size)
        self.decoder.committed_reader.bind(*size)
        for source in self.paged:
            source.bind(kv_caches, attn_groups[order[0]], layout)
        return order

    def make_method(self, batched: bool) -> Method:
        """How trees are drawn and verified."""
        trees = self.config.scheduled_trees()
        return Method(
            schedule=make_schedule(self.config, trees, can_sync=not batched),
            proposers=[tree.config.proposer() for tree in trees],
            rule=make_rule(self.config),
            batched=batched,
            max_trees=self.config.max_trees,
        )

    def _models(self, draft_model_class: type[PagedDraftModel]) -> list[EngineModel]:
        """Make the draft models and the head, in the spec-config's order."""
        config = self.config
        models: list[EngineModel] = [
            draft_model_class(
                self.vllm_config, model, hot, f"draft_model_{number}", self.stats
            )
            for number, (model, hot) in enumerate(
                zip(config.models, config.hot_token_files, strict=True)
            )
        ]
        if config.head is not None:
            models.append(self._head(config.head))
        return models

    def _head(self, model: str) -> EngineModel:
        """Make the source that suits the kind of head."""
        config, stats = self.config, self.stats
        head = read_head_config(model)
        if isinstance(head, LyannaHeadConfig):
            memory = ChainMemory("off", 1)
            if isinstance(config, LyannaConfig):
                memory = ChainMemory(config.resample, config.resample_min_levels)
            if head.context:
                return ChainHead(self.vllm_config, model, "draft_head", memory, stats)
            return EngineChainSource(self.vllm_config, model, memory, stats)
        if isinstance(head, EagleHeadConfig):
            hot = config.hot_tokens if isinstance(config, EagleTreeConfig) else None
            return PagedEagleHead(self.vllm_config, model, hot, "draft_head", stats)
        if isinstance(head, DFlashHeadConfig):
            return PagedDFlashHead(self.vllm_config, model, "draft_head", stats)
        return EngineHeadSource(self.vllm_config, model, stats)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load draft models or a head; vLLM has just loaded the target."""
        for model in self.models:
            model.load(target_model)
        models = [m for m in self.models if isinstance(m, PagedDraftModel)]
        if models:
            # one tensor for all: no step compares them
            vocabulary = shared_vocabulary(models)
            for draft_model in models:
                draft_model.vocabulary = vocabulary

    def propose(
        self,
        batch: EmittedBatch,
        plan: StepPlan | None = None,
        unseen_part: Draft | None = None,
    ) -> Proposal | None:
        """Draw the next trees at the end of a step; see ``TreeDecoder.draft``."""
        self.save_schedule()
        return self.decoder.draft(batch, plan, unseen_part)

    def save_schedule(self) -> None:
        """Keep what the schedule has learned for the next start, now and then."""
        if self.cache is not None:
            self.cache.save_if_due()


def engine_limits(runner: V1Runner | V2Runner) -> EngineLimits:
    """What a decoder knows of the engine that it runs in."""
    parallel = runner.parallel_config
    return EngineLimits(
        device=runner.device,
        rank=parallel.rank,
        # Engines of a data-parallel launch must not draw alike.
        seed=runner.model_config.seed + parallel.data_parallel_index,
        max_model_len=runner.max_model_len,
        max_num_tokens=runner.max_num_tokens,
    )


def make_schedule(
    config: MethodConfig, trees: Sequence[ScheduledTree], can_sync: bool
) -> Schedule:
    """How the tree of a step is chosen."""
    if config.schedule == "measured":
        max_slowdown = config.max_slowdown or MAX_SLOWDOWN
        return AdaptiveScheduler(
            trees, config.max_trees, first_rank_values, can_sync, max_slowdown
        )
    return ListedSchedule(trees)


def first_rank_values(values: list[float]) -> list[float]:
    """What the first of the tensor-parallel ranks passes; all of them call it.

    Raises:
        RanksDiffer: the ranks are not connected any more. A schedule's aid must not
            catch it: this rank alone would go on without the schedule.

    """
    try:
        shared: list[float] = get_tp_group().broadcast_object(values)
    except Exception as error:
        raise RanksDiffer(
            f"rank 0's times do not come to all ranks: {error}"
        ) from error
    return shared


def make_rule(config: MethodConfig) -> Rule:
    """How sampled requests' trees are verified."""
    typical = config.lossy_typical_acceptance
    if typical is not None:
        return TypicalAcceptance(typical.epsilon, typical.delta).rule
    return config.rule


def layout_limits(method: Method, has_own_kv: bool) -> LayoutLimits:
    """What a layout must have room for, with all trees of a method's schedule."""
    sizes = TreeSizes.largest([proposer.sizes for proposer in method.proposers])
    return LayoutLimits(sizes, method.max_trees, has_own_kv)
