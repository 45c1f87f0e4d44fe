"""The check of what requests say, and what a model's own defaults say for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from vllm_treespec.config.request_options import request_options
from vllm_treespec.engine.adapters import choose_adapter

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")


class Prompt(Protocol):
    """What vLLM's runners know of a request's prompt."""

    prompt_token_ids: list[int] | None
    prompt_embeds: object | None
    # images and the like
    mm_features: Sequence[MultiModalFeatureSpec]


class RequestCheck(LogitsProcessor):
    """Refuses requests that say something wrong of draft trees, when they come in.

    vLLM's front-end asks the classes of custom logits processors whether a request's
    parameters are valid. That is all this class is for: no object of it is made.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``RequestOptionsError`` if ``extra_args`` are wrong."""
        request_options(sampling_params.extra_args)


def warn_of_min_p(model_config: ModelConfig) -> None:
    """Say so if vLLM will refuse all requests that leave a model's defaults alone."""
    min_p = model_config.get_diff_sampling_param().get("min_p")
    if min_p:
        logger.warning(
            "The model's generation_config.json gives requests a min_p of %s, and vLLM "
            "refuses requests with min_p under any speculative decoding. Start without "
            "speculative_config, or draw without min_p: "
            "--override-generation-config '{\"min_p\": 0}'",
            min_p,
        )


def drafters_can_read(request: Prompt, vocab_size: int) -> bool:
    """Whether what drafts can read a request's prompt; else it decodes plainly.

    What drafts reads token ids. An image has ids of its own there, in some models
    outside of the vocabulary. Other inputs than images were not tested.
    """
    if request.prompt_embeds is not None:
        return False
    if not request.mm_features:
        return True
    ids = request.prompt_token_ids or []
    return (
        all(feature.modality == "image" for feature in request.mm_features)
        and min(ids) >= 0
        and max(ids) < vocab_size
    )


def request_check(device: str) -> str:
    """The class that checks requests, as vLLM names it.

    vLLM's V2 runner has an interface of its own for such classes.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    """
    if choose_adapter(device).asynchronous:
        return "vllm_treespec.engine.v2.request_check:RequestCheck"
    return f"{RequestCheck.__module__}:{RequestCheck.__name__}"
