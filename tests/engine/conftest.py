"""Engines for the engine tier: each in its own process, each started once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from vllm_treespec.assets import AssetError, drafters, ensure_target

MAX_MODEL_LEN = 320
SPECS: dict[str, dict[str, object]] = {
    "sd": {"method": "sd", "depth": 4},
    "rsd_c": {"method": "rsd_c", "branching_factors": [3, 2, 1]},
    "rsd_s": {"method": "rsd_s", "beam_width": 4, "depth": 4},
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
def run_engine(
    target: str, draft: str, tmp_path_factory: pytest.TempPathFactory
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
            llm["speculative_config"] = {
                "model": draft,
                "schedule": "fixed",
                **SPECS[method],
            }
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
