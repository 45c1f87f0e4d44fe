"""At temperature 1 the tokens of drawn trees follow the target's law.

Other trees are tested more sharply, token for token: ``sampled.py``.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from scipy.stats import chisquare

from tests.engine.conftest import SPECS, TINY
from tests.engine.tiny_models import SIZES, write_pair
from tests.heads import write_head

NUM_SEEDS = 1000
TOP = 64


# After it, the head with random weights is right for one tree in eight.
PROMPT = [(28 * i + 10) % 64 for i in range(9)]


@pytest.fixture(scope="module")
def law_target(
    target: str, shared_folder: Path
) -> Callable[[bool], tuple[dict[str, str], dict[str, object]]]:
    """Return a function that gives small models, and options of an engine for them.

    A grammar needs a tokenizer: with it the models have the real target's vocabulary.
    Without, they have so few tokens that a head with random weights is right at times.
    """

    def make(tokenizer: bool) -> tuple[dict[str, str], dict[str, object]]:
        folder = shared_folder / ("law-tokenizer" if tokenizer else "law")
        vocab_size, sharpness = (49152, 2.0) if tokenizer else (64, 1.0)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                write_pair(folder, sharpness=sharpness, vocab_size=vocab_size)
                sizes = {"hidden_size": SIZES["hidden_size"], "vocab_size": vocab_size}
                write_head(folder / "eagle", "eagle", **sizes)
                for file in Path(target).glob("tokenizer*") if tokenizer else ():
                    shutil.copy(file, folder / "target")
        names = ("target", "draft")
        models = {name: str(folder / name) for name in names}
        models["eagle_tree"] = str(folder / "eagle")
        return models, {**TINY, "skip_tokenizer_init": not tokenizer}

    return make


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
        ("eagle-stochastic", False),
    ],
    ids=[
        "rsd_s",
        "spectr",
        "grammar",
        "eagle-stochastic",
    ],
)
def test_tokens_follow_the_target(
    method: str,
    any_text: bool,
    run_engine: Callable[..., dict],
    law_target: Callable[[bool], tuple[dict[str, str], dict[str, object]]],
) -> None:
    """Turns red when drafts, scores or their random numbers bend the law.

    The first token is drawn after the prompt, without a tree. The second one comes
    from a tree, whose nodes a grammar (of any text) masks in the last case: its law is
    known for the requests that began with the likeliest token.
    """
    models, options = law_target(any_text)
    run = partial(run_engine, None, model=models["target"], **options)
    likeliest = {"temperature": 0.0, "max_tokens": 2, "logprobs": TOP}
    job: dict = {"prompts": [PROMPT], "params": likeliest, "max_in_flight": 1}
    greedy = run([job])["jobs"][0][0]
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
    job = {"prompts": [PROMPT] * NUM_SEEDS, "params": params, "max_in_flight": 8}
    spec = {"schedule": "fixed", **SPECS[method]}
    spec["model"] = models.get(str(spec["method"]), models["draft"])
    result = run([job], speculative_config=spec)
    assert result["trees"][0] > 0.9 * NUM_SEEDS
    assert result["nodes"][0] > 6 * result["trees"][0], "only chains were scored"
    accepted = {int(n): count for n, count in result["stats"]["accepted"].items()}
    assert sum(accepted.values()) - accepted.get(0, 0) > 20, "no drafts were accepted"
    assert accepted.get(0, 0) > 20, "no drafts were rejected"
    answers = [a["token_ids"] for a in result["jobs"][0]]
    assert follows([first for first, _ in answers], greedy["logprobs"][0])
    seconds = [second for first, second in answers if first == greedy["token_ids"][0]]
    assert len(seconds) > 50
    assert follows(seconds, greedy["logprobs"][1])
    wrong = greedy["logprobs"][0]
    assert not follows(seconds, wrong), "negative control: another law must fail"
