"""Jobs for the engines of the support matrix, beside those of its rows."""

from collections.abc import Callable
from typing import Any

from tests.engine.sampled import with_and_without_trees
from tests.engine.support import ROWS
from tests.engine.support_checks import BASE, MAX_MODEL_LEN, TEXTS, Request, Same
from tests.engine.support_requests import ASK, PERSON

FREE = {**BASE, "ignore_eos": True}
SEEDS = (5, 6, 7, 8)
STRUCTURED = {"structured_outputs": {"json": PERSON}, "max_tokens": 60}


def job_of(check: Same, encode: Callable[[str | int], list[int]]) -> dict:
    """The job of a row."""
    texts = check.texts or TEXTS
    prompts = [encode(t) for t in texts[: len(check.params)]]
    base = {} if check.job.get("run") == "beams" else BASE
    params: Any = [{**base, **p} for p in check.params]
    if check.job.get("run") == "beams":
        (params,) = params
    return {"prompts": prompts, "params": params, "max_in_flight": 64, **check.job}


def usual_jobs(encode: Callable[[str | int], list[int]]) -> dict[str, dict]:
    """Jobs beside the rows' for the engine with plenty of room."""
    prompt = encode(TEXTS[0])
    sampled = {**FREE, "temperature": 0.8}
    seeded: dict = {
        "prompts": [prompt] * len(SEEDS),
        "params": [{**sampled, "seed": seed} for seed in SEEDS],
    }
    streams = [encode(t) for t in (*TEXTS, TEXTS[0])]
    return {
        "seeds alone": {**seeded, "max_in_flight": 1},
        "seeds together": {**seeded, "max_in_flight": 8},
        "n": {
            "prompts": [prompt, encode(TEXTS[1])],
            "params": [{**sampled, "seed": SEEDS[0], "n": 3}, FREE],
            "max_in_flight": 2,
        },
        "abort": {
            "prompts": streams,
            "params": FREE,
            "run": "stream",
            "abort_after": [None, 4, None, 9],
        },
        "prefix": {
            "prompts": [encode(200), encode(200) + encode(" And then")],
            "params": FREE,
            "max_in_flight": 1,
        },
        "grammars": {
            "prompts": [encode(ASK)] * 4,
            "params": [
                {"temperature": t, "seed": 1 + i, **STRUCTURED}
                for i, t in enumerate((0.0, 1.0, 1.0, 0.7))
            ],
            "max_in_flight": 4,
        },
        "at the limit": {
            "prompts": [encode(MAX_MODEL_LEN), encode(MAX_MODEL_LEN + 1)],
            "params": BASE,
            "run": "refused",
        },
    }


def tight_jobs(encode: Callable[[str | int], list[int]]) -> dict[str, dict]:
    """Jobs beside the rows' for the engine with a small KV cache."""
    prompts = [encode(60 + i) for i in range(5)]
    texts = [encode(t) for t in TEXTS]
    trees, plain = with_and_without_trees(prompts, 8, max_tokens=60)
    return {
        "sampled preemption": trees,
        "sampled, no drafts": {**plain, "max_in_flight": 1},
        "preemption": {
            "prompts": prompts,
            "params": {**FREE, "max_tokens": 60},
            "max_in_flight": 8,
        },
        "lora": {
            "prompts": texts * 2,
            "params": FREE,
            "lora": [True] * 3 + [False] * 3,
            "max_in_flight": 8,
        },
    }


def refused_job(encode: Callable[[str | int], list[int]]) -> dict:
    """Requests that vLLM refuses under speculative decoding."""
    params = [r.check.params for r in ROWS if isinstance(r.check, Request)]
    prompts = [encode(TEXTS[0])] * len(params)
    return {"prompts": prompts, "params": params, "run": "refused"}
