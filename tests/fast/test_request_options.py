"""What a request may say of draft trees, and who refuses what it may not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_treespec.config.request_options import (
    RequestOptionsError,
    request_options,
)

ALL = 63


@pytest.mark.parametrize(
    ("extra_args", "limit"),
    [
        (None, ALL),
        ({}, ALL),
        ({"session_id": "others"}, ALL),
        ({"treespec": {}}, ALL),
        ({"treespec": "{}"}, ALL),
        ({"treespec": {"enabled": True}}, ALL),
        ({"treespec": {"enabled": False}}, 0),
        ({"treespec": '{"enabled": false}'}, 0),
        ({"treespec": {"max_drafts": 0}}, 0),
        ({"treespec": {"max_drafts": 2}}, 2),
        ({"treespec": ' {"max_drafts": 2} ', "session_id": "others"}, 2),
        ({"treespec": {"enabled": False, "max_drafts": 2}}, 0),
        ({"treespec": {"max_drafts": 10**30}}, ALL),
    ],
)
def test_what_requests_may_say(extra_args: dict[str, Any] | None, limit: int) -> None:
    """Red when a request gets another tree than it asked for."""
    assert request_options(extra_args).limit == limit


@pytest.mark.parametrize(
    ("extra_args", "says"),
    [
        ({"treespec": {"max_draft": 2}}, "'max_draft' is not one of its keys; remove"),
        (
            {"treespec": {"max_drafts": -1}},
            "'max_drafts' is -1: Input should be greater",
        ),
        ({"treespec": {"max_drafts": 2.0}}, "'max_drafts' is 2.0"),
        ({"treespec": {"max_drafts": True}}, "'max_drafts' is True"),
        ({"treespec": {"max_drafts": "2"}}, "'max_drafts' is '2'"),
        ({"treespec": '{"max_drafts": NaN}'}, "'max_drafts' is nan"),
        ({"treespec": {"enabled": 0}}, "'enabled' is 0: Input should be a valid bool"),
        ({"treespec": {"enabled": "no", "x": 1}}, "'x' is not one of its keys"),
        ({"treespec": {1: 2}}, "1 is"),
        ({"treespec": "off"}, "'treespec' is 'off', which is not JSON; write"),
        ({"treespec": "[" * 100_000}, "which is not JSON; write"),
        ({"treespec": "3"}, "'treespec' is '3'; write"),
        ({"treespec": None}, "'treespec' is None; write"),
        ({"treespec": False}, "'treespec' is False; write"),
        ({"treespec": ["enabled"]}, "'treespec' is ['enabled']; write"),
        ({"treespec_enabled": False}, "there is no 'treespec_enabled'; write"),
    ],
)
def test_what_requests_may_not_say(extra_args: dict[str, Any], says: str) -> None:
    """Red when a slip is ignored, or named in a message that helps nobody."""
    with pytest.raises(RequestOptionsError) as error:
        request_options(extra_args)
    assert says in str(error.value)
    assert "vllm_xargs" in str(error.value)
    assert len(str(error.value)) < 400


WRONG = {"treespec": {"max_draft": 2}}


def test_front_end_asks_our_check() -> None:
    """Red when vLLM lets wrong requests in, or our check is lost on its way."""
    pytest.importorskip("vllm", reason="the check is a class of vLLM's")
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    from vllm_treespec.engine.request_check import request_check

    validate_logits_processors_parameters([request_check("cpu")], SamplingParams())
    wrong = SamplingParams(extra_args=WRONG)
    validate_logits_processors_parameters(None, wrong)
    with pytest.raises(VLLMValidationError, match="max_draft"):
        validate_logits_processors_parameters([request_check("cpu")], wrong)


def test_configs_name_our_check(tmp_path: Any) -> None:
    """Red when an engine with trees starts without the check of its requests."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.engine.arg_utils import EngineArgs

    from tests.fast.small_engine import model_config
    from vllm_treespec.engine.request_check import request_check
    from vllm_treespec.plugin import register

    register()
    model_config().save_pretrained(tmp_path)
    ours = {"method": "suffix_tree"}
    for spec, custom, found in (
        (ours, None, [request_check("cpu")]),
        (ours, ["some:Processor"], ["some:Processor", request_check("cpu")]),
        (None, None, None),
    ):
        config = EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=64,
            disable_log_stats=True,
            speculative_config=spec,
            logits_processors=custom,
        ).create_engine_config()
        assert config.model_config.logits_processors == found


def test_workers_keep_processors_from_the_stock_runner() -> None:
    """Red when vLLM's runner sees any: it takes none together with drafts."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm_treespec.engine.v1.stock_runner import without_processors

    model_config = SimpleNamespace(logits_processors=["check"])
    config = SimpleNamespace(model_config=model_config)
    with without_processors(config):
        assert model_config.logits_processors is None
    assert model_config.logits_processors == ["check"]
    with pytest.raises(MemoryError), without_processors(config):
        raise MemoryError
    assert model_config.logits_processors == ["check"]


def test_which_requests_draft() -> None:
    """Red when a request with a tree would get logprobs of other values."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm import SamplingParams

    from vllm_treespec.engine.v1.views import may_draft_trees

    for logprobs in (0, 2):
        params = SamplingParams(logprobs=logprobs)
        assert may_draft_trees(params)
        assert not may_draft_trees(params, processed_logprobs=True)
    assert may_draft_trees(SamplingParams(), processed_logprobs=True)


@pytest.mark.parametrize(
    ("defaults", "warned"), [({"min_p": 0.05, "top_p": 0.8}, True), ({}, False)]
)
def test_min_p_of_a_model_is_warned_of(
    defaults: dict[str, float],
    warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red when vLLM refuses all requests, and nobody says so at the start."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.config import ModelConfig

    from tests.fast.small_engine import model_config
    from vllm_treespec.engine.request_check import warn_of_min_p

    model_config().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    target = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    warn_of_min_p(target)
    assert ("--override-generation-config" in caplog.text) == warned


def test_what_a_request_must_not_emit() -> None:
    """Red when a limit of a request is left out, or made where there is none."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_treespec.engine.v1.views import forbidden_of, may_draft_trees

    def found(**limits: Any) -> Any:
        params = SamplingParams(**limits)
        assert may_draft_trees(params)
        return forbidden_of(params, 6, torch.device("cpu"))

    assert found() is None
    assert found(stop_token_ids=[3]) is None
    assert found(min_tokens=4) is None, "nothing ends it"
    stops = found(min_tokens=4, stop_token_ids=[3, 1])
    assert (stops.stop_tokens, stops.min_tokens) == ([1, 3], 4)
    assert stops.not_allowed is None
    allowed = found(allowed_token_ids=[0, 4]).not_allowed
    assert allowed.tolist() == [False, True, True, True, False, True]
    grammar = StructuredOutputsParams(regex="a+")
    params = SamplingParams(min_tokens=4, structured_outputs=grammar)
    assert not may_draft_trees(params)
