"""Two tensor-parallel ranks answer as one does, and draw the same trees.

As a script, ``python test_tensor_parallel.py FOLDER RANKS NAMES...``, this file runs
engines one after the other and writes what they answered. After the last of several
ranks' engines it lets the ranks draw different numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# No multiple of what vLLM pads to, so that the last rank's part has padding.
VOCAB_SIZE = 100
PLAIN, RSD_S, REDRAFTER = "plain", "rsd_s", "redrafter"
SHAPES: dict[str, dict[str, Any]] = {
    RSD_S: {"beam_width": 3, "depth": 3, "schedule": [{"batch_size": 3}]},
    # So wide that a head of random weights is right now and then.
    REDRAFTER: {
        "beam_width": 20,
        "length": 2,
        "num_drafts": 15,
        "schedule": "fixed",
    },
}
JOBS: dict[str, dict[str, Any]] = {
    # More requests than the schedule above has a tree for.
    "greedy x4": {"num_requests": 4, "temperature": 0.0},
    "greedy": {"num_requests": 3, "temperature": 0.0},
    "seeded": {"num_requests": 3, "temperature": 1.0, "seed": 11},
    "unseeded": {"num_requests": 3, "temperature": 1.0, "top_p": 0.9},
}
GREEDY = ("greedy x4", "greedy")


def start(name: str, folder: Path, ranks: int) -> Any:
    """Start an engine."""
    from vllm import LLM

    spec = None
    if name != PLAIN:
        spec = {"method": name, "model": str(folder / name), **SHAPES[name]}
    return LLM(
        model=str(folder / "target"),
        speculative_config=spec,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=2**28,
    )


def stop(llm: Any) -> None:
    """Stop an engine, so that the next one can start in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def answer(llm: Any, num_requests: int, **params: Any) -> list[list[int]]:
    """Token ids that the engine answers a few prompts with."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * i * j + 3) % 90 for j in range(1, 9)])
        for i in range(1, num_requests + 1)
    ]
    sampling = SamplingParams(
        max_tokens=20, ignore_eos=True, detokenize=False, **params
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def reseed(worker: Any) -> None:
    """Let every rank draw numbers of its own."""
    from vllm_treespec.core.uniforms import UniformSource

    worker.model_runner.decoder.uniforms = UniformSource(worker.rank)


def main() -> None:
    """Run the engines of one number of ranks."""
    folder, ranks, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    results: dict[str, Any] = {}
    for name in names:
        llm = start(name, folder, ranks)
        results[name] = {job: answer(llm, **params) for job, params in JOBS.items()}
        if name != PLAIN:
            results[name]["stats"] = llm.collective_rpc("treespec_stats")
        (folder / f"{ranks}.json").write_text(json.dumps(results))
        if ranks > 1 and name == names[-1]:
            llm.collective_rpc(reseed)
            answer(llm, **JOBS["unseeded"])
        stop(llm)


def run_script(folder: Path, ranks: int, *names: str) -> tuple[dict[str, Any], str]:
    """Run this file; what the engines answered, and what the processes said."""
    cores = sorted(os.sched_getaffinity(0))[:ranks]
    if len(cores) < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} cores")
    environment = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, __file__, folder, str(ranks), *names],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    file = folder / f"{ranks}.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    assert tuple(results) == names, done.stdout[-4000:]
    return results, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small target, a draft model that often agrees, and a head."""
    from tests.engine.tiny_models import write_pair
    from tests.heads import write_head

    folder = tmp_path_factory.mktemp("tensor_parallel")
    _, draft = write_pair(folder, vocab_size=VOCAB_SIZE)
    Path(draft).rename(folder / RSD_S)
    write_head(folder / REDRAFTER, REDRAFTER, hidden_size=128, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """Answers of engines on one rank.

    Plain vLLM is last: a process remembers the attention backend it chose first.
    """
    return run_script(folder, 1, RSD_S, REDRAFTER, PLAIN)[0]


@pytest.fixture(scope="module")
def two(folder: Path) -> tuple[dict[str, Any], str]:
    """Answers of engines on two ranks, and what their processes said."""
    return run_script(folder, 2, REDRAFTER, RSD_S)


@pytest.mark.parametrize("method", [RSD_S, REDRAFTER])
def test_two_ranks_answer_as_one(
    method: str, one: dict[str, Any], two: tuple[dict[str, Any], str]
) -> None:
    """Red when a part of a model, a draw or a commit depends on the rank."""
    for job in JOBS:
        assert two[0][method][job] == one[method][job], job
    for job in GREEDY:
        assert two[0][method][job] == one[PLAIN][job], job


@pytest.mark.parametrize("method", [RSD_S, REDRAFTER])
def test_ranks_draw_the_same_trees(
    method: str, one: dict[str, Any], two: tuple[dict[str, Any], str]
) -> None:
    """Red when ranks draw or accept different trees, or none are drawn at all."""
    (alone,) = one[method]["stats"]
    ranks = two[0][method]["stats"]
    assert len(ranks) == 2
    for stats in (alone, *ranks):
        del stats["seconds"]
    assert ranks == [alone, alone]
    assert alone["trees"] > 50
    assert sum(n for length, n in alone["accepted"].items() if int(length)) > 5
    assert ("plain" in alone["modes"]) == (method == RSD_S)


def test_ranks_that_differ_stop_the_engine(two: tuple[dict[str, Any], str]) -> None:
    """Red when a rank that draws other numbers goes on with a text of its own."""
    assert "tensor-parallel rank 1 drew other drafts than rank 0" in two[1]


if __name__ == "__main__":
    main()
