"""Runs one vLLM engine: jobs in as JSON, results out as JSON.

``main`` is called in a process of the engine's own. A job holds prompts (token ids),
sampling parameters (one dict, or one per prompt) and how many run at once. It may
also say, per prompt: ``priorities``, ``lora`` (whether the adapter of the request file
is on), ``embeds`` (whether the prompt goes in as embeddings of its tokens), ``images``
(numbers of its pictures, see ``image_models.py``) and ``abort_after`` (tokens after
which the request is aborted, or null); and
how its prompts run: ``"run": "generate"`` (the default), ``"stream"``, ``"beams"``,
``"sessions"`` (each goes on with ``more``, a prompt) or ``"refused"`` (the answer is
the error's message).
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EmbedsPrompt, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)
from vllm.v1.metrics.reader import Counter

from tests.engine.image_models import do_without_torchvision, picture

# Parameters that JSON cannot hold as they are.
FROM_JSON: dict[str, Callable[[dict], object]] = {
    "structured_outputs": lambda value: StructuredOutputsParams(**value),
    "repetition_detection": lambda value: RepetitionDetectionParams(**value),
    "logit_bias": lambda value: {int(token): bias for token, bias in value.items()},
}

# Counted for every job.
COUNTS = ("trees", "nodes", "accepted")


def runner_of(llm: LLM) -> Any:
    """The model runner of an engine that runs in this process."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def capture_kv(runner: Any, num_blocks: int) -> list:
    """Record the target's KV of the first request's first full blocks, once."""
    found: list = []
    finish = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        result = finish(grammar_output)
        batch = runner.input_batch
        if batch.num_reqs and not found:
            block_size = batch.block_table[0].block_size
            if batch.num_tokens_no_spec[0] > num_blocks * block_size:
                table = batch.block_table[0].block_table.np[0, :num_blocks]
                layers = runner.compilation_config.static_forward_context
                for name, layer in layers.items():
                    if not name.startswith("draft_"):
                        found.append(layer.kv_cache[table].clone())
        return result

    runner.sample_tokens = sample_tokens
    return found


def logprobs_as_json(steps: Any) -> list[dict[str, float]]:
    """Log probabilities, one dict per token."""
    return [{str(t): lp.logprob for t, lp in (s or {}).items()} for s in steps or []]


def answer_as_json(out: Any, answer: Any) -> dict[str, Any]:
    """One answer of a request."""
    return {
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "logprobs": logprobs_as_json(answer.logprobs),
        "prompt_logprobs": logprobs_as_json(out.prompt_logprobs),
        "num_cached_tokens": out.num_cached_tokens,
    }


def output_as_json(out: Any) -> dict[str, Any]:
    """A request's first answer, with the others (n > 1) beside it."""
    first, *others = [answer_as_json(out, answer) for answer in out.outputs]
    return {**first, "others": others} if others else first


def sampling_params(job: dict) -> list[SamplingParams]:
    """The job's parameters, one per prompt."""
    params = job["params"]
    if isinstance(params, dict):
        params = [params] * len(job["prompts"])
    return [
        SamplingParams(
            **{k: FROM_JSON[k](v) if k in FROM_JSON else v for k, v in p.items()}
        )
        for p in params
    ]


def per_prompt(job: dict, key: str, default: Any) -> list:
    """What a job says for each of its prompts."""
    return job.get(key) or [default] * len(job["prompts"])


def prompts_of(llm: LLM, job: dict) -> list[Any]:
    """The job's prompts, as token ids with images or without, or as embeddings."""
    prompts: list[Any] = []
    embeds = per_prompt(job, "embeds", False)
    images_of = per_prompt(job, "images", ())
    for token_ids, as_embeddings, pictures in zip(
        job["prompts"], embeds, images_of, strict=True
    ):
        if pictures:
            images = {"image": [picture(number) for number in pictures]}
            prompts.append(
                TokensPrompt(prompt_token_ids=token_ids, multi_modal_data=images)
            )
            continue
        if not as_embeddings:
            prompts.append(TokensPrompt(prompt_token_ids=token_ids))
            continue
        with torch.inference_mode():
            values = runner_of(llm).model.embed_input_ids(torch.tensor(token_ids))
        prompts.append(EmbedsPrompt(prompt_embeds=torch.tensor(values.tolist())))
    return prompts


def generate(llm: LLM, job: dict, adapter: LoRARequest | None) -> list[dict]:
    """Generate for every prompt of a job, ``max_in_flight`` at a time."""
    prompts = prompts_of(llm, job)
    params = sampling_params(job)
    priorities = per_prompt(job, "priorities", 0)
    lora = [adapter if on else None for on in per_prompt(job, "lora", False)]
    results = []
    for start in range(0, len(prompts), job["max_in_flight"]):
        part = slice(start, start + job["max_in_flight"])
        outputs = llm.generate(
            prompts[part],
            params[part],
            use_tqdm=False,
            lora_request=lora[part],
            priority=priorities[part],
        )
        results += [output_as_json(out) for out in outputs]
    return results


def stream(llm: LLM, job: dict) -> list[dict]:
    """Put the pieces of streamed answers together; abort where the job says so."""
    engine = llm.llm_engine
    results: list[dict] = [
        {"token_ids": [], "text": "", "finish_reason": None, "pieces": 0}
        for _ in job["prompts"]
    ]
    abort_after = per_prompt(job, "abort_after", None)
    names: dict[str, int] = {}
    for i, (prompt, params) in enumerate(
        zip(job["prompts"], sampling_params(job), strict=True)
    ):
        params.output_kind = RequestOutputKind.DELTA
        names[f"stream-{i}"] = i
        engine.add_request(f"stream-{i}", TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        for out in engine.step():
            i = names[out.request_id]
            (piece,) = out.outputs
            results[i]["token_ids"] += list(piece.token_ids)
            results[i]["text"] += piece.text
            results[i]["finish_reason"] = piece.finish_reason
            results[i]["pieces"] += 1
            limit = abort_after[i]
            if limit is not None and len(results[i]["token_ids"]) >= limit:
                engine.abort_request([out.request_id])
    return results


def sessions(llm: LLM, job: dict) -> list[dict]:
    """Two turns of each prompt, whose input comes in parts, then one ordinary request.

    Every second session has its second part before its first turn has ended. The
    ordinary request has the session's whole text as its prompt.
    """
    engine = llm.llm_engine
    core: Any = engine.engine_core
    params = sampling_params(job)
    tokens: list[list[int]] = [[] for _ in job["prompts"]]
    texts: list[list[int]] = [[] for _ in job["prompts"]]
    ended = [0] * len(tokens)

    def add(i: int, part: list[int]) -> None:
        prompt = TokensPrompt(prompt_token_ids=[*part])
        core.add_request(
            engine.input_processor.process_inputs(
                f"{i}", prompt, params[i], ("generate",), resumable=True
            )
        )

    for i, prompt in enumerate(job["prompts"]):
        add(i, prompt)
        if i % 2:
            add(i, job["more"])
    while min(ended) < 2:
        for out in core.get_output().outputs:
            i = int(out.request_id)
            tokens[i] += out.new_token_ids
            if out.finish_reason is None:
                continue
            ended[i] += 1
            if ended[i] == 2:
                request = core.engine_core.scheduler.requests[out.request_id]
                texts[i] = list(request.all_token_ids)
                core.abort_requests([out.request_id])
            elif not i % 2:
                add(i, job["more"])
    ordinary = [TokensPrompt(prompt_token_ids=text) for text in texts]
    outputs = llm.generate(ordinary, params, use_tqdm=False)
    return [
        {
            **output_as_json(out),
            "token_ids": [*turns, *out.outputs[0].token_ids],
            "session": text,
        }
        for turns, text, out in zip(tokens, texts, outputs, strict=True)
    ]


def beams(llm: LLM, job: dict) -> list[dict]:
    """Beam search; the job's params are those of ``BeamSearchParams``."""
    prompts: Any = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    outputs = llm.beam_search(prompts, BeamSearchParams(**job["params"]))
    return [
        {
            "token_ids": out.sequences[0].tokens,
            "others": [{"token_ids": s.tokens} for s in out.sequences[1:]],
        }
        for out in outputs
    ]


def refused(llm: LLM, job: dict) -> list[dict]:
    """Return the message with which vLLM refuses each request."""
    results: list[dict] = []
    for prompt, params in zip(job["prompts"], sampling_params(job), strict=True):
        try:
            llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
            results.append({"message": None})
        except (ValueError, VLLMValidationError) as error:
            results.append({"message": str(error)})
    return results


def run_job(llm: LLM, job: dict, adapter: LoRARequest | None) -> list[dict]:
    """Run one job the way it says."""
    how = job.get("run", "generate")
    if how == "generate":
        return generate(llm, job, adapter)
    ways = {"stream": stream, "beams": beams, "sessions": sessions, "refused": refused}
    return ways[how](llm, job)


def count_preemptions(llm: LLM) -> int:
    """How often the scheduler has preempted a request."""
    (counter,) = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert isinstance(counter, Counter)
    return int(counter.value)


def watch_blocks(llm: LLM) -> list[int]:
    """Record in every step how many blocks of the KV cache requests hold."""
    held: list[int] = []
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    pool, stock = scheduler.kv_cache_manager.block_pool, scheduler.schedule

    def schedule(*args: Any) -> Any:
        output = stock(*args)
        held.append(pool.num_gpu_blocks - pool.get_num_free_blocks())
        return output

    scheduler.schedule = schedule
    return held


def counts_of(stats: dict[str, Any]) -> dict[str, int]:
    """Trees, their nodes, and accepted drafts so far."""
    drafts = sum(length * trees for length, trees in stats["accepted"].items())
    return {"trees": stats["trees"], "nodes": stats["nodes"], "accepted": drafts}


def kv_cache_of(llm: LLM) -> dict[str, int]:
    """What the scheduler has of KV cache: blocks, tokens, and groups of layers."""
    cache = llm.llm_engine.vllm_config.cache_config
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "num_blocks": cache.num_gpu_blocks,
        "num_tokens": cache.kv_cache_size_tokens,
        "num_groups": len(scheduler.kv_cache_config.kv_cache_groups),
    }


def main(request_file: str, result_file: str) -> None:
    """Run the jobs of the request file."""
    request = json.loads(Path(request_file).read_text())
    arguments = request["llm"]
    if "reasoning_config" in arguments:
        arguments["reasoning_config"] = ReasoningConfig(**arguments["reasoning_config"])
    if any("images" in job for job in request["jobs"]):
        do_without_torchvision()
    start = time.perf_counter()
    llm = LLM(**arguments, disable_log_stats=False)
    adapter = None
    if "adapter" in request:
        adapter = LoRARequest("adapter", 1, request["adapter"])
    result: dict[str, Any] = {"jobs": [], "preemptions": []}
    result["seconds"] = [time.perf_counter() - start]
    trees = bool(arguments.get("speculative_config"))
    if "capture_kv" in request:
        found = capture_kv(runner_of(llm), request["capture_kv"])
    if "watch_blocks" in request:
        result["kv_cache"] = kv_cache_of(llm)
        result["held"] = watch_blocks(llm)
    before = dict.fromkeys(COUNTS, 0)
    result |= {name: [] for name in COUNTS}
    for job in request["jobs"]:
        preemptions = count_preemptions(llm)
        start = time.perf_counter()
        result["jobs"].append(run_job(llm, job, adapter))
        result["seconds"].append(time.perf_counter() - start)
        result["preemptions"].append(count_preemptions(llm) - preemptions)
        if trees:
            result["stats"] = stats = llm.collective_rpc("treespec_stats")[0]
            counts = counts_of(stats)
            for name in COUNTS:
                result[name].append(counts[name] - before[name])
            before = counts
    if "capture_kv" in request:
        torch.save(found, Path(result_file).with_name("kv.pt"))
    Path(result_file).write_text(json.dumps(result))
