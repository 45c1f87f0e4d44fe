"""Every node of a tree gets the grammar's mask after its own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import draws_of
from tests.fast.random_trees import random_parents, random_trees

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

import llguidance
import outlines_core
import xgrammar
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_outlines import OutlinesGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from vllm_treespec.engine.scheduler import fill_tree_masks, is_allowed
from vllm_treespec.engine.v1.views import may_draft_trees
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import RULES, TargetLogits, score

# Token ids are bytes; the last one ends a text.
VOCAB_SIZE, END = 262, 261
NUM_WORDS = -(-VOCAB_SIZE // 32)
REGEX = r"(ab|a[bc]+d|[0-9]{1,3})(, [a-z]{2})?"
MAX_NODES, NUM_TREES = 14, 30


def with_xgrammar() -> Callable[[], Any]:
    words: list[Any] = [bytes([i]) for i in range(256)]
    words += [f"<{i}>" for i in range(256, VOCAB_SIZE)]
    info = xgrammar.TokenizerInfo(
        words, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]
    )
    compiled = xgrammar.GrammarCompiler(info).compile_regex(REGEX)
    return lambda: XgrammarGrammar(
        vocab_size=VOCAB_SIZE,
        matcher=xgrammar.GrammarMatcher(compiled, max_rollback_tokens=MAX_NODES),
        ctx=compiled,
    )


def with_guidance() -> Callable[[], Any]:
    tokenizer = llguidance.LLTokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eos_token) == (VOCAB_SIZE, END)
    grammar = llguidance.LLMatcher.grammar_from_regex(REGEX)
    return lambda: GuidanceGrammar(
        llguidance.LLMatcher(tokenizer, grammar), tokenizer, VOCAB_SIZE
    )


def with_outlines() -> Callable[[], Any]:
    letters = {chr(i): [i] for i in range(32, 127)}
    vocabulary = outlines_core.Vocabulary(END, letters)
    index = outlines_core.Index(REGEX, vocabulary)
    return lambda: OutlinesGrammar(
        VOCAB_SIZE, END, outlines_core.Guide(index, max_rollback=MAX_NODES)
    )


@pytest.fixture(
    scope="module",
    params=[with_xgrammar, with_guidance, with_outlines],
    ids=["xgrammar", "guidance", "outlines"],
)
def new_grammar(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Return a function that makes grammars in their first state."""
    return request.param()


def mask_after(grammar: Any, token_ids: list[int]) -> Tensor:
    """The mask after a path, int32 [num_words], from a grammar that never goes back."""
    mask = torch.full((1, NUM_WORDS), -1, dtype=torch.int32)
    for token in token_ids:
        if grammar.is_terminated():
            return torch.full_like(mask[0], -1)
        grammar.fill_bitmask(mask, 0)
        if not is_allowed(mask[0], token):
            return torch.full_like(mask[0], -1)
        assert grammar.accept_tokens("", [token])
    if grammar.is_terminated():
        return torch.full_like(mask[0], -1)
    grammar.fill_bitmask(mask, 0)
    return mask[0]


def random_tree(
    new_grammar: Callable[[], Any], generator: torch.Generator
) -> tuple[list[int], list[int], Tensor]:
    """Tokens and parents of a tree's drafts, and what its masks should be.

    Most tokens are allowed after their paths, so that paths are long and end.
    """
    parents = random_parents(MAX_NODES, generator)
    paths: list[list[int]] = [[]]
    masks = [mask_after(new_grammar(), [])]
    for parent in parents[1:]:
        allowed = [t for t in range(VOCAB_SIZE) if is_allowed(masks[parent], t)]
        if float(torch.rand(1, generator=generator)) < 0.15:
            allowed = [*range(97, 123), END]
        pick = int(torch.randint(len(allowed), (1,), generator=generator))
        paths.append([*paths[parent], allowed[pick]])
        masks.append(mask_after(new_grammar(), paths[-1]))
    return [path[-1] for path in paths[1:]], parents[1:], torch.stack(masks)


def test_a_tree_has_the_masks_of_its_paths(new_grammar: Callable[[], Any]) -> None:
    """Red when a node gets another mask, or the grammar does not come back."""
    generator = torch.Generator().manual_seed(0)
    ended = branched = forbidden = chains_differ = 0
    for _ in range(NUM_TREES):
        token_ids, parents, expected = random_tree(new_grammar, generator)
        grammar = new_grammar()
        masks = torch.zeros((MAX_NODES, NUM_WORDS), dtype=torch.int32)
        fill_tree_masks(grammar, masks, token_ids, parents)
        assert torch.equal(masks, expected)
        assert torch.equal(mask_after(grammar, []), expected[0])
        assert not grammar.is_terminated()
        in_order = list(range(len(token_ids)))
        fill_tree_masks(new_grammar(), masks, token_ids, in_order)
        chains_differ += not torch.equal(masks, expected)
        ended += any(
            t == END and is_allowed(expected[p], t)
            for t, p in zip(token_ids, parents, strict=True)
        )
        forbidden += any(
            not is_allowed(expected[p], t)
            for t, p in zip(token_ids, parents, strict=True)
        )
        branched += len(set(parents)) < len(parents)
    assert min(ended, forbidden, branched) > 5, "the trees must test what they are for"
    assert chains_differ > 10, "negative control: masks along the flat list must fail"


def test_a_cut_tree_has_the_same_masks(new_grammar: Callable[[], Any]) -> None:
    """Red when drafts that the scheduler had no room for change other masks."""
    generator = torch.Generator().manual_seed(1)
    token_ids, parents, expected = random_tree(new_grammar, generator)
    for count in range(len(token_ids)):
        masks = torch.zeros((1 + count, NUM_WORDS), dtype=torch.int32)
        fill_tree_masks(new_grammar(), masks, token_ids[:count], parents)
        assert torch.equal(masks, expected[: 1 + count])


def test_a_grammar_that_has_ended_allows_everything(
    new_grammar: Callable[[], Any],
) -> None:
    """Red when drafts after the end of a text (ignore_eos) are masked."""
    grammar = new_grammar()
    assert grammar.accept_tokens("", [*b"ab", END])
    masks = torch.zeros((3, NUM_WORDS), dtype=torch.int32)
    fill_tree_masks(grammar, masks, [7, 8], [0, 0])
    assert bool((masks == -1).all())
    assert grammar.is_terminated()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_drafts_are_harmless(temperature: float) -> None:
    """Red when a forbidden draft is accepted, or a text leaves its grammar."""
    letters = "abcdef"
    size = len(letters)
    info = xgrammar.TokenizerInfo([*letters, "<end>"], stop_token_ids=[size])
    compiled = xgrammar.GrammarCompiler(info).compile_regex("(a[bc]|d+[ae])*[bf]+")
    num_reqs, max_nodes = 400, 12
    generator = torch.Generator().manual_seed(2)
    tree = random_trees(num_reqs, max_nodes, size, generator)
    draws = draws_of(tree)
    tree = replace(tree, draws=replace(draws, probs=draws.probs.float()))
    grammar = XgrammarGrammar(
        size + 1, xgrammar.GrammarMatcher(compiled, max_rollback_tokens=12), compiled
    )
    logits = torch.randn(num_reqs, max_nodes, size, generator=generator)
    for req, count in enumerate(tree.num_nodes.tolist()):
        masks = torch.zeros((count, 1), dtype=torch.int32)
        drafts, parents = (
            t[req, 1:count].tolist() for t in (tree.token_ids, tree.parents)
        )
        fill_tree_masks(grammar, masks, drafts, parents)
        xgrammar.apply_token_bitmask_inplace(logits[req, :count], masks)
    sampling = SamplingTensors(
        torch.full((num_reqs,), temperature),
        all_greedy=not temperature,
        all_random=bool(temperature),
    )
    root_rows = torch.arange(num_reqs) * max_nodes
    target = TargetLogits(logits.flatten(0, 1), root_rows, sampling)
    uniforms = torch.rand(num_reqs, max_nodes, generator=generator, dtype=torch.float64)
    scored = score(tree, target, uniforms, RULES["recursive_rejection"])
    for row in scored.emitted(tree).tolist():
        emitted = [t for t in row if t >= 0]
        assert grammar.validate_tokens(emitted) == emitted
    assert int((scored.num_accepted > 1).sum()) > 10


def test_grammars_after_reasoning() -> None:
    """Red when a tree may hold the end of the reasoning that its grammar follows."""
    json_object = StructuredOutputsParams(json_object=True)
    params = SamplingParams(structured_outputs=json_object)
    assert may_draft_trees(params, grammar_after_reasoning=False)
    assert not may_draft_trees(params, grammar_after_reasoning=True)
    assert may_draft_trees(SamplingParams(), grammar_after_reasoning=True)
