"""Custom logits processors, which vLLM's runner leaves out where there are drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeGuard

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    cached_load_custom_logitsprocs,
)

from vllm_treespec.engine.request_check import RequestCheck

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


def custom_processors(
    vllm_config: VllmConfig, device: torch.device
) -> list[LogitsProcessor]:
    """Make the processors of the arguments, and those of installed packages."""
    names = tuple(vllm_config.model_config.logits_processors or ())
    processors = [
        made(vllm_config, device, PIN_MEMORY)
        for made in cached_load_custom_logitsprocs(names)
        if made is not RequestCheck
    ]
    for processor in processors:
        if not is_for_single_requests(processor):
            logger.warning(
                "The logits processor %s may change any request, so no request has a "
                "draft tree; write it as an AdapterLogitsProcessor, which says "
                "which requests it changes",
                type(processor).__name__,
            )
    return processors


def is_for_single_requests(
    processor: LogitsProcessor,
) -> TypeGuard[AdapterLogitsProcessor]:
    """Whether it says which requests it changes, as vLLM's adapter does."""
    kind = type(processor)
    return (
        isinstance(processor, AdapterLogitsProcessor)
        and kind.update_state is AdapterLogitsProcessor.update_state
        and kind.apply is AdapterLogitsProcessor.apply
    )


def may_change(processors: Sequence[LogitsProcessor], row: int) -> bool:
    """Whether one may change the logits of the request in this row of the batch.

    vLLM has told the processors of the batch.
    """
    return any(
        not is_for_single_requests(processor) or row in processor.req_info
        for processor in processors
    )
