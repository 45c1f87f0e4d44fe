"""What draft trees cannot serve is refused at start-up, in one clear message."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.heads import HEADS, write_head
from vllm_treespec.config import SpecConfigError
from vllm_treespec.plugin import register


@pytest.fixture
def configure(target: str, draft: str) -> Callable[..., object]:
    """Return a function that makes the engine's config as ``vllm serve`` would."""
    from vllm.engine.arg_utils import EngineArgs

    register()

    def make(spec: dict, **options: object) -> object:
        spec = {"model": draft, **spec}
        return EngineArgs(
            model=target, speculative_config=spec, max_model_len=256, **options
        ).create_engine_config()

    return make


def one_line(error: BaseException) -> str:
    """The message of an error, which is laid out on lines of its own."""
    return " ".join(str(error).split())


CHAIN = {"method": "sd", "depth": 3}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({**CHAIN, "width": 2}, "'width' is not a key"),
        ({**CHAIN, "model": "/nowhere/draft"}, "no folder /nowhere/draft"),
        ({"method": "redrafter"}, "is not the configuration of a head"),
    ],
)
def test_bad_input_is_named(
    configure: Callable[..., object], spec: dict, says: str
) -> None:
    """Turns red when an engine is configured for what a spec-config may not say."""
    with pytest.raises(SpecConfigError) as error:
        configure(spec)
    assert says in one_line(error.value)


def test_other_vocabulary_is_named(
    configure: Callable[..., object], draft: str, tmp_path: Path
) -> None:
    """Turns red when a draft model of another vocabulary is loaded."""
    config = json.loads((Path(draft) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 32000}))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(SpecConfigError) as error:
        configure({**CHAIN, "model": str(tmp_path)})
    assert "has 32000 tokens, the target's 49152" in one_line(error.value)


@pytest.mark.parametrize(
    ("method", "config", "says"),
    [
        ("eagle_tree", {"layer_ids": (2, 15, 31)}, "the target has 30"),
        ("lyanna", {"hidden_size": 64}, "has target_hidden_size 64, the target 576"),
    ],
)
def test_heads_of_others_are_named(
    configure: Callable[..., object],
    tmp_path: Path,
    method: str,
    config: dict,
    says: str,
) -> None:
    """Turns red when a head starts at a target that it is not for."""
    sizes = {"hidden_size": 576, "vocab_size": 49152, "num_hot_tokens": 16, **config}
    head = write_head(tmp_path, HEADS[method], **sizes)
    with pytest.raises(SpecConfigError) as error:
        configure({"method": method, "model": head})
    assert says in one_line(error.value)


def test_other_vllm_is_refused(
    configure: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when an unsupported vLLM is only found out by a crash."""
    monkeypatch.setattr("vllm.__version__", "0.40.0")
    with pytest.raises(RuntimeError) as error:
        configure(CHAIN)
    assert "vLLM 0.40.0 is not supported" in one_line(error.value)


def test_missing_seam_is_named(
    configure: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a seam that vLLM dropped is not noticed at start-up."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_input_fits_in_drafter")
    with pytest.raises(RuntimeError) as error:
        configure(CHAIN)
    assert "_input_fits_in_drafter (" in one_line(error.value)


def test_others_notice_nothing(target: str) -> None:
    """Turns red when our plugin touches a vLLM that does not name our methods."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    for spec in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        args = EngineArgs(model=target, speculative_config=spec, max_model_len=256)
        config = args.create_engine_config()
        assert config.additional_config == {}
        assert "treespec" not in str(config.parallel_config.worker_cls)
        assert config.scheduler_config.scheduler_cls is None


def test_experts_in_several_engines_are_refused(tmp_path: Path) -> None:
    """Red when engines that must step together start with trees."""
    from transformers import MixtralConfig
    from vllm.engine.arg_utils import EngineArgs

    register()
    config = MixtralConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=64,
        architectures=["MixtralForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    arguments = EngineArgs(
        model=str(tmp_path),
        speculative_config={"method": "suffix_tree"},
        data_parallel_size=2,
        skip_tokenizer_init=True,
    )
    with pytest.raises(SpecConfigError, match="mixtures of experts"):
        arguments.create_engine_config()
