"""The Dockerfiles: what a linter says, and that what they copy is there."""

import re
from pathlib import Path

import pytest

from tests.fast.deployment import DEPLOY, run

ROOT = DEPLOY.parent
FILES = sorted((DEPLOY / "docker").glob("Dockerfile.?pu"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_no_word(path: Path) -> None:
    assert run("hadolint", path) == ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_everything_that_is_copied_is_there(path: Path) -> None:
    """Red when a file moves, or .dockerignore hides it from the build."""
    ignore = Path(f"{path}.dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", path.read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names
    for name in names:
        assert (ROOT / name).exists()
        assert name.partition("/")[0] in allowed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_runs_as_an_unprivileged_user(path: Path) -> None:
    users = re.findall(r"^USER (.*)$", path.read_text(), re.MULTILINE)
    assert users[-1] == "2000:2000"


def test_the_gpu_image_has_a_vllm_that_we_support() -> None:
    """Red when setup.py asks for another vLLM."""
    text = (DEPLOY / "docker" / "Dockerfile.gpu").read_text()
    (version,) = re.findall(r"^ARG VLLM_VERSION=(.*)$", text, re.MULTILINE)
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    assert f"\nvllm-cpu=={version}\n" in lock
