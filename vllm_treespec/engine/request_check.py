"""The check of what requests say, and what a model's own defaults say for them."""

from __future__ import annotations

import json
import logging

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from vllm_treespec.config.request_options import request_options

# vLLM prints the lines of loggers below "vllm".
logger = logging.getLogger("vllm.treespec")
# Penalties, and the values that leave requests their trees.
NO_PENALTY = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class RequestCheck(LogitsProcessor):
    """Refuses requests that say something wrong of draft trees, when they come in.

    vLLM's front-end asks the classes of custom logits processors whether a request's
    parameters are valid. That is all this class is for: no object of it is made.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``RequestOptionsError`` if ``extra_args`` are wrong."""
        request_options(sampling_params.extra_args)


def warn_of_penalties(model_config: ModelConfig) -> None:
    """Say so if a model's generation_config.json takes the trees from all requests."""
    defaults = model_config.get_diff_sampling_param()
    penalties = {
        name: defaults[name]
        for name, none in NO_PENALTY.items()
        if defaults.get(name, none) != none
    }
    if penalties:
        logger.warning(
            "Requests have no draft trees unless they switch off what the model's "
            "generation_config.json says: %s. Trees cannot follow penalties. For "
            "trees in all requests, whose answers then differ, start with "
            "--override-generation-config '%s'",
            json.dumps(penalties),
            json.dumps({name: NO_PENALTY[name] for name in penalties}),
        )


# as vLLM names such a class
REQUEST_CHECK = f"{RequestCheck.__module__}:{RequestCheck.__name__}"
