"""Decoding with trees equals plain decoding token for token, in float32.

Greedy text is that of stock vLLM, sampled text that of requests without drafts.
"""

from collections.abc import Callable

import pytest
import torch

from tests.engine.conftest import MAX_MODEL_LEN, SPECS
from tests.engine.sampled import DRAWN, assert_same_text, with_and_without_trees
from tests.heads import HEADS
from vllm_treespec.tools.assets import drafters

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. "
    "He counted the steps, one by one, and wrote the weather into his book. "
)
# Its end is drafted well, so that turns end inside accepted drafts.
LIST = "Animals:\n" + "red fox, blue jay, green frog, grey owl;\n" * 4 + "red fox,"
BLOCKS = 4
# Prompts of the jobs that show what batches change; those behind them end near blocks
# and near ``max_model_len``.
BATCHED = 8
# Numbers of the job of sessions, and of the first sampled one.
SESSIONS, SAMPLED = 4, 5


@pytest.fixture(scope="module")
def prompts(tokenize: Callable[[str], list[int]]) -> list[list[int]]:
    """Prompts from one word to one that nearly fills ``max_model_len``."""
    long = tokenize(TEXT * 20)
    return [
        tokenize("Hello"),
        tokenize("The capital of France is"),
        tokenize("def fibonacci(n):\n    "),
        tokenize("1 2 3 4 5 6 7 8"),
        tokenize(TEXT),
        long[:250],
        long[:130] + tokenize(" And then"),
        long[: MAX_MODEL_LEN - 10],
        long[: MAX_MODEL_LEN - 1],
        long[:31],
        long[:32],
        long[:33],
    ]


@pytest.fixture(scope="module")
def jobs(prompts: list[list[int]], tokenize: Callable[[str], list[int]]) -> list[dict]:
    """Prompts one by one, eight at once, and all of them again, some from the cache.

    36 tokens end in another block than the prompt; log probabilities need fewer. Two
    requests have a grammar. The input of three comes in parts; their turns end at
    different places in a tree. The last two jobs are sampled, with drafts and without.
    """
    greedy = {"temperature": 0.0, "max_tokens": 36, "ignore_eos": True}
    logprobs = {**greedy, "max_tokens": 20, "logprobs": 2}
    regex = r"([a-z]{1,8} ){40}"
    grammar = {**greedy, "max_tokens": 20, "structured_outputs": {"regex": regex}}
    return [
        {"prompts": prompts[:BATCHED], "params": greedy, "max_in_flight": 1},
        {"prompts": prompts[:BATCHED], "params": greedy, "max_in_flight": BATCHED},
        {"prompts": prompts, "params": logprobs, "max_in_flight": 8},
        {"prompts": prompts[1:3], "params": grammar, "max_in_flight": 2},
        {
            "run": "sessions",
            "prompts": [tokenize(LIST)] * 3,
            "more": tokenize("\nOnce more:\nred fox,"),
            "params": [{**greedy, "max_tokens": count} for count in (7, 8, 9)],
        },
        *with_and_without_trees(prompts, 8, max_tokens=36, top_p=0.95),
    ]


@pytest.fixture(scope="module")
def plain(run_engine: Callable[..., dict], jobs: list[dict]) -> dict:
    """What stock vLLM answers."""
    return run_engine(None, jobs[:SAMPLED], capture_kv=BLOCKS)


# A greedy request gets the likeliest nodes in place of drawn ones, as other methods do.
DRAWN_ALIKE = ("eagle-stochastic", "redrafter-stochastic")


@pytest.fixture(scope="module", params=[n for n in SPECS if n not in DRAWN_ALIKE])
def method(request: pytest.FixtureRequest) -> str:
    """Name of a spec-config."""
    return request.param


@pytest.fixture(scope="module")
def trees(method: str, run_engine: Callable[..., dict], jobs: list[dict]) -> dict:
    """What stock vLLM answers with draft trees, once per method."""
    return run_engine(method, jobs, capture_kv=BLOCKS)


def test_tokens_equal_plain(plain: dict, trees: dict) -> None:
    """Turns red when positions, masks, scoring or commit are off by anything."""
    for plain_job, tree_job in zip(plain["jobs"], trees["jobs"], strict=False):
        for expected, found in zip(plain_job, tree_job, strict=True):
            assert found["token_ids"] == expected["token_ids"]
            assert found["finish_reason"] == expected["finish_reason"]


def test_sampled_tokens_equal_plain(trees: dict, method: str) -> None:
    """Turns red when a token is drawn by noise that is not its position's."""
    if method in DRAWN:
        pytest.skip("its trees are drawn")
    # a head that is not shipped has random weights
    assert_same_text(trees, SAMPLED, min_accepted=0)


def test_sessions(plain: dict, trees: dict) -> None:
    """Turns red when a session goes on elsewhere, or leaves blocks of another text."""
    for expected, found in zip(
        plain["jobs"][SESSIONS], trees["jobs"][SESSIONS], strict=True
    ):
        assert found["session"] == expected["session"]
        assert found["token_ids"] == expected["token_ids"]
        assert found["num_cached_tokens"] == expected["num_cached_tokens"] == 64


def test_logprobs_equal_plain(plain: dict, trees: dict) -> None:
    """Turns red when a token's log probability is read at another node."""
    for expected, found in zip(plain["jobs"][2], trees["jobs"][2], strict=True):
        for want, have in zip(expected["logprobs"], found["logprobs"], strict=True):
            assert want.keys() == have.keys()
            for token, logprob in want.items():
                assert have[token] == pytest.approx(logprob, abs=2e-3)


def test_kv_after_commit_equals_plain(plain: dict, trees: dict) -> None:
    """Turns red when accepted KV ends up in a wrong slot, even if text survives."""
    want, have = torch.load(plain["kv_file"]), torch.load(trees["kv_file"])
    assert len(want) == len(have) == 30
    for plain_layer, tree_layer in zip(want, have, strict=True):
        torch.testing.assert_close(tree_layer, plain_layer, atol=2e-3, rtol=1e-3)


def test_trees_were_really_used(trees: dict, method: str) -> None:
    """Turns red when drafting silently stops: then all of the above proves nothing."""
    stats = trees["stats"]
    accepted = {int(k): v for k, v in stats["accepted"].items()}
    assert stats["trees"] > 100
    kind = HEADS.get(str(SPECS[method]["method"]))
    if kind and f"{kind}-smollm2-135m" not in drafters():
        pytest.skip("a head with random weights: nothing is accepted")
    assert sum(k * v for k, v in accepted.items()) > 20


def test_trees_need_no_batch(trees: dict, method: str) -> None:
    """Turns red when a head reads the hidden state of another request or node.

    Then fewer drafts are accepted in batches, and more trees are drawn; a few may
    differ by rounding.
    """
    if SPECS[method]["method"] not in HEADS:
        pytest.skip("draft models may have to catch up in batches")
    alone, together, *_ = trees["trees"]
    assert together == pytest.approx(alone, rel=0.03)


def test_compression_is_counted(trees: dict, method: str) -> None:
    """Turns red when beams are not merged, or their tokens not counted."""
    tokens, nodes = (trees["stats"][f"beam_{name}"] for name in ("tokens", "nodes"))
    if method != "redrafter":
        assert tokens == nodes == 0
        return
    assert tokens % 24 == 0
    assert 1.0 < tokens / nodes < 24.0
