"""What every proposer is and gets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_treespec.host_copies import on_device
from vllm_treespec.sampling.coupling import noise_of
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.plan import PLAIN_PLAN, StepPlan
from vllm_treespec.sources.base import DraftModel
from vllm_treespec.sources.continuations import Continuations
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source

# How likely drafts are accepted at least, where nothing else says which are worth it.
UNPRICED = 0.1


def tokens_of(columns: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Tokens of the target's vocabulary that columns stand for, int64, same shape."""
    return columns if vocabulary is None else vocabulary.take(columns)


@dataclass(frozen=True)
class ProposerInputs:
    """Everything a proposer may draw from, for the requests that want drafts."""

    # int64 [num_reqs], the last committed token of each request
    root_token_ids: Tensor
    sampling: SamplingTensors
    # float64 [num_reqs, Proposer.sizes.num_uniforms] in [0, 1)
    uniforms: Tensor
    # those of the method, in its order, begun when they are first looked at; none where
    # an index drafts alone
    draft_models: Sequence[DraftModel] = ()
    # draws in a graph what a proposer would draw from them; None: no graph fits
    replay: Callable[[Proposer, ProposerInputs], Draft | None] | None = None
    # int64 [num_reqs, at least max_depth], keys of the noise by which the target draws
    # the tokens after nodes of each depth (``uniforms.noise_keys``); None: drafts must
    # not depend on it
    noise_keys: Tensor | None = None
    # what the models drew before the host knew the roots, by this plan; None: nothing
    unseen_part: Draft | None = None
    # from these keys and tokens to the noise, float64
    noise_of: Callable[[Tensor, Tensor], Tensor] = noise_of
    # of each suffix index
    continuations: Sequence[Continuations] = ()
    # float64 [num_reqs], see ``log_min_claims``; None: they follow from the plan
    min_log_claims: Tensor | None = None
    # int64 [num_reqs], see ``max_drafts``; None: they follow from the plan
    num_drafts: Tensor | None = None
    # int64 [num_reqs], the deepest level that each tree may have; None: all levels
    levels: Tensor | None = None
    # what drafting may spend; only pruning is read of it here
    plan: StepPlan = PLAIN_PLAN
    # whether the host waits for a value, to leave out levels that are not worth it
    can_sync: bool = False

    def draw(self, proposer: Proposer) -> Draft:
        """Let a proposer draw from draft models, in a graph where one fits."""
        draft = None if self.replay is None else self.replay(proposer, self)
        return proposer.propose(self) if draft is None else draft

    @property
    def follows_noise(self) -> bool:
        """Whether ranked drafts follow the noise by which the target draws."""
        return self.noise_keys is not None and not self.sampling.all_greedy

    def min_claims(self, source: Source, min_probability: float | None) -> list[float]:
        """The claim that drafts of each tree have at least.

        Args:
            source: of the drafts.
            min_probability: at least this; None: what the plan says, and where it
                prunes nothing ``UNPRICED``.

        """
        if self.plan.prunes:
            return self.plan.min_claim(source, min_probability or 0.0)
        least = UNPRICED if min_probability is None else min_probability
        return [least] * len(self.root_token_ids)

    def log_min_claims(self, source: Source, min_probability: float | None) -> Tensor:
        """The logarithms of ``min_claims``, float64 [num_reqs]."""
        if self.min_log_claims is not None:
            return self.min_log_claims
        claims = self.min_claims(source, min_probability)
        logs = [math.log(claim) if claim else -math.inf for claim in claims]
        device = self.root_token_ids.device
        return on_device(torch.tensor(logs, dtype=torch.float64), device)

    def max_drafts(self) -> Tensor | None:
        """Draft tokens that each tree of a model may have, int64 [num_reqs].

        The rows of a step are shared out evenly; None: as many as the proposer says.
        """
        limits, max_rows = self.num_drafts, self.plan.max_rows
        if limits is not None or max_rows is None:
            return limits
        num_reqs = len(self.root_token_ids)
        return torch.full_like(self.root_token_ids, max(max_rows // num_reqs, 1))

    def within_levels(self, values: Tensor, level: int) -> Tensor:
        """Leave out the candidates of a level where trees are not that deep.

        Args:
            values: [num_reqs, ...], what ranks the candidates.
            level: of the candidates, from 1.

        Returns:
            the same with -inf for the candidates that are left out.

        """
        if self.levels is None:
            return values
        beyond = (self.levels < level).view(-1, *[1] * (values.dim() - 1))
        return values.masked_fill(beyond, -torch.inf)


class Proposer(ABC):
    """Draws a draft tree for every request of a batch.

    Attributes:
        sizes: how large its trees become.
        num_beam_tokens: tokens that a tree is made of before equal ones are merged;
            None: its nodes are all there is.
        min_probability: joint probability of a model's draft at least; None: what the
            plan says.
        can_end_early: whether a plan may let a model read fewer levels.
        reads_sampling: whether drafts depend on the requests' sampling parameters.
        draws_on_device: whether it draws by the device's work alone.

    """

    num_beam_tokens: int | None = None
    min_probability: float | None = 0.0
    can_end_early: bool = False
    reads_sampling: bool = True
    draws_on_device: bool = False
    sizes: TreeSizes

    def index_hits(self, plan: StepPlan, found: Continuations) -> Sequence[float]:
        """How likely an index drafts each request's next token; (): it is not known.

        Args:
            plan: of the step, which prunes.
            found: of the requests that draft.

        """
        return ()

    @property
    def graph_part(self) -> Proposer | None:
        """What draws from a draft model by the device's work alone; None: nothing does.

        So a CUDA graph can hold it, and it may draw before the host knows the roots.
        """
        return self if self.draws_on_device else None

    @abstractmethod
    def propose(self, inputs: ProposerInputs) -> Draft:
        """Draw one tree per request."""
