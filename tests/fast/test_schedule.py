"""Which tree is drawn: by batch size, by what was accepted, and never by a draw."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from vllm_treespec.config import SpecConfigError, parse_spec_config
from vllm_treespec.core.schedule import MIN_TREES, PAUSE_STEPS, AdaptiveSchedule

SPEC = {"method": "rsd_s", "model": "draft", "beam_width": 3, "depth": 3}
LADDER = [
    {"batch_size": 2, "min_acceptance_length": 1.5},
    {"batch_size": 4, "beam_width": 2, "min_acceptance_length": 1.2},
    {"batch_size": 8, "beam_width": 1, "depth": 1},
]


def schedule(entries: Any = LADDER) -> AdaptiveSchedule:
    config = parse_spec_config({**SPEC, "schedule": entries})
    return AdaptiveSchedule(config.scheduled_trees())


def test_batch_size_chooses() -> None:
    """Red when a large batch keeps a tree that costs more than it brings."""
    chosen = [schedule().choose(n) for n in (1, 2, 3, 4, 5, 8, 9, 100)]
    assert chosen == [0, 0, 1, 1, 2, 2, None, None]
    names = [tree.name for tree in schedule().trees]
    assert names == ["rsd_s 3x3", "rsd_s 2x3", "rsd_s 1x1"]


def test_fixed_never_changes() -> None:
    """Red when "fixed" starts to depend on anything."""
    fixed = schedule("fixed")
    fixed.observe(0, [0] * 10 * MIN_TREES)
    assert [fixed.choose(n) for n in (1, 1000)] == [0, 0]


def test_default_ends_in_plain_decoding() -> None:
    """Red when the default schedule draws trees for any batch however large."""
    default = schedule("default")
    assert default.choose(1) == 0
    assert default.choose(1000) is None


def test_a_tree_not_worth_it_is_given_up_and_tried_again() -> None:
    """Red when a low acceptance length is put up with, or never looked at again."""
    adaptive = schedule()
    adaptive.choose(1)
    adaptive.observe(0, [0] * (MIN_TREES - 1))
    assert adaptive.choose(1) == 0
    adaptive.observe(0, [1])
    assert adaptive.choose(1) == 1
    adaptive.observe(1, [0] * MIN_TREES)
    assert adaptive.choose(1) == 2
    adaptive.observe(2, [0] * MIN_TREES)
    assert adaptive.choose(1) == 2, "an acceptance length of 1 was asked for"
    later = [adaptive.choose(1) for _ in range(PAUSE_STEPS)]
    assert set(later[:-9]) == {2}
    assert later[-1] == 0


def test_old_trees_are_forgotten() -> None:
    """Red when a good past hides for ever that drafts have become bad."""
    adaptive = schedule()
    adaptive.choose(1)
    adaptive.observe(0, [3] * 10 * MIN_TREES)
    for _ in range(1000):
        adaptive.observe(0, [0, 0])
    assert adaptive.choose(1) == 1


def test_use_always() -> None:
    """Red when a benchmark of one tree measures another."""
    adaptive = schedule()
    adaptive.force_tree({"beam_width": 2})
    assert [adaptive.choose(n) for n in (1, 1000)] == [1, 1]
    adaptive.force_tree(None)
    assert adaptive.choose(1) == 0
    with pytest.raises(ValueError, match="it has rsd_s 3x3, rsd_s 2x3, rsd_s 1x1"):
        adaptive.force_tree({"beam_width": 7})


def test_choosing_needs_no_spec_config() -> None:
    """Red when the core imports spec-configs, or pydantic, again."""
    code = (
        "import sys, vllm_treespec.core.schedule, vllm_treespec.core.sizes\n"
        "unwanted = {'pydantic', 'torch', 'vllm_treespec.config'}\n"
        "sys.exit(bool(unwanted & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "'schedule' is empty"),
        ("never", "'default' or 'fixed'"),
        ([{"batch_size": 0}], "batch_size"),
        ([{"beam_width": 2}], "'schedule.0.batch_size' is missing; add it"),
        ([{"batch_size": 2, "width": 2}], "write beam_width, depth"),
        ([{"batch_size": 2, "beam_width": 40}], "at most 63 fit"),
        ([{"batch_size": 2, "beam_width": "x"}], "beam_width is wrong"),
        ([{"batch_size": 2, "min_acceptance_length": 0.5}], "min_acceptance_length"),
    ],
)
def test_wrong_schedules_are_named(entries: Any, says: str) -> None:
    """Red when a schedule that cannot work gets as far as the engine."""
    with pytest.raises(SpecConfigError) as error:
        schedule(entries)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
