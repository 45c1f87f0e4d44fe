"""What happens in a world whatever is planned: its requests, texts and speed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Draft tokens of a request that does not limit its trees.
NO_LIMIT = 63
# Levels that a draw decides about at most.
MAX_DEPTH = 32


@dataclass(frozen=True)
class Text:
    """What an index, a model and fixed trees bring in a text.

    Attributes:
        name: of a class of requests; the best policy may draft for one class alone.
        repeats: how often an index finds a continuation.
        rates: one of them is drawn at each find: the claim of the first token, of each
            other token that of the one before it times the rate.
        length: tokens of a continuation.
        kept: accepted over claimed tokens of the index.
        rival: probability that a find has a second continuation beside it.
        rival_rate: its rate.
        sureness: one of them is drawn at each step: the claim of a model's first
            token, of each other token that of the one before it times it.
        model_kept: accepted over claimed probability of a model's level.
        level_accepted: how often one branch of a fixed tree's level is accepted.
        sampled_kept: factor of all rates of sampled requests.

    """

    name: str = "text"
    repeats: float = 0.0
    rates: Sequence[float] = (0.9,)
    length: int = 12
    kept: float = 1.0
    rival: float = 0.0
    rival_rate: float = 0.0
    sureness: Sequence[float] = (0.0,)
    model_kept: float = 1.0
    level_accepted: float = 0.0
    sampled_kept: float = 0.7


@dataclass(frozen=True)
class Request:
    """A running request; its slot is no other one's."""

    slot: int
    text: Text
    sampled: bool = False
    # draft tokens that its tree may have; 0: it does not draft
    limit: int = NO_LIMIT
    # tokens of its prompt
    prompt: int = 0

    @property
    def truth(self) -> float:
        """Factor of the rates at which its tokens are accepted."""
        return self.text.sampled_kept if self.sampled else 1.0


class Draw(NamedTuple):
    """What the text of a request holds at one step."""

    # rate of the index's continuation, 0: none; and of the one beside it
    rate: float
    rival: float
    # tokens of each continuation
    length: int
    # and those that would be accepted
    depth: int
    rival_depth: int
    # rate of a model's claims, and its tokens that would be accepted
    sure: float
    model_depth: int
    # uniform, decides how deep fixed trees are accepted
    luck: float


@dataclass(frozen=True)
class Step:
    """A step of all running requests."""

    phase: str
    requests: Sequence[Request]
    # of each request
    draws: Sequence[Draw]
    # whether the engine also reads a prompt, so that the step is not timed
    reads_prompt: bool
    # how much longer all forwards take by now
    pace: float


def depth_of(rate: float, luck: float, scale: float = 1.0) -> int:
    """Levels that are accepted: the n-th one if ``scale * rate ** n`` > ``luck``."""
    depth, left = 0, scale * rate
    while left > luck and depth < MAX_DEPTH:
        depth += 1
        left *= rate
    return depth


@dataclass
class Tape:
    """Records steps; equal seeds and calls record equal ones.

    Attributes:
        seed: of all that is random.
        drift: standard deviation of the logarithm of the pace.
        memory: steps after which the pace is another one.
        prompts: share of the steps that also read a prompt.

    """

    seed: int
    drift: float = 0.0
    memory: float = 1.0
    prompts: float = 0.05
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin without steps."""
        self.random = random.Random(self.seed)
        self.log_pace = 0.0
        self.slowness = 1.0
        self.num_slots = 0

    def join(
        self,
        text: Text,
        count: int = 1,
        sampled: bool = False,
        limit: int = NO_LIMIT,
        prompt: int = 0,
    ) -> list[Request]:
        """New requests of a text."""
        first, self.num_slots = self.num_slots, self.num_slots + count
        return [
            Request(slot, text, sampled, limit, prompt)
            for slot in range(first, self.num_slots)
        ]

    def run(self, num_steps: int, requests: Iterable[Request], phase: str = "") -> None:
        """Record steps of these requests; the best policy is that of their phase."""
        running = list(requests)
        for _ in range(num_steps):
            draws = [self._draw(request) for request in running]
            reads_prompt = self.random.random() < self.prompts
            pace = self.slowness * self._next_pace()
            self.steps.append(Step(phase, running, draws, reads_prompt, pace))

    def _next_pace(self) -> float:
        """A little faster or slower (an Ornstein-Uhlenbeck process)."""
        if self.drift:
            spread = self.drift * math.sqrt(2 / self.memory)
            change = self.random.gauss(0, spread) - self.log_pace / self.memory
            self.log_pace += change
        return math.exp(self.log_pace)

    def _draw(self, request: Request) -> Draw:
        """What a request's text holds at one step."""
        text, truth, source = request.text, request.truth, self.random
        rate = rival = 0.0
        depth = rival_depth = 0
        if text.repeats and source.random() < text.repeats:
            rate, luck = source.choice(text.rates), source.random()
            depth = min(depth_of(rate, luck, text.kept * truth), text.length)
            if text.rival and source.random() < text.rival:
                # Both do not begin alike: one of them is accepted at most.
                rival = text.rival_rate
                scale = min(text.kept * truth, 1.0)
                rival_depth = min(depth_of(rival, 1 - luck, scale), text.length)
                rival_depth *= depth == 0
        sure, model_depth = 0.0, 0
        if any(text.sureness):
            sure = source.choice(text.sureness)
            rate_of_model = min(sure * text.model_kept * truth, 1.0)
            model_depth = depth_of(rate_of_model, source.random())
        luck = source.random()
        return Draw(
            rate, rival, text.length, depth, rival_depth, sure, model_depth, luck
        )
