"""At temperature 1 the emitted tokens follow the target's law."""

from collections import Counter
from collections.abc import Callable

import pytest
from scipy.stats import chisquare

from tests.engine.conftest import SPECS

NUM_SEEDS = 1200
TOP = 64


@pytest.fixture(scope="module")
def prompt(tokenize: Callable[[str], list[int]]) -> list[int]:
    """A prompt after which many tokens are likely."""
    return tokenize("Once upon a time, there was a little")


@pytest.fixture(scope="module")
def start(run_engine: Callable[..., dict], prompt: list[int]) -> dict:
    """The target's most likely first token, and its law of the second one."""
    greedy = {"temperature": 0.0, "max_tokens": 2, "logprobs": TOP}
    answer = run_engine(None, [{"prompts": [prompt], "params": greedy, "at_once": 1}])
    return answer["jobs"][0][0]


@pytest.mark.parametrize("method", ["rsd_s", "rsd_c"])
def test_second_token_follows_the_target(
    method: str, run_engine: Callable[..., dict], prompt: list[int], start: dict
) -> None:
    """Turns red when drafts, scores or their random numbers bend the law.

    The first token comes from the prompt and is sampled plainly; with top_k = 1 of the
    first draw not to be had per token, the requests whose first token is the most
    likely one are kept. Their second token comes from a tree.
    """
    assert method in SPECS
    import numpy as np

    params = [
        {"temperature": 1.0, "max_tokens": 2, "seed": seed, "ignore_eos": True}
        for seed in range(NUM_SEEDS)
    ]
    job = {"prompts": [prompt] * NUM_SEEDS, "params": params, "at_once": 8}
    answers = run_engine(method, [job])["jobs"][0]
    first = start["token_ids"][0]
    seconds = Counter(a["token_ids"][1] for a in answers if a["token_ids"][0] == first)
    total = sum(seconds.values())
    law = {int(t): float(np.exp(lp)) for t, lp in start["logprobs"][1].items()}
    kept = {t: p for t, p in law.items() if p * total >= 5}
    observed = [seconds[t] for t in kept] + [total - sum(seconds[t] for t in kept)]
    expected = [p * total for p in kept.values()]
    expected.append(total - sum(expected))
    assert total > 50
    assert chisquare(observed, expected).pvalue > 1e-4
