"""Structured output on the V2 runner: masks of grammars, in torch here."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import StructuredOutputsParams

from tests.v2.engines import GREEDY, engine
from tests.v2.prompts import NUM_TOKENS, PARAMS, PROMPTS, greedy_answers
from tests.v2.test_graphs import WITH_GRAPHS
from tests.v2.test_trees import INDEX, accepted
from vllm_treespec.engine.v2.verify import valid_nodes
from vllm_treespec.trees.tree import MAX_NODES

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PATTERN = "[a-f]{3}-(cat|dog)-[0-9]{2}"


@pytest.fixture
def spelling_target(target: str, tmp_path: Path) -> str:
    """Folder of the target with a tokenizer: every token is a byte."""
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    vocabulary = {byte: token for token, byte in enumerate(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=BYTES[-1])
    fast.save_pretrained(folder)
    return str(folder)


def test_answers_obey_a_grammar(spelling_target: str) -> None:
    """Red when masks reach other rows than those of their request."""
    structured = StructuredOutputsParams(regex=PATTERN)
    obeys = {**GREEDY, "structured_outputs": structured, "ignore_eos": False}
    with engine(spelling_target, skip_tokenizer_init=False) as running:
        free, bound = running.generate(PROMPTS[:2], [GREEDY, obeys])
    assert [free] == greedy_answers(spelling_target, PROMPTS[:1])
    *word, end = (BYTES[token] for token in bound)
    assert end == BYTES[-1]
    assert re.fullmatch(PATTERN, "".join(word))


def test_trees_under_a_grammar(spelling_target: str) -> None:
    """Red when a node gets the mask of another one, or a grammar cuts a tree.

    A request whose tokens are in flight is masked late, when its tree is known.
    """
    regexes = [PATTERN + "[x-z]{5}", "([A-C][0-9]){8}"]
    structured = [
        {
            **PARAMS["sampled"],
            "ignore_eos": False,
            "structured_outputs": StructuredOutputsParams(regex=regex),
        }
        for regex in regexes
    ]
    params = [*structured, PARAMS["sampled"]]
    with engine(spelling_target, skip_tokenizer_init=False) as plain:
        expected = plain.generate(PROMPTS[:3], params, NUM_TOKENS)
    arguments = {**WITH_GRAPHS, "skip_tokenizer_init": False}
    # fewer nodes than a graph has rows
    spec = {**INDEX, "num_drafts": 5}
    with engine(spelling_target, spec, **arguments) as running:
        assert running.generate(PROMPTS[:3], params, NUM_TOKENS) == expected
        accepted(running)
        assert running.generate(PROMPTS[:3], params, NUM_TOKENS) == expected
        assert accepted(running) > NUM_TOKENS
        assert running.generate(PROMPTS[:1], params[:1], NUM_TOKENS) == expected[:1]
        assert accepted(running) > 4


def test_what_a_grammar_cuts() -> None:
    """Red when rows that only fill a graph cut a tree, or one without a grammar.

    A tree that is cut to its own size loses the draws that added no node.
    """
    first_rows = torch.tensor([0, 8, 16, 24, 25])
    invalid = torch.zeros(25, dtype=torch.bool)
    # of a tree of 4 nodes those that fill; of one of 6 all drafts
    invalid[4:8] = invalid[17:24] = True
    found = valid_nodes(invalid, first_rows, torch.tensor([4, 8, 6, 1]))
    assert found.tolist() == [MAX_NODES, MAX_NODES, 1, MAX_NODES]
