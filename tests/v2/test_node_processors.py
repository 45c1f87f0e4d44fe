"""What is applied after a node equals what stock applies behind its path as a chain."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from tests.fast.random_trees import random_trees
from vllm_treespec.engine.v2.node_processors import StepTexts, read_paths
from vllm_treespec.trees.tree import TreeBatch

# Few tokens, so that paths repeat each other, the texts, words and markers.
VOCAB_SIZE = 5
MAX_NODES = 12
# of the thinking: its begin, its end, and what is forced there
MARKERS = {
    "reasoning_start_token_ids": [1],
    "natural_reasoning_end_token_ids": [2, 3],
    "reasoning_end_token_ids": [4, 2, 3],
}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
# one token says what may not follow, two do, or three
BAD_WORDS = [
    [0, 1],
    *([t, u, (t + u) % 5] for t in range(5) for u in (0, 3)),
    [1, 2, 1, 2],
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "penalties": [
        {"presence_penalty": 0.6},
        PENALTIES,
        {"frequency_penalty": -0.3, "presence_penalty": 0.2},
        {"repetition_penalty": 0.7},
    ],
    "bad words": [
        {"_bad_words_token_ids": words}
        for words in (BAD_WORDS, [[4]], BAD_WORDS[:8], BAD_WORDS[7:])
    ],
    "thinking": [{"thinking_token_budget": budget} for budget in (0, 1, 3, 7)],
    "mixed": [
        {"_bad_words_token_ids": BAD_WORDS, "thinking_token_budget": 2},
        {"temperature": 0.7},
        {**PENALTIES, "_bad_words_token_ids": BAD_WORDS},
        {"thinking_token_budget": 4, "presence_penalty": 0.5},
    ],
}


@dataclass
class Rows:
    """Rows of logits as a sampler is told of them."""

    logits: Tensor
    reqs: Tensor
    tokens: Tensor
    local_pos: Tensor

    def apply(self, sampler: Sampler) -> Tensor:
        """Logits that the sampler draws from."""
        batch = torch.arange(4)
        return sampler.apply_sampling_params(
            self.logits,
            self.reqs,
            batch,
            batch.numpy(),
            torch.zeros_like(self.reqs),
            self.tokens,
            self.local_pos,
            np.full(4, 40),
        )


def make_sampler(params: list[dict[str, Any]], generator: torch.Generator) -> Sampler:
    """A stock sampler with four requests; texts of 1 to 20 tokens, half of them output.

    The runner's row of a request is its place.
    """
    states = RequestState(
        4, 48, 48, MAX_NODES, VOCAB_SIZE, torch.device("cpu"), 1, True
    )
    states.free_indices.sort(reverse=True)
    config = SimpleNamespace(reasoning_config=SimpleNamespace(**MARKERS))
    sampler = Sampler(config, 4, VOCAB_SIZE, torch.device("cpu"), states)
    for place, length in enumerate((2, 20, 7, 11)):
        text = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        states.add_request(str(place), length // 2, text, length, 20)
        sampler.add_request(place, SamplingParams(**params[place]))
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    return sampler


def as_rows(tree: TreeBatch, logits: Tensor) -> tuple[Rows, Tensor]:
    """All nodes, two rows of no node behind each tree; and the rows of the roots."""
    sizes = (tree.num_nodes + 2).tolist()
    width = MAX_NODES + 2
    tokens = torch.nn.functional.pad(tree.token_ids, (0, 2))
    kept = torch.cat([r * width + torch.arange(n) for r, n in enumerate(sizes)])
    rows = Rows(
        logits.flatten(0, 1)[kept],
        kept // width,
        tokens.flatten()[kept].int(),
        (kept % width).int(),
    )
    return rows, torch.tensor([0, *sizes[:-1]]).cumsum(0)


def as_chains(tree: TreeBatch, logits: Tensor) -> tuple[Rows, Tensor]:
    """Each node's path as a chain of its own; and the last row of each chain."""
    places: list[tuple[int, int]] = []
    local_pos: list[int] = []
    last: list[int] = []
    for req in range(tree.num_reqs):
        for node in range(int(tree.num_nodes[req])):
            path = [node]
            while path[0]:
                path.insert(0, int(tree.parents[req, path[0]]))
            places += [(req, step) for step in path]
            local_pos += range(len(path))
            last.append(len(places) - 1)
    # kernels read each of them as it lies in memory
    reqs, nodes = torch.tensor(places).T.contiguous()
    rows = Rows(
        logits[reqs, nodes],
        reqs,
        tree.token_ids[reqs, nodes].int(),
        torch.tensor(local_pos, dtype=torch.int32),
    )
    return rows, torch.tensor(last)


def stand_in(tree: TreeBatch, roots: Tensor) -> Any:
    """What is read of a decoder: the trees of a step."""
    sizes = SimpleNamespace(max_depth=MAX_NODES)
    method = SimpleNamespace(proposers=[SimpleNamespace(sizes=sizes)])
    trees = SimpleNamespace(tree=tree, tree_index=0, root_rows=roots, branching=True)
    return SimpleNamespace(trees=trees, method=method)


@pytest.mark.parametrize("kind", KINDS)
def test_each_node_is_the_end_of_its_path(kind: str) -> None:
    """Red when a node has a sibling's penalties, or other floats than stock's chain.

    The last request has no tree. Where nobody looks at trees, all rows are chains:
    then logits differ.
    """
    differ = False
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tree = random_trees(4, MAX_NODES, VOCAB_SIZE, generator)
        tree = tree.cut(torch.tensor([MAX_NODES, MAX_NODES, 5, 1]))
        logits = torch.randn((4, MAX_NODES + 2, VOCAB_SIZE), generator=generator)
        sampler = make_sampler(KINDS[kind], generator)
        chains, last = as_chains(tree, logits)
        expected = chains.apply(sampler)[last]
        rows, roots = as_rows(tree, logits)
        decoder = stand_in(tree.select(torch.arange(3)), roots[:3])
        read_paths(sampler, StepTexts(decoder))
        for place, params in enumerate(KINDS[kind]):
            # as before: our classes note more of a request
            sampler.add_request(place, SamplingParams(**params))
        sampler.apply_staged_writes()
        is_node = (rows.local_pos < tree.num_nodes[rows.reqs]).nonzero()[:, 0]
        assert torch.equal(rows.apply(sampler)[is_node], expected)
        decoder.trees = None
        differ |= not torch.equal(rows.apply(sampler)[is_node], expected)
    assert differ
