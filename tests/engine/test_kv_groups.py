"""Targets whose layers lie in several KV cache groups: window and full layers.

As in Gemma 3 (several groups of windows) and GPT-OSS (one of each, with sinks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import MAX_MODEL_LEN, TINY
from tests.engine.sampled import (
    assert_same_text,
    repeating,
    tokens_of,
    with_and_without_trees,
)
from tests.engine.tiny_models import write_layered, write_with_sinks
from vllm_treespec.config import SpecConfigError
from vllm_treespec.plugin import register

WINDOW = 16
# Heads of the tiny target have one key-value head, too.
ONE_KV_HEAD = {"num_key_value_heads": 1}
MAX_TREES = 5
SUFFIX = {"method": "suffix_tree", "num_drafts": 8, "depth": 4}
# So wide that a head of random weights is right now and then.
WIDE: dict[str, dict[str, object]] = {
    "redrafter": {"beam_width": 20, "length": 2, "num_drafts": 15},
    "eagle_tree": {"top_k": 15, "depth": 2, "num_drafts": 15},
    "lyanna": {"top_k": 15, "depth": 2, "num_drafts": 15, "resample": "merge"},
}
# Of many windows.
PROMPTS = repeating((9, 4), (60, 9), (130, 30), (200, 11))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 70, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_tokens": 70, "ignore_eos": True}
# Alone; together, from cached blocks; with longer prompts behind cached ones.
JOBS = [
    {"prompts": PROMPTS, "params": GREEDY, "max_in_flight": 1},
    {"prompts": PROMPTS, "params": GREEDY, "max_in_flight": 4},
    {
        "prompts": [[*prompt, 3, 1, 4, 1, 5] for prompt in PROMPTS],
        "params": GREEDY,
        "max_in_flight": 4,
    },
]
# Engines with trees run these, too: sampled, with drafts and without.
JOBS_OF_TREES = [
    *JOBS,
    *with_and_without_trees(PROMPTS, 3, max_tokens=24, temperature=0.5),
]
# Beside requests that are sampled, that limit their trees, or that have none.
MIXED = {
    "prompts": [*PROMPTS, *PROMPTS],
    "params": [
        GREEDY,
        SAMPLED,
        {**GREEDY, "extra_args": {"treespec": {"max_drafts": 2}}},
        GREEDY,
        {**GREEDY, "repetition_penalty": 1.3},
        SAMPLED,
        {**GREEDY, "extra_args": {"treespec": {"enabled": False}}},
        {**GREEDY, "max_tokens": 90},
    ],
    "max_in_flight": 8,
}
GREEDY_ROWS = (0, 2, 3, 4, 6, 7)


@dataclass(frozen=True)
class Kind:
    """A kind of target: how it is written, and how many groups vLLM makes of it.

    ``with_head``: with the layer of a head, which is one more layer without a window.
    """

    write: Callable[[Path], str]
    groups: int
    with_head: int
    methods: tuple[str, ...]


KINDS = {
    # 2 full layers and 4 with windows: groups of 2. With a head 3 and 4: groups of 4.
    "gemma": Kind(
        lambda folder: write_layered(
            folder, WINDOW, windowed=2, patterns=2, **ONE_KV_HEAD
        ),
        groups=3,
        with_head=2,
        methods=("suffix_tree", "redrafter", "lyanna"),
    ),
    # one of each; with a head groups of one layer
    "gpt_oss": Kind(
        lambda folder: write_with_sinks(folder, WINDOW, **ONE_KV_HEAD),
        groups=2,
        with_head=3,
        methods=("suffix_tree", "eagle_tree", "lyanna"),
    ),
}
CASES = [(kind, method) for kind in KINDS for method in KINDS[kind].methods]
OWN_KV = ("eagle_tree", "lyanna")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of a target of every kind."""
    folder = tmp_path_factory.mktemp("groups")
    return {name: kind.write(folder / name) for name, kind in KINDS.items()}


@pytest.fixture
def answer(
    run_engine: Callable[..., dict], targets: dict[str, str], tiny: dict[str, str]
) -> Callable[..., dict]:
    """Return a function that runs jobs on a kind of target."""

    def run(kind: str, method: str | None, jobs: list[dict], **options: Any) -> dict:
        options = {"model": targets[kind], **TINY, "watch_blocks": True, **options}
        options.setdefault("max_num_batched_tokens", 64)
        if method is not None:
            spec: dict[str, object] = {"method": method, "schedule": "fixed"}
            spec |= {"max_trees": MAX_TREES}
            if method == "suffix_tree":
                spec |= SUFFIX
            else:
                spec |= {"model": tiny[method], **WIDE[method]}
            options["speculative_config"] = spec
        return run_engine(None, jobs, **options)

    return run


def cached(result: dict) -> list[list[int]]:
    """Prompt tokens that were found in the cache, by job."""
    return [[answer["num_cached_tokens"] for answer in job] for job in result["jobs"]]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_tokens_equal_plain(
    kind: str, method: str, answer: Callable[..., dict]
) -> None:
    """Red when a tree reads or commits blocks of another group, or freed ones.

    Prompts come again, so that their blocks are found in the cache of every group.
    """
    plain, trees = answer(kind, None, JOBS), answer(kind, method, JOBS_OF_TREES)
    expected = KINDS[kind].with_head if method in OWN_KV else KINDS[kind].groups
    assert trees["kv_cache"]["num_groups"] == expected
    assert tokens_of(trees)[: len(JOBS)] == tokens_of(plain)
    assert cached(trees)[1 : len(JOBS)] == cached(plain)[1:]
    assert min(cached(plain)[2][2:]) >= 4 * WINDOW, "no long prompt was cached"
    assert min(trees["trees"][: len(JOBS)]) > 20, "hardly a tree was drafted"
    assert trees["nodes"][1] > 2 * trees["trees"][1], "no tree branched"
    assert_same_text(trees, len(JOBS))


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_one_group_drafts_the_same(
    kind: str, method: str, answer: Callable[..., dict]
) -> None:
    """Red when a head finds other KV or features than in one group.

    Or when a user can no longer ask for one group.
    """
    one = answer(kind, method, JOBS_OF_TREES, disable_hybrid_kv_cache_manager=True)
    trees = answer(kind, method, JOBS_OF_TREES)
    assert one["kv_cache"]["num_groups"] == 1
    assert tokens_of(one) == tokens_of(trees)
    for name in ("trees", "nodes", "accepted"):
        assert one["stats"][name] == trees["stats"][name]
    assert set(trees["stats"]["accepted"]) - {"0"}, "no draft was accepted"


@pytest.mark.parametrize(
    ("kind", "method"),
    [("gemma", "suffix_tree"), ("gpt_oss", "suffix_tree"), ("gpt_oss", "eagle_tree")],
)
def test_mixed_batches(kind: str, method: str, answer: Callable[..., dict]) -> None:
    """Red when greedy answers change beside sampled ones, limits, or prompts."""
    plain, trees = answer(kind, None, [MIXED]), answer(kind, method, [MIXED])
    for row in GREEDY_ROWS:
        assert tokens_of(trees)[0][row] == tokens_of(plain)[0][row], row
    assert trees["trees"][0] > 20


@pytest.mark.parametrize(
    ("kind", "method"),
    [("gemma", "suffix_tree"), ("gpt_oss", "suffix_tree"), ("gpt_oss", "eagle_tree")],
)
def test_preemption(kind: str, method: str, answer: Callable[..., dict]) -> None:
    """Red when a request that lost its blocks comes back with KV of another."""
    prompts = [*PROMPTS, *PROMPTS]
    job = {"prompts": prompts, "params": GREEDY, "max_in_flight": 8}
    sampled = with_and_without_trees(prompts, 8, max_tokens=50, temperature=0.5)
    plain = answer(kind, None, [job])
    tight = answer(kind, method, [job, *sampled], num_gpu_blocks_override=36)
    assert min(tight["preemptions"][:2]) > 0
    assert tokens_of(tight)[0] == tokens_of(plain)[0]
    assert_same_text(tight, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_the_cache_are_those_of_plain_vllm(
    kind: str, answer: Callable[..., dict]
) -> None:
    """Red when trees cost more of the KV cache than their fork blocks.

    Or when several groups hold no more tokens than one.
    """
    method, forks = "suffix_tree", MAX_TREES * (8 - 1) * 2
    memory = {"kv_cache_memory_bytes": 2**26}
    of_plain, of_trees, of_one = (
        answer(kind, *engine, JOBS[:1], **memory, **options)["kv_cache"]
        for engine, options in (
            ((None,), {}),
            ((method,), {}),
            ((method,), {"disable_hybrid_kv_cache_manager": True}),
        )
    )
    num_groups = KINDS[kind].groups
    assert of_plain["num_groups"] == of_trees["num_groups"] == num_groups
    assert of_trees["num_blocks"] == of_plain["num_blocks"] - num_groups * forks
    share = of_trees["num_blocks"] / of_plain["num_blocks"]
    assert of_trees["num_tokens"] == pytest.approx(share * of_plain["num_tokens"], 0.01)
    # 10 blocks without a window, 4 with one
    gain = num_groups * 10 / (10 + 4 * (num_groups - 1))
    assert of_trees["num_tokens"] == pytest.approx(gain * of_one["num_tokens"], 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_request_holds_what_it_holds_in_plain_vllm(
    kind: str, answer: Callable[..., dict]
) -> None:
    """Red when blocks before a window are not freed under trees."""
    length = MAX_MODEL_LEN - GREEDY["max_tokens"]
    job = {"prompts": [(PROMPTS[3] * 2)[:length]], "params": GREEDY, "max_in_flight": 1}
    held = {
        name: answer(kind, method, [job], **options)["held"][-1]
        for name, method, options in (
            ("plain", None, {}),
            ("trees", "suffix_tree", {}),
            ("one", "suffix_tree", {"disable_hybrid_kv_cache_manager": True}),
        )
    }
    num_groups = KINDS[kind].groups
    # a tree may begin the next block of every group
    assert held["plain"] <= held["trees"] <= held["plain"] + num_groups
    # blocks of one group are as many times larger
    assert held["trees"] < 0.7 * num_groups * held["one"]


@pytest.mark.parametrize(
    ("method", "asked", "refused"),
    [
        ("suffix_tree", False, False),
        ("suffix_tree", True, True),
        ("suffix_tree", None, False),
        ("redrafter", None, False),
        ("eagle_tree", None, False),
        ("eagle_tree", True, True),
        ("eagle_tree", False, False),
        ("rsd_s", None, True),
        ("rsd_s", True, True),
    ],
)
def test_who_gets_several_groups(
    method: str,
    asked: bool | None,
    refused: bool,
    targets: dict[str, str],
    tiny: dict[str, str],
) -> None:
    """Red when a method is given one group for nothing, or several that it cannot."""
    assert one_group(targets["gpt_oss"], method, asked, tiny) == refused


def test_heads_of_other_sizes_get_one_group(
    tiny: dict[str, str], tmp_path: Path
) -> None:
    """Red when a head's layer makes blocks of another size, or groups of one layer."""
    other = write_with_sinks(tmp_path / "other", WINDOW)
    assert one_group(other, "eagle_tree", None, tiny)
    assert not one_group(other, "redrafter", None, tiny)
    # there is no group of full layers that it could join
    assert one_group(tiny["target"], "eagle_tree", None, tiny)
    with pytest.raises(SpecConfigError, match="disable_hybrid_kv_cache_manager=False"):
        one_group(other, "eagle_tree", False, tiny)
    with pytest.raises(SpecConfigError, match="disable_hybrid_kv_cache_manager=False"):
        one_group(other, "rsd_s", False, tiny)


def one_group(
    target: str, method: str, asked: bool | None, tiny: dict[str, str]
) -> bool:
    """Whether an engine's layers are to be in one group; nothing is started."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    spec: dict[str, object] = {"method": method}
    if method != "suffix_tree":
        spec["model"] = tiny["draft" if method == "rsd_s" else method]
    config = EngineArgs(
        model=target,
        speculative_config=spec,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        disable_hybrid_kv_cache_manager=asked,
    ).create_engine_config()
    return bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
