"""The texts of the requests of a batch, as far as they are committed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TextView:
    """Committed tokens of the requests of a batch, on the host."""

    # int [num_reqs, max_len], by position
    token_ids: np.ndarray
    # int [num_reqs], how many of them are the prompt, and how many there are
    num_prompt_tokens: np.ndarray
    num_tokens: np.ndarray

    def text(self, req: int) -> np.ndarray:
        """Prompt and output of a request, int [n]."""
        return self.token_ids[req, : self.num_tokens[req]]

    def num_output_tokens(self, req: int) -> int:
        """How many tokens a request has put out."""
        return int(self.num_tokens[req] - self.num_prompt_tokens[req])

    def last_output(self, req: int, count: int) -> list[int]:
        """The last tokens that a request has put out, at most so many."""
        end = self.num_tokens[req]
        first = max(end - count, self.num_prompt_tokens[req])
        last: list[int] = self.token_ids[req, first:end].tolist()
        return last


# of nobody, where no text is read
NO_TEXTS = TextView(np.zeros((0, 0), np.int32), *np.zeros((2, 0), np.int64))
