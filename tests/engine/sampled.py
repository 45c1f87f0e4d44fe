"""Sampled answers with trees are those of plain decoding by the same noise.

Holds for methods whose drafts were not drawn, in float32.
"""

from collections.abc import Sequence
from typing import Any

# Drafts of these are drawn, and verified by rejection: another text, the same law.
DRAWN = ("sd", "rsd_c", "rsd_s", "spectr", "specinfer")


def with_and_without_trees(
    prompts: Sequence[list[int]], max_in_flight: int, **params: Any
) -> tuple[dict, dict]:
    """Two jobs of the same requests at temperature 1, the second one without drafts.

    Each request has a seed of its own. The second job runs in other batches.

    Args:
        prompts: token ids.
        max_in_flight: of the first job.
        params: other parameters of all requests. An index finds drafts for a target
            of random weights at lower temperatures only.

    """
    seeded = [
        {"temperature": 1.0, "ignore_eos": True, "seed": 100 + number, **params}
        for number in range(len(prompts))
    ]
    plain = [{**one, "extra_args": {"treespec": {"enabled": False}}} for one in seeded]
    return (
        {"prompts": prompts, "params": seeded, "max_in_flight": max_in_flight},
        {"prompts": prompts, "params": plain, "max_in_flight": max_in_flight + 1},
    )


def assert_same_text(result: dict, first: int, min_accepted: int = 1) -> None:
    """Compare the answers of two such jobs, which lie side by side.

    Args:
        result: of the engine.
        first: number of the job with trees.
        min_accepted: of its drafts; equal texts prove little where none is accepted.

    """
    trees, plain = result["jobs"][first : first + 2]
    assert [a["token_ids"] for a in trees] == [a["token_ids"] for a in plain]
    assert result["trees"][first] > 0
    assert result["trees"][first + 1] == 0
    assert result["accepted"][first] >= min_accepted, "no draft was accepted"


def tokens_of(result: dict) -> list[list[list[int]]]:
    """Tokens of the answers, by job."""
    return [[answer["token_ids"] for answer in job] for job in result["jobs"]]


def assert_trees_equal_plain(trees: dict, plain: dict, num_jobs: int) -> None:
    """Compare the first jobs of two engines; the second job's trees must branch."""
    assert tokens_of(trees)[:num_jobs] == tokens_of(plain)
    assert min(trees["trees"][:num_jobs]) > 20, "hardly a tree was drafted"
    assert trees["nodes"][1] > 2 * trees["trees"][1], "no tree branched"


def repeating(*texts: tuple[int, int]) -> list[list[int]]:
    """Texts that repeat themselves, so that trees of earlier text are drafted.

    ``texts`` are their lengths, and after how many tokens each repeats itself.
    """
    return [
        [(7 * (i % period) + 3 * j) % 500 for i in range(length)]
        for j, (length, period) in enumerate(texts)
    ]


REPEATING = repeating((9, 4), (40, 9), (64, 30), (130, 11))
