"""A small scheduler with paged blocks, which does to trees what vLLM's may do."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_treespec.batch.forbidden import Forbidden
from vllm_treespec.testing.toy_models import BLOCK_SIZE, NO_PENALTY, texts_so_far


@dataclass(eq=False)
class Request:
    """A request on its way."""

    name: str
    # prompt, then output
    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    # whether it may draft trees
    drafts: bool = True
    # draft tokens that a tree of it may have
    max_drafts: int = 63
    # for repetition, frequency and presence
    penalties: tuple[float, float, float] = NO_PENALTY
    # what it must not emit
    forbidden: Forbidden | None = None
    num_computed: int = field(default=0, init=False)
    blocks: list[int] = field(default_factory=list, init=False)
    # the last tree that was drawn for it, without the root, and in which step
    proposed: list[int] = field(default_factory=list, init=False)
    parents: list[int] = field(default_factory=list, init=False)
    proposed_in: int = field(default=-1, init=False)
    num_preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Note where the output begins."""
        self.num_prompt = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        """Tokens emitted so far, those past the limit left out."""
        return self.token_ids[self.num_prompt :][: self.max_tokens]


@dataclass(frozen=True)
class Habits:
    """Limits of a scheduler, and how often it does what is not the rule."""

    # a tree comes back without its last nodes
    cut: float = 0.0
    # no drafts come back
    lose: float = 0.0
    # other drafts come back
    other: float = 0.0
    # a request is left out for a step; then its drafts come back late
    skip: float = 0.0
    preempt: float = 0.0
    # whether requests that begin alike share blocks
    share: bool = True
    token_budget: int = 64
    chunk: int = 64
    max_running: int = 8
    max_model_len: int = 96
    num_blocks: int = 96
    # KV cache groups; those after the first keep a window only
    num_groups: int = 1


@dataclass(frozen=True)
class Scheduled:
    """A request's share of a step."""

    request: Request
    num_tokens: int
    # the last ones of them
    drafts: list[int]


@dataclass
class StepPlan:
    """A step as the scheduler plans it."""

    # in the order in which they were scheduled
    scheduled: list[Scheduled] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # ended since the step before
    finished: list[Request] = field(default_factory=list)


class Blocks:
    """Blocks of the KV cache, shared by requests that begin alike."""

    def __init__(self, num_blocks: int) -> None:
        """Block 0 stays unused, as in vLLM."""
        self.users = [0] * num_blocks
        # number of the text that ends with a full block, and back
        self.block_of: dict[int, int] = {}
        self.text_of: dict[int, int] = {}
        self.free = deque(range(1, num_blocks))
        # how often a block was found that another request had filled
        self.num_shared = 0

    def take(self) -> int:
        """A block that nobody uses; it loses what it held."""
        block = self.free.popleft()
        self.users[block] = 1
        if block in self.text_of:
            del self.block_of[self.text_of.pop(block)]
        return block

    def shared(self, token_ids: Sequence[int]) -> list[int]:
        """Take the full blocks in which the beginning of a text already lies."""
        blocks: list[int] = []
        # The last token is computed anyway: its logits are wanted.
        for text in texts_so_far(token_ids[:-1])[BLOCK_SIZE - 1 :: BLOCK_SIZE]:
            block = self.block_of.get(int(text))
            if block is None:
                break
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
            self.num_shared += 1
            blocks.append(block)
        return blocks

    def keep(self, request: Request) -> None:
        """Let others share what the request's full blocks hold."""
        texts = texts_so_far(request.token_ids[: request.num_computed])
        ends = texts[BLOCK_SIZE - 1 :: BLOCK_SIZE]
        for block, text in zip(request.blocks, ends.tolist(), strict=False):
            if text not in self.block_of and block not in self.text_of:
                self.block_of[text] = block
                self.text_of[block] = text

    def release(self, request: Request) -> None:
        """Give a request's blocks back; what they hold stays until they are taken."""
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        request.blocks = []


class Scheduler:
    """First come, first served, in steps of a token budget."""

    def __init__(self, habits: Habits, seed: int) -> None:
        """Begin without requests."""
        self.habits = habits
        self.random = random.Random(seed)
        self.blocks = Blocks(habits.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []
        # drafts to send for a request instead of its own, once; for tests
        self.sends: dict[str, list[int]] = {}

    def schedule(self) -> StepPlan:
        """Plan a step."""
        plan = StepPlan(finished=self.finished)
        self.finished = []
        left = self.habits.token_budget
        preempted = [r for r in self.running if self._often(self.habits.preempt)]
        for request in preempted:
            self._preempt(request)
        plan.preempted = preempted
        for request in list(self.running):
            if not self._often(self.habits.skip):
                left -= self._schedule(request, left, plan)
        while self.waiting and left > 0 and not preempted and self._has_room():
            request = self.waiting.popleft()
            if self.habits.share:
                request.blocks = self.blocks.shared(request.token_ids)
            request.num_computed = len(request.blocks) * BLOCK_SIZE
            self.running.append(request)
            left -= self._schedule(request, left, plan)
            (plan.resumed if request.num_preemptions else plan.new).append(request)
        return plan

    def _often(self, share: float) -> bool:
        return self.random.random() < share

    def _has_room(self) -> bool:
        """Whether one more request may run, however long it is."""
        few = len(self.running) < self.habits.max_running
        return few and len(self.blocks.free) > self.habits.max_model_len // BLOCK_SIZE

    def _schedule(self, request: Request, left: int, plan: StepPlan) -> int:
        """Schedule one request if it fits; return how many tokens it takes."""
        drafts = self._sent(request)
        total = len(request.token_ids) + len(drafts)
        num_tokens = min(
            total - request.num_computed,
            left,
            self.habits.chunk,
            self.habits.max_model_len - 1 - request.num_computed,
        )
        if num_tokens <= 0:
            return 0
        end = request.num_computed + num_tokens
        if -(-end // BLOCK_SIZE) - len(request.blocks) > len(self.blocks.free):
            self._preempt(request)
            return 0
        while len(request.blocks) * BLOCK_SIZE < end:
            request.blocks.append(self.blocks.take())
        num_drafts = max(end - len(request.token_ids), 0)
        plan.scheduled.append(Scheduled(request, num_tokens, drafts[:num_drafts]))
        return num_tokens

    def _sent(self, request: Request) -> list[int]:
        """The drafts that come back for a request."""
        habits, drafts = self.habits, request.proposed
        if request.name in self.sends:
            return self.sends.pop(request.name)
        if not drafts or self._often(habits.lose):
            return []
        if self._often(habits.cut):
            return drafts[: self.random.randrange(1, len(drafts) + 1)]
        if self._often(habits.other):
            return [(token + 1) % 5 for token in drafts]
        return drafts

    def _preempt(self, request: Request) -> None:
        """Send a request back to wait, without its KV and drafts."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.blocks.release(request)
        request.num_computed = 0
        request.proposed = []
        request.num_preemptions += 1

    def update(self, request: Request) -> None:
        """Take in a request after a step; end it if it has all its tokens."""
        self.blocks.keep(request)
        long = len(request.token_ids) >= self.habits.max_model_len
        if long or len(request.token_ids) - request.num_prompt >= request.max_tokens:
            self.running.remove(request)
            self.blocks.release(request)
            self.finished.append(request)
