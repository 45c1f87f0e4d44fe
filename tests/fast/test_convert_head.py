"""`treespec convert-head`: heads published as pytorch_model.bin."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.published_heads import PublishedHead
from vllm_treespec.cli import app
from vllm_treespec.heads import HeadError, load_eagle_head
from vllm_treespec.heads.convert import INDEX


def bin_head(folder: Path, head: PublishedHead, num_files: int = 1) -> Path:
    """A head as EAGLE-1 is published: pytorch_model.bin."""
    head.write(folder)
    tensors = head.tensors()
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    files = {
        name: f"pytorch_model-{n % num_files}.bin" for n, name in enumerate(tensors)
    }
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        torch.save(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def convert(*arguments: Any) -> Any:
    """Run the command."""
    return CliRunner().invoke(app, ["convert-head", *map(str, arguments)])


@pytest.mark.parametrize("num_files", [1, 2])
def test_conversion(num_files: int, tmp_path: Path) -> None:
    """Red when `treespec convert-head` changes a number or leaves a tensor out."""
    head = PublishedHead("eagle", fc_bias=True)
    folder = bin_head(tmp_path / "in", head, num_files)
    with pytest.raises(HeadError, match=f"`treespec convert-head {folder} OUT` makes"):
        load_eagle_head(folder)
    done = convert(folder, tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert f"Wrote {tmp_path / 'out'}" in done.stdout
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == head.tensors().keys()
    assert all(written[name].equal(t) for name, t in head.tensors().items())
    assert load_eagle_head(tmp_path / "out").config.fuse_bias
    done = convert(folder, tmp_path / "half", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.stderr
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_refused_conversions(tmp_path: Path) -> None:
    """Red when a conversion overwrites files, or ends in a traceback."""
    folder = bin_head(tmp_path / "in", PublishedHead("eagle"))
    other = PublishedHead().write(tmp_path / "other")
    pickled = bin_head(tmp_path / "pickled", PublishedHead("eagle"))
    torch.save({"x": Path("y")}, pickled / "pytorch_model.bin")
    listed = bin_head(tmp_path / "listed", PublishedHead("eagle"))
    torch.save({"x": [1]}, listed / "pytorch_model.bin")
    cases = [
        (folder, other, "exists and is not empty; name a new folder"),
        (other, tmp_path / "out", "holds no pytorch_model.bin; heads with model.safe"),
        (pickled, tmp_path / "out", "pytorch_model.bin cannot be read ("),
        (listed, tmp_path / "out", "holds more than tensors; get the head again"),
        ("/nowhere", tmp_path / "out", "there is no folder /nowhere"),
    ]
    for source, out, says in cases:
        done = convert(source, out)
        assert done.exit_code == 1
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
