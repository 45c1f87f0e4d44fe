"""Quantised weights and kinds of attention: trees answer as plain vLLM does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import TINY
from tests.engine.processes import EngineProcessError
from tests.engine.quantised_models import write_quantised
from tests.engine.sampled import (
    REPEATING,
    assert_same_text,
    assert_trees_equal_plain,
    tokens_of,
    with_and_without_trees,
)
from tests.engine.tiny_models import (
    SIZES,
    write_chunked,
    write_layered,
    write_rows,
    write_windowed,
    write_with_sinks,
)

WINDOW = 16
# A whole number of KV blocks.
CHUNK = 32
# No request is so long.
WHOLE = 512
NO_SINK = -1e4
SUFFIX = {"method": "suffix_tree", "num_drafts": 8, "depth": 4}
# The two likeliest tokens below each node, so that the target's own are among them.
OWN_DRAFT = {"method": "rsd_c", "branching_factors": [2, 2, 1]}
DEPTH = 3
HEADS = ("redrafter", "eagle_tree", "lyanna")
# vLLM's int8 kernel for processors with AMX has no float32.
INT8_DTYPE = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


@dataclass(frozen=True)
class Kind:
    """A kind of target: how it is made of a plain one, and in which type it runs."""

    write: Callable[[str, Path], str]
    dtype: str = "float32"
    methods: tuple[str, ...] = ("suffix_tree", "own draft")
    # Targets of the same weights without the kind's properties, one by one.
    without: tuple[Callable[[Path], str], ...] = ()


def quantised(form: str) -> Callable[[str, Path], str]:
    """Return a function that writes a target in a quantised format."""
    return lambda source, folder: write_quantised(source, folder, form)


KINDS = {
    "int8": Kind(
        quantised("int8"),
        INT8_DTYPE,
        methods=("suffix_tree", "own draft", *HEADS),
    ),
    "fp8": Kind(quantised("fp8")),
    # vLLM has no kernel for 4 bit and float32.
    "int4": Kind(quantised("int4"), "bfloat16"),
    "gptq": Kind(quantised("gptq"), "bfloat16"),
    "awq": Kind(quantised("awq"), "bfloat16"),
    "window": Kind(
        lambda _, folder: write_windowed(folder, WINDOW),
        methods=("suffix_tree", "own draft", "full draft", *HEADS),
    ),
    "window in some layers": Kind(
        lambda _, folder: write_layered(folder, WINDOW),
        without=(lambda folder: write_layered(folder, WHOLE),),
    ),
    "sinks": Kind(
        lambda _, folder: write_with_sinks(folder, WINDOW),
        methods=("suffix_tree", "own draft", "full draft", "eagle_tree"),
        without=(
            lambda folder: write_with_sinks(folder, WHOLE),
            lambda folder: write_with_sinks(folder, WINDOW, NO_SINK),
        ),
    ),
    "chunks": Kind(
        lambda _, folder: write_chunked(folder, CHUNK),
        methods=("suffix_tree", "own draft", "full draft", "eagle_tree"),
        without=(lambda folder: write_chunked(folder, WHOLE),),
    ),
}
CASES = [(kind, method) for kind in KINDS for method in KINDS[kind].methods]
PARAMS = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
JOBS = [
    {"prompts": REPEATING, "params": PARAMS, "max_in_flight": number}
    for number in (1, 4)
]
SAMPLED = with_and_without_trees(REPEATING, 3, max_tokens=24, temperature=0.5)


@pytest.fixture(scope="module")
def targets(
    tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Folder of a target of every kind."""
    folder = tmp_path_factory.mktemp("kinds")
    return {
        name: kind.write(tiny["target"], folder / name) for name, kind in KINDS.items()
    }


@pytest.fixture
def answer(
    run_engine: Callable[..., dict], targets: dict[str, str], tiny: dict[str, str]
) -> Callable[..., dict]:
    """Return a function that runs the jobs on a kind of target."""

    def run(name: str, method: str | dict | None, **target: str) -> dict:
        options: dict[str, Any] = {"model": targets[name], **TINY, **target}
        options["dtype"] = KINDS[name].dtype
        if method is not None:
            specs: dict[str, dict[str, object]] = {
                "suffix_tree": SUFFIX,
                "own draft": {**OWN_DRAFT, "model": targets[name]},
                "full draft": {**OWN_DRAFT, "model": tiny["draft"]},
                **{head: {"method": head, "model": tiny[head]} for head in HEADS},
            }
            spec = specs[method] if isinstance(method, str) else method
            options["speculative_config"] = {**spec, "schedule": "fixed"}
        sampled = SAMPLED if same_when_sampled(name, method) else ()
        return run_engine(None, [*JOBS, *sampled], **options)

    return run


def same_when_sampled(kind: str, method: str | dict | None) -> bool:
    """Whether sampled text is that without trees: in float32, if none is drawn."""
    return KINDS[kind].dtype == "float32" and method in ("suffix_tree", *HEADS)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_tokens_equal_plain(
    kind: str, method: str, answer: Callable[..., dict]
) -> None:
    """Red when a kind of weights or of attention is read otherwise under a tree."""
    plain, trees = answer(kind, None), answer(kind, method)
    assert_trees_equal_plain(trees, plain, len(JOBS))
    if same_when_sampled(kind, method):
        assert_same_text(trees, len(JOBS))


@pytest.mark.parametrize("kind", ["int8", "window"])
def test_kinds_matter(
    kind: str, answer: Callable[..., dict], tiny: dict[str, str]
) -> None:
    """Red when a target runs as the plain one that it was made of."""
    assert tokens_of(answer(kind, None)) != tokens_of(
        answer(kind, None, model=tiny["target"])
    )


@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].without])
def test_attention_matters(
    kind: str, answer: Callable[..., dict], tmp_path: Path
) -> None:
    """Red when windows, sinks or chunks do not count in plain vLLM's answers."""
    found = tokens_of(answer(kind, None))
    for number, write in enumerate(KINDS[kind].without):
        without = write(tmp_path / str(number))
        for job, other in zip(
            found, tokens_of(answer(kind, None, model=without)), strict=True
        ):
            assert job[-1] != other[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_drafts_for_itself(kind: str, answer: Callable[..., dict]) -> None:
    """Red when a draft model's weights or windows are read otherwise than a target's.

    Then it would not draft what it answers as a target.
    """
    stats = answer(kind, "own draft")["stats"]
    assert stats["accepted"][str(DEPTH)] > 0.9 * stats["trees"]


@pytest.mark.parametrize(("rows", "share"), [(480, 0.3), (576, 0.9)])
def test_padding_of_the_vocabulary(
    rows: int,
    share: float,
    answer: Callable[..., dict],
    tiny: dict[str, str],
    tmp_path: Path,
) -> None:
    """Red when a draft model of fewer or more rows is refused, or drafts other tokens.

    Red, too, when a token of the text that it has no row for ends the engine.
    """
    target = write_rows(tiny["target"], tmp_path / "target", SIZES["vocab_size"])
    draft = write_rows(tiny["target"], tmp_path / "draft", rows)
    plain, trees = (
        answer("fp8", method, model=target)
        for method in (None, {**OWN_DRAFT, "model": draft})
    )
    assert tokens_of(trees) == tokens_of(plain)
    assert max(map(max, tokens_of(plain)[0])) >= 480, "no token lacks a row"
    stats = trees["stats"]
    assert stats["accepted"][str(DEPTH)] > share * stats["trees"]


def test_quantised_output_layers_are_named(
    answer: Callable[..., dict], tiny: dict[str, str], tmp_path: Path
) -> None:
    """Red when a head reads packed numbers as an output layer, or no remedy is named.

    A method without a head needs no such layer.
    """
    target = write_quantised(tiny["target"], tmp_path / "gptq", "gptq", output=True)
    with pytest.raises(EngineProcessError, match="output layer, which is quantised"):
        answer("gptq", "redrafter", model=target)
    plain, trees = (answer("gptq", m, model=target) for m in (None, "suffix_tree"))
    assert tokens_of(trees) == tokens_of(plain)


def test_hot_tokens_need_an_output_layer(
    answer: Callable[..., dict], tiny: dict[str, str], tmp_path: Path
) -> None:
    """Red when packed numbers are read as a draft model's output layer."""
    draft = write_quantised(tiny["draft"], tmp_path / "draft", "gptq", output=True)
    spec = {**OWN_DRAFT, "model": draft}
    hot = tmp_path / "hot.json"
    hot.write_text("[1, 2, 3]")
    remedy = "is quantised, which is not supported with hot tokens; write"
    with pytest.raises(EngineProcessError, match=remedy):
        answer("gptq", {**spec, "hot_tokens": str(hot)})
    plain, trees = answer("gptq", None), answer("gptq", {**spec, "hot_tokens": "all"})
    assert tokens_of(trees) == tokens_of(plain)
