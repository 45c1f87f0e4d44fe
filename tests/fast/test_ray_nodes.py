"""What is said of a Ray node that cannot run draft trees."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
from typer.testing import CliRunner

from vllm_treespec import __version__
from vllm_treespec.cli import app
from vllm_treespec.config import SpecConfigError
from vllm_treespec.plugin import check_ray_nodes_first
from vllm_treespec.ray_nodes import (
    NodeFacts,
    RayNodeError,
    check_nodes,
    make_probe,
    plugins_problem,
)

NODE = "10.0.0.7 (id 3f2a11bc)"
HERE = NodeFacts("1.2.0", None, {"/models/draft": {"config.json": 10, "model": 20}})
# Runs what was pickled, in a Python that has nothing of ours.
WITHOUT_US = """
import pickle, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('vllm_treespec', 'vllm', 'torch'):
            raise ImportError(name)
sys.meta_path.insert(0, Nothing())
print(pickle.load(sys.stdin.buffer)())
"""


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (
            {"version": None},
            "vllm-treespec is not installed there; install vllm-treespec 1.2.0 there",
        ),
        (
            {"version": "1.1.0"},
            "it has vllm-treespec 1.1.0, and this process has 1.2.0; install "
            "vllm-treespec 1.2.0 there with pip",
        ),
        (
            {"plugins": "lora,mine"},
            "VLLM_PLUGINS='lora,mine' leaves treespec out; unset it, or set "
            "VLLM_PLUGINS=lora,mine,treespec",
        ),
        (
            {"files": {"/models/draft": {}}},
            "the drafter's file /models/draft/config.json is missing there; copy the "
            "folder /models/draft there",
        ),
        (
            {"files": {"/models/draft": {"config.json": 10, "model": 19}}},
            "the drafter's file /models/draft/model has 19 bytes there and 20 bytes "
            "here; copy",
        ),
    ],
)
def test_what_a_node_lacks_is_named(there: dict, says: str) -> None:
    """Red when such a node gets as far as a traceback of its worker."""
    with pytest.raises(RayNodeError) as error:
        check_nodes(HERE, {"10.0.0.6": HERE, NODE: replace(HERE, **there)})
    assert str(error.value).startswith(f"Ray node {NODE}: {says}")


@pytest.mark.parametrize(
    "there",
    [
        {},
        {"plugins": "treespec"},
        {"plugins": "lora,treespec"},
        {"files": {"/models/draft": {"config.json": 10, "model": 20, "README": 1}}},
    ],
)
def test_a_complete_node_passes(there: dict) -> None:
    """Red when a node is refused on which the engine would start."""
    check_nodes(HERE, {NODE: replace(HERE, **there)})


def test_an_empty_list_of_plugins_leaves_us_out() -> None:
    """Red when VLLM_PLUGINS set to nothing counts as not set; vLLM loads none then."""
    assert plugins_problem("") == (
        "VLLM_PLUGINS='' leaves treespec out",
        "unset it, or set VLLM_PLUGINS=treespec",
    )


def test_the_probe_runs_without_our_package(tmp_path: Path) -> None:
    """Red when the question itself fails on the nodes that it is for."""
    (tmp_path / "config.json").write_text("{}")
    gone = str(tmp_path / "gone")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US],
        input=cloudpickle.dumps(make_probe([str(tmp_path), gone])),
        capture_output=True,
        env={**os.environ, "VLLM_PLUGINS": "other"},
        cwd=tmp_path,
        check=True,
    )
    files = {str(tmp_path): {"config.json": 2}, gone: {}}
    expected = {"version": __version__, "plugins": "other", "files": files}
    assert done.stdout.decode().strip() == str(expected)


def test_the_first_ray_executor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when trees run on an executor that no test has run them on."""
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(SpecConfigError, match="unset VLLM_USE_RAY_V2"):
        check_ray_nodes_first(SimpleNamespace())


def test_our_command_says_that_we_are_left_out() -> None:
    """Red when a user learns from vLLM only that a method of ours is unknown."""
    environment = {"VLLM_PLUGINS": "other"}
    done = CliRunner().invoke(app, ["doctor", "--help"], env=environment)
    assert done.exit_code == 0
    assert (
        "VLLM_PLUGINS='other' leaves treespec out, so vLLM does not know our methods; "
        "unset it, or set VLLM_PLUGINS=other,treespec"
    ) in done.stderr
