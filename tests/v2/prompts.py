"""Prompts of the V2 tier, and what transformers answers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

# Within a page, over two, over several and more than a step, and one that waits.
PROMPTS = [
    [(37 * i + 11 * j) % 250 + 3 for j in range(length)]
    for i, length in enumerate((5, 23, 60, 11))
]

NUM_TOKENS = 16
# Kinds of requests.
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 11},
    "narrow": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5},
}


def greedy_answers(
    model: str, prompts: list[list[int]], max_tokens: int = 16
) -> list[list[int]]:
    """Answer each prompt alone by transformers.

    Args:
        model: folder of the target.
        prompts: token ids.
        max_tokens: of each answer.

    Returns:
        token ids of the answers.

    """
    target = LlamaForCausalLM.from_pretrained(model).eval()
    answers = []
    for prompt in prompts:
        text = torch.tensor([prompt])
        for _ in range(max_tokens):
            (token,) = target(text).logits[:, -1].argmax(-1).tolist()
            text = torch.cat([text, torch.tensor([[token]])], 1)
        answers.append(text[0, len(prompt) :].tolist())
    return answers
