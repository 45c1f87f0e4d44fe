"""Penalties after every node of a tree: values, laws, texts, whole steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.drafting import draws_of
from tests.fast.enumeration import FLOAT32, NOTICEABLE, Scorer, float32_law_error
from tests.fast.interpreted import interpreted
from tests.fast.languages import (
    Language,
    prefix_tokens,
    random_tables,
)
from tests.fast.random_trees import random_trees
from tests.fast.rule_forms import numbers_of, sizes_of
from tests.fast.test_batched_rules import batch
from tests.fast.toy_workloads import SOME_ENGINES, make_engine
from vllm_treespec.kernels import kv_move
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.sampling.penalties import (
    PenalisedTexts,
    Penalties,
    PenaltyView,
    SeenTokens,
    no_drafts,
)
from vllm_treespec.scorers import (
    RULES,
    ScorerOutput,
    TargetLogits,
    recursive_rejection,
    score,
)
from vllm_treespec.scorers.recursive_rejection import recursive_rejection_batched
from vllm_treespec.step import plain_draw
from vllm_treespec.step.plain_draw import draw_plainly
from vllm_treespec.testing.fake_scheduler import Request
from vllm_treespec.testing.fake_views import penalty_view
from vllm_treespec.testing.toy_models import after, penalised
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch, ancestor_bits

# repetition, frequency, presence
STRENGTHS = ((1.3, 0.0, 0.0), (1.0, 0.6, 0.0), (0.8, -0.2, 0.7), (1.0, 0.0, 0.0))


def penalties_of(view: PenaltyView, tree: TreeBatch, below: bool = True) -> Penalties:
    """Penalties of all requests, seen for the first time, after every node.

    ``below``: whether nodes have the penalties of their paths, as they should.
    """
    reqs = np.arange(len(view.texts.num_tokens))
    drafts, roots = tree.token_ids[:, 1:].numpy(), torch.ones_like(tree.token_ids)
    ancestors = ancestor_bits(tree, int(tree.depths.max())) if below else roots
    penalties = PenalisedTexts().penalties(view, reqs, reqs, drafts, ancestors)
    assert penalties is not None
    return penalties


def path_to(tree: TreeBatch, req: int, node: int) -> list[int]:
    """Drafts from below the root to a node."""
    path = []
    while node > 0:
        path.append(int(tree.token_ids[req, node]))
        node = int(tree.parents[req, node])
    return path[::-1]


@pytest.mark.parametrize("vocab_size", [4, 30])
def test_every_node_has_vllms_penalties(vocab_size: int) -> None:
    """Red when a count, an order or a path is another one than vLLM's."""
    for seed in range(3):
        pytest.importorskip("vllm", reason="needs vLLM")
        from vllm.v1.sample.ops.penalties import apply_all_penalties

        generator = torch.Generator().manual_seed(seed)
        num_reqs = len(STRENGTHS)
        tree = random_trees(num_reqs, 9, vocab_size, generator)
        texts = torch.randint(vocab_size, (num_reqs, 12), generator=generator).tolist()
        texts = [text[: 6 + req] for req, text in enumerate(texts)]
        num_prompt = [4, 5, 1, 3]
        for req, text in enumerate(texts):
            tree.token_ids[req, 0] = text[-1]
        penalties = penalties_of(penalty_view(texts, num_prompt, STRENGTHS), tree)
        reqs, nodes = tree.is_node().nonzero().unbind(1)
        logits = 5 * torch.randn((len(reqs), vocab_size), generator=generator)
        logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
        outputs = [
            texts[req][num_prompt[req] :] + path_to(tree, req, node)
            for req, node in zip(reqs.tolist(), nodes.tolist(), strict=True)
        ]
        prompts = torch.full((num_reqs, 5), vocab_size)
        for req, length in enumerate(num_prompt):
            prompts[req, :length] = torch.tensor(texts[req][:length])
        repetition, frequency, presence = torch.tensor(STRENGTHS).T[:, reqs]
        expected = apply_all_penalties(
            logits.clone(), prompts[reqs], presence, frequency, repetition, outputs
        )
        assert penalties.apply(logits.clone(), reqs, nodes).equal(expected)
        kept = reqs == 1
        alone = penalties.select(torch.tensor([1]))
        none = torch.zeros_like(reqs[kept])
        found = alone.apply(logits[kept].bfloat16(), none, nodes[kept])
        rounded = [
            penalised(row, texts[1][:5], outputs[place], STRENGTHS[1])
            for row, place in zip(
                logits[kept].bfloat16(), kept.nonzero()[:, 0].tolist(), strict=True
            )
        ]
        assert found.equal(torch.stack(rounded))


def test_requests_without_penalties_cost_nothing() -> None:
    """Red when texts of requests without a penalty are counted."""
    view = penalty_view([[1, 2], [3, 4]], [1, 1], [STRENGTHS[0], STRENGTHS[3]])
    texts, one, both = PenalisedTexts(), np.array([1]), np.arange(2)
    nothing = no_drafts(torch.arange(1)), no_drafts(torch.arange(2))
    assert texts.penalties(None, both, both, *nothing[1]) is None
    assert texts.penalties(view, one, one, *nothing[0]) is None
    with patch.object(SeenTokens, "note") as note:
        assert texts.penalties(view, both, both, *nothing[1]) is not None
    note.assert_called_once()


def test_texts_are_counted_as_they_grow() -> None:
    """Red when a token is counted twice, or a slot's next request finds old counts."""
    text = torch.randint(9, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    texts, slot = PenalisedTexts(), np.array([5])

    def found(length: int, num_prompt: int, text: list[int] = text) -> Counter:
        view = penalty_view([text[:length]], [num_prompt], STRENGTHS[:1])
        nothing = no_drafts(torch.arange(1))
        penalties = texts.penalties(view, np.array([0]), slot, *nothing)
        assert penalties is not None
        pairs = zip(penalties.tokens[0].tolist(), penalties.counts[0], strict=True)
        return Counter({token: int(count) for token, count in pairs})

    for length in (6, 6, 7, 12, 40):
        expected = Counter(dict.fromkeys(text[:length], 0))
        expected.update(text[6:length])
        assert found(length, 6) == expected
    texts.finish_requests(slot)
    assert found(3, 3, [1, 1, 2]) == {1: 0, 2: 0}


@dataclass(frozen=True)
class PenalisedLanguage(Language):
    """A language of logits under one request's penalties; ``table`` has them.

    ``below``: whether nodes have the penalties of their paths, as they should.
    """

    # float32 [num_prefixes, vocab_size], without penalties
    raw: Tensor
    text: tuple[int, ...]
    below: bool

    def target_logits(self, tree: TreeBatch, sampling: SamplingTensors) -> TargetLogits:
        count = tree.num_reqs
        texts, num_prompt = [list(self.text)] * count, [2] * count
        view = penalty_view(texts, num_prompt, [STRENGTHS[2]] * count)
        plain = Language(self.raw).target_logits(tree, sampling)
        penalties = penalties_of(view, tree, self.below)
        return replace(plain, penalties=penalties)


def penalised_language(
    raw: Tensor, text: tuple[int, ...], below: bool
) -> PenalisedLanguage:
    """Penalise the logits of every prefix by its own tokens."""
    rows = [
        penalised(
            row,
            text[:2],
            [*text[2:], *prefix_tokens(prefix, raw.shape[1])],
            STRENGTHS[2],
        )
        for prefix, row in enumerate(raw)
    ]
    return PenalisedLanguage(torch.stack(rows), raw, text, below)


def batched(tree: TreeBatch, target: TargetLogits, uniforms: Tensor) -> ScorerOutput:
    """The rule's form for GPUs."""
    sizes = TreeSizes(max_nodes=7, max_depth=2, max_width=4, max_leaves=4)
    return recursive_rejection_batched(tree, target, uniforms, sizes)


@pytest.mark.parametrize(
    ("scorer", "below"),
    [(recursive_rejection, True), (batched, True), (recursive_rejection, False)],
    ids=["walk", "batched", "control"],
)
def test_law_under_penalties(scorer: Scorer, below: bool) -> None:
    """Red when a node's penalties leave out its path; the control must be noticed."""
    draft, target = (side.table.log().float() for side in random_tables("random", 3, 2))
    language = penalised_language(target, (0, 0, 2, 1), below)
    root = language.text[-1]
    error = float32_law_error(scorer, draft, language, root, factors=(2, 1))
    assert (error < FLOAT32) == below
    assert below or error > NOTICEABLE


@pytest.mark.parametrize("walks", [True, False], ids=["walk", "batched"])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_sees_penalised_logits(name: str, walks: bool) -> None:
    """Red when a rule, or a choice of requests, leaves the penalties out."""
    tree, target, uniforms = batch(29, 6, 9, "mixed", 3)
    draws = draws_of(tree)
    if name == "k_seq":
        alone = torch.zeros_like(draws.without_replacement)
        tree = replace(tree, draws=replace(draws, without_replacement=alone))
    texts = [[*range(0, 29, 2), root] for root in tree.token_ids[:, 0].tolist()]
    strengths = [(3.0, 0.0, 0.0), (1.0, 3.0, 0.0), (0.5, 0.0, -4.0)] * 2
    penalties = penalties_of(penalty_view(texts, [5] * 6, strengths), tree)
    reqs, nodes = tree.is_node().nonzero().unbind(1)
    rows = target.root_rows[reqs] + nodes
    logits = target.logits.clone()
    logits[rows] = penalties.apply(target.logits[rows], reqs, nodes)
    sizes = None if walks else sizes_of(tree)
    found, expected, plain = (
        score(tree, of_target, numbers_of(RULES[name], uniforms), RULES[name], sizes)
        for of_target in (
            replace(target, penalties=penalties),
            replace(target, logits=logits),
            target,
        )
    )
    assert found.path.equal(expected.path)
    assert found.next_token_ids.equal(expected.next_token_ids)
    assert not found.next_token_ids.equal(plain.next_token_ids), "they changed nothing"


def with_penalties(requests: list[Request]) -> list[Request]:
    """Give requests the penalties of ``STRENGTHS``, one after another."""
    for number, request in enumerate(requests):
        request.penalties = STRENGTHS[number % len(STRENGTHS)]
    return requests


@pytest.mark.parametrize(("name", "habits", "masks"), SOME_ENGINES)
def test_greedy_answers_are_those_of_plain_decoding(
    name: str, habits: str, masks: bool
) -> None:
    """Red when a step with trees emits other tokens than plain decoding would."""
    engine = make_engine(name, HABITS[habits], masks=masks)
    with interpreted(kv_move):
        check_greedy(engine, with_penalties(workload(0)))
    assert sum(engine.accepted[count] for count in engine.accepted if count) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_plain_draws_have_penalties(temperature: float) -> None:
    """Red when a request without a tree is drawn from logits without its penalties."""

    def expected(request: Request, logits: Tensor) -> Tensor:
        text, length = request.token_ids, request.num_prompt
        return penalised(logits, text[:length], text[length:], request.penalties)

    requests = [
        Request(f"r{number}", [number, 3, 3], 12, temperature=temperature)
        for number in range(4)
    ]
    assert plain_rows(with_penalties(requests), expected) > 10


def plain_rows(
    requests: list[Request], expected: Callable[[Request, Tensor], Tensor]
) -> int:
    """Run requests; check what tokens of requests without trees are drawn of.

    Args:
        requests: to run.
        expected: from a request and the target's logits to what it should be drawn of.

    Returns:
        how many tokens were drawn so.

    """
    engine = make_engine("suffix_tree", HABITS["whole"])
    rows_seen = 0

    def noting(target: TargetLogits, keys: Tensor, batched: bool) -> Tensor:
        nonlocal rows_seen
        every = torch.arange(len(keys))
        probs = target.probs(every, torch.zeros_like(every))
        in_tree = engine.decoder.trees
        left = set(range(len(engine.now.requests)))
        left -= set() if in_tree is None else set(in_tree.host_reqs.tolist())
        for row, place in zip(every, sorted(left), strict=True):
            request = engine.now.requests[place]
            of_target = after(engine.language.target, request.token_ids)
            own = target.sampling.select(row[None])
            assert probs[row].equal(own.probs(expected(request, of_target)[None])[0])
            rows_seen += 1
        return draw_plainly(target, keys, batched)

    with patch.object(plain_draw, "draw_plainly", side_effect=noting):
        engine.run(*requests)
    return rows_seen
