"""Targets that take images: trees answer as plain vLLM does, with images and without.

The targets are Qwen2.5-VL's kind, whose positions have three axes, and Gemma 3's, with
sliding windows in some layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TINY
from tests.engine.image_models import KINDS, PLACE, do_without_torchvision
from tests.engine.processes import EngineProcessError, call
from tests.engine.sampled import (
    DRAWN,
    assert_same_text,
    assert_trees_equal_plain,
    tokens_of,
    with_and_without_trees,
)

METHODS: dict[str, dict[str, object]] = {
    "suffix_tree": {"num_drafts": 8, "depth": 4},
    "rsd_c": {"branching_factors": [2, 2, 1]},
    "redrafter": {},
    "eagle_tree": {},
    "lyanna": {},
}
# vLLM hands out no hidden states of a Gemma 3 with images but the last ones.
CASES = [
    (kind, method)
    for kind in KINDS
    for method in METHODS
    if (kind, method) != ("gemma3", "eagle_tree")
]
PARAMS = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
IN_FLIGHT = (1, 4)
# Chunks of prompts: shorter than the longest prompts, and than some images.
CHUNK = 64


def text(length: int, period: int) -> list[int]:
    """Tokens that repeat themselves, so that trees of earlier text are drafted."""
    return [7 + (11 * (i % period)) % 480 for i in range(length)]


def jobs_of(kind: str, sampled: bool) -> list[dict[str, Any]]:
    """Prompts with no image, one, the same text with another, and two.

    They run alone, and from the prefix cache together; then, if so, sampled, with
    drafts and without.
    """
    place = PLACE[kind]
    prompts = [
        text(50, 9),
        [*text(9, 4), *place, *text(40, 5)],
        [*text(9, 4), *place, *text(40, 5)],
        [*place, *text(70, 13), *place, *text(40, 6)],
    ]
    jobs = [
        {"prompts": prompts, "params": PARAMS, "max_in_flight": number}
        for number in IN_FLIGHT
    ]
    if sampled:
        jobs += with_and_without_trees(prompts, 3, max_tokens=24, temperature=0.5)
    return [{**job, "images": [[], [2], [5], [4, 8]]} for job in jobs]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a target of every kind, with its language model in it."""
    folder = tmp_path_factory.mktemp("images")
    for kind, write in KINDS.items():
        write(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture
def answer(
    run_engine: Callable[..., dict], targets: dict[str, Path], tiny: dict[str, str]
) -> Callable[..., dict]:
    """Return a function that runs the jobs on a kind of target."""

    def run(kind: str, method: str | None, **keys: object) -> dict:
        options: dict[str, Any] = {
            **TINY,
            "model": str(targets[kind]),
            "skip_tokenizer_init": False,
            "max_num_batched_tokens": CHUNK,
            "limit_mm_per_prompt": {"image": 2, "video": 0},
        }
        if method is not None:
            drafter = tiny.get(method, str(targets[kind] / "draft"))
            model = {} if method == "suffix_tree" else {"model": drafter}
            options["speculative_config"] = {
                "method": method,
                "schedule": "fixed",
                **METHODS[method],
                **model,
                **keys,
            }
        sampled = method is not None and method not in DRAWN
        return run_engine(None, jobs_of(kind, sampled), **options)

    return run


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_tokens_equal_plain(
    kind: str, method: str, answer: Callable[..., dict]
) -> None:
    """Red when a node behind an image has another position than its token has."""
    plain, trees = answer(kind, None), answer(kind, method)
    assert_trees_equal_plain(trees, plain, len(IN_FLIGHT))
    assert all(a["num_cached_tokens"] for a in trees["jobs"][1])
    if method not in DRAWN:
        assert_same_text(trees, len(IN_FLIGHT))


@pytest.mark.parametrize("kind", KINDS)
def test_images_matter(kind: str, answer: Callable[..., dict]) -> None:
    """Red when the targets of this file no longer look at their images."""
    _, first, other, _ = tokens_of(answer(kind, None))[0]
    assert first != other


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_accepted(kind: str, answer: Callable[..., dict]) -> None:
    """Red when equal answers prove nothing: no deep draft is accepted, or all are.

    The draft model is the target's language model, which sees no images.
    """
    stats = answer(kind, "rsd_c")["stats"]
    assert stats["accepted"]["3"] > 0.1 * stats["trees"]
    assert stats["accepted"]["0"] > 0


def doctor(target: Path) -> bool:
    """Ask the doctor about a target, in a process of its own."""
    from rich.console import Console

    from vllm_treespec.tools.target_doctor import TargetCheck, check_target

    do_without_torchvision()
    return check_target(TargetCheck(str(target)), Console())


@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_agrees(kind: str, targets: dict[str, Path], tmp_path: Path) -> None:
    """Red when ``treespec doctor --target`` refuses what an engine runs."""
    function = f"{__name__}:{doctor.__name__}"
    assert call(function, targets[kind], log=tmp_path / "log", engines=0)


def test_draft_models_with_images_are_named(
    answer: Callable[..., dict], targets: dict[str, Path]
) -> None:
    """Red when a draft model that takes images is loaded, or no remedy is named."""
    model = str(targets["qwen2.5-vl"])
    with pytest.raises(EngineProcessError, match=r"\(qwen2_5_vl\)"):
        answer("qwen2.5-vl", "rsd_c", model=model)


def test_heads_without_their_layers_are_named(answer: Callable[..., dict]) -> None:
    """Red when vLLM hands them out, so that the page may say so, or no one is told."""
    with pytest.raises(EngineProcessError, match="does not hand out for Gemma3"):
        answer("gemma3", "eagle_tree")
