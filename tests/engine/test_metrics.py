"""vLLM's counters, ours and the worker's own, in an engine with a process of its own.

The engine is ``AsyncLLM``, which is what ``vllm serve`` runs.
"""

import asyncio
import logging
import re
from typing import Any

import prometheus_client
import pytest

from tests.engine.processes import call
from vllm_treespec.metrics import counter_file


async def generate_all(request: dict) -> dict[str, Any]:
    """Generate all prompts at once; return what was counted and logged."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**request["engine"]))
    logging.getLogger("vllm").addHandler(handler)

    async def generate(
        number: int, prompt: list[int], params: dict, most_outputs: int = 1000
    ) -> None:
        outputs = engine.generate(
            {"prompt_token_ids": prompt},
            SamplingParams(**params, detokenize=False),
            str(number),
        )
        async for _ in outputs:
            most_outputs -= 1
            if not most_outputs:
                break
        await outputs.aclose()

    try:
        await asyncio.gather(
            *(generate(i, *job) for i, job in enumerate(request["jobs"]))
        )
        (worker,) = await engine.collective_rpc("treespec_stats")
        await engine.do_log_stats()
        metrics = prometheus_client.generate_latest().decode()
        left = enumerate(request["aborted"])
        # after 2, 3, ... outputs: the last ones run among few, so that they have trees
        await asyncio.gather(
            *(generate(100 + i, p, params, 2 + i) for i, (p, params) in left)
        )
        # The last requests' steps end.
        await asyncio.sleep(1)
        return {
            "worker": worker,
            "metrics": metrics,
            "after aborts": prometheus_client.generate_latest().decode(),
            "lines": lines,
            "left": counter_file(engine.vllm_config).exists(),
        }
    finally:
        engine.shutdown()


def run_engine(request: dict) -> dict[str, Any]:
    """Run the engine of a request, in the process that it is called in."""
    return asyncio.run(generate_all(request))


@pytest.fixture(scope="module")
def counted(
    tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What an engine counted in which trees differ and not every request has one."""
    folder = tmp_path_factory.mktemp("metrics")
    spec = {
        "method": "rsd_s",
        "beam_width": 3,
        "depth": 3,
        "max_trees": 3,
        "schedule": [
            {"batch_size": 3},
            {"batch_size": 5, "beam_width": 2, "depth": 2},
        ],
    }
    prompts = [[504, 75, 282, 49, 314], [1, 90, 198], [28, 339, 416] * 20]
    params: list[dict] = [
        {"temperature": 0.8, "max_tokens": 17, "ignore_eos": True},
        {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True},
        {"temperature": 1.0, "top_k": 2, "max_tokens": 50, "ignore_eos": True},
        # The last to start: they run among few.
        {"temperature": 0, "max_tokens": 64, "ignore_eos": True},
    ]
    request = {
        "engine": {
            "model": tiny["target"],
            "skip_tokenizer_init": True,
            "dtype": "float32",
            # Reached by the longest prompt: its last trees do not fit.
            "max_model_len": 80,
            "max_num_seqs": 6,
            # Prompts and trees do not always fit: the scheduler cuts trees.
            "max_num_batched_tokens": 44,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**26,
            "disable_log_stats": False,
            "speculative_config": {**spec, "model": tiny["draft"]},
        },
        "jobs": [(prompt, p) for p in params for prompt in prompts],
        "aborted": 8 * [(prompts[0], params[2])],
    }
    function = f"{__name__}:{run_engine.__name__}"
    return call(function, request, log=folder / "log")


def samples(
    counted: dict[str, Any], name: str, label: str = "engine", when: str = "metrics"
) -> dict:
    """Values of a counter, by one of its labels."""
    pattern = rf'^vllm:{name}_total{{.*\b{label}="([^"]*)".*}} (\S+)$'
    found = re.findall(pattern, counted[when], re.MULTILINE)
    return {key: float(value) for key, value in found}


def test_vllm_counts_what_the_worker_scored(counted: dict[str, Any]) -> None:
    """Red when a tree, node or accepted token is missing from vLLM's counters."""
    worker = counted["worker"]
    accepted = {int(n): count for n, count in worker["accepted"].items()}
    assert worker["nodes"] < 10 * worker["trees"], "no tree was smaller than others"
    assert samples(counted, "spec_decode_num_drafts") == {"0": worker["trees"]}
    assert samples(counted, "spec_decode_num_draft_tokens") == {
        "0": worker["nodes"] - worker["trees"]
    }
    assert samples(counted, "spec_decode_num_accepted_tokens") == {
        "0": sum(n * count for n, count in accepted.items())
    }
    by_depth = samples(counted, "spec_decode_num_accepted_tokens_per_pos", "position")
    assert by_depth == {
        str(position): sum(c for n, c in accepted.items() if n > position)
        for position in range(9)
    }
    assert by_depth["1"] > 0


def test_ours_agree(counted: dict[str, Any]) -> None:
    """Red when ours differ from vLLM's counters or from the worker's own totals."""
    worker = counted["worker"]
    drafted = samples(counted, "spec_decode_num_draft_tokens")["0"]
    accepted = samples(counted, "spec_decode_num_accepted_tokens")["0"]
    assert samples(counted, "treespec_num_nodes_verified") == {"0": worker["nodes"]}
    assert samples(counted, "treespec_num_nodes_wasted") == {"0": drafted - accepted}
    positions = samples(counted, "spec_decode_num_accepted_tokens_per_pos", "position")
    assert samples(counted, "treespec_num_accepted_tokens_per_depth", "depth") == {
        str(int(position) + 1): count for position, count in positions.items() if count
    }
    assert samples(counted, "treespec_num_steps", "mode") == worker["modes"]
    assert worker["steps"] == sum(worker["modes"].values())
    assert len(worker["modes"]) == 3, "two trees and plain"
    assert worker["modes"]["plain"] > 0
    seconds = samples(counted, "treespec_stage_seconds", "stage")
    assert seconds.pop("keep_features") == 0.0, "only heads with context keep any"
    assert seconds == pytest.approx(worker["seconds"], rel=1e-6)
    assert all(seconds.values())
    mode_seconds = samples(counted, "treespec_mode_seconds", "mode")
    assert mode_seconds == pytest.approx(worker["mode_seconds"], rel=1e-6)
    tokens = samples(counted, "treespec_mode_tokens", "mode")
    assert tokens == worker["mode_tokens"]
    assert tokens.keys() == mode_seconds.keys() <= worker["modes"].keys()


def test_aborted_requests_count_on_both_sides_alike(counted: dict[str, Any]) -> None:
    """Red when trees of requests that end while their step runs count for one side."""
    ours, trees, drafts, accepted, wasted = (
        samples(counted, name, when="after aborts")["0"]
        for name in (
            "treespec_num_nodes_verified",
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "treespec_num_nodes_wasted",
        )
    )
    assert trees > samples(counted, "spec_decode_num_drafts")["0"]
    assert ours == trees + drafts
    assert wasted == drafts - accepted


def test_stock_line_agrees(counted: dict[str, Any]) -> None:
    """Red when the rates of vLLM's line are no longer those of depths."""
    (line,) = [s for s in counted["lines"] if "SpecDecoding metrics:" in s]
    by_depth = samples(counted, "treespec_num_accepted_tokens_per_depth", "depth")
    trees = counted["worker"]["trees"]
    rates = ", ".join(f"{by_depth[d] / trees:.3f}" for d in sorted(by_depth))
    assert f"Per-position acceptance rate: {rates}, 0.000, 0.000" in line


def test_no_file_has_a_name(counted: dict[str, Any]) -> None:
    """Red when the counters' file keeps its name, and so may outlive the engine."""
    assert not counted["left"]
