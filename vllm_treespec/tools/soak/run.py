"""A whole soak: plain vLLM, trees, comparison; each engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_treespec.atomic_files import replaced
from vllm_treespec.config import parse_spec_config
from vllm_treespec.tools.launch import EngineError, events_of
from vllm_treespec.tools.prompts import chat_tokens
from vllm_treespec.tools.soak import check
from vllm_treespec.tools.soak.records import Answer, End, EngineRun, SoakJob
from vllm_treespec.tools.soak.requests import Material, SoakRequest

ENGINE = "vllm_treespec.tools.soak.engine"
BLOCK_SIZE = 32

OnEvent = Callable[[str, dict[str, Any]], None]


class SoakError(RuntimeError):
    """An engine that failed; one line that names the requests in flight."""


class Settings(BaseModel):
    """What a soak is run with."""

    target: str
    spec: dict[str, Any]
    requests: int = 2000
    seed: int = 0
    max_num_seqs: int = 16
    kv_blocks: int = 32
    max_model_len: int = 320


class EngineSummary(BaseModel):
    """One engine's run in numbers."""

    requests: int
    aborted: int
    # tokens emitted, those of aborted requests included
    tokens: int
    memory_growth_mib: float | None
    start_seconds: float
    end: End


class Report(BaseModel):
    """What a soak found."""

    settings: Settings
    plain: EngineSummary
    trees: EngineSummary
    greedy_compared: int
    sampled_compared: int
    # None: the run was too short to tell
    checks: dict[str, bool | None]
    problems: list[check.Problem]
    # greedy answers that differ where two tokens are equally likely but for rounding
    ties: list[check.Difference]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return False not in self.checks.values()


def material(target: str, prompts: Sequence[str], max_model_len: int) -> Material:
    """Tokenise prompts, as conversations, with the target's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    conversations = [chat_tokens(tokenizer, prompt) for prompt in prompts]
    return Material.of(conversations, max_model_len)


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that both engines share."""
    return {
        "model": settings.target,
        "dtype": "float32",
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        # less than the longest prompt, so that prompts come in chunks, and room for a
        # tree of a dozen nodes for every request
        "max_num_batched_tokens": max(
            settings.max_model_len * 4 // 5, settings.max_num_seqs * 12
        ),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": settings.kv_blocks,
        "enable_prefix_caching": True,
        "enforce_eager": True,
    }


def soak(
    settings: Settings, requests: list[SoakRequest], out: Path, on_event: OnEvent
) -> Report:
    """Run both engines and check.

    Args:
        settings: what to run with.
        requests: what to send.
        out: folder that gets each engine's log and finished run, and ``soak.json``; if
            an earlier soak was cut, its finished runs are not done again.
        on_event: called with the side and its events: ``starting``, ``started``,
            ``progress``, ``answer``, ``failed``, ``end``, and ``kept`` for a run that
            was not done again.

    Raises:
        SoakError: when an engine fails.

    """
    report_file = out / "soak.json"
    if report_file.exists():
        for side in ("plain", "trees", "ties"):
            (out / f"{side}.json").unlink(missing_ok=True)
        report_file.unlink()
    shared = engine_arguments(settings)
    crowd = 2 * settings.max_num_seqs
    plain = run_or_reuse(
        SoakJob(
            side="plain",
            engine=shared,
            requests=[without_seed(request) for request in requests],
            max_in_flight=crowd,
        ),
        out,
        on_event,
    )
    trees = run_or_reuse(
        SoakJob(
            side="trees",
            engine={**shared, "speculative_config": settings.spec},
            requests=[*requests, *repeated(requests, settings.spec)],
            max_in_flight=crowd,
        ),
        out,
        on_event,
    )
    found = check.differences(requests, plain, trees)
    if found:
        again = run_or_reuse(tie_job(requests, found, shared), out, on_event)
        found = check.with_gaps(found, plain, again)
    report = make_report(settings, requests, plain, trees, found)
    report_file.write_text(report.model_dump_json(indent=2) + "\n")
    return report


def repeated(
    requests: Sequence[SoakRequest], spec: dict[str, Any]
) -> list[SoakRequest]:
    """Requests that an engine with trees gets once more without drafts.

    They are sampled by a seed. Where drafts are drawn there are none: the text without
    drafts is another one.
    """
    if not parse_spec_config(spec).rule.follows_noise:
        return []
    return [request.without_drafts() for request in requests if request.seeded]


def without_seed(request: SoakRequest) -> SoakRequest:
    """The request as plain vLLM can carry it.

    On the CPU, vLLM 0.32 ends with an error when the prompt of a seeded request comes
    in chunks: it rewinds a generator by an offset that only GPU generators have.
    """
    params = {name: v for name, v in request.params.items() if name != "seed"}
    return request.model_copy(update={"params": params})


def tie_job(
    requests: Sequence[SoakRequest],
    found: Sequence[check.Difference],
    shared: dict[str, Any],
) -> SoakJob:
    """Plain vLLM once more on the requests that differ, one at a time."""
    ids = {item.request for item in found}
    return SoakJob(
        side="ties",
        engine={**shared, "logprobs_mode": "processed_logprobs"},
        requests=[
            request.model_copy(
                update={
                    "params": {**request.params, "logprobs": 5},
                    "abort_after": None,
                }
            )
            for request in requests
            if request.id in ids
        ],
        max_in_flight=1,
    )


def make_report(
    settings: Settings,
    requests: Sequence[SoakRequest],
    plain: EngineRun,
    trees: EngineRun,
    found: Sequence[check.Difference],
) -> Report:
    """Check both runs, their differences given."""
    problems = [
        *check.check_engine(plain),
        *check.check_engine(trees),
        *check.logprob_problems(requests, plain, trees),
        *check.memory_problems(plain, trees),
    ]
    problems += [
        check.Problem(
            check=check.GREEDY,
            side="trees",
            request=item.request,
            detail=describe(item),
        )
        for item in found
        if not item.tie
    ]
    checks: dict[str, bool | None] = dict.fromkeys(check.CHECKS, True)
    sampled_compared = len(trees.job.requests) - len(requests)
    if not sampled_compared:
        del checks[check.SAMPLED]
    if None in [check.memory_growth(run.end.memory) for run in (plain, trees)]:
        checks[check.MEMORY] = None
    checks.update((problem.check, False) for problem in problems)
    return Report(
        settings=settings,
        plain=summarise(plain),
        trees=summarise(trees),
        greedy_compared=sum(request.greedy for request in requests),
        sampled_compared=sampled_compared,
        checks=checks,
        problems=problems,
        ties=[item for item in found if item.tie],
    )


def describe(item: check.Difference) -> str:
    """One line about a difference."""
    gap = "unknown" if item.gap is None else f"{item.gap:.5f}"
    return f"{item.detail}: {item.trees}, plain {item.plain} (gap {gap})"


def summarise(run: EngineRun) -> EngineSummary:
    """Put a run in numbers."""
    return EngineSummary(
        requests=len(run.answers),
        aborted=sum(answer.aborted for answer in run.answers),
        tokens=sum(
            len(part.token_ids) for answer in run.answers for part in answer.completions
        ),
        memory_growth_mib=check.memory_growth(run.end.memory),
        start_seconds=run.start_seconds,
        end=run.end.model_copy(update={"memory": run.end.memory[::10]}),
    )


def run_or_reuse(job: SoakJob, out: Path, on_event: OnEvent) -> EngineRun:
    """Run an engine, or take the run of the same job that ``out`` holds."""
    kept = out / f"{job.side}.json"
    if kept.is_file():
        try:
            run = EngineRun.model_validate_json(kept.read_text())
        except ValidationError:
            run = None
        if run is not None and run.job == job:
            on_event(job.side, {"event": "kept"})
            return run
    run = run_engine(job, out / f"{job.side}.log", on_event)
    with replaced(kept) as part:
        part.write_text(run.model_dump_json())
    return run


def run_engine(job: SoakJob, log: Path, on_event: OnEvent) -> EngineRun:
    """Run a job in a process of its own.

    Raises:
        SoakError: when the process ends before the last request is answered.

    """
    on_event(job.side, {"event": "starting"})
    events: dict[str, Any] = {"answers": [], "in_flight": []}

    sent = events_of(ENGINE, job, log, timeout_s=job.timeout_s)
    try:
        with closing(sent):
            for event in sent:
                keep(event, events)
                on_event(job.side, event)
    except EngineError as error:
        flight = ", ".join(events["in_flight"]) or "none"
        reason = f"{job.side}: {error}; requests in flight: {flight}"
        raise SoakError(reason) from None
    return EngineRun(
        job=job,
        start_seconds=events["started"],
        answers=events["answers"],
        end=events["end"],
    )


def keep(event: dict[str, Any], events: dict[str, Any]) -> None:
    """Keep of an event what the run is made of."""
    if event["event"] == "started":
        events["started"] = event["seconds"]
    elif event["event"] == "answer":
        events["answers"].append(Answer.model_validate(event["answer"]))
    elif event["event"] == "progress":
        events["in_flight"] = event["in_flight"]
    elif event["event"] == "end":
        events["end"] = End.model_validate(event["end"])
