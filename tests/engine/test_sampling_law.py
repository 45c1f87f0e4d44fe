"""At temperature 1 the emitted tokens follow the target's law."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

NUM_SEEDS = 1000
TOP = 64


@pytest.fixture(scope="module")
def prompt(tokenize: Callable[[str], list[int]]) -> list[int]:
    """A prompt after which many tokens are likely."""
    return tokenize("Once upon a time, there was a little")


@pytest.fixture(scope="module")
def greedy(run_engine: Callable[..., dict], prompt: list[int]) -> dict:
    """The two most likely first tokens in a row, and the target's laws of both."""
    params = {"temperature": 0.0, "max_tokens": 2, "logprobs": TOP}
    answer = run_engine(None, [{"prompts": [prompt], "params": params, "at_once": 1}])
    return answer["jobs"][0][0]


def follows(tokens: list[int], logprobs: dict[str, float]) -> bool:
    """Chi-square test of drawn tokens against the law they should have."""
    counts, total = Counter(tokens), len(tokens)
    law = {int(t): float(np.exp(lp)) for t, lp in logprobs.items()}
    likely = [t for t, p in law.items() if p * total >= 5]
    observed = [counts[t] for t in likely]
    expected = [law[t] * total for t in likely]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    return chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize(
    ("method", "any_text"),
    [
        ("rsd_s", False),
        ("spectr", False),
        ("rsd_s", True),
        ("redrafter", False),
        ("redrafter-stochastic", False),
    ],
    ids=["rsd_s", "spectr", "grammar", "redrafter", "redrafter-stochastic"],
)
def test_tokens_follow_the_target(
    method: str,
    any_text: bool,
    run_engine: Callable[..., dict],
    prompt: list[int],
    greedy: dict,
) -> None:
    """Turns red when drafts, scores or their random numbers bend the law.

    The first token is drawn after the prompt, without a tree. The second one comes
    from a tree, whose nodes a grammar (of any text) masks in the last case: its law is
    known for the requests that began with the likeliest token.
    """
    grammar = {"structured_outputs": {"regex": r"(.|\n)*"}} if any_text else {}
    params = [
        {
            "temperature": 1.0,
            "max_tokens": 2,
            "seed": seed,
            "ignore_eos": True,
            **grammar,
        }
        for seed in range(NUM_SEEDS)
    ]
    job = {"prompts": [prompt] * NUM_SEEDS, "params": params, "at_once": 8}
    result = run_engine(method, [job])
    assert result["trees"][0] > 0.9 * NUM_SEEDS
    assert result["nodes"][0] > 6 * result["trees"][0], "only chains were scored"
    answers = [a["token_ids"] for a in result["jobs"][0]]
    assert follows([first for first, _ in answers], greedy["logprobs"][0])
    seconds = [second for first, second in answers if first == greedy["token_ids"][0]]
    assert len(seconds) > 50
    assert follows(seconds, greedy["logprobs"][1])
    wrong = greedy["logprobs"][0]
    assert not follows(seconds, wrong), "negative control: another law must fail"
