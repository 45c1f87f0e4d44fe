"""What goes into an engine's process and what comes out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from vllm_treespec.tools.soak.requests import SoakRequest


class SoakJob(BaseModel):
    """What one engine process is told to do."""

    # "plain", "trees" or "ties"
    side: str
    # arguments of vllm.LLM, speculative_config among them
    engine: dict[str, Any]
    requests: list[SoakRequest]
    # unfinished requests in the engine at most
    max_in_flight: int
    timeout_s: float = 7200.0

    @property
    def has_trees(self) -> bool:
        """Whether the engine drafts."""
        return "speculative_config" in self.engine


class Completion(BaseModel):
    """One of a request's answers as far as it came."""

    token_ids: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    # per token, by token id
    logprobs: list[dict[int, float]] | None = None


class Answer(BaseModel):
    """All that came for a request; an id that is answered twice has two."""

    id: str
    completions: list[Completion]
    # per prompt token after the first, by token id
    prompt_logprobs: list[dict[int, float]] | None = None
    aborted: bool = False


class End(BaseModel):
    """An engine's state after its last request, and what it counted."""

    seconds: float
    steps: int
    preemptions: int
    # prompt tokens looked up in the prefix cache, and found there
    prefix_queries: int
    prefix_hits: int
    # trees verified; None for a plain engine
    trees: int | None = None
    acceptance_length: float | None = None
    # the scheduler's KV blocks without the null block, and how many are free
    num_blocks: int
    free_blocks: int
    # where -> ids of requests it still holds
    leftovers: dict[str, list[str]] = {}
    # MiB of the process, at even distances
    memory: list[float] = []


class EngineRun(BaseModel):
    """One engine's whole run."""

    job: SoakJob
    start_seconds: float
    answers: list[Answer]
    end: End
