"""Two data-parallel engines answer as one does, and count for one front-end."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import call
from tests.engine.sampled import DRAWN
from tests.engine.tiny_models import write_pair

NUM_REQUESTS = 8
PLAIN = "plain"
SAMPLED: dict[str, Any] = {"temperature": 0.5, "seed": 3}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "sampled, no drafts": {
        **SAMPLED,
        "extra_args": {"treespec": {"enabled": False}},
    },
}
SPECS: dict[str, dict[str, Any]] = {
    "suffix_tree": {"min_probability": 0.0},
    "rsd_s": {"beam_width": 3, "depth": 3},
}


async def answer(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tokens of some requests at once, greedy and sampled, and our counters."""
    from prometheus_client import REGISTRY, generate_latest
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def one(name: str, number: int) -> list[int]:
        prompt = [(7 * number * j + 3) % 90 for j in range(1, 9)]
        params = SamplingParams(
            **JOBS[name], max_tokens=24, ignore_eos=True, detokenize=False
        )
        tokens: list[int] = []
        inputs = TokensPrompt(prompt_token_ids=prompt)
        async for output in engine.generate(inputs, params, f"{name} {number}"):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    numbers = range(1, NUM_REQUESTS + 1)
    answers: dict[str, Any] = {
        name: await asyncio.gather(*(one(name, number) for number in numbers))
        for name in JOBS
    }
    text = generate_latest(REGISTRY).decode()
    engine.shutdown()
    lines = [line for line in text.splitlines() if line.startswith("vllm:treespec")]
    return {**answers, "lines": lines}


def run_engines(name: str, folder: Path, engines: int) -> None:
    """Run the requests through engines; write what they answered."""
    spec = None
    if name != PLAIN:
        spec = {"method": name, **SPECS[name], "schedule": "fixed"}
        if name == "rsd_s":
            spec["model"] = str(folder / "draft")
    arguments = {
        "model": str(folder / "target"),
        "speculative_config": spec,
        "data_parallel_size": engines,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 2**28,
    }
    result = asyncio.run(answer(arguments))
    (folder / f"{name}-{engines}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """Return a function that runs engines once for a name and a number of them."""
    folder = tmp_path_factory.mktemp("data_parallel")
    write_pair(folder, vocab_size=100)

    @cache
    def run(name: str, engines: int) -> Any:
        if len(os.sched_getaffinity(0)) < engines:
            pytest.skip(f"{engines} engines need {engines} cores")
        call(
            f"{__name__}:{run_engines.__name__}",
            *(name, folder, engines),
            log=folder / f"{name}-{engines}.log",
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            engines=engines,
        )
        return json.loads((folder / f"{name}-{engines}.json").read_text())

    return run


@pytest.mark.parametrize("method", SPECS)
def test_two_engines_answer_as_one(method: str, run: Callable[[str, int], Any]) -> None:
    """Red when an answer depends on which engine gives it."""
    two = run(method, 2)
    assert two["greedy"] == run(PLAIN, 1)["greedy"]
    if method not in DRAWN:
        assert two["sampled"] == two["sampled, no drafts"]


@pytest.mark.parametrize("method", SPECS)
def test_both_engines_count(method: str, run: Callable[[str, int], Any]) -> None:
    """Red when an engine draws no trees, or the front-end misses its counters."""
    lines = run(method, 2)["lines"]
    for engine in (0, 1):
        (line,) = (
            line
            for line in lines
            if line.startswith("vllm:treespec_num_nodes_verified_total{")
            and f'engine="{engine}"' in line
        )
        assert float(line.rpartition(" ")[2]) > 20
