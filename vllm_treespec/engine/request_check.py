"""The check of what requests say."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from vllm_treespec.config.request_options import request_options


class RequestCheck(LogitsProcessor):
    """Refuses requests that say something wrong of draft trees, when they come in.

    vLLM's front-end asks the classes of custom logits processors whether a request's
    parameters are valid. That is all this class is for: no object of it is made.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``RequestOptionsError`` if ``extra_args`` are wrong."""
        request_options(sampling_params.extra_args)


# as vLLM names such a class
REQUEST_CHECK = f"{RequestCheck.__module__}:{RequestCheck.__name__}"
