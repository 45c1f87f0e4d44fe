"""Which requests a custom logits processor may change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="logits processors are classes of vLLM's")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from tests.engine.no_repeats import NoRepeats
from vllm_treespec.engine.request_check import request_check
from vllm_treespec.engine.v1.custom_processors import custom_processors, may_change

CPU = torch.device("cpu")


class Everything(NoRepeats):
    """Changes all requests, whatever it says."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change all rows."""
        return logits + 1


def processors(*given: type[LogitsProcessor] | str) -> list[LogitsProcessor]:
    """What a worker makes of the argument."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=list(given))
    )
    return custom_processors(config, CPU)


def test_our_check_is_not_made() -> None:
    """Red when the check of requests becomes a processor, which it is not."""
    assert processors(request_check("cpu")) == []
    assert [type(made) for made in processors(NoRepeats, request_check("cpu"))] == [
        NoRepeats
    ]


def test_requests_that_ask_have_no_trees() -> None:
    """Red when a processor meets a tree, or costs other requests theirs."""
    (asked,) = processors(NoRepeats)
    params = [SamplingParams(), SamplingParams(extra_args={"no_repeats": True})]
    asked.update_state(
        BatchUpdate(2, [], [(row, p, [1], []) for row, p in enumerate(params)], [])
    )
    assert [may_change([asked], row) for row in range(2)] == [False, True]
    assert not may_change([], 1)


def test_others_may_change_any_request(caplog: pytest.LogCaptureFixture) -> None:
    """Red when a processor that changes all rows meets a tree, or nobody is told."""
    assert may_change(processors(NoRepeats, Everything), 0)
    assert "Everything may change any request" in caplog.text
    assert "NoRepeats" not in caplog.text
