"""The decoder's views of a fake engine's step, as an engine's adapter makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm_treespec.batch.views import (
    BlockTables,
    EmittedBatch,
    GroupBlocks,
    HiddenStates,
    PagedBatch,
    SamplingView,
    ScheduledBatch,
    TargetInputs,
    scheduler_room,
)
from vllm_treespec.sampling.penalties import PenaltyView
from vllm_treespec.sampling.texts import TextView
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import BLOCK_SIZE, NO_PENALTY, kv_slots

# Buffers of an engine are longer than a batch.
SPARE = [0, 0, 0]
# Tokens that layers of groups after the first see.
WINDOW = 7


@dataclass
class Step:
    """What is known of the running step, by place in the batch."""

    requests: list[Request]
    num_tokens: list[int]
    drafts: list[list[int]]
    # int64 [num_reqs], place in the batch of the request that was scheduled first, ...
    in_turn: np.ndarray
    # None: the scheduler preempted requests, as under priorities
    token_budget: int | None
    # per query row, the text that it ends
    texts: list[list[int]] = field(default_factory=list)

    def scheduled_batch(self, slots: np.ndarray, habits: Habits) -> ScheduledBatch:
        """The step before the target's forward."""
        num_computed = ints(r.num_computed for r in self.requests)
        room = np.empty_like(num_computed)
        room[self.in_turn] = scheduler_room(
            ints(self.num_tokens)[self.in_turn],
            num_computed[self.in_turn],
            self.token_budget,
            habits.max_model_len,
        )
        return ScheduledBatch(
            slots=slots,
            num_computed=num_computed,
            num_scheduled=ints(self.num_tokens),
            num_drafts=ints(map(len, self.drafts)),
            draft_token_ids=ints(token for row in self.drafts for token in row),
            room=room,
            num_rows=1 + ints(map(len, self.drafts)),
        )

    def target_inputs(self, max_blocks: int, habits: Habits) -> TargetInputs:
        """Inputs of the target as if all drafts were chains."""
        tokens: list[int] = []
        positions: list[int] = []
        logits_indices: list[int] = []
        for request, num_tokens, drafts in zip(
            self.requests, self.num_tokens, self.drafts, strict=True
        ):
            places = np.arange(request.num_computed, request.num_computed + num_tokens)
            tokens += [(request.token_ids + drafts)[place] for place in places]
            positions += places.tolist()
            logits_indices += range(len(tokens) - 1 - len(drafts), len(tokens))
        starts = torch.tensor([0, *self.num_tokens]).cumsum(0)
        context_lens = torch.tensor([r.num_computed for r in self.requests])
        return TargetInputs(
            input_ids=torch.tensor(tokens + SPARE).int(),
            positions=(torch.tensor(positions + SPARE), self.axes(positions)),
            logits_indices=torch.tensor(logits_indices).int(),
            batch=PagedBatch(
                query_start_loc=starts.int(),
                context_lens=context_lens.int(),
                groups=tuple(
                    self.group_blocks(group, max_blocks, habits)
                    for group in range(habits.num_groups)
                ),
            ),
        )

    def group_blocks(self, group: int, max_blocks: int, habits: Habits) -> GroupBlocks:
        """Blocks and slots of the batch in a group."""
        slots: list[int] = []
        rows = [blocks_in(group, request, habits) for request in self.requests]
        for row, request, num_tokens in zip(
            rows, self.requests, self.num_tokens, strict=True
        ):
            places = np.arange(request.num_computed, request.num_computed + num_tokens)
            slots += kv_slots(row, places).tolist()
        table = padded_rows(rows, max_blocks)
        return GroupBlocks(torch.from_numpy(table), torch.tensor(slots))

    def axes(self, positions: list[int]) -> Tensor:
        """Positions with three axes, other ones than the tokens before have.

        Returns:
            int64 [3, num_tokens].

        """
        first_blocks = [request.blocks[0] for request in self.requests]
        shifts = np.repeat(first_blocks, self.num_tokens)
        return (torch.tensor(positions) - torch.from_numpy(shifts)).repeat(3, 1)

    def block_table(self, max_blocks: int) -> np.ndarray:
        """Blocks of the batch, int32 [num_reqs, max_blocks]."""
        return padded_rows([r.blocks for r in self.requests], max_blocks)

    def sampling(self) -> SamplingView:
        """Sampling parameters of the batch."""
        host = np.array([r.temperature for r in self.requests], dtype=np.float32)
        temperature = torch.from_numpy(host) if host.any() else None
        texts = [r.token_ids for r in self.requests]
        num_prompt = [r.num_prompt for r in self.requests]
        strengths = [r.penalties for r in self.requests]
        penalties = None
        if any(strength != NO_PENALTY for strength in strengths):
            penalties = penalty_view(texts, num_prompt, strengths)
        return SamplingView(
            host, temperature, None, None, text_view(texts, num_prompt), penalties
        )

    def emitted_batch(
        self,
        emitted: list[list[int]],
        before: ScheduledBatch,
        hidden: HiddenStates,
        max_model_len: int,
    ) -> EmittedBatch:
        """The step after its tokens were emitted and appended."""
        table = self.block_table(-(-max_model_len // BLOCK_SIZE))
        token_ids = np.full((len(self.requests), max_model_len), -9, dtype=np.int32)
        for row, request in zip(token_ids, self.requests, strict=True):
            row[: len(request.token_ids)] = request.token_ids
        return EmittedBatch(
            slots=before.slots,
            num_computed=before.num_computed,
            num_scheduled=before.num_scheduled,
            num_emitted=ints(map(len, emitted)),
            num_tokens=ints(len(r.token_ids) for r in self.requests),
            token_ids=token_ids,
            sampling=self.sampling(),
            blocks=BlockTables(
                host_table=table,
                device_table=torch.from_numpy(table),
                num_blocks=ints(len(r.blocks) for r in self.requests),
            ),
            hidden=hidden,
        )


def blocks_in(group: int, request: Request, habits: Habits) -> list[int]:
    """A request's blocks in a group: those before a window are block 0, as in vLLM."""
    if group == 0:
        return request.blocks
    num_free = max(0, request.num_computed + 1 - WINDOW) // BLOCK_SIZE
    kept = [block + group * habits.num_blocks for block in request.blocks[num_free:]]
    return [0] * num_free + kept


def first_seen(group: int, length: int) -> int:
    """First token that the last one of so many sees in a group."""
    return 0 if group == 0 else max(0, length - WINDOW)


def penalty_view(
    texts: list[list[int]],
    num_prompt: Sequence[int],
    strengths: Sequence[Sequence[float]],
) -> PenaltyView:
    """Penalties for repetition, frequency and presence, and the texts so far."""
    repetition, frequency, presence = np.array(strengths, dtype=np.float32).T
    return PenaltyView(repetition, frequency, presence, text_view(texts, num_prompt))


def text_view(texts: list[list[int]], num_prompt: Sequence[int]) -> TextView:
    """Texts so far, and how long their prompts are."""
    return TextView(
        token_ids=padded_rows(texts, max(map(len, texts))),
        num_prompt_tokens=ints(num_prompt),
        num_tokens=ints(map(len, texts)),
    )


def padded_rows(rows: list[list[int]], width: int) -> np.ndarray:
    """A table of rows that end in zeros, int32 [len(rows), width]."""
    table = np.zeros((len(rows), width), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def ints(values: Iterable[int]) -> np.ndarray:
    """An array of integers, int64."""
    return np.array(list(values), dtype=np.int64)
