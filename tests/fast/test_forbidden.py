"""Forbidden tokens after every node of a tree: values, laws, whole steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fast.enumeration import FLOAT32, NOTICEABLE, Scorer, float32_law_error
from tests.fast.interpreted import interpreted
from tests.fast.languages import Language, prefix_tokens, random_tables
from tests.fast.random_trees import random_trees
from tests.fast.test_penalties import (
    batched,
    path_to,
    plain_rows,
)
from tests.fast.toy_workloads import SOME_ENGINES, make_engine
from vllm_treespec.batch.forbidden import (
    Forbidden,
    RequestRows,
    leaving_out,
    limited_rows,
)
from vllm_treespec.kernels import kv_move
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import TargetLogits, recursive_rejection
from vllm_treespec.testing.fake_scheduler import Request
from vllm_treespec.testing.fake_views import text_view
from vllm_treespec.testing.toy_models import VOCAB_SIZE, permitted
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload
from vllm_treespec.trees.tree import TreeBatch


def all_but(allowed: set[int], vocab_size: int = VOCAB_SIZE) -> Tensor:
    """The mask of a request that may emit these tokens only."""
    return torch.tensor([token not in allowed for token in range(vocab_size)])


LIMITS = (
    Forbidden(all_but({0, 1, 3, 4, 6})),
    Forbidden(bad_words=((3,), (1, 4), (0, 6, 2), (5, 5))),
    None,
    Forbidden(stop_tokens=(0, 1, 2), min_tokens=9),
    Forbidden(all_but({1, 2, 3, 5}), ((2, 2),), (1,), 4),
)


def rows_of(
    tree: TreeBatch, limits: tuple[Forbidden | None, ...], below: bool = True
) -> list[RequestRows]:
    """Rows of all requests with limits, where nodes follow the root of each request.

    ``below``: whether nodes have the limits of their paths, as they should.
    """
    found = []
    for req, forbidden in enumerate(limits):
        first, size = req * tree.max_nodes, int(tree.num_nodes[req])
        if forbidden is not None and below:
            drafts, parents = (
                values[req, 1:size].tolist()
                for values in (tree.token_ids, tree.parents)
            )
            found.append(RequestRows(req, forbidden, first, drafts, parents))
        elif forbidden is not None:
            rows = range(first, first + size)
            found += [RequestRows(req, forbidden, row) for row in rows]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_node_has_its_own_limits(dtype: torch.dtype) -> None:
    """Red when a path, a length or a mask is another request's or another node's."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tree = random_trees(len(LIMITS), 9, VOCAB_SIZE, generator)
        shape = len(LIMITS), 8
        texts = torch.randint(VOCAB_SIZE, shape, generator=generator).tolist()
        texts = [text[: 5 + req % 3] for req, text in enumerate(texts)]
        num_prompt = [2, 4, 1, 1, 5]
        logits = torch.randn(
            (tree.num_reqs * tree.max_nodes, VOCAB_SIZE), generator=generator
        ).to(dtype)
        before = logits.clone()
        view = text_view(texts, num_prompt)
        with leaving_out(logits, rows_of(tree, LIMITS), view):
            found = logits.clone()
        assert logits.equal(before), "logprobs are of these logits"
        num_forbidden = 0
        for req, node in tree.is_node().nonzero().tolist():
            output = texts[req][num_prompt[req] :] + path_to(tree, req, node)
            row = req * tree.max_nodes + node
            expected = permitted(logits[row], output, LIMITS[req])
            assert found[row].equal(expected)
            num_forbidden += int(expected.isinf().sum())
        assert num_forbidden > 20


def test_bad_words_are_vllms() -> None:
    """Red when a bad word is found elsewhere than vLLM finds it."""
    for seed in range(3):
        pytest.importorskip("vllm", reason="needs vLLM")
        from vllm.v1.sample.ops.bad_words import apply_bad_words

        generator = torch.Generator().manual_seed(seed)
        tree = random_trees(6, 9, 3, generator)
        words = [[2], [0, 1], [1, 1, 0], [0, 0, 0, 2]]
        texts = torch.randint(3, (6, 5), generator=generator).tolist()
        num_prompt = [5, 4, 3, 3, 2, 1]
        limits = (Forbidden(bad_words=words),) * 6
        logits = torch.randn((6 * tree.max_nodes, 3), generator=generator)
        view = text_view(texts, num_prompt)
        with leaving_out(logits, rows_of(tree, limits), view):
            found = logits.clone()
        for req, node in tree.is_node().nonzero().tolist():
            output = texts[req][num_prompt[req] :] + path_to(tree, req, node)
            expected = logits[req * tree.max_nodes + node :][:1].clone()
            apply_bad_words(expected, {0: words}, [output])
            assert found[req * tree.max_nodes + node].equal(expected[0])


def test_limits_that_are_over_cost_nothing() -> None:
    """Red when a request that may end, or has no limits, is looked at in each step."""
    view = text_view([[1, 2, 3, 4]] * len(LIMITS), [1] * len(LIMITS))
    ended = replace(view, num_prompt_tokens=view.num_prompt_tokens - 6)
    reqs = np.arange(len(LIMITS))
    for texts, expected in ((view, [0, 1, 3, 4]), (ended, [0, 1, 4])):
        found = limited_rows(LIMITS, reqs, 2 * reqs, texts)
        assert [rows.req for rows in found] == expected
        assert [rows.first_row for rows in found] == [2 * req for req in expected]


# What follows the text of the law's language: at the root neither 2, a stop token, nor
# 3; then 2 unless 1 came before, and 1 unless 0 did.
TEXT, NUM_PROMPT = (1, 1, 2, 0), 2
OF_LAW = Forbidden(all_but({0, 1, 2}, 4), ((1, 2), (0, 0, 1)), (2,), 3)


@dataclass(frozen=True)
class LimitedLanguage(Language):
    """A language of logits under one request's limits; ``table`` has them."""

    # float32 [num_prefixes, vocab_size], without limits
    raw: Tensor
    below: bool

    def target_logits(self, tree: TreeBatch, sampling: SamplingTensors) -> TargetLogits:
        count = tree.num_reqs
        plain = Language(self.raw).target_logits(tree, sampling)
        rows = rows_of(tree, (OF_LAW,) * count, self.below)
        view = text_view([list(TEXT)] * count, [NUM_PROMPT] * count)
        with leaving_out(plain.logits, rows, view):
            return replace(plain, logits=plain.logits.clone())


def limited_language(raw: Tensor, below: bool) -> LimitedLanguage:
    """Take out of the logits of every prefix what must not follow it."""
    rows = [
        permitted(row, [*TEXT[NUM_PROMPT:], *prefix_tokens(prefix, 4)], OF_LAW)
        for prefix, row in enumerate(raw)
    ]
    return LimitedLanguage(torch.stack(rows), raw, below)


@pytest.mark.parametrize(
    ("scorer", "below"),
    [
        (recursive_rejection, True),
        (batched, True),
        (recursive_rejection, False),
    ],
    ids=["walk", "batched", "control"],
)
def test_law_under_limits(scorer: Scorer, below: bool) -> None:
    """Red when a node's limits leave out its path; the control must be noticed."""
    draft, target = (side.table.log().float() for side in random_tables("random", 4, 2))
    language = limited_language(target, below)
    error = float32_law_error(scorer, draft, language, TEXT[-1], factors=(2, 1))
    assert (error < FLOAT32) == below
    assert below or error > NOTICEABLE


def with_limits(requests: list[Request]) -> list[Request]:
    """Give requests ``LIMITS``, one after another."""
    for number, request in enumerate(requests):
        request.forbidden = LIMITS[number % len(LIMITS)]
    return requests


@pytest.mark.parametrize(("name", "habits", "masks"), SOME_ENGINES)
def test_greedy_answers_are_those_of_plain_decoding(
    name: str, habits: str, masks: bool
) -> None:
    """Red when a step with trees emits other tokens than plain decoding would."""
    engine = make_engine(name, HABITS[habits], masks=masks)
    requests = with_limits(workload(0, 20))
    free = [engine.language.greedy(r.token_ids, r.max_tokens) for r in requests]
    with interpreted(kv_move):
        check_greedy(engine, requests)
    changed = [
        request.output != answer
        for request, answer in zip(requests, free, strict=True)
        if request.forbidden is not None
    ]
    assert sum(changed) > 8, "the limits change nothing"
    assert sum(engine.accepted[count] for count in engine.accepted if count) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_plain_draws_have_limits(temperature: float) -> None:
    """Red when a request without a tree is drawn from what it must not emit."""

    def expected(request: Request, logits: Tensor) -> Tensor:
        return permitted(logits, request.token_ids[3:], request.forbidden)

    requests = [
        Request(f"r{number}", [number, 3, 3], 12, temperature=temperature)
        for number in range(5)
    ]
    assert plain_rows(with_limits(requests), expected) > 10
