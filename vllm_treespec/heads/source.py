"""A draft head as a source: it drafts from the target's final hidden state."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vllm_treespec.batch.stats import DRAFT_FORWARD, StepStats
from vllm_treespec.heads import DraftHead
from vllm_treespec.sources.base import (
    DeviceSource,
    DraftModel,
    Reads,
    Roots,
    SampledTokens,
)


class HeadSource(DeviceSource):
    """The head of ``redrafter`` or ``medusa_tree``; it keeps nothing between steps."""

    reads = Reads(root_hidden=True)
    head: DraftHead

    def __init__(self, stats: StepStats) -> None:
        """Count the head's time; ``head`` is set when it is loaded."""
        self.stats = stats

    def blank_start(self, num_trees: int, max_blocks: int) -> dict[str, Tensor]:
        """Hidden states of zeros."""
        weight = next(self.head.parameters())
        return {"hidden": weight.new_zeros((num_trees, self.head.config.hidden_size))}

    def start(self, roots: Roots) -> dict[str, Tensor]:
        """The hidden states from which the roots were emitted."""
        assert roots.hidden is not None
        return {"hidden": roots.hidden}

    def start_unseen(self, sampled: SampledTokens) -> dict[str, Tensor]:
        """The same of a step that the host has not seen."""
        assert sampled.hidden is not None
        return {"hidden": sampled.hidden}

    def grow(
        self, start: Mapping[str, Tensor], root_token_ids: Tensor, depth: int
    ) -> DraftModel:
        """Begin trees; see ``DraftHead.draft``."""
        with self.stats.stage(DRAFT_FORWARD):
            draft = self.head.draft(start["hidden"], root_token_ids)
            return TimedDraft(draft, self.stats)


class TimedDraft:
    """The trees that a head grows in one step, with the time that takes."""

    def __init__(self, draft: DraftModel, stats: StepStats) -> None:
        """Wrap what the head began."""
        self._draft = draft
        self._stats = stats
        self.vocabulary = draft.vocabulary

    def root_logits(self) -> Tensor:
        """Logits below the roots, [num_reqs, draft_vocab_size]."""
        with self._stats.stage(DRAFT_FORWARD):
            return self._draft.root_logits()

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Read one more level; see ``DraftModel.extend``."""
        with self._stats.stage(DRAFT_FORWARD):
            return self._draft.extend(token_ids, parents)
