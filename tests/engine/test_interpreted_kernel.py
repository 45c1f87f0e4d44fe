"""The GPU path on a CPU: masks, commit by moves, batched rules, Triton interpreted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.eagle_models import (
    VOCAB_SIZE,
    write_known_language,
    write_lyanna_head,
)
from tests.engine.tiny_models import (
    write_layered,
    write_pair,
    write_windowed,
    write_with_sinks,
)
from tests.heads import write_head
from vllm_treespec.config import parse_spec_config
from vllm_treespec.plugin import stock_arguments

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "seed": 5}
# Draws without replacement, and independent ones that repeat.
SPECS: dict[str, dict[str, object]] = {
    "rsd_s": {"method": "rsd_s", "beam_width": 3, "depth": 2},
    "spectr": {"method": "spectr", "num_paths": 3, "depth": 2},
    "eagle_tree": {"method": "eagle_tree", "top_k": 3, "depth": 2},
    "lyanna": {"method": "lyanna", "depth": 2, "resample": "merge"},
}
# Prompts that cross a page at once, late, and while they are read in chunks.
LENGTHS = (31, 5, 40)
ENGINE: dict[str, object] = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 48,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**26,
}


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def write_gemma(folder: Path, **options: Any) -> str:
    """Write a target with windows in two of three layers; its folder."""
    return write_layered(folder, windowed=2, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a small target and of a draft model that often agrees."""
    return write_pair(tmp_path_factory.mktemp("pair"), **HEADS)


@pytest.fixture(scope="module")
def known_language(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a target, and of heads that know its language, by method."""
    folder = tmp_path_factory.mktemp("known")
    target, head = write_known_language(folder)
    lyanna = write_lyanna_head(folder / "lyanna", folder / "target")
    return {"target": target, "eagle_tree": head, "lyanna": lyanna}


@pytest.fixture
def interpreted(run_engine: Callable[..., dict]) -> Callable[..., dict]:
    """Return a function that runs jobs on the GPU path, from stock arguments."""

    def run(jobs: list[dict], arguments: dict, **options: object) -> dict:
        ours = {
            "worker_cls": "tests.engine.interpreted.InterpretedWorker",
            "at_import": {"TRITON_INTERPRET": "1"},
        }
        return run_engine(None, jobs, **{**ENGINE, **arguments, **ours, **options})

    return run


@pytest.mark.parametrize("method", SPECS)
def test_gpu_path_equals_plain_and_cpu_path(
    method: str,
    run_engine: Callable[..., dict],
    interpreted: Callable[..., dict],
    pair: tuple[str, str],
    known_language: dict[str, str],
) -> None:
    """Red when kernel, masks, moves or rules of the GPU path are wrong anywhere.

    Or when a captured graph would see an earlier step's batch, or a request would wait
    for the kernels' compiler.

    Greedy answers are plain vLLM's on its stock attention. Sampled ones with a seed
    are those of the CPU path, which draws the same numbers: branches and masks are one
    method. They are those without drafts, too, if trees are not drawn.
    """
    target, draft = pair
    if method in known_language:
        target, draft = known_language["target"], known_language[method]
    prompts = [
        [(7 * i + 13 * j) % VOCAB_SIZE for i in range(length)]
        for j, length in enumerate(LENGTHS)
    ]
    job = {
        "prompts": [*prompts, prompts[1][::-1]],
        "params": [GREEDY, SAMPLED, GREEDY, {**GREEDY, "repetition_penalty": 1.3}],
        "max_in_flight": 4,
    }
    off = {**SAMPLED, "extra_args": {"treespec": {"enabled": False}}}
    without_trees = {"prompts": prompts[1:2], "params": off, "max_in_flight": 1}
    spec = {**SPECS[method], "model": draft, "schedule": "fixed"}
    arguments = stock_arguments(parse_spec_config(spec), 32, "cpu")
    plain = run_engine(None, [job], model=target, **ENGINE)
    branches = run_engine(None, [job], model=target, **{**ENGINE, **arguments})
    masks = interpreted([job, without_trees], arguments, model=target)
    for i in (0, 2, 3):
        assert tokens_of(masks)[i] == tokens_of(plain)[i]
    assert tokens_of(masks) == tokens_of(branches)
    for name in ("trees", "nodes", "accepted"):
        assert masks["stats"][name] == branches["stats"][name]
    assert masks["stats"]["late_kernels"] == []
    accepted = set(masks["stats"]["accepted"])
    if parse_spec_config(spec).rule.name == "coupled_draw":
        # A head that equals its target is right at every level.
        assert max(map(int, accepted)) >= 2, "no tree was accepted deep"
        (without,) = masks["jobs"][1]
        assert without["token_ids"] == tokens_of(masks)[1]
    else:
        assert {"1", "2"} <= accepted, "no tree was accepted deep"
    if method == "rsd_s":
        assert masks["stats"]["replays"] >= 3, "no batch of whole trees came again"


@pytest.mark.parametrize("write", [write_windowed, write_with_sinks, write_gemma])
def test_windows_and_sinks(
    write: Callable[..., str],
    run_engine: Callable[..., dict],
    interpreted: Callable[..., dict],
    tmp_path: Path,
) -> None:
    """Red when a node's window is counted in slots, or keys before it are read.

    Or when sinks do not reach the kernel. They come with windows in some layers, which
    are in KV cache groups of their own: their blocks before the window are freed, and
    accepted nodes move in every group. Prompts repeat themselves, so that a tree of
    earlier text is drafted at once.
    """
    sizes = {**HEADS, "vocab_size": 64}
    target = write(tmp_path / "target", window=12, **sizes)
    prompts = [[(3 * i * i + j) % 11 for i in range(n)] for j, n in enumerate((20, 45))]
    job = {"prompts": prompts, "params": GREEDY, "max_in_flight": 2}
    spec = {
        "method": "suffix_tree",
        "num_drafts": 8,
        "depth": 4,
        "min_probability": 0.02,
        "schedule": "fixed",
    }
    arguments = stock_arguments(parse_spec_config(spec), 32, "cpu")
    plain = run_engine(None, [job], model=target, **ENGINE)
    masks = interpreted([job], arguments, model=target)
    assert tokens_of(masks) == tokens_of(plain)
    assert masks["nodes"][0] > 2 * masks["trees"][0], "no tree branched"


@pytest.mark.parametrize("method", ["eagle_tree", "lyanna"])
def test_heads_in_groups(
    method: str,
    run_engine: Callable[..., dict],
    interpreted: Callable[..., dict],
    tmp_path: Path,
) -> None:
    """Red when a head reads other blocks under masks than along branches.

    Its layer lies in a KV cache group beside windows. The head drafts the same from
    one group: it reads the same KV and features.
    """
    sizes = {**HEADS, "vocab_size": 64}
    target = write_with_sinks(tmp_path / "target", window=12, **sizes)
    kind = {"eagle_tree": "eagle", "lyanna": "lyanna"}[method]
    head = write_head(tmp_path / "head", kind, hidden_size=128, vocab_size=64)
    prompts = [[(3 * i * i + j) % 64 for i in range(n)] for j, n in enumerate((20, 45))]
    job = {"prompts": prompts, "params": GREEDY, "max_in_flight": 2}
    # so wide that a head of random weights is right now and then
    spec: dict[str, object] = {"method": method, "model": head, "schedule": "fixed"}
    spec |= {"top_k": 15, "depth": 2, "num_drafts": 15}
    arguments = stock_arguments(parse_spec_config(spec), 32, "cpu")
    plain = run_engine(None, [job], model=target, **ENGINE)
    groups = {"disable_hybrid_kv_cache_manager": False, "watch_blocks": True}
    several = interpreted([job], arguments, model=target, **groups)
    one = interpreted([job], arguments, model=target)
    assert several["kv_cache"]["num_groups"] > 1
    assert tokens_of(several) == tokens_of(one) == tokens_of(plain)
    for name in ("trees", "nodes", "accepted"):
        assert several["stats"][name] == one["stats"][name]
    assert {"1"} <= set(several["stats"]["accepted"]), "no draft was accepted"


def tokens_of(result: dict) -> list[list[int]]:
    """Tokens of the answers."""
    return [answer["token_ids"] for answer in result["jobs"][0]]
