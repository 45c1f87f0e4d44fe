"""Engines for the engine tier: each in its own process, each started once."""

import hashlib
import json
import os
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file
from xdist.scheduler import LoadScopeScheduling

from tests.engine import processes
from tests.engine.processes import ENVIRONMENT, call
from tests.engine.selection import is_quick, is_rare
from tests.engine.times import where_the_time_went
from tests.engine.tiny_models import SIZES, write_pair
from tests.heads import HEADS, write_head
from vllm_treespec.config import HEAD_METHODS
from vllm_treespec.tools.assets import AssetError, drafters, ensure_target

# For every engine, also those that tests start in their own way.
os.environ.update(ENVIRONMENT)
MAX_MODEL_LEN = 320
# Files whose tests of one parameter share engines, and those of two do not.
BY_PARAMETER = ("test_greedy.py", "test_sampling_law.py", "test_schedule.py")
# These start first, so that no pytest process has a long one left at the end.
FIRST = (
    "test_support_matrix.py",
    "test_interpreted_kernel.py",
    "test_soak.py",
    "test_tensor_parallel.py",
    "test_sampling_law.py",
    "test_server.py",
    "test_metrics.py",
)
SPECS: dict[str, dict[str, object]] = {
    "sd": {"method": "sd", "depth": 4},
    "rsd_c": {"method": "rsd_c", "branching_factors": [3, 2, 1]},
    "rsd_s": {"method": "rsd_s", "beam_width": 4, "depth": 4},
    "spectr": {"method": "spectr", "num_paths": 3, "depth": 3},
    "specinfer": {"method": "specinfer"},
    "suffix_tree": {"method": "suffix_tree", "num_drafts": 8, "depth": 4},
    "redrafter": {
        "method": "redrafter",
        "tree": "beams",
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
    "redrafter-dynamic": {
        "method": "redrafter",
        "beam_width": 4,
        "length": 3,
        "num_drafts": 10,
    },
    "medusa_tree": {"method": "medusa_tree", "num_drafts": 7},
    "eagle_tree": {"method": "eagle_tree", "num_drafts": 10},
    "eagle-stochastic": {
        "method": "eagle_tree",
        "tree": "stochastic",
        "num_drafts": 10,
    },
    "dflash_tree": {"method": "dflash_tree", "num_drafts": 10, "depth": 4},
    "lyanna": {
        "method": "lyanna",
        "num_drafts": 10,
        "resample": "merge",
        "resample_drafts": 5,
    },
    "hybrid": {
        "method": "hybrid",
        "num_drafts": 10,
        "depth": 6,
        "min_probability": 0.0,
    },
    "hybrid-eagle": {
        "method": "hybrid",
        "drafter": "eagle",
        "num_drafts": 10,
        "depth": 6,
    },
}

# What all engines have in common.
ENGINE: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 192,
    "enforce_eager": True,
    "block_size": 32,
}
# An engine of a small target, for ``run_engine``.
TINY: dict[str, object] = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 2**28,
}


class EngineScheduling(LoadScopeScheduling):
    """Gives tests that share engines to one process, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of the tests that stay together: a file, or part of it."""
        file, _, name = nodeid.partition("::")
        if file.endswith(BY_PARAMETER):
            return f"{file}[{name.partition('[')[2]}"
        return file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> EngineScheduling:
    """With ``--numprocesses``: keep engines together, and the order of the tests."""
    config.option.loadscopereorder = False
    return EngineScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder belongs to the engine tier; long files come first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if not is_quick(item.path.name, item.name):
                item.add_marker(pytest.mark.thorough)
            if is_rare(item.path.name, item.name):
                item.add_marker(pytest.mark.rare)
    order = {name: position for position, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Note in a test's reports which engines ended meanwhile."""
    report = yield
    report.user_properties += [("engines", usage) for usage in processes.ended]
    processes.ended.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the time went: see docs/dev/tests.md."""
    reports = [
        report
        for group in terminalreporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport) and "/engine/" in report.nodeid
    ]
    table = where_the_time_went(reports)
    if len(table) > 2:
        terminalreporter.section("where the time went")
        terminalreporter.write_line("\n".join(table))


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
        method = HEAD_METHODS.get(str(spec.get("drafter")), method)
        return spec | {"model": heads.get(method, draft)}

    return make


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all of pytest's processes share, new in every run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def tiny(shared_folder: Path) -> dict[str, str]:
    """Folders of a small target, of a draft model that often agrees, and of heads.

    All have random weights.
    """
    folder = shared_folder / "tiny"
    with FileLock(shared_folder / "tiny.lock"):
        if not folder.exists():
            write_pair(folder)
            sizes = {name: SIZES[name] for name in ("hidden_size", "vocab_size")}
            write_head(folder / "redrafter", "redrafter", **sizes)
            write_head(folder / "eagle_tree", "eagle", **sizes)
            write_head(folder / "dflash_tree", "dflash", **sizes)
            write_head(folder / "lyanna", "lyanna", **sizes)
    names = ("target", "draft", "redrafter", "eagle_tree", "dflash_tree", "lyanna")
    return {name: str(folder / name) for name in names}


@pytest.fixture(scope="session")
def run_engine(
    target: str, spec_of: Callable[[str], dict[str, object]], shared_folder: Path
) -> Callable[..., dict]:
    """Return a function that runs jobs through a fresh float32 engine.

    Tests that ask for the same engine and the same jobs share one run of it.
    """

    def run(method: str | None, jobs: list[dict], **options: object) -> dict:
        llm: dict[str, object] = {
            "model": target,
            **ENGINE,
            "kv_cache_memory_bytes": 2**30,
            "max_logprobs": 64,
        }
        if method is not None:
            llm["speculative_config"] = spec_of(method)
        request: dict = {"llm": {**llm, **options}, "jobs": jobs}
        for name in ("capture_kv", "adapter", "at_import", "watch_blocks"):
            if name in request["llm"]:
                request[name] = request["llm"].pop(name)
        text = json.dumps(request)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        folder = shared_folder / "engines" / name
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not (folder / "result.json").exists():
                (folder / "request.json").write_text(text)
                call(
                    "tests.engine.child:main",
                    *(str(folder / file) for file in ("request.json", "result.json")),
                    log=folder / "log",
                    environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                    at_import=request.get("at_import"),
                )
        result = json.loads((folder / "result.json").read_text())
        result["kv_file"] = str(folder / "kv.pt")
        return result

    return run


@pytest.fixture(scope="session")
def log_drafts(shared_folder: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs jobs on an engine and notes all drafts."""

    def start(
        model: str, spec: dict[str, Any], jobs: list[dict], **options: Any
    ) -> dict[str, Any]:
        arguments = {
            "model": model,
            **ENGINE,
            **TINY,
            "speculative_config": spec,
            **options,
        }
        shared_folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(json.dumps([arguments, jobs]).encode()).hexdigest()
        log = shared_folder / f"drafts-{name[:16]}.log"
        result: dict[str, Any] = call(
            "tests.engine.draft_log:run",
            arguments,
            jobs,
            log=log,
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        return result

    return start


@pytest.fixture(scope="session")
def tokenize(target: str) -> Callable[[str], list[int]]:
    """Return a function from text to token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)

    @cache
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text)

    return encode
