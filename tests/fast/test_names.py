"""Our names beside vLLM's own, and what vLLM does with methods that are not ours."""

import copy
import logging
import os
import traceback
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from pydantic import ValidationError
from vllm.config import StructuredOutputsConfig, VllmConfig, speculative
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler

from tests.heads import llama
from vllm_treespec.config import METHODS, SpecConfigError, parse_spec_config
from vllm_treespec.config.vllm_names import VLLM_METHODS
from vllm_treespec.engine.scheduler import TreeScheduler
from vllm_treespec.plugin import register


def literals(kind: Any) -> set[str]:
    """All strings of a nested Literal."""
    return {
        name
        for part in get_args(kind)
        for name in ([part] if isinstance(part, str) else literals(part))
    }


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Folder of a small target: a configuration, no weights and no tokenizer."""
    llama(hidden_size=64).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def engine_args(target: str, spec: dict[str, Any] | None) -> EngineArgs:
    """The arguments of an engine, before the plugin sees them."""
    return EngineArgs(
        model=target,
        skip_tokenizer_init=True,
        max_model_len=64,
        dtype="float32",
        speculative_config=spec and dict(spec),
    )


def configure(target: str, spec: dict[str, Any] | None) -> VllmConfig:
    """Make the engine's config as ``vllm serve`` would, with our plugin."""
    register()
    return engine_args(target, spec).create_engine_config()


def test_names_are_not_vllms() -> None:
    """Red when a method of ours gets a name of vLLM's, or vLLM takes one of ours."""
    installed = literals(speculative.SpeculativeMethod)
    assert {"ngram", "suffix", "eagle", "mtp"} <= installed <= VLLM_METHODS
    assert not VLLM_METHODS & METHODS.keys()


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "suffix", "num_drafts": 16, "depth": 12},
        {"method": "medusa", "model": "/head", "max_trees": 4},
        {"method": "rsd-s", "model": "d"},
        {"method": "RSD_S", "model": "d", "beam_width": 4},
        {"method": ["rsd_s"], "model": "d"},
        {"method": "suffix_tree", "num_speculative_tokens": 3},
        {"model": "d", "beam_width": 4},
    ],
)
def test_what_nobody_knows_is_ours_to_name(spec: dict[str, Any], target: str) -> None:
    """Red when a slip in a spec-config of ours gets vLLM's list of methods only."""
    with pytest.raises(SpecConfigError) as alone:
        parse_spec_config(spec)
    with pytest.raises(SpecConfigError) as error:
        configure(target, spec)
    assert str(error.value).split() == str(alone.value).split()


@pytest.mark.parametrize("name", ["/nowhere", "my model", "a/b/c", "x" * 4000])
def test_targets_that_are_nowhere_are_named(name: str) -> None:
    """Red when a start asks the hub for a folder, and shows what it says of ids."""
    with pytest.raises(SpecConfigError) as error:
        configure(name, {"method": "suffix_tree"})
    message = " ".join(str(error.value).split())
    assert message.startswith("--model: there is no folder")
    assert "name the folder, or the hub id" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    "spec",
    [
        {
            "method": "suffix",
            "num_speculative_tokens": 8,
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 100,
        },
        {"method": "suffix"},
        {"method": "medusa", "model": "/heads", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"model": "/draft", "num_speculative_tokens": 3},
        {"model": "/draft", "max_model_len": 32},
    ],
)
def test_stock_spec_configs_reach_vllm(
    spec: dict[str, Any], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when our plugin takes, changes or refuses a spec-config of vLLM's own."""
    found: list[dict[str, Any]] = []

    def make(**keys: Any) -> None:
        found.append({k: v for k, v in keys.items() if not k.startswith("target_")})

    monkeypatch.setattr(arg_utils, "SpeculativeConfig", make)
    configure(target, spec)
    assert found == [spec]


@pytest.mark.parametrize(
    "spec", [None, {"method": "ngram", "num_speculative_tokens": 3}]
)
def test_unused_changes_nothing(
    spec: dict[str, Any] | None, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when vLLM with our plugin, and no method of ours, differs from vLLM alone."""
    register()
    stock = EngineArgs.create_engine_config.__wrapped__
    monkeypatch.setattr(EngineArgs, "create_engine_config", stock)
    alone = engine_args(target, spec)
    config_alone = alone.create_engine_config()
    before = surroundings()
    register.__wrapped__()
    beside = engine_args(target, spec)
    config_beside = beside.create_engine_config()
    assert surroundings() == before
    assert str(vars(beside)) == str(vars(alone))
    assert str(config_beside) == str(config_alone)
    assert config_beside.additional_config == {}
    assert "treespec" not in str(config_beside.parallel_config.worker_cls)
    assert config_beside.scheduler_config.get_scheduler_cls() is Scheduler


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_arguments_stay_the_callers(kind: type[EngineArgs], target: str) -> None:
    """Red when arguments differ after a config of ours was made from them."""
    register()
    args = kind(
        model=target,
        skip_tokenizer_init=True,
        max_model_len=64,
        dtype="float32",
        disable_log_stats=True,
        # vLLM writes the first into the second.
        reasoning_parser_plugin="nowhere.py",
        structured_outputs_config=StructuredOutputsConfig(),
        additional_config={"theirs": {"kept": [1]}},
        speculative_config={"method": "suffix_tree", "num_drafts": 8, "depth": 4},
    )
    # As vllm serve does, which starts several API servers.
    args._api_process_count = 3
    before, fields = copy.deepcopy(args), set(vars(args))
    for _ in range(2):
        config = args.create_engine_config()
        assert config.scheduler_config.get_scheduler_cls() is TreeScheduler
        assert config.additional_config["theirs"] == {"kept": [1]}
        assert config.additional_config["treespec"]["method"] == "suffix_tree"
        assert config.parallel_config._api_process_count == 3
        assert args == before
        assert set(vars(args)) == fields


def surroundings() -> tuple[dict[str, str], dict[str, tuple[list[Any], int, bool]]]:
    """The environment, and every logger's handlers, level and propagation."""
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    return dict(os.environ), {
        name: (list(logger.handlers), logger.level, logger.propagate)
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger)
    }


def test_message_ends_the_traceback(target: str) -> None:
    """Red when who reads a server's last lines finds them in one long line."""
    with pytest.raises(SpecConfigError) as error:
        configure(target, {"method": "sd", "model": "d", "depth": 0, "width": 2})
    lines = "".join(traceback.format_exception(error.value)).splitlines()
    (start,) = (i for i, line in enumerate(lines) if "SpecConfigError: " in line)
    assert lines[start + 1] == "", "the message begins on a line of its own"
    message = lines[start + 2 :]
    assert " ".join(message).startswith("speculative_config for method 'sd': 'depth'")
    assert len(message) > 1
    assert max(map(len, message)) <= 88
    assert error.value.__suppress_context__, "no traceback of another error above"


def test_vllms_own_refusals_stay(target: str) -> None:
    """Red when an error about a method of vLLM's own is replaced by one of ours."""
    with pytest.raises(ValidationError, match="Unexpected keyword argument"):
        configure(target, {"method": "ngram", "depth": 3})
    with pytest.raises(ValidationError, match="greater than 0"):
        configure(target, {"method": "suffix", "num_speculative_tokens": 0})
