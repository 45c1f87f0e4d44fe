"""What vLLM's V2 sampler changes in logits by the text before, for nodes of trees.

The stock classes read the rows of a request as a chain. Those here add to them what
is different where a tree branches; all state of requests stays the stock classes'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState, apply_bad_words
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, apply_penalties
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from vllm_treespec.trees.node_texts import NodeTexts

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from vllm_treespec.batch.matching import PlacedTrees
    from vllm_treespec.step.decoder import TreeDecoder

# that stock gives the token which ends the thinking
FORCED = 1.0e9


class StepTexts:
    """Gives the texts of the running step's trees, made once where they are read."""

    def __init__(self, decoder: TreeDecoder) -> None:
        """Take the decoder, which has the trees."""
        self.decoder = decoder
        self._trees: PlacedTrees | None = None
        self._texts: NodeTexts

    def of_rows(self, num_rows: int) -> NodeTexts | None:
        """Texts of all rows; None if each row has those before it as its path."""
        trees = self.decoder.trees
        if trees is None or not trees.branching:
            return None
        if trees is not self._trees:
            proposer = self.decoder.method.proposers[trees.tree_index]
            self._texts = NodeTexts.of_trees(
                trees.tree, trees.root_rows, num_rows, proposer.sizes.max_depth
            )
            self._trees = trees
        return self._texts


class TreePenalties(PenaltiesState):
    """Penalties that count the drafts on a node's own path."""

    texts: StepTexts

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Penalise by the committed texts, then once more the tokens of each path.

        For the latter stock's kernel gets a vocabulary that is the path, so that both
        compute alike.
        """
        if not self.use_penalty[ctx.idx_mapping_np].any():
            return logits
        texts = self.texts.of_rows(len(logits))
        if texts is None:
            return super().apply(logits, ctx)
        paths, reqs = texts.paths, ctx.expanded_idx_mapping.long()
        # The first token fills short paths; roots fill theirs with any token.
        tokens = torch.where(paths < 0, paths[:, :1], paths).clamp(min=0)
        of_path = logits.gather(1, tokens)
        roots = torch.zeros_like(ctx.expanded_local_pos)
        super().apply(logits, replace(ctx, expanded_local_pos=roots))
        on_path = (tokens[:, :, None] == paths[:, None]).sum(dim=2, dtype=torch.int32)
        apply_penalties(
            of_path,
            torch.arange(len(reqs), device=reqs.device),
            ctx.input_ids,
            roots,
            self.repetition_penalty.gpu[reqs],
            self.frequency_penalty.gpu[reqs],
            self.presence_penalty.gpu[reqs],
            # A token that the output holds may be in the prompt or not.
            reqs.new_zeros((len(reqs), 1 + paths.shape[1] // 32), dtype=torch.int32),
            self.output_bin_counts[reqs[:, None], tokens] + on_path,
        )
        is_root = texts.depths[:, None] == 0
        return logits.scatter_(
            1, tokens, torch.where(is_root, logits.gather(1, tokens), of_path)
        )


class TreeBadWords(BadWordsState):
    """Bad words that begin in the output and end behind a node's own path."""

    texts: StepTexts
    # int64 [max_num_reqs], tokens of each request's longest word
    longest: np.ndarray

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note how much of a text its words are compared with."""
        words = sampling_params.bad_words_token_ids or ()
        self.longest[req_idx] = max(map(len, words), default=0)
        return super().add_request(req_idx, sampling_params)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Forbid the words' last tokens; each row is a request of its own for that."""
        longest = int(self.longest[ctx.idx_mapping_np].max())
        if not longest:
            return logits
        texts = self.texts.of_rows(len(logits))
        if texts is None:
            return super().apply(logits, ctx)
        states, reqs = self.req_states, ctx.expanded_idx_mapping.long()
        num_tokens = states.total_len.gpu[reqs]
        tails = texts.tails(longest, states.all_token_ids.gpu, reqs, num_tokens)
        num_output = num_tokens + texts.depths - states.prompt_len.gpu[reqs]
        apply_bad_words(
            logits,
            torch.arange(len(reqs), device=reqs.device),
            self.bad_word_token_ids.gpu[reqs],
            self.bad_word_offsets.gpu[reqs],
            self.num_bad_words.gpu[reqs],
            tails,
            (longest - num_output).clamp(min=0),
            torch.full_like(num_output, longest),
            ctx.input_ids,
            torch.zeros_like(ctx.expanded_local_pos),
            int(self.num_bad_words.np[ctx.idx_mapping_np].max()),
        )
        return logits


class TreeThinkingBudget(ThinkingBudgetState):
    """A thinking budget that counts the drafts on a node's own path."""

    texts: StepTexts

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Force a token where the budget is spent: roots by stock, nodes here."""
        if not self.enabled or not self.use_thinking_budget[ctx.idx_mapping_np].any():
            return
        texts = self.texts.of_rows(len(logits))
        if texts is None:
            super().apply(logits, ctx)
            return
        ends = self.reasoning_end_token_ids.long().expand(len(logits), -1)
        before = logits.gather(1, ends)
        # It also notes the last markers of the committed texts.
        super().apply(logits, ctx)
        forced = self._forced(texts, ctx.expanded_idx_mapping.long())
        of_nodes = before.masked_fill(ends == forced[:, None], FORCED)
        is_root = texts.depths[:, None] == 0
        logits.scatter_(1, ends, torch.where(is_root, logits.gather(1, ends), of_nodes))

    def _forced(self, texts: NodeTexts, reqs: Tensor) -> Tensor:
        """The token that each row must emit, int64 [num_rows]; -1: none.

        Args:
            texts: of the rows.
            reqs: int64 [num_rows], the runner's rows of their requests.

        """
        start = self.reasoning_start_token_ids
        end = self.natural_reasoning_end_token_ids
        forced = self.reasoning_end_token_ids
        states, num_tokens = self.req_states, self.req_states.total_len.gpu[reqs]
        # every marker that ends in a draft, or the whole forced end
        length = max(texts.paths.shape[1] + max(len(start), len(end)), len(forced))
        tails = texts.tails(length, states.all_token_ids.gpu, reqs, num_tokens)
        num_tokens = num_tokens + texts.depths
        begin = num_tokens - length
        last_start = torch.maximum(
            self.cached_last_start[reqs], last_place(tails, start, begin)
        )
        last_end = torch.maximum(
            self.cached_last_end[reqs], last_place(tails, end, begin)
        )
        budget = self.thinking_token_budget.gpu[reqs]
        num_thought = num_tokens - last_start - len(start)
        is_spent = (budget >= 0) & (num_thought >= budget)
        is_spent &= (last_start >= 0) & (last_start > last_end)
        num_emitted = torch.zeros_like(num_tokens)
        for number in range(1, len(forced)):
            emitted = (tails[:, -number:] == forced[:number]).all(dim=1)
            num_emitted.masked_fill_(emitted & (num_tokens >= number), number)
        return torch.where(is_spent, forced[num_emitted].long(), -1)


def last_place(tails: Tensor, marker: Tensor, begin: Tensor) -> Tensor:
    """Where the last marker in the ends of some texts begins; negative: nowhere.

    Args:
        tails: int64 [num_rows, length].
        marker: int [n], its tokens.
        begin: int64 [num_rows], place of the first token of ``tails`` in the text,
            negative where that is shorter.

    Returns:
        int64 [num_rows].

    """
    found = (tails.unfold(1, len(marker), 1) == marker).all(dim=2)
    place = begin[:, None] + torch.arange(found.shape[1], device=begin.device)
    return place.masked_fill(~found, -1).amax(dim=1)


def read_paths(sampler: Sampler, texts: StepTexts) -> None:
    """Let what the sampler applies after a node depend on its path alone.

    To be called before there are requests.
    """
    classes = {
        PenaltiesState: TreePenalties,
        BadWordsState: TreeBadWords,
        ThinkingBudgetState: TreeThinkingBudget,
    }
    for state in (*sampler.logits_processors, sampler.thinking_budget_state):
        if type(state) in classes:
            # a second state would take as much memory as the first
            state.__class__ = classes[type(state)]
            state.texts = texts
        if isinstance(state, TreeBadWords):
            state.longest = np.zeros_like(state.num_bad_words.np, dtype=np.int64)
