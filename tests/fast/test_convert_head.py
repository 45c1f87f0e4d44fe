"""`treespec convert-head`: heads published as pytorch_model.bin."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.published_heads import PublishedHead
from vllm_treespec.cli import app
from vllm_treespec.heads import HeadError, load_eagle_head
from vllm_treespec.heads.convert import INDEX, convert_head


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


def change(folder: Path, **tensors: Any) -> None:
    """Write a head's weights again with others, as names with _ for each dot."""
    path = folder / "pytorch_model.bin"
    named = {name.replace("_weight", ".weight"): t for name, t in tensors.items()}
    torch.save(torch.load(path, weights_only=True) | named, path)


def listing(folder: Path, **files: Any) -> None:
    """Write an index of weights."""
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def elsewhere(folder: Path) -> None:
    """Let the index name a file that lies outside of the folder."""
    torch.save({"a": torch.ones(2)}, folder.parent / "elsewhere.bin")
    listing(folder, a="../elsewhere.bin")


def written(content: Any) -> Callable[[Path], None]:
    """Let pytorch_model.bin hold something else."""
    return lambda folder: torch.save(content, folder / "pytorch_model.bin")


def text(name: str, content: str) -> Callable[[Path], Any]:
    """Write a file."""
    return lambda folder: (folder / name).write_text(content)


BIN = "pytorch_model.bin"
DEEP = "[" * 100_000
# What was done to a head's folder; the file, and the words of the message.
REFUSED: list[tuple[Callable[[Path], Any], str, str]] = [
    (lambda f: (f / BIN).unlink(), "", "holds no pytorch_model.bin; heads with model."),
    (written({"x": Path("y")}), BIN, "is damaged, or holds more than tensors; get the"),
    (written({"x": [1]}), BIN, "'x' is no tensor with a name and numbers; get the"),
    (written({1: torch.ones(2)}), BIN, "1 is no tensor with a name and numbers"),
    (written({"a": torch.ones(2, device="meta")}), BIN, "'a' is no tensor with a name"),
    (written({"a": torch.ones(2).to_sparse()}), BIN, "'a' is no tensor with a name"),
    (written({"a": torch.ones(1).expand(2**50)}), BIN, "can't allocate memory"),
    (written([torch.ones(2)]), BIN, "it holds no tensors by name"),
    (text(BIN, ""), BIN, "cannot be read: it is damaged (EOFError"),
    (text(BIN, "root:x:0:0:root"), BIN, "cannot be read: it is damaged"),
    (written({}), "config.json", "the weights beside it are not those of an EAGLE"),
    (lambda f: listing(f, a="/etc/passwd"), INDEX, "no file '/etc/passwd' beside it"),
    (
        elsewhere,
        INDEX,
        "there is no file '../elsewhere.bin' beside it; copy",
    ),
    (lambda f: listing(f, a=5), INDEX, "there is no file 5 beside it"),
    (lambda f: listing(f, a=["x"]), INDEX, "there is no file ['x'] beside it"),
    (lambda f: listing(f, a="x" * 4000), INDEX, "there is no file 'xxxxxxxxxxxx...xxx"),
    (listing, INDEX, "cannot be read: it lists no files; copy the folder again"),
    (text(INDEX, DEEP), INDEX, "its lists and objects are nested too deeply"),
    (text("config.json", DEEP), "config.json", "are nested too deeply"),
    (
        text("config.json", "[1]"),
        "config.json",
        "holds no JSON object; copy",
    ),
    (
        lambda f: change(f, x=torch.ones(2)),
        "",
        "missing none, not known x; correct it, ",
    ),
    (
        lambda f: change(f, fc_weight=torch.ones(16, 32, dtype=torch.int8)),
        "",
        "fc.weight is torch.int8, and weights are floating-point numbers",
    ),
    (
        lambda f: change(f, fc_weight=torch.ones(16, 33)),
        "",
        "fc.weight has the shape [16, 33], and config.json says [16, 32]",
    ),
    (
        lambda f: change(f, fc_weight=torch.full((16, 32), torch.nan)),
        "",
        "fc.weight holds NaN or infinity; correct it, train or get the whole head",
    ),
    (lambda f: change(f, fc_weight=torch.tensor(1.0)), "", "'fc.weight' beside it has"),
]


@pytest.mark.parametrize(("do", "file", "says"), REFUSED)
def test_refused_conversions(
    do: Callable[[Path], Any], file: str, says: str, tmp_path: Path
) -> None:
    """Red when an odd head is a traceback, is read elsewhere, or leaves a folder."""
    folder = bin_head(tmp_path / "in", PublishedHead("eagle"))
    do(folder)
    done = convert(folder, tmp_path / "out")
    assert done.exit_code == 1, done.exception
    assert done.stderr.startswith("treespec: ")
    assert says in done.stderr
    assert str(folder / file) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_flipped_bits(tmp_path: Path) -> None:
    """Red when a byte of pytorch_model.bin decides whether there is a traceback."""
    folder = bin_head(tmp_path / "in", PublishedHead("eagle"))
    whole = (folder / BIN).read_bytes()
    random = Random(1)
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        (folder / BIN).write_bytes(damaged)
        with suppress(HeadError):
            convert_head(str(folder), tmp_path / "out")
            shutil.rmtree(tmp_path / "out")


def test_folders_of_conversions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a folder is overwritten, or a full disk leaves half of one."""
    folder = bin_head(tmp_path / "in", PublishedHead("eagle"))
    other = PublishedHead().write(tmp_path / "other")
    assert "is not empty; name a new folder" in convert(folder, other).stderr
    out = tmp_path / "out"
    assert "there is no folder /nowhere" in convert("/nowhere", out).stderr

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("vllm_treespec.heads.convert.save_file", full)
    assert "treespec: No space left on device\n" in convert(folder, out).stderr
    assert not out.exists()
    out.mkdir()
    assert convert(folder, out).exit_code == 1
    assert not list(out.iterdir())


def test_numbers_beyond_a_dtype(tmp_path: Path) -> None:
    """Red when a conversion to float16 makes infinity of a large number."""
    folder = bin_head(tmp_path / "in", PublishedHead("eagle"))
    change(folder, fc_weight=torch.full((16, 32), 1e6))
    done = convert(folder, tmp_path / "out", "--dtype", "float16")
    assert "holds numbers beyond those of torch.float16; leave out --dty" in done.stderr
    assert convert(folder, tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
