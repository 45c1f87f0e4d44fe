"""Two tensor-parallel ranks answer as one does, and draw the same trees."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import EngineProcessError, call
from tests.engine.tiny_models import SIZES, write_layered, write_pair
from tests.heads import HEADS, write_head

# No multiple of what vLLM pads to, so that the last rank's part has padding.
VOCAB_SIZE = 100
PLAIN, RSD_S, REDRAFTER = "plain", "rsd_s", "redrafter"
EAGLE, DFLASH, LYANNA = "eagle_tree", "dflash_tree", "lyanna"
METHODS = (RSD_S, REDRAFTER, EAGLE, DFLASH, LYANNA)
# RSD-S whose trees are chosen by what rank 0 measures.
MEASURED = "measured"
# ReDrafter's trees, and none, on a target whose layers lie in several KV cache groups.
GROUPS, PLAIN_GROUPS = "groups", "plain groups"
SHAPES: dict[str, dict[str, Any]] = {
    RSD_S: {"beam_width": 3, "depth": 3, "schedule": [{"batch_size": 3}]},
    # So wide that a head of random weights is right now and then.
    REDRAFTER: {
        "beam_width": 20,
        "length": 2,
        "num_drafts": 15,
        "schedule": "fixed",
    },
    EAGLE: {"top_k": 15, "depth": 2, "num_drafts": 15, "schedule": "fixed"},
    DFLASH: {"top_k": 15, "depth": 2, "num_drafts": 15, "schedule": "fixed"},
    LYANNA: {"top_k": 15, "num_drafts": 15, "resample": "merge", "schedule": "fixed"},
    MEASURED: {"beam_width": 3, "depth": 3, "schedule": "measured"},
}
JOBS: dict[str, dict[str, Any]] = {
    # More requests than the schedule above has a tree for.
    "greedy x4": {"num_requests": 4, "temperature": 0.0},
    "greedy": {"num_requests": 3, "temperature": 0.0},
    "limits": {
        "num_requests": 3,
        "temperature": 0.0,
        "said": [{}, {"enabled": False}, {"max_drafts": 2}],
    },
    "seeded": {"num_requests": 3, "temperature": 1.0, "seed": 11},
    "seeded, no drafts": {
        "num_requests": 3,
        "temperature": 1.0,
        "seed": 11,
        "said": [{"enabled": False}] * 3,
    },
    "unseeded": {"num_requests": 3, "temperature": 1.0, "top_p": 0.9},
}
GREEDY = ("greedy x4", "greedy", "limits")


def start(name: str, folder: Path, ranks: int, executor: str = "mp") -> Any:
    """Start an engine; ``executor`` is vLLM's for several ranks."""
    from vllm import LLM

    spec = None
    if name not in (PLAIN, PLAIN_GROUPS):
        method = {MEASURED: RSD_S, GROUPS: REDRAFTER}.get(name, name)
        spec = {"method": method, "model": str(folder / method)}
        spec |= SHAPES[MEASURED if name == MEASURED else method]
    in_groups = name in (GROUPS, PLAIN_GROUPS)
    return LLM(
        model=str(folder / ("layered" if in_groups else "target")),
        speculative_config=spec,
        tensor_parallel_size=ranks,
        distributed_executor_backend=executor if ranks > 1 else "uni",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=2**28,
    )


def answer(
    llm: Any, num_requests: int, said: Sequence[dict] = (), **params: Any
) -> list[list[int]]:
    """Token ids that the engine answers a few prompts with.

    ``said`` is what each request says of draft trees.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * i * j + 3) % 90 for j in range(1, 9)])
        for i in range(1, num_requests + 1)
    ]
    params |= {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
    sampling = [
        SamplingParams(**params, extra_args={"treespec": options})
        for options in said or [{}] * num_requests
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def reseed(worker: Any) -> None:
    """Let every rank give requests keys of their own."""
    worker.model_runner.decoder.slots.num_unseeded += worker.rank


def forwards(worker: Any) -> tuple[dict[int, float], dict[int, float]]:
    """What forwards took when the engine started, of target and draft model."""
    timed = worker.model_runner.decoder.method.schedule.cost.forwards
    return dict(timed.target), dict(timed.draft)


def answers(llm: Any, name: str, jobs: Iterable[str] = JOBS) -> dict[str, Any]:
    """What an engine answers in jobs, and what its ranks counted."""
    found: dict[str, Any] = {job: answer(llm, **JOBS[job]) for job in jobs}
    if name not in (PLAIN, PLAIN_GROUPS):
        found["stats"] = llm.collective_rpc("treespec_stats")
    if name == MEASURED:
        found["forwards"] = llm.collective_rpc(forwards)
    return found


def run_jobs(name: str, folder: Path, ranks: int) -> None:
    """Run all jobs through an engine of this process; write what it answered.

    Two ranks then get numbers of their own, which is to end the process.
    """
    llm = start(name, folder, ranks)
    result = answers(llm, name)
    (folder / f"{name}-{ranks}.json").write_text(json.dumps(result))
    if (name, ranks) == (RSD_S, 2):
        llm.collective_rpc(reseed)
        answer(llm, **JOBS["unseeded"])
    llm.llm_engine.engine_core.shutdown()


def write_models(folder: Path) -> None:
    """Write a small target, a draft model that often agrees, and heads."""
    _, draft = write_pair(folder, vocab_size=VOCAB_SIZE)
    Path(draft).rename(folder / RSD_S)
    write_layered(folder / "layered", 8, windowed=2, vocab_size=VOCAB_SIZE)
    sizes = {"hidden_size": SIZES["hidden_size"], "vocab_size": VOCAB_SIZE}
    for method in (REDRAFTER, EAGLE, DFLASH, LYANNA):
        write_head(folder / method, HEADS[method], **sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[[str, int], dict[str, Any]]:
    """Return a function that runs an engine, once for a name and a number of ranks."""

    @cache
    def run(name: str, ranks: int) -> dict[str, Any]:
        cores = sorted(os.sched_getaffinity(0))[:ranks]
        if len(cores) < ranks:
            pytest.skip(f"{ranks} ranks need {ranks} cores")
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if ranks > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
        file = folder / f"{name}-{ranks}.json"
        try:
            call(
                f"{__name__}:{run_jobs.__name__}",
                *(name, folder, ranks),
                log=file.with_suffix(".log"),
                environment=environment,
            )
        except EngineProcessError:
            if not file.exists():
                raise
        return json.loads(file.read_text())

    return run


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_answer_as_one(
    method: str, run: Callable[[str, int], dict[str, Any]]
) -> None:
    """Red when a part of a model, a draw or a commit depends on the rank."""
    one, two, plain = run(method, 1), run(method, 2), run(PLAIN, 1)
    for job in JOBS:
        assert two[job] == one[job], job
    for job in GREEDY:
        assert two[job] == plain[job], job
    if method != RSD_S:  # whose trees are drawn
        assert two["seeded"] == two["seeded, no drafts"]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_draw_the_same_trees(
    method: str, run: Callable[[str, int], dict[str, Any]]
) -> None:
    """Red when ranks draw or accept different trees, or none are drawn at all."""
    (alone,) = without_seconds(run(method, 1)["stats"])
    assert without_seconds(run(method, 2)["stats"]) == [alone, alone]
    assert alone["trees"] > 50
    assert sum(n for length, n in alone["accepted"].items() if int(length)) > 5
    assert ("plain" in alone["modes"]) == (method == RSD_S)


def test_groups_on_two_ranks(run: Callable[[str, int], dict[str, Any]]) -> None:
    """Red when ranks lay trees in KV cache groups in another order, or other forks."""
    one, two, plain = run(GROUPS, 1), run(GROUPS, 2), run(PLAIN_GROUPS, 1)
    for job in JOBS:
        assert two[job] == one[job], job
    for job in GREEDY:
        assert two[job] == plain[job], job
    assert two["seeded"] == two["seeded, no drafts"]
    (alone,) = without_seconds(one["stats"])
    assert without_seconds(two["stats"]) == [alone, alone]
    assert alone["trees"] > 50


def test_ranks_choose_the_same_trees(run: Callable[[str, int], dict[str, Any]]) -> None:
    """Red when a rank chooses by its own clock, or a schedule changes a token."""
    two, plain = run(MEASURED, 2), run(PLAIN, 1)
    for job in GREEDY:
        assert two[job] == plain[job], job
    first, second = without_seconds(two["stats"])
    assert first == second
    assert len(first["modes"]) > 1, "one option was always chosen"
    assert first["mode_tokens"], "no step was timed"


def test_ranks_begin_with_the_same_costs(
    run: Callable[[str, int], dict[str, Any]],
) -> None:
    """Red when a start times nothing, or each rank's forwards for itself."""
    first, second = run(MEASURED, 2)["forwards"]
    assert first == second
    for timed in first:
        assert list(map(int, timed)) == [1, 8, 16, 32, 64]
        assert all(0 < seconds < 5 for seconds in timed.values())


def without_seconds(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks counted, without the times they took."""
    times = ("seconds", "mode_seconds")
    return [{k: v for k, v in stats.items() if k not in times} for stats in ranks]


def test_ranks_that_differ_stop_the_engine(
    folder: Path, run: Callable[[str, int], dict[str, Any]]
) -> None:
    """Red when a rank that draws other numbers goes on with a text of its own."""
    run(RSD_S, 2)
    log = (folder / f"{RSD_S}-2.log").read_text()
    assert "tensor-parallel rank 1 drew other drafts than rank 0" in log
