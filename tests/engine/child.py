"""Runs one vLLM engine in a process of its own: jobs in as JSON, results out as JSON.

Used as ``python child.py REQUEST.json RESULT.json``. A job holds prompts (token ids),
sampling parameters (one dict, or one per prompt) and how many run at once.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


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
                    if not name.startswith("draft_model"):
                        found.append(layer.kv_cache[table].clone())
        return result

    runner.sample_tokens = sample_tokens
    return found


def run_job(llm: LLM, job: dict) -> list[dict]:
    """Generate for every prompt of a job, ``at_once`` at a time."""
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = job["params"]
    if isinstance(params, dict):
        params = [params] * len(prompts)
    sampling = [SamplingParams(**p) for p in params]
    results = []
    for start in range(0, len(prompts), job["at_once"]):
        part = slice(start, start + job["at_once"])
        for out in llm.generate(prompts[part], sampling[part], use_tqdm=False):
            (answer,) = out.outputs
            results.append(
                {
                    "token_ids": list(answer.token_ids),
                    "finish_reason": answer.finish_reason,
                    "logprobs": [
                        {str(t): lp.logprob for t, lp in step.items()}
                        for step in answer.logprobs or []
                    ],
                }
            )
    return results


def main() -> None:
    """Run the jobs of the request file."""
    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**request["llm"])
    result: dict[str, Any] = {}
    if "capture_kv" in request:
        import torch

        found = capture_kv(runner_of(llm), request["capture_kv"]["num_blocks"])
    result["jobs"] = [run_job(llm, job) for job in request["jobs"]]
    if "capture_kv" in request:
        torch.save(found, request["capture_kv"]["file"])
    if request["llm"].get("speculative_config"):
        result["stats"] = llm.collective_rpc("treespec_stats")[0]
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
