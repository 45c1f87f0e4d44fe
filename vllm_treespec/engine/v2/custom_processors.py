"""Custom logits processors, which read the rows of a request as a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_treespec.engine.v2.request_check import RequestCheck

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
    from vllm.v1.worker.gpu.sample.sampler import Sampler

# they go by rows alone, or by nodes' paths (``node_processors.py``), or change nothing
KNOWN = (LogitBiasState, PenaltiesState, BadWordsState, RequestCheck)


class CustomProcessor(LogitsProcessor):
    """One of them, and which requests it said to change: these decode plainly."""

    def __init__(self, processor: LogitsProcessor, max_num_reqs: int) -> None:
        """Take the processor."""
        self.processor = processor
        # bool [max_num_reqs], by the runner's rows
        self.changes = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note whether it changes a request."""
        changes = self.processor.add_request(req_idx, sampling_params)
        self.changes[req_idx] = changes
        return changes

    def apply_staged_writes(self) -> None:
        """Pass it on."""
        self.processor.apply_staged_writes()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Change logits as the processor does."""
        return self.processor.apply(logits, ctx)


def watch_custom_processors(sampler: Sampler) -> list[CustomProcessor]:
    """Note from now on which requests custom processors change.

    To be called before there are requests.
    """
    max_num_reqs = len(sampler.needs_logits_processing)
    watched = []
    for place, processor in enumerate(sampler.logits_processors):
        if not isinstance(processor, KNOWN):
            watched.append(CustomProcessor(processor, max_num_reqs))
            sampler.logits_processors[place] = watched[-1]
    return watched
