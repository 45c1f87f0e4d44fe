"""Two tensor-parallel ranks on the V2 runner, in processes that are forks of this."""

from __future__ import annotations

from typing import Any

from tests.v2.engines import engine
from tests.v2.prompts import PARAMS
from tests.v2.test_trees import FEW, SHORT

RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
}
SPEC: dict[str, Any] = {
    "method": "hybrid",
    "num_drafts": 7,
    "depth": 4,
    "top_k": 2,
    "model_depth": 2,
    "min_probability": 0.0,
    # by rank 0's times
    "schedule": "measured",
    "schedule_cache": False,
}
TIMES = ("seconds", "mode_seconds")


def test_two_ranks_answer_as_one(
    pair: tuple[str, str], expected: dict[str, list[list[int]]]
) -> None:
    """Red when a draw, a choice or a commit depends on the rank.

    Or when a draft model is not timed when the engine starts.
    """
    answers = [answer[:FEW] for answer in expected["sampled"][: len(SHORT)]]
    with engine(pair[0], {**SPEC, "model": pair[1]}, **RANKS) as running:
        for _ in range(2):
            assert running.generate(SHORT, PARAMS["sampled"], FEW) == answers
        ranks = running.llm.collective_rpc("treespec_stats")
    first, second = (
        {name: count for name, count in stats.items() if name not in TIMES}
        for stats in ranks
    )
    assert first == second
    assert first["nodes"] > 2 * first["trees"] > 0
