"""Every row of the support matrix, as draft trees really behave."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

from tests.engine.conftest import SPECS
from tests.engine.support import ROWS
from tests.engine.support_checks import (
    DEPTH,
    LONG_TEXT,
    Arguments,
    Model,
    Outcome,
    Request,
    Row,
    Same,
)
from tests.engine.support_jobs import (
    SEEDS,
    job_of,
    refused_job,
    tight_jobs,
    usual_jobs,
)
from tests.engine.tiny_models import write_adapter
from vllm_treespec.config import SpecConfigError
from vllm_treespec.plugin import register

METHOD = "rsd_s"
# with a draft model, with a head, and with one that has context
METHODS = (METHOD, "redrafter", "eagle_tree", "lyanna")
# A cache so small that requests are preempted; priorities and an adapter besides.
TIGHT: dict[str, object] = {
    "num_gpu_blocks_override": 16,
    "scheduling_policy": "priority",
    "enable_lora": True,
    # vLLM's CPU kernels read the last slot for requests without an adapter: one more
    # slot than adapters leaves it empty.
    "max_loras": 2,
    "max_lora_rank": 8,
    "logprobs_mode": "raw_logits",
    "reasoning_config": {
        "reasoning_start_str": "<think>",
        "reasoning_end_str": "</think>",
    },
}


def rows(check: type) -> list:
    """The rows tested in one way, as test parameters."""
    return [pytest.param(r, id=r.feature) for r in ROWS if isinstance(r.check, check)]


def same(engine: str) -> list[Row]:
    """The rows whose requests run through one of the engines."""
    return [r for r in ROWS if isinstance(r.check, Same) and r.check.engine == engine]


@dataclass(frozen=True)
class Engine:
    """What an engine answered, by name of the row or job."""

    answers: dict[str, list[dict]]
    trees: dict[str, int]
    nodes: dict[str, int]
    preemptions: dict[str, int]


# by method, None without trees; each runs once
Engines = Callable[[str | None], Engine]


@pytest.fixture(scope="module")
def encode(tokenize: Callable[[str], list[int]]) -> Callable[[str | int], list[int]]:
    """Return a function from a text, or a number of tokens, to a prompt."""
    long = tokenize(LONG_TEXT)
    return lambda text: long[:text] if isinstance(text, int) else tokenize(text)


@pytest.fixture(scope="module")
def adapter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a LoRA adapter with random weights."""
    return write_adapter(Path(target), tmp_path_factory.mktemp("adapter"))


def run(
    engine: str,
    method: str | None,
    jobs: dict[str, dict],
    encode: Callable[[str | int], list[int]],
    run_engine: Callable[..., dict],
) -> Engine:
    """Run the rows of an engine, those that may share batches in one job."""
    shared: dict = {"prompts": [], "params": [], "max_in_flight": 64}
    parts: dict[str, slice] = {}
    for row in same(engine):
        check = row.check
        assert isinstance(check, Same)
        job = job_of(check, encode)
        if check.alone or check.job:
            jobs[row.feature] = job
            continue
        start = len(shared["prompts"])
        shared["prompts"] += job["prompts"]
        shared["params"] += job["params"]
        parts[row.feature] = slice(start, len(shared["prompts"]))
    jobs["shared"] = shared
    result = run_engine(method, list(jobs.values()))
    found = Engine(
        dict(zip(jobs, result["jobs"], strict=True)),
        dict(zip(jobs, result["trees"], strict=False)),
        dict(zip(jobs, result["nodes"], strict=False)),
        dict(zip(jobs, result["preemptions"], strict=True)),
    )
    for feature, part in parts.items():
        found.answers[feature] = found.answers["shared"][part]
    return found


@pytest.fixture(scope="module")
def usual(
    run_engine: Callable[..., dict], encode: Callable[[str | int], list[int]]
) -> Engines:
    """Engines with plenty of room."""

    @cache
    def of(method: str | None) -> Engine:
        jobs = usual_jobs(encode)
        if method:
            jobs["refused"] = refused_job(encode)
        return run("usual", method, jobs, encode, run_engine)

    return of


@pytest.fixture(scope="module")
def tight(
    run_engine: Callable[..., dict],
    encode: Callable[[str | int], list[int]],
    adapter: str,
) -> Engines:
    """Engines with a small KV cache."""
    start = partial(run_engine, adapter=adapter, **TIGHT)
    return cache(lambda m: run("tight", m, tight_jobs(encode), encode, start))


def assert_same(check: Same, plain: list[dict], trees: list[dict]) -> None:
    """Compare the greedy answers of a row."""
    for params, want, have in zip(check.params, plain, trees, strict=True):
        if params.get("temperature"):
            continue
        for name in check.compare:
            if not name.endswith("logprobs"):
                assert have[name] == want[name], (params, name)
                continue
            for expected, found in zip(want[name], have[name], strict=True):
                assert found == pytest.approx(expected, abs=2e-3), (params, name)


@pytest.mark.parametrize("row", rows(Same))
def test_same_answers(row: Row, request: pytest.FixtureRequest) -> None:
    """Turns red when a feature changes its result because trees are on."""
    assert isinstance(row.check, Same)
    engines = request.getfixturevalue(row.check.engine)
    plain, trees = (engines(m).answers[row.feature] for m in (None, METHOD))
    assert_same(row.check, plain, trees)


@pytest.mark.parametrize(
    "row", [r for r in rows(Same) if r.id != "beam search"], ids=lambda r: r.feature
)
def test_requests_draft_what_the_page_says(row: Row) -> None:
    """Turns red when requests draft more or less than the page says."""
    from tests.engine.child import sampling_params
    from vllm_treespec.engine.v1.views import may_draft_trees

    assert isinstance(row.check, Same)
    first = {"prompts": [[1]], "params": row.check.params[0]}
    (params,) = sampling_params(first)
    assert may_draft_trees(params) == (row.outcome is Outcome.TREE)


def test_trees_were_really_used(usual: Engines) -> None:
    """Turns red when drafting silently stops: then equality proves nothing."""
    assert usual(METHOD).trees["shared"] > 100
    assert usual(METHOD).trees["streaming"] > 5
    assert usual(METHOD).trees["chunked prefill"] > 5
    assert usual(METHOD).trees["beam search"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_trees_were_used_in_small_caches(method: str, tight: Engines) -> None:
    """Turns red when drafting silently stops beside preemption or an adapter."""
    assert tight(method).trees["preemption"] > 20
    assert tight(method).trees["lora"] > 20


def test_requests_ended_for_every_reason(usual: Engines) -> None:
    """Turns red when the rows' requests stop testing what they are there for."""
    answers = usual(METHOD).answers
    ended, ignored, *_ = answers["end of sequence, ignore_eos"]
    assert (ended["finish_reason"], ignored["finish_reason"]) == ("stop", "length")
    assert len(answers["min_tokens"][0]["token_ids"]) >= 12
    assert any(a["stop_reason"] == "return" for a in answers["stop strings"])
    assert any(a["stop_reason"] == 30 for a in answers["stop token ids"])
    assert answers["repetition_detection"][0]["finish_reason"] == "repetition"


def test_structured_output_is_valid(usual: Engines) -> None:
    """Turns red when a grammar is left while its requests draft trees, or stop to."""
    answers = usual(METHOD).answers
    trees, nodes = (d["grammars"] for d in (usual(METHOD).trees, usual(METHOD).nodes))
    assert trees > 10
    assert nodes > 2 * (1 + DEPTH) * trees, "chains, or trees cut by their grammar"
    assert (
        answers["grammars"][0]["token_ids"]
        == usual(None).answers["grammars"][0]["token_ids"]
    )
    for answer in answers["grammars"]:
        person = json.loads(answer["text"])
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
    choice = answers["choice"][0]["text"]
    assert choice in ("a happy young person", "a happy old person")


def test_seeds(usual: Engines) -> None:
    """Turns red when a seeded answer depends on the batch, or seeds do nothing."""
    alone = [a["token_ids"] for a in usual(METHOD).answers["seeds alone"]]
    together = [a["token_ids"] for a in usual(METHOD).answers["seeds together"]]
    assert alone == together
    assert len({tuple(ids) for ids in alone}) == len(SEEDS)


def test_several_answers(usual: Engines) -> None:
    """Turns red when the answers of one request share random numbers."""
    for method in (None, METHOD):
        first, neighbour = usual(method).answers["n"]
        found = [first, *first["others"]]
        single = usual(method).answers["seeds alone"]
        assert [a["token_ids"] for a in found] == [a["token_ids"] for a in single[:3]]
    plain_neighbour = usual(None).answers["n"][1]
    assert neighbour["token_ids"] == plain_neighbour["token_ids"]


def test_abort(usual: Engines) -> None:
    """Turns red when aborting a request in mid-answer disturbs the others."""
    plain, trees = (usual(m).answers["abort"] for m in (None, METHOD))
    for i in (0, 2):
        assert trees[i]["token_ids"] == plain[i]["token_ids"]
        assert trees[i]["finish_reason"] == "length"
    for i, limit in ((1, 4), (3, 9)):
        assert trees[i]["finish_reason"] is None
        assert limit <= len(trees[i]["token_ids"]) <= limit + DEPTH
        assert trees[i]["token_ids"][:limit] == plain[i]["token_ids"][:limit]


def test_prefix_cache(usual: Engines) -> None:
    """Turns red when cached blocks hold KV of rejected nodes or of forks."""
    plain, trees = (usual(m).answers["prefix"] for m in (None, METHOD))
    assert [a["token_ids"] for a in trees] == [a["token_ids"] for a in plain]
    assert trees[1]["num_cached_tokens"] == plain[1]["num_cached_tokens"] >= 160


def test_prompts_at_the_limit_are_refused_alike(usual: Engines) -> None:
    """Turns red when a prompt that leaves no room for a token gets in."""
    plain, trees = (usual(m).answers["at the limit"] for m in (None, METHOD))
    assert plain == trees
    assert all("max" in answer["message"] for answer in trees)


@pytest.mark.parametrize("method", METHODS)
def test_preemption(method: str, tight: Engines) -> None:
    """Turns red when a preempted request resumes with a stale tree or KV."""
    assert tight(method).preemptions["preemption"] > 0
    plain, trees = (tight(m).answers["preemption"] for m in (None, method))
    assert [a["token_ids"] for a in trees] == [a["token_ids"] for a in plain]


@pytest.mark.parametrize("method", METHODS[1:])
def test_preemption_of_sampled_requests(method: str, tight: Engines) -> None:
    """Turns red when a preempted request resumes with other noise."""
    assert tight(method).preemptions["sampled preemption"] > 0
    trees, plain = (
        [a["token_ids"] for a in tight(method).answers[name]]
        for name in ("sampled preemption", "sampled, no drafts")
    )
    assert trees == plain


@pytest.mark.parametrize("method", METHODS)
def test_lora(method: str, tight: Engines) -> None:
    """Turns red when an adapter reaches wrong rows of a tree, or the draft model."""
    plain, trees = (
        [a["token_ids"] for a in tight(m).answers["lora"]] for m in (None, method)
    )
    assert trees == plain
    assert plain[:3] != plain[3:], "negative control: the adapter must matter"


def test_requests_refused_by_vllm(usual: Engines) -> None:
    """Turns red when vLLM lets a request in that trees do not serve."""
    checks = [r.check for r in ROWS if isinstance(r.check, Request)]
    for check, answer in zip(checks, usual(METHOD).answers["refused"], strict=True):
        assert isinstance(check, Request)
        assert check.says in str(answer["message"])


def refusal(**arguments: object) -> str:
    """The message with which an engine refuses to start."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    with pytest.raises(SpecConfigError, match=r".") as error:
        EngineArgs(max_model_len=256, **arguments).create_engine_config()
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("row", rows(Arguments))
def test_arguments_are_refused(row: Row, target: str, draft: str) -> None:
    """Turns red when an argument that trees do not serve starts up silently."""
    assert isinstance(row.check, Arguments)
    own = row.check.arguments.get("speculative_config", {})
    spec = {**SPECS[METHOD], "model": draft, **own}
    arguments = {**row.check.arguments, "speculative_config": spec}
    assert row.check.says in refusal(model=target, **arguments)


@pytest.mark.parametrize("row", rows(Model))
def test_models_are_refused(row: Row, target: str, draft: str, tmp_path: Path) -> None:
    """Turns red when a target that trees do not serve starts up silently."""
    assert isinstance(row.check, Model)
    (tmp_path / "config.json").write_text(json.dumps(row.check.config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(target) / name).read_bytes())
    spec = {**SPECS[METHOD], "model": draft}
    says = refusal(model=str(tmp_path), speculative_config=spec, **row.check.arguments)
    assert row.check.says in says
    assert re.search(r"(serve it without|remove) speculative_config", says)
