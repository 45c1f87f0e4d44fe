"""vLLM's scheduler, with grammar masks, sessions and metrics for draft trees."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_treespec.aids import Aid
from vllm_treespec.batch.matching import PADDING_TOKEN_ID
from vllm_treespec.batch.stats import Acceptance, StepCounts
from vllm_treespec.config import parse_spec_config
from vllm_treespec.metrics import open_counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")

WORD = 32
# A word of a mask in which every token is allowed.
ALL_ALLOWED = -1


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """Drafts on their way to the scheduler, with the trees that they form."""

    # request id -> parent of every node but the root, in the order of the drafts
    parents: dict[str, list[int]]
    # what the worker counted since its last drafts went to the scheduler
    counts: StepCounts = field(default_factory=StepCounts)


class TreeSchedulerMixin:
    """Counts draft trees for the metrics, and warns of a drafter that never helps.

    What a worker counted is added to the counters that the front-end shows
    (:mod:`vllm_treespec.metrics`), if the engine keeps statistics. It stands before
    one of vLLM's schedulers among a class' parents.
    """

    vllm_config: VllmConfig
    log_stats: bool
    requests: dict[str, Request]

    def __init__(self, *args: object, **options: object) -> None:
        """Make the stock scheduler."""
        super().__init__(*args, **options)
        self.counting = Aid("Counting draft trees", "their metrics stand still")
        self.counters = (
            self.counting.run(None, open_counters, self.vllm_config)
            if self.log_stats
            else None
        )
        # nodes and accepted tokens of trees that vLLM does not count
        self._left_out: list[tuple[int, int]] = []
        self._acceptance = Acceptance()
        self._drafter = drafter_of(self.vllm_config.additional_config["treespec"])

    def leave_out_ended(
        self, num_drafts: Mapping[str, int], output: ModelRunnerOutput
    ) -> None:
        """Note the trees of requests that have ended, which vLLM does not count.

        Args:
            num_drafts: by request, of the trees of a step.
            output: of the step.

        """
        for req_id, count in num_drafts.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                emitted = output.sampled_token_ids[output.req_id_to_index[req_id]]
                self._left_out.append((1 + count, len(emitted) - 1))

    def take_counts(self, counts: StepCounts) -> None:
        """Take in what a worker counted up to the step before."""
        counts, self._left_out = counts.without(self._left_out), []
        if self.counters is not None:
            self.counting.run(None, self.counters.add, counts)
        self.counting.run(None, self._watch_acceptance, counts)

    def _watch_acceptance(self, counts: StepCounts) -> None:
        """Warn once of a drafter of which nothing is accepted."""
        self._acceptance.add(counts)
        if self._drafter is not None and self._acceptance.is_missing:
            logger.warning(
                "None of %d draft tokens of %s was accepted. Answers are right, but "
                "drafting only slows them down. Likely reasons: it was made for "
                "another target, or for another version of this one; its tokenizer is "
                "another; its weights are damaged. Name another one as "
                "speculative_config 'model', or remove speculative_config",
                self._acceptance.drafts,
                self._drafter,
            )
            self._drafter = None


class TreeScheduler(TreeSchedulerMixin, Scheduler):
    """vLLM's scheduler, for which a structured output's drafts are a tree.

    The stock one reads drafts as a chain: it cuts them where they leave the grammar,
    and fills the masks along them. Here they stay whole and every node gets the mask
    after its own path. The target then gives forbidden drafts no probability, so that
    they are rejected by the rule that verifies all others. Requests without a tree
    are left to the stock scheduler.

    A session, whose prompt comes in parts, goes on where plain vLLM's goes on: drafts
    that were accepted behind the end of a turn are computed, but no part of the text.

    With the drafts comes what the worker counted. vLLM's counts are of the same trees:
    ours leaves out those of requests that ended while their step ran, vLLM's the
    padding in place of drafts.
    """

    def __init__(self, *args: object, **options: object) -> None:
        """Make the stock scheduler."""
        super().__init__(*args, **options)
        self._parents: dict[str, list[int]] = {}
        # requests whose drafts of the step are padding
        self._padded: set[str] = set()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take in the next drafts; those of the step before were sent, and are gone."""
        if isinstance(draft_token_ids, TreeDraftTokenIds):
            self._parents |= draft_token_ids.parents
            self.take_counts(draft_token_ids.counts)
        if not any(draft_token_ids.draft_token_ids):
            return
        self._parents = {r: p for r, p in self._parents.items() if r in self.requests}
        stock = DraftTokenIds([], [])
        for req_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(req_id)
            # Others have ended, or are sessions that wait for their next turn.
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            if (
                drafts
                and request.use_structured_output
                and not request.is_prefill_chunk
            ):
                request.spec_token_ids = drafts
            else:
                stock.req_ids.append(req_id)
                stock.draft_token_ids.append(drafts)
        super().update_draft_token_ids(stock)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step, and note which of its drafts only one side counts."""
        if self.counters is not None:
            self.counting.run(
                None, self._note_drafts, scheduler_output, model_runner_output
            )
        return super().update_from_output(scheduler_output, model_runner_output)

    def _note_drafts(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> None:
        """Note padding, which vLLM would count, and trees that it does not count."""
        drafts = scheduled.scheduled_spec_decode_tokens
        self._padded = {r for r, d in drafts.items() if d[0] == PADDING_TOKEN_ID}
        trees = {r: len(d) for r, d in drafts.items() if r not in self._padded}
        self.leave_out_ended(trees, output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a request's drafts, unless they are padding."""
        if request_id in self._padded:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def _handle_stopped_request(self, request: Request) -> bool:
        """Let a session go on behind the last token but one of its turn, as in vLLM.

        The stock scheduler counts as computed what was accepted and then cut off.
        """
        request.num_computed_tokens = min(
            request.num_computed_tokens, request.num_tokens - 1
        )
        return super()._handle_stopped_request(request)

    def get_grammar_bitmask(
        self, scheduler_output: SchedulerOutput
    ) -> GrammarOutput | None:
        """Masks of all structured outputs of the step, a row for every node."""
        trees = {
            req_id: drafts
            for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
            if self.requests[req_id].use_structured_output
            and drafts[0] != PADDING_TOKEN_ID
        }
        if not trees:
            return super().get_grammar_bitmask(scheduler_output)
        others = {
            req_id: count
            for req_id, count in scheduler_output.num_scheduled_tokens.items()
            if req_id not in trees
        }
        stock = super().get_grammar_bitmask(
            replace(scheduler_output, num_scheduled_tokens=others)
        )
        masks = [self._tree_masks(req_id, drafts) for req_id, drafts in trees.items()]
        sizes = [len(drafts) for drafts in trees.values()]
        if stock is None:
            return GrammarOutput(list(trees), np.concatenate(masks), sizes)
        assert stock.num_acceptable_drafts is not None
        return GrammarOutput(
            [*stock.structured_output_request_ids, *trees],
            np.concatenate([stock.grammar_bitmask, *masks]),
            [*stock.num_acceptable_drafts, *sizes],
        )

    def _tree_masks(self, req_id: str, drafts: list[int]) -> np.ndarray:
        """Masks of one request's tree, int32 [1 + num_drafts, num_words]."""
        backend = self.structured_output_manager.backend
        request = self.requests[req_id].structured_output_request
        assert backend is not None
        assert request is not None
        assert isinstance(request.grammar, StructuredOutputGrammar)
        masks = backend.allocate_token_bitmask(1 + len(drafts))
        fill_tree_masks(request.grammar, masks, drafts, self._parents[req_id])
        return masks.numpy()


def drafter_of(settings: dict[str, Any]) -> str | None:
    """The draft models or the head that a spec-config names, None: an index drafts."""
    config = parse_spec_config(settings)
    return " and ".join(filter(None, [*config.models, config.head])) or None


def fill_tree_masks(
    grammar: StructuredOutputGrammar,
    masks: Tensor,
    token_ids: Sequence[int],
    parents: Sequence[int],
) -> None:
    """Fill in which tokens a grammar allows after each node of a tree.

    The grammar is walked depth first, a token forward or back at a time, and is left
    in the state in which it was found. Everything is allowed after the end of a
    grammar, as in vLLM, and below forbidden tokens, which are never accepted.

    Args:
        grammar: in the state after the root.
        masks: int32 [1 + len(token_ids), num_words], changed in place.
        token_ids: of the nodes in level order, without the root.
        parents: of the same nodes, 0 is the root; further entries are not looked at.

    """
    children: list[list[int]] = [[] for _ in range(1 + len(token_ids))]
    for node, parent in enumerate(parents[: len(token_ids)], start=1):
        children[parent].append(node)

    def visit(node: int) -> None:
        if grammar.is_terminated():
            return
        grammar.fill_bitmask(masks, node)
        for child in children[node]:
            token = token_ids[child - 1]
            if is_allowed(masks[node], token) and grammar.accept_tokens("", [token]):
                visit(child)
                grammar.rollback(1)

    masks.fill_(ALL_ALLOWED)
    visit(0)


def is_allowed(mask: Tensor, token_id: int) -> bool:
    """Whether a mask, int32 [num_words], has the bit of a token."""
    return bool(int(mask[token_id // WORD]) >> (token_id % WORD) & 1)
