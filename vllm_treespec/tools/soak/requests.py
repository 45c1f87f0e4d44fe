"""Random requests: the same seed gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from vllm_treespec.config.request_options import drafts_allowed

MAX_TOKENS = 64
WAITS = (0, 0, 0, 0, 0, 0, 0, 1, 3)
STOPS = (".", ",", " the", "\n", "and", "ing a", "1", " is")
BAD_WORDS = (" the", "The", ".", " and", "I", " train", "was")
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no", "perhaps not"]},
    {"choice": ["red", "green", "blue"]},
    {"regex": r"[A-Z][a-z]{1,8}, [0-9]{1,3}"},
    {"regex": r"(ab|ba){2,6}"},
    {
        "json": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        }
    },
    {"grammar": 'root ::= ("left" | "right") (" " root)?'},
)
# What requests say of their trees; over HTTP it comes as text.
SAID: tuple[Any, ...] = (
    {"enabled": False},
    {"max_drafts": 1},
    {"max_drafts": 3},
    '{"max_drafts": 5}',
)
# Ends the id of a request that is sent once more without drafts.
WITHOUT_DRAFTS = "-without-drafts"


class SoakRequest(BaseModel):
    """One request, and when it arrives and goes."""

    id: str
    prompt: list[int]
    # arguments of vllm.SamplingParams; structured_outputs and output_kind by name
    params: dict[str, Any]
    output: Literal["cumulative", "delta", "final_only"] = "cumulative"
    # engine steps between the request before and this one
    wait_steps: int = 0
    # aborted once so many tokens are out, None: never
    abort_after: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the answer is determined."""
        return self.params["temperature"] == 0.0

    @property
    def seeded(self) -> bool:
        """Whether the answer is sampled by a seed."""
        return not self.greedy and "seed" in self.params

    def without_drafts(self) -> SoakRequest:
        """The same request once more, under another id."""
        params = {**self.params, **drafts_allowed(False)}
        name = self.id + WITHOUT_DRAFTS
        return self.model_copy(update={"id": name, "params": params})


@dataclass(frozen=True)
class Material:
    """What prompts are made of."""

    # whole conversations that wait for an answer
    conversations: Sequence[list[int]]
    # each at least ``max_model_len`` tokens long
    stories: Sequence[list[int]]

    @classmethod
    def of(cls, conversations: Sequence[list[int]], max_model_len: int) -> Material:
        """Make stories of the conversations, each starting with another one."""
        stories = []
        for start in range(len(conversations)):
            story: list[int] = []
            i = start
            while len(story) < max_model_len:
                story += conversations[i % len(conversations)]
                i += 1
            stories.append(story)
        return cls(conversations, stories)


def make_requests(
    count: int, seed: int, material: Material, max_model_len: int
) -> list[SoakRequest]:
    """Make random requests.

    Half are greedy. Two in three prompts begin like another one, so that the prefix
    cache is hit; lengths go from one token to ``max_model_len - 1``. Answers have at
    most 64 tokens, 19 in the mean.
    """
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = _prompt(rng, material, max_model_len)
        params = _params(rng, material)
        abort = rng.random() < 0.1
        output: Any = rng.choice(("cumulative", "delta", "final_only"))
        requests.append(
            SoakRequest(
                id=f"soak-{i}",
                prompt=prompt,
                params=params,
                # tokens are counted as they come
                output="delta" if abort else output,
                wait_steps=rng.choice(WAITS),
                abort_after=rng.randint(0, params["max_tokens"]) if abort else None,
            )
        )
    return requests


def _prompt(rng: random.Random, material: Material, max_model_len: int) -> list[int]:
    """A conversation, a story's beginning, or that with another ending."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(material.conversations)[: max_model_len - 1]
    story = rng.choice(material.stories)
    if kind < 0.33:
        return story[: max_model_len - rng.randint(1, 2)]
    length = round((max_model_len - 1) ** rng.random())
    if kind < 0.7:
        return story[:length]
    other = rng.choice(material.stories)
    shared = rng.randint(0, length)
    start = rng.randint(0, len(other) - (length - shared))
    return story[:shared] + other[start : start + length - shared]


def _params(rng: random.Random, material: Material) -> dict[str, Any]:
    """Draw sampling parameters; those not drawn stay at vLLM's defaults.

    min_p and logit_bias are left out: vLLM refuses them with speculative decoding.
    """
    params: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 1 + int(MAX_TOKENS * rng.random() ** 2.5),
    }
    if rng.random() < 0.5:
        params.update(_sampled(rng))
    if rng.random() < 0.04:
        return {**params, "structured_outputs": dict(rng.choice(GRAMMARS))}
    tokens = rng.choice(material.stories)
    drawn: list[tuple[float, dict[str, Any]]] = [
        (0.2, {"ignore_eos": True}),
        (0.1, {"stop": rng.sample(STOPS, rng.randint(1, 2))}),
        (0.05, {"stop": [rng.choice(STOPS)], "include_stop_str_in_output": True}),
        (0.08, {"stop_token_ids": rng.sample(tokens, 3)}),
        (0.08, {"min_tokens": rng.randint(1, params["max_tokens"])}),
        (0.2, {"logprobs": rng.randint(0, 5)}),
        (0.06, {"prompt_logprobs": rng.randint(0, 3)}),
        (0.05, {"presence_penalty": round(rng.uniform(-1, 1.5), 2)}),
        (0.05, {"frequency_penalty": round(rng.uniform(-0.5, 1), 2)}),
        (0.05, {"repetition_penalty": round(rng.uniform(0.9, 1.5), 2)}),
        (0.05, {"bad_words": rng.sample(BAD_WORDS, 2)}),
        (0.05, {"allowed_token_ids": sorted(set(rng.sample(tokens, 60)))}),
        (0.2, {"extra_args": {"treespec": rng.choice(SAID)}}),
    ]
    for share, option in drawn:
        if rng.random() < share:
            params.update(option)
    return params


def _sampled(rng: random.Random) -> dict[str, Any]:
    """Parameters of a request that is sampled."""
    params: dict[str, Any] = {"temperature": round(rng.uniform(0.3, 1.3), 2)}
    drawn: list[tuple[float, dict[str, Any]]] = [
        (0.3, {"top_k": rng.choice((1, 5, 20, 50))}),
        (0.3, {"top_p": round(rng.uniform(0.5, 0.98), 2)}),
        (0.5, {"seed": rng.getrandbits(31)}),
        (0.15, {"n": 2}),
    ]
    for share, option in drawn:
        if rng.random() < share:
            params.update(option)
    return params
