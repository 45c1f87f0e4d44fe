"""What must hold after a soak; no engine."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from vllm_treespec.tools.soak.records import Answer, Completion, End, EngineRun
from vllm_treespec.tools.soak.requests import WITHOUT_DRAFTS, SoakRequest

# Two tokens this close in log probability may change places with the batch's shape.
TIE_GAP = 1e-3
LOGPROB_TOLERANCE = 5e-3
MAX_GROWTH_MIB = 64.0
# A thousand engine steps: for a few hundred, an engine still touches new memory.
MIN_SAMPLES = 200

ANSWERED = "every request answered once"
PARAMETERS = "answers are what was asked for"
GREEDY = "greedy answers equal plain vLLM's"
SAMPLED = "sampled answers equal those without drafts"
LOGPROBS = "log probabilities equal plain vLLM's"
BLOCKS = "every KV block free"
LEFTOVERS = "no request left in the engine"
MEMORY = f"memory grew less than {MAX_GROWTH_MIB:.0f} MiB more than plain vLLM's"
PREEMPTED = "preemption happened"
DRAFTED = "trees were drafted all the time"
CHECKS = (
    *(ANSWERED, PARAMETERS, GREEDY, SAMPLED, LOGPROBS),
    *(BLOCKS, LEFTOVERS, MEMORY, PREEMPTED, DRAFTED),
)


class Problem(BaseModel):
    """One thing that does not hold."""

    check: str
    # "plain" or "trees"
    side: str
    # None for what concerns the whole engine
    request: str | None = None
    detail: str


class Difference(BaseModel):
    """An answer that is not the one without trees."""

    request: str
    # the first token that differs, and what the two say; None where one has ended
    position: int
    plain: int | None
    trees: int | None
    detail: str
    # difference in log probability of the two tokens, None where unknown
    gap: float | None = None

    @property
    def tie(self) -> bool:
        """Whether the two tokens are equally likely but for rounding."""
        return self.gap is not None and self.gap <= TIE_GAP


def check_engine(run: EngineRun) -> list[Problem]:
    """Check one engine's run on its own."""
    requests = run.job.requests
    found = [
        *check_answered(requests, run.answers),
        *check_parameters(requests, run),
        *check_sampled(requests, run.answers),
        *check_end(run.end),
        *check_drafted(requests, run.end),
    ]
    return [Problem(side=run.job.side, **problem) for problem in found]


def check_answered(
    requests: Sequence[SoakRequest], answers: Sequence[Answer]
) -> Iterator[dict[str, Any]]:
    """Find requests that are missing, answered twice or were never sent."""
    counts = Counter(answer.id for answer in answers)
    for request in requests:
        count = counts.pop(request.id, 0)
        if count != 1:
            detail = f"answered {count} times"
            yield {"check": ANSWERED, "request": request.id, "detail": detail}
    for unknown in counts:
        detail = "answered, but never sent"
        yield {"check": ANSWERED, "request": unknown, "detail": detail}


def check_parameters(
    requests: Sequence[SoakRequest], run: EngineRun
) -> Iterator[dict[str, Any]]:
    """Find answers that are not what the request's parameters ask for."""
    wanted = {request.id: request for request in requests}
    max_model_len = run.job.engine["max_model_len"]
    for answer in run.answers:
        if answer.id not in wanted:
            continue
        request = wanted[answer.id]
        room = min(request.params["max_tokens"], max_model_len - len(request.prompt))
        for part in answer.completions:
            for detail in parameter_problems(request, part, answer.aborted, room):
                yield {"check": PARAMETERS, "request": request.id, "detail": detail}


def parameter_problems(
    request: SoakRequest, part: Completion, aborted: bool, room: int
) -> Iterator[str]:
    """Say what is wrong with one answer, which may have ``room`` tokens.

    An aborted one may end anywhere.
    """
    params, tokens = request.params, part.token_ids
    min_tokens = params.get("min_tokens", 0)
    if len(tokens) > room:
        yield f"{len(tokens)} tokens, at most {room} were to come"
    if part.finish_reason is None and not aborted:
        yield "it never finished"
    if part.finish_reason == "length" and len(tokens) != room:
        yield f"ended for length at {len(tokens)} tokens of {room}"
    if part.finish_reason == "stop" and len(tokens) < min_tokens:
        yield f"stopped at {len(tokens)} tokens, not before {min_tokens}"
    if part.finish_reason not in (None, "length", "stop"):
        yield f"finish reason {part.finish_reason}"
    allowed = params.get("allowed_token_ids")
    if allowed and not set(tokens) <= set(allowed):
        yield f"tokens that were not allowed: {sorted(set(tokens) - set(allowed))}"
    if min_tokens == 0:
        if set(tokens[:-1]) & set(params.get("stop_token_ids", ())):
            yield "went on after a stop token"
        if not params.get("include_stop_str_in_output"):
            for stop in params.get("stop", ()):
                if stop in part.text:
                    yield f"the text holds the stop string {stop!r}"
    if "logprobs" in params and tokens:
        yield from _broken_logprobs(part, params["logprobs"])
    if "structured_outputs" in params and part.finish_reason == "stop":
        grammar = params["structured_outputs"]
        if not follows(grammar, part.text):
            yield f"{part.text!r} does not follow {grammar}"


def _broken_logprobs(part: Completion, count: int) -> Iterator[str]:
    if part.logprobs is None or len(part.logprobs) != len(part.token_ids):
        found = "no" if part.logprobs is None else len(part.logprobs)
        yield f"{found} log probabilities for {len(part.token_ids)} tokens"
        return
    for token, position in zip(part.token_ids, part.logprobs, strict=True):
        if token not in position or len(position) not in (count, count + 1):
            yield f"log probabilities of {sorted(position)} beside token {token}"
            return


def follows(grammar: dict[str, Any], text: str) -> bool:
    """Whether a text is what a structured output asks for."""
    if "choice" in grammar:
        return text in grammar["choice"]
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text) is not None
    if "json" in grammar:
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            return False
        return isinstance(found, dict) and set(found) == set(
            grammar["json"]["required"]
        )
    return set(text.split(" ")) <= {"left", "right"}


def check_sampled(
    requests: Sequence[SoakRequest], answers: Sequence[Answer]
) -> Iterator[dict[str, Any]]:
    """Compare seeded answers with those that the same requests got without drafts."""
    found = {answer.id: answer for answer in answers}
    for request in requests:
        plain = found.get(request.id + WITHOUT_DRAFTS)
        if plain is None or request.id not in found:
            continue
        trees = found[request.id]
        aborted = plain.aborted or trees.aborted
        for want, have in zip(plain.completions, trees.completions, strict=True):
            item = _difference(request.id, want, have, aborted)
            if item is not None:
                detail = f"{item.detail}: {item.trees}, without drafts {item.plain}"
                yield {"check": SAMPLED, "request": request.id, "detail": detail}


def check_end(end: End) -> Iterator[dict[str, Any]]:
    """Find blocks and requests that an engine did not give back."""
    if end.free_blocks != end.num_blocks:
        detail = f"{end.free_blocks} of {end.num_blocks} blocks are free"
        yield {"check": BLOCKS, "detail": detail}
    for place, ids in end.leftovers.items():
        detail = f"the {place} holds {', '.join(ids[:8])}"
        yield {"check": LEFTOVERS, "request": ids[0], "detail": detail}
    if end.preemptions == 0:
        detail = "no request was preempted: lower --kv-blocks"
        yield {"check": PREEMPTED, "detail": detail}


def check_drafted(
    requests: Sequence[SoakRequest], end: End
) -> Iterator[dict[str, Any]]:
    """Find an engine that hardly drafted, whose other checks then prove nothing."""
    if end.trees is not None and end.trees < 2 * len(requests):
        detail = f"{end.trees} trees verified; is the spec-config's schedule 'fixed'?"
        yield {"check": DRAFTED, "detail": detail}


def memory_problems(plain: EngineRun, trees: EngineRun) -> list[Problem]:
    """Find memory that trees take ever more of, and plain vLLM does not.

    Plain vLLM's own process grows too: by some 230 MiB over the last thousand of
    2,000 requests, with the answers that the soak keeps.
    """
    growth = memory_growth(trees.end.memory)
    if growth is None:
        return []
    more = growth - (memory_growth(plain.end.memory) or 0.0)
    if more < MAX_GROWTH_MIB:
        return []
    detail = f"{more:.0f} MiB more than plain over the second half of the run"
    return [Problem(check=MEMORY, side="trees", detail=detail)]


def memory_growth(samples: Sequence[float]) -> float | None:
    """MiB that the second half of a run added, None for a run too short to tell."""
    if len(samples) < MIN_SAMPLES:
        return None
    width = len(samples) // 10
    middle = len(samples) // 2
    return statistics.median(samples[-width:]) - statistics.median(
        samples[middle - width : middle]
    )


def differences(
    requests: Sequence[SoakRequest], plain: EngineRun, trees: EngineRun
) -> list[Difference]:
    """Compare the greedy answers; of aborted ones, what both have."""
    theirs = {answer.id: answer for answer in plain.answers}
    ours = {answer.id: answer for answer in trees.answers}
    found = []
    for request in requests:
        if request.greedy and request.id in theirs and request.id in ours:
            plain_answer, answer = theirs[request.id], ours[request.id]
            (want,), (have,) = plain_answer.completions, answer.completions
            aborted = plain_answer.aborted or answer.aborted
            difference = _difference(request.id, want, have, aborted)
            if difference is not None:
                found.append(difference)
    return found


def _difference(
    request: str, want: Completion, have: Completion, aborted: bool
) -> Difference | None:
    position = _first_difference(want, have)
    detail = ""
    if position < min(len(want.token_ids), len(have.token_ids)):
        detail = f"token {position} of {len(want.token_ids)} differs"
    elif aborted:
        return None
    elif len(want.token_ids) != len(have.token_ids):
        detail = f"{len(have.token_ids)} tokens, not {len(want.token_ids)}"
    elif want.finish_reason != have.finish_reason:
        detail = f"finished for {have.finish_reason}, not {want.finish_reason}"
    elif want.text != have.text:
        detail = f"same tokens, but {have.text!r}, not {want.text!r}"
    else:
        return None
    return Difference(
        request=request,
        position=position,
        plain=_at(want.token_ids, position),
        trees=_at(have.token_ids, position),
        detail=detail,
    )


def _first_difference(want: Completion, have: Completion) -> int:
    """First place where tokens differ, or the end of the shorter answer."""
    pairs = zip(want.token_ids, have.token_ids, strict=False)
    shortest = min(len(want.token_ids), len(have.token_ids))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def with_gaps(
    found: Sequence[Difference], plain: EngineRun, ties: EngineRun
) -> list[Difference]:
    """Set the gaps of differing tokens.

    ``ties`` are the same requests on plain vLLM once more, one at a time, with the log
    probabilities from which tokens are chosen.
    """
    theirs = {answer.id: answer.completions[0] for answer in plain.answers}
    again = {answer.id: answer.completions[0] for answer in ties.answers}
    return [
        item.model_copy(
            update={"gap": _gap(item, theirs[item.request], again[item.request])}
        )
        for item in found
    ]


def _gap(item: Difference, plain: Completion, again: Completion) -> float | None:
    """Gap of the two tokens, where the second plain run came the same way."""
    end = item.position
    same_way = again.token_ids[:end] == plain.token_ids[:end]
    if not same_way or not again.logprobs or end >= len(again.logprobs):
        return None
    position = again.logprobs[end]
    if item.plain not in position or item.trees not in position:
        return None
    return abs(position[item.plain] - position[item.trees])


def logprob_problems(
    requests: Sequence[SoakRequest], plain: EngineRun, trees: EngineRun
) -> list[Problem]:
    """Compare prompts' log probabilities, and those of greedy answers."""
    theirs = {answer.id: answer for answer in plain.answers}
    ours = {answer.id: answer for answer in trees.answers}
    found = []
    for request in requests:
        if request.id not in theirs or request.id not in ours:
            continue
        want, have = theirs[request.id], ours[request.id]
        details = []
        if "prompt_logprobs" in request.params:
            details.append(_unlike_prompts(request, want, have))
        if request.greedy and "logprobs" in request.params:
            details.append(_unlike_answers(want.completions[0], have.completions[0]))
        found += [
            Problem(check=LOGPROBS, side="trees", request=request.id, detail=detail)
            for detail in details
            if detail
        ]
    return found


def _unlike_prompts(request: SoakRequest, plain: Answer, trees: Answer) -> str | None:
    if plain.prompt_logprobs is None or trees.prompt_logprobs is None:
        if plain.aborted or trees.aborted or len(request.prompt) == 1:
            return None
        return "no log probabilities of the prompt"
    worst = _largest_gap(plain.prompt_logprobs, trees.prompt_logprobs)
    if len(plain.prompt_logprobs) != len(trees.prompt_logprobs):
        return "log probabilities of another number of prompt tokens"
    return f"the prompt's are {worst:.4f} apart" if worst > LOGPROB_TOLERANCE else None


def _unlike_answers(plain: Completion, trees: Completion) -> str | None:
    end = _first_difference(plain, trees)
    worst = _largest_gap((plain.logprobs or [])[:end], (trees.logprobs or [])[:end])
    return f"the answer's are {worst:.4f} apart" if worst > LOGPROB_TOLERANCE else None


def _largest_gap(
    want: Sequence[dict[int, float]], have: Sequence[dict[int, float]]
) -> float:
    """Largest difference of a token that both report."""
    gaps = (
        abs(a[token] - b[token])
        for a, b in zip(want, have, strict=False)
        for token in a.keys() & b.keys()
    )
    return max(gaps, default=0.0)
