"""Lyanna in the engine: its chains are those of plain torch, its answers plain vLLM's.

The target and the heads are small and have random weights. Trees are so wide that a
part of them is accepted all the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.engine.conftest import ENGINE, TINY
from tests.engine.processes import call
from tests.engine.sampled import assert_same_text, tokens_of, with_and_without_trees
from tests.engine.tiny_models import SIZES, write_pair
from tests.fast.tiny_training import PlainAttention
from tests.heads import write_head
from vllm_treespec.heads import load_lyanna_head
from vllm_treespec.proposers import DynamicTree, Lyanna, ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sources.chain import ChainDraft

VOCAB_SIZE = 64
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
# Shorter and longer than a block, and than a chunk of a prompt.
LENGTHS = (3, 31, 32, 100, 200)
SHAPE = {"top_k": 12, "depth": 3, "num_drafts": 20}
MODES: dict[str, dict[str, Any]] = {
    "replace": {"resample": "replace"},
    "merge": {"resample": "merge", "resample_drafts": 16},
    "drawn": {"resample": "replace", "tree": "stochastic"},
    "without context": {"resample": "merge", "resample_drafts": 16},
}


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(2)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]


def jobs() -> list[dict]:
    """One by one, with plain steps between, from the prefix cache, and preempted.

    Two requests at a time are too many for the schedule: the longer one drafts when
    the other has ended.
    """
    lengths = [{**GREEDY, "max_tokens": n} for n in (20, 60)]
    return [
        {"prompts": prompts(), "params": GREEDY, "max_in_flight": 1},
        {"prompts": prompts()[:4], "params": lengths * 2, "max_in_flight": 2},
        {"prompts": prompts(), "params": GREEDY, "max_in_flight": 1},
    ]


def crowded() -> list[dict]:
    """More text than a cache of 16 blocks holds."""
    params = {**GREEDY, "max_tokens": 100}
    return [{"prompts": prompts((90,) * 4), "params": params, "max_in_flight": 4}]


@pytest.fixture(scope="module")
def models(shared_folder: Path) -> dict[str, str]:
    """Folders of a target and of heads with context and without."""
    folder = shared_folder / "lyanna"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            write_pair(folder, vocab_size=VOCAB_SIZE)
            sizes = {"hidden_size": SIZES["hidden_size"], "vocab_size": VOCAB_SIZE}
            for name, context in (("head", True), ("without context", False)):
                write_head(folder / name, "lyanna", context=context, **sizes)
    return {name: str(folder / name) for name in ("target", "head", "without context")}


@pytest.fixture(scope="module")
def answers(
    run_engine: Callable[..., dict], models: dict[str, str]
) -> Callable[..., dict]:
    """Return a function that runs jobs in a mode; None: without trees."""

    def run(mode: str | None, of: list[dict], **options: Any) -> dict:
        if mode is not None:
            head = models.get(mode, models["head"])
            spec = {"method": "lyanna", "model": head, **SHAPE, **MODES[mode]}
            options = {"speculative_config": {"schedule": "fixed", **spec}, **options}
        return run_engine(None, of, model=models["target"], **TINY, **options)

    return run


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_plain(mode: str, answers: Callable[..., dict]) -> None:
    """Red when a chain, a leftover or a merged tree changes a token, or goes unused."""
    both = with_and_without_trees(prompts(), 2, max_tokens=24)
    sampled = both if mode != "drawn" else ()
    plain, trees = answers(None, jobs()), answers(mode, [*jobs(), *sampled])
    assert tokens_of(trees)[: len(jobs())] == tokens_of(plain)
    if sampled:
        assert_same_text(trees, len(jobs()))
    stats = trees["stats"]
    assert sum(n for length, n in stats["accepted"].items() if int(length)) > 50
    assert 0 < stats["leftover_accepted"] < stats["leftover_nodes"]


def test_preempted_requests(answers: Callable[..., dict]) -> None:
    """Red when a preempted request drafts from what its lost tree left over."""
    plain = answers(None, crowded())
    sampled = with_and_without_trees(crowded()[0]["prompts"], 4, max_tokens=100)
    trees = answers("replace", [*crowded(), *sampled], num_gpu_blocks_override=16)
    assert min(trees["preemptions"]) > 0
    assert tokens_of(trees)[:1] == tokens_of(plain)
    assert_same_text(trees, 1)
    assert trees["stats"]["leftover_nodes"] > 0


# The drafts themselves, and "off"


class PlainChains:
    """The drafts after any text, by transformers and plain torch."""

    def __init__(self, target: str, head: str) -> None:
        model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.model = model.eval()
        self.head = load_lyanna_head(head).float()
        embedding = model.model.embed_tokens.weight.detach()
        self.head.share(embedding, model.lm_head.weight.detach())
        self.proposer = Lyanna(DynamicTree(**SHAPE))

    @torch.no_grad()
    def drafts(self, text: list[int]) -> list[int]:
        """Draft tokens below the last token of a text."""
        inputs = torch.tensor(text)
        states = self.model.model(inputs[None, :-1]).last_hidden_state[0]
        head, attend = self.head, PlainAttention()
        positions = torch.arange(len(states))
        state = head.read(states, inputs[1:], positions, attend)[-1:]
        chain = [state]
        for step in range(1, SHAPE["depth"]):
            state = head.read(state, None, positions[-1:] + step, attend)
            chain.append(state)
        logits = head.logits(torch.stack(chain, dim=1))
        draft = ChainDraft(logits, head.info_logits, inputs[-1:], head.hot_token_ids)
        greedy = SamplingTensors(torch.zeros(1), all_greedy=True)
        none: Tensor = torch.zeros(1, 0)
        tree = self.proposer.propose(
            ProposerInputs(inputs[-1:], greedy, none, draft_models=[draft])
        ).tree
        return tree.token_ids[0, 1 : int(tree.num_nodes)].tolist()


def logged(result: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Texts, and the drafts after them."""
    for job in result["drafts"]:
        for text, drafts in job.items():
            yield json.loads(text), drafts


def test_drafts_are_those_of_plain_torch(
    models: dict[str, str], answers: Callable[..., dict], shared_folder: Path
) -> None:
    """Red when a pair, a position, a norm, a level or a token's info is another.

    In every kind of step: pairs are read late, in chunks, and from the prefix cache.
    """
    schedule = [{"batch_size": 1}]
    spec = {"method": "lyanna", "model": models["head"], **SHAPE, "schedule": schedule}
    arguments = {
        "model": models["target"],
        **ENGINE,
        **TINY,
        "speculative_config": spec,
    }
    found = call(
        "tests.engine.draft_log:run",
        arguments,
        jobs(),
        log=shared_folder / "lyanna-drafts.log",
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    expected = tokens_of(answers(None, jobs()))
    assert [[a["token_ids"] for a in job] for job in found["jobs"]] == expected
    plain = PlainChains(models["target"], models["head"])
    both = list(logged(found))
    assert len(both) > 100
    # Rounding may decide between two nodes that are all but equally likely. Besides,
    # a cached block's last pair may hold another text's token.
    equal = sum(drafts == plain.drafts(text) for text, drafts in both)
    assert equal >= 0.97 * len(both)
