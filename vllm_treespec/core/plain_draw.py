"""Tokens of requests that have no tree in a step, drawn as trees' tokens are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_treespec.core.sampling import SamplingTensors, draw, likeliest

# Rows that each thread draws at once. The system clears the memory of more rows each
# time anew, which takes longer than to draw.
ROWS_OF_A_THREAD = 1


def draw_plainly(
    logits: Tensor, rows: Tensor, sampling: SamplingTensors, uniforms: Tensor
) -> Tensor:
    """Draw the next token of each request, on a CPU.

    Args:
        logits: [num_rows, vocab_size].
        rows: int64 [num_reqs], the requests' rows of them.
        sampling: of the requests.
        uniforms: float64 [num_reqs, 1] in [0, 1); [num_reqs, 0] where all are greedy.

    Returns:
        int64 [num_reqs]; the likeliest token of greedy requests.

    """
    if sampling.all_random:
        parts = torch.arange(len(rows)).split(
            ROWS_OF_A_THREAD * torch.get_num_threads()
        )
        return torch.cat(
            [
                draw(sampling.select(part).probs(logits[rows[part]]), uniforms[part, 0])
                for part in parts
            ]
        )
    if sampling.all_greedy:
        return rows.new_tensor(likeliest(logits, rows.tolist()))
    tokens = torch.zeros_like(rows)
    for kind, is_greedy in ((sampling.greedy, True), (~sampling.greedy, False)):
        reqs = torch.nonzero(kind)[:, 0]
        of_kind = replace(
            sampling.select(reqs), all_greedy=is_greedy, all_random=not is_greedy
        )
        tokens[reqs] = draw_plainly(logits, rows[reqs], of_kind, uniforms[reqs])
    return tokens
