"""The check of what requests say, for vLLM's V2 runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_treespec.config.request_options import request_options

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.sampling_params import SamplingParams


class RequestCheck(LogitsProcessor):
    """Refuses requests that say something wrong of draft trees, when they come in.

    vLLM's front-end calls ``validate_params``. As a processor it changes nothing.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ``RequestOptionsError`` if ``extra_args`` are wrong."""
        request_options(sampling_params.extra_args)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Change no request."""
        return False

    def apply(self, logits: Tensor, ctx: object) -> Tensor:
        """Leave logits as they are."""
        return logits
