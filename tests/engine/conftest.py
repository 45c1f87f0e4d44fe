"""Engines for the engine tier: each in its own process, each started once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.heads import HEADS, write_head
from vllm_treespec.tools.assets import AssetError, drafters, ensure_target

MAX_MODEL_LEN = 320
SPECS: dict[str, dict[str, object]] = {
    "sd": {"method": "sd", "depth": 4},
    "rsd_c": {"method": "rsd_c", "branching_factors": [3, 2, 1]},
    "rsd_s": {"method": "rsd_s", "beam_width": 4, "depth": 4},
    "spectr": {"method": "spectr", "num_paths": 3, "depth": 3},
    "specinfer": {"method": "specinfer"},
    "suffix_tree": {"method": "suffix_tree", "num_drafts": 8, "depth": 4},
    "redrafter": {
        "method": "redrafter",
        "beam_width": 6,
        "length": 4,
        "num_drafts": 15,
    },
    "redrafter-stochastic": {
        "method": "redrafter",
        "beam_search": "stochastic",
        "beam_width": 3,
        "length": 3,
    },
    "medusa_tree": {"method": "medusa_tree", "num_drafts": 7},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder belongs to the engine tier."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def target() -> str:
    """Folder of the target model."""
    try:
        return str(ensure_target(progress=False))
    except AssetError as error:
        pytest.skip(f"no target model: {error}")


@pytest.fixture(scope="session")
def draft() -> str:
    """Folder of the shipped draft model."""
    return str(drafters()["smollm2-135m-draft"])


@pytest.fixture(scope="session")
def second_draft(draft: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of another draft model: the shipped one without its last layer."""
    folder = tmp_path_factory.mktemp("second_draft")
    config = json.loads((Path(draft) / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = last
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(Path(draft) / "model.safetensors")
    kept = {k: w for k, w in weights.items() if f"layers.{last}." not in k}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="session")
def heads(target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of a head by method: the shipped one, else one with random weights."""
    config = json.loads((Path(target) / "config.json").read_text())
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size")}
    folders = {}
    for method, kind in HEADS.items():
        shipped = drafters().get(f"{kind}-smollm2-135m")
        folders[method] = (
            str(shipped)
            if shipped
            else write_head(
                tmp_path_factory.mktemp(method), kind, num_hot_tokens=4096, **sizes
            )
        )
    return folders


@pytest.fixture(scope="session")
def spec_of(
    draft: str, second_draft: str, heads: dict[str, str]
) -> Callable[[str], dict[str, object]]:
    """Return a function from a name in ``SPECS`` to the spec-config tests use."""

    def make(name: str) -> dict[str, object]:
        spec = {"schedule": "fixed", **SPECS[name]}
        method = str(spec["method"])
        if method == "specinfer":
            return spec | {
                "drafts": [
                    {"model": draft, "branching_factors": [2, 1, 1]},
                    {"model": second_draft, "branching_factors": [2, 2]},
                ]
            }
        if method == "suffix_tree":
            return spec
        return spec | {"model": heads.get(method, draft)}

    return make


@pytest.fixture(scope="session")
def run_engine(
    target: str,
    spec_of: Callable[[str], dict[str, object]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict]:
    """Return a function that runs jobs through a fresh float32 engine."""

    def run(method: str | None, jobs: list[dict], **options: object) -> dict:
        folder = tmp_path_factory.mktemp("engine")
        llm: dict[str, object] = {
            "model": target,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 192,
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 2**30,
            "max_logprobs": 64,
        }
        if method is not None:
            llm["speculative_config"] = spec_of(method)
        request: dict = {"llm": {**llm, **options}, "jobs": jobs}
        if "capture_kv" in request["llm"]:
            request["capture_kv"] = {
                "num_blocks": request["llm"].pop("capture_kv"),
                "file": str(folder / "kv.pt"),
            }
        if "adapter" in request["llm"]:
            request["adapter"] = request["llm"].pop("adapter")
        (folder / "request.json").write_text(json.dumps(request))
        child = Path(__file__).parent / "child.py"
        done = subprocess.run(
            [sys.executable, child, folder / "request.json", folder / "result.json"],
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads((folder / "result.json").read_text())
        result["kv_file"] = str(folder / "kv.pt")
        return result

    return run


@pytest.fixture(scope="session")
def tokenize(target: str) -> Callable[[str], list[int]]:
    """Return a function from text to token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)

    @cache
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text)

    return encode
