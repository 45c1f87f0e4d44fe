"""Sources and rules that no other quick test has, on a small target."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import TINY
from tests.engine.sampled import REPEATING
from tests.engine.tiny_models import SIZES, write_pair
from tests.heads import write_head

# Widths with which even a head of random weights is right now and then.
SPECS: dict[str, dict[str, Any]] = {
    "spectr": {"num_paths": 3, "depth": 3},
    "specinfer": {},
    "suffix_tree": {"num_drafts": 8, "depth": 4},
    "medusa_tree": {"num_drafts": 24},
}
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
JOBS = [
    {"prompts": REPEATING, "params": GREEDY, "max_in_flight": number}
    for number in (1, 4)
]


@pytest.fixture(scope="module")
def models(
    tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each method drafts with, as keys of its spec-config."""
    folder = tmp_path_factory.mktemp("methods")
    _, second = write_pair(folder, noise=0.3)
    sizes = {name: SIZES[name] for name in ("hidden_size", "vocab_size")}
    head = write_head(folder / "medusa", "medusa", **sizes)
    drafts = [
        {"model": tiny["draft"], "branching_factors": [2, 1, 1]},
        {"model": second, "branching_factors": [2, 2]},
    ]
    return {
        "spectr": {"model": tiny["draft"]},
        "specinfer": {"drafts": drafts},
        "suffix_tree": {},
        "medusa_tree": {"model": head},
    }


@pytest.mark.parametrize("method", SPECS)
def test_tokens_equal_plain(
    method: str,
    run_engine: Callable[..., dict],
    tiny: dict[str, str],
    models: dict[str, dict[str, Any]],
) -> None:
    """Red when a source's trees are laid out, scored or committed wrongly."""
    options: dict[str, Any] = {"model": tiny["target"], **TINY}
    spec = {"method": method, "schedule": "fixed", **SPECS[method], **models[method]}
    plain = run_engine(None, JOBS, **options)
    trees = run_engine(None, JOBS, speculative_config=spec, **options)
    for want, have in zip(plain["jobs"], trees["jobs"], strict=True):
        assert [a["token_ids"] for a in have] == [a["token_ids"] for a in want]
    assert min(trees["trees"]) > 20, "hardly a tree was drafted"
    assert trees["nodes"][1] > 2 * trees["trees"][1], "no tree branched"
    assert set(trees["stats"]["accepted"]) - {"0"}, "no draft was accepted"
