"""The object behind vLLM's ``custom_class`` method: from a spec-config to a decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import VllmConfig

from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.core.decoder import EngineLimits, Method, TreeDecoder
from vllm_treespec.core.matching import Proposal
from vllm_treespec.core.schedule import AdaptiveSchedule
from vllm_treespec.core.stats import StepStats
from vllm_treespec.core.views import EmittedBatch
from vllm_treespec.engine.draft_model import PagedDraftModel
from vllm_treespec.engine.head_source import EngineHead
from vllm_treespec.layouts.base import LargestTrees, TreeLayout
from vllm_treespec.scorers import RULES, Rule, TypicalAcceptance
from vllm_treespec.sources.base import DraftSource


class TreeDrafter:
    """Makes and loads what a spec-config names; vLLM makes one per worker."""

    decoder_class = TreeDecoder
    decoder: TreeDecoder

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Read our settings, which travel in vLLM's ``additional_config``."""
        self.vllm_config = vllm_config
        self.config = parse_spec_config(vllm_config.additional_config["treespec"])
        self.stats = StepStats()
        self.draft_models: list[PagedDraftModel] = []
        self.head: EngineHead | None = None
        grammars = vllm_config.structured_outputs_config
        # whether a grammar begins at the end of some reasoning only
        self.grammar_after_reasoning = bool(grammars.reasoning_parser)
        self.grammar_after_reasoning &= not grammars.enable_in_reasoning

    def make_decoder(
        self,
        make_layout: Callable[[LargestTrees], TreeLayout],
        draft_model_class: type[PagedDraftModel],
        batched_rules: bool,
        limits: EngineLimits,
    ) -> TreeDecoder:
        """Make the decoder for a device, with sources that are not loaded yet.

        Args:
            make_layout: the device's layout for trees up to these bounds.
            draft_model_class: how draft models run on the device.
            batched_rules: whether rules look at all nodes at once.
            limits: of the engine.

        """
        method = self.method(batched_rules)
        layout = make_layout(largest_trees(method, bool(self.config.models)))
        self.decoder = self.decoder_class(
            method, self._sources(draft_model_class), layout, limits, self.stats
        )
        return self.decoder

    def method(self, batched: bool) -> Method:
        """How trees are drawn and verified."""
        trees = self.config.scheduled()
        return Method(
            schedule=AdaptiveSchedule(trees),
            proposers=[tree.config.proposer() for tree in trees],
            rule=rule_of(self.config),
            batched=batched,
            max_trees=self.config.max_trees,
        )

    def _sources(self, draft_model_class: type[PagedDraftModel]) -> list[DraftSource]:
        """What the method's proposers draw from, in the spec-config's order."""
        self.draft_models = [
            draft_model_class(
                self.vllm_config, model, f"draft_model_{index}", self.stats
            )
            for index, model in enumerate(self.config.models)
        ]
        sources: list[DraftSource] = [*self.draft_models]
        if self.config.head is not None:
            self.head = EngineHead(self.vllm_config, self.config.head, self.stats)
            sources.append(self.head)
        index = self.config.text_index()
        if index is not None:
            sources.append(index)
        return sources

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the draft models or the head; vLLM has just loaded the target."""
        for draft_model in self.draft_models:
            draft_model.load()
        if self.head is not None:
            self.head.load(target_model)

    def propose(self, batch: EmittedBatch) -> Proposal | None:
        """Draw the next trees at the end of a step."""
        return self.decoder.draft(batch)


def rule_of(config: MethodConfig) -> Rule:
    """How sampled requests' trees are verified."""
    typical = config.lossy_typical_acceptance
    if typical is not None:
        return TypicalAcceptance(typical.epsilon, typical.delta).rule
    return RULES[config.rule]


def largest_trees(method: Method, read_by_models: bool) -> LargestTrees:
    """Bounds of all trees of a method's schedule."""
    sizes = [proposer.sizes for proposer in method.proposers]
    return LargestTrees(
        max_nodes=max(s.max_nodes for s in sizes),
        max_depth=max(s.max_depth for s in sizes),
        max_width=max(s.max_width for s in sizes),
        max_leaves=max(s.max_leaves for s in sizes),
        max_trees=method.max_trees,
        read_by_models=read_by_models,
    )
