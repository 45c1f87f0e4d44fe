"""A draft head as a source: it drafts from the target's final hidden state."""

from __future__ import annotations

from torch import Tensor

from vllm_treespec.batch.stats import DRAFT_FORWARD, StepStats
from vllm_treespec.heads import DraftHead
from vllm_treespec.sources.base import DraftModel, ModelSource, Reads, Roots


class HeadSource(ModelSource):
    """The head of ``redrafter`` or ``medusa_tree``; it keeps nothing between steps."""

    reads = Reads(root_hidden=True)
    head: DraftHead

    def __init__(self, stats: StepStats) -> None:
        """Count the head's time; ``head`` is set when it is loaded."""
        self.stats = stats

    def begin(self, roots: Roots) -> DraftModel:
        """Begin the trees of a step; see ``DraftHead.draft``."""
        assert roots.hidden is not None
        with self.stats.stage(DRAFT_FORWARD):
            draft = self.head.draft(roots.hidden, roots.root_token_ids)
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
