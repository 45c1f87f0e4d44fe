"""Trees that come and go with the batch size: same tokens, and drafts catch up."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.engine.conftest import TINY
from tests.engine.sampled import DRAWN, assert_same_text, with_and_without_trees

# Number of the first sampled job.
SAMPLED = 3

SPECS: dict[str, dict] = {
    "rsd_c": {
        "branching_factors": [3, 2],
        "schedule": [{"batch_size": 2}, {"batch_size": 4, "branching_factors": [2]}],
    },
    "redrafter": {
        "beam_width": 3,
        "length": 2,
        "schedule": [{"batch_size": 2}, {"batch_size": 4, "beam_width": 2}],
    },
    "eagle_tree": {
        "top_k": 3,
        "depth": 2,
        "num_drafts": 5,
        "schedule": [{"batch_size": 2}, {"batch_size": 4, "depth": 1}],
    },
    "lyanna": {
        "top_k": 3,
        "num_drafts": 5,
        "resample": "replace",
        "schedule": [{"batch_size": 2}, {"batch_size": 4, "depth": 2}],
    },
    "hybrid": {
        "num_drafts": 6,
        "depth": 3,
        "top_k": 3,
        "model_depth": 2,
        "max_cached_tokens": 0,
        "schedule": [{"batch_size": 2}, {"batch_size": 4, "model_depth": 0}],
    },
}
MODES = {
    "rsd_c": {"plain", "rsd_c 3.2", "rsd_c 2"},
    "redrafter": {"plain", "redrafter 3x2x5", "redrafter 2x2x5"},
    "eagle_tree": {"plain", "eagle_tree 3x2x5", "eagle_tree 3x1x5"},
    "lyanna": {"plain", "lyanna 3x3x5", "lyanna 3x2x5"},
    "hybrid": {"plain", "hybrid 6x3+draft_model 3x2", "hybrid 6x3"},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of eight lengths."""
    tokens = [(7 * i * i + 3) % 509 for i in range(100)]
    return [tokens[: 8 + 11 * i] for i in range(8)]


@pytest.fixture(scope="module")
def jobs(prompts: list[list[int]]) -> list[dict]:
    """Eight requests at once (plain), then the same one by one, then three at once.

    The last two jobs are sampled, with drafts and without.
    """
    greedy = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    return [
        *(
            {"prompts": prompts, "params": greedy, "max_in_flight": max_in_flight}
            for max_in_flight in (8, 1, 3)
        ),
        *with_and_without_trees(prompts, 3, max_tokens=32),
    ]


@pytest.fixture(scope="module")
def run_tiny(
    run_engine: Callable[..., dict], tiny: dict[str, str]
) -> Callable[..., dict]:
    """Return a function that runs jobs through an engine of a small target."""
    return partial(run_engine, None, model=tiny["target"], **TINY)


@pytest.fixture(scope="module")
def plain(run_tiny: Callable[..., dict], jobs: list[dict]) -> dict:
    """What stock vLLM answers."""
    return run_tiny(jobs[:SAMPLED])


@pytest.fixture(scope="module", params=SPECS)
def method(request: pytest.FixtureRequest) -> str:
    """A method with a draft model, and one with a head."""
    return request.param


@pytest.fixture(scope="module")
def spec(method: str, tiny: dict[str, str]) -> dict:
    """The spec-config of a method, with a schedule."""
    model = tiny.get(method, tiny["draft"])
    return {**SPECS[method], "method": method, "model": model}


@pytest.fixture(scope="module")
def adaptive(run_tiny: Callable[..., dict], spec: dict, jobs: list[dict]) -> dict:
    """What an engine answers whose trees follow the batch size."""
    return run_tiny(jobs, speculative_config=spec)


def test_tokens_equal_plain(plain: dict, adaptive: dict) -> None:
    """Turns red when a change of trees between steps changes a token."""
    for expected, found in zip(plain["jobs"], adaptive["jobs"], strict=False):
        assert [a["token_ids"] for a in found] == [a["token_ids"] for a in expected]


def test_sampled_tokens_equal_plain(adaptive: dict, method: str) -> None:
    """Turns red when a change of trees between steps changes a sampled token."""
    if method in DRAWN:
        pytest.skip("its trees are drawn")
    assert_same_text(adaptive, SAMPLED)


def test_the_measured_schedule_changes_no_text(
    run_tiny: Callable[..., dict], tiny: dict[str, str], prompts: list[list[int]]
) -> None:
    """Turns red when the clock, which decides over trees, decides over tokens."""
    spec = {"method": "hybrid", "model": tiny["draft"], "schedule": "measured"}
    jobs = with_and_without_trees(prompts, 3, max_tokens=64, temperature=0.3)
    assert_same_text(run_tiny(list(jobs), speculative_config=spec), 0)


def test_batch_size_chose_the_tree(adaptive: dict, method: str) -> None:
    """Turns red when trees are drawn for a batch that is too large, or for none."""
    assert adaptive["stats"]["modes"].keys() == MODES[method]
    one_by_one = adaptive["trees"][1]
    assert one_by_one > 8 * 10


def test_draft_models_catch_up(
    run_tiny: Callable[..., dict],
    jobs: list[dict],
    adaptive: dict,
    method: str,
    spec: dict,
) -> None:
    """Turns red when drafts are drawn from a context that was read in part only.

    The prompts came from the prefix cache, filled while nothing was drafted. An engine
    that always read along needs as many trees for the same tokens.
    """
    if method == "redrafter":
        pytest.skip("a head reads no context")
    fixed = {**spec, "schedule": "fixed"}
    always = run_tiny(jobs[1:2], speculative_config=fixed)
    assert adaptive["trees"][1] == always["trees"][0]
