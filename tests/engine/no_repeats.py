"""A custom logits processor for requests that ask for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class NoRepeats(AdapterLogitsProcessor):
    """Forbids the last tokens of the output to requests with ``no_repeats``."""

    def is_argmax_invariant(self) -> bool:
        """It forbids the most likely token, too."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The processor of a request; None: it has none."""
        if not (params.extra_args or {}).get("no_repeats"):
            return None
        return forbid_last


def forbid_last(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Forbid the last eight tokens of the output."""
    logits[output_ids[-8:]] = -torch.inf
    return logits
