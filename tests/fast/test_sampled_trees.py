"""The simulation of sampled trees reads what engines would read."""

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.sampled_trees import Simulation, decode, row_of
from tests.heads import llama
from vllm_treespec.proposers import DynamicTree, Proposer, RsdS


@pytest.mark.parametrize(
    "tree", [RsdS(1, 3), DynamicTree(1, 3, 3), DynamicTree(3, 2, 12)]
)
def test_a_perfect_draft_model_is_always_accepted(tree: Proposer) -> None:
    """Red when drafts and target see different tokens, positions or texts."""
    config = llama(vocab_size=13, hidden_size=16, intermediate_size=24)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11]]
    start = Simulation(model, model, torch.arange(13), prompts)
    for _ in range(2):
        counts = decode(start.copy(), tree, 1.0, 5, end=-9, seed=1)
        assert counts.tolist() == [[5 * (1 + tree.sizes.max_depth), 5]] * 3


def test_standard_errors_are_over_texts() -> None:
    """Red when steps of one text count as if they were independent."""
    row = row_of("chat", 6, "dynamic", torch.tensor([[20, 10], [40, 10]]))
    assert (row["tokens"], row["steps"]) == (3.0, 20)
    assert row["error"] == pytest.approx(200**0.5 / 20)
