"""Calls of benchmarks that start no engine: what cannot be, and dry runs."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gpu import card
from tests.fast.tables import rows, written_out
from tests.heads import write_head
from vllm_treespec.tools.assets import shipped_drafter

# What every call of a command has; an option given twice counts as given last.
SHARED = {
    "rsd": "--dry-run --target DRAFTER --draft DRAFTER",
    "redrafter": "--dry-run --target DRAFTER --redrafter IN/redrafter"
    " --medusa IN/medusa",
    "alternate": "--dry-run --data IN/data.jsonl --target t --draft none --spec SUFFIX"
    " --batch-sizes 1,2",
    "workloads": "--dry-run --workloads chat --target IN",
}
CALLS = rows("""
rsd --parts toy,length => there is no 'length'
rsd --sides rsd_x => there is no tree 'rsd_x'
rsd --temperatures 0.3;1 => no list of numbers
rsd --draft no/such/folder => holds no *.safetensors
rsd --draft none => need a draft model
redrafter --only table1,table3 => there is no 'table3'
redrafter --tree 4x4 => beam width x length x draft tokens
redrafter --medusa no/such/folder => there is no folder no/such/folder
redrafter --medusa IN/redrafter => holds a redrafter head
alternate --variants schedule => --variants: name two or more
alternate --variants schedule --vary SURE=0.9 => --variants: name two or more
alternate --variants plain,trees => there is no 'trees'
alternate --vary MOST_SURE=0.9,0.95 => is not module:NAME=VALUE
alternate --vary SURE=high => is no list of numbers
alternate --vary SUREs=1,2 => there is no number
workloads --data IN => --draft
gpu-kernel --nodes '' => --nodes
gpu-kernel --nodes 0 => --nodes
gpu-kernel --nodes 1,x => --nodes
gpu-step --nodes '' => --nodes
gpu-step --nodes 0 => --nodes
gpu-step --nodes 1,x => --nodes
gpu-end-to-end --only speed --nodes '' => --nodes
gpu-end-to-end --only speed --nodes 0 => --nodes
gpu-end-to-end --only speed --nodes 1,x => --nodes
gpu-kernel => finds no CUDA device here
gpu-step => finds no CUDA device here
gpu-end-to-end => finds no CUDA device here
""")
# What is left to do, in a folder that stays empty.
DRY_RUNS = rows("""
rsd => 142 cells to measure in 12 engines
rsd --parts toy => nothing
redrafter => 54 cells to measure in 6 engines
""")
PLACES = {
    "DRAFTER": shipped_drafter(),
    "SUFFIX": json.dumps({"method": "suffix_tree"}),
    "SURE": "vllm_treespec.sources.continuations:MOST_SURE",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what the calls name."""
    folder = tmp_path_factory.mktemp("inputs")
    for kind in ("redrafter", "medusa"):
        write_head(folder / kind, kind)
    rows = '{"workload": "chat", "prompt": "hello"}\n' * 8
    (folder / "data.jsonl").write_text(rows)
    return folder


def invoke(given: str, inputs: Path, out: Path) -> tuple[int, str]:
    """Exit status of a call and what it prints."""
    command, *arguments = shlex.split(given)
    call = [*SHARED.get(command, "").split(), "--out", str(out), *arguments]
    call = written_out(call, {**PLACES, "IN": str(inputs)})
    done = CliRunner().invoke(app, [command, *call])
    return done.exit_code, done.output


@pytest.mark.parametrize(("given", "says"), CALLS)
def test_wrong_calls(
    given: str,
    says: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a mistake is a traceback, a long run, numbers, or found in silence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "--nodes" in given:
        monkeypatch.setattr(card, "require_card", lambda: None)
    code, output = invoke(given, inputs, tmp_path)
    assert code in (1, 2), output
    assert says in output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "says"), DRY_RUNS)
def test_dry_runs(given: str, says: str, inputs: Path, tmp_path: Path) -> None:
    """Red when --dry-run starts engines, counts others, or touches the folder."""
    code, output = invoke(given, inputs, tmp_path / "out")
    assert code == 0, output
    assert says in output if says != "nothing" else "engines" not in output
    assert not (tmp_path / "out").exists()
