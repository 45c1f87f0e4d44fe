"""The committed tokens of running requests, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_treespec.sampling.texts import TextView


class HostTexts:
    """Prompt and output of every request, by the runner's own row of the request.

    vLLM's V2 runner has them on the device alone.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        """Allocate rows for all requests that may run."""
        # int32 [max_num_reqs, max_model_len]
        self.token_ids = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        # int64 [max_num_reqs]
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)

    def start(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Note a request that begins, or goes on after a preemption."""
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens

    def append(
        self, rows: np.ndarray, token_ids: np.ndarray, num_new: np.ndarray
    ) -> None:
        """Note what a step emitted.

        Tokens behind the longest text are left out: their request has ended.

        Args:
            rows: int [n].
            token_ids: int [n, width].
            num_new: int [n], how many of them each request emitted.

        """
        ends = np.minimum(self.num_tokens[rows] + num_new, self.token_ids.shape[1])
        for row, new, end in zip(rows.tolist(), token_ids, ends.tolist(), strict=True):
            begin = self.num_tokens[row]
            self.token_ids[row, begin:end] = new[: end - begin]
        self.num_tokens[rows] = ends

    def view(self, rows: np.ndarray) -> TextView:
        """The texts of a batch, by rows int [num_reqs]; copied up to the longest."""
        num_tokens = self.num_tokens[rows]
        longest = int(num_tokens.max())
        return TextView(
            self.token_ids[rows, :longest], self.num_prompt_tokens[rows], num_tokens
        )
