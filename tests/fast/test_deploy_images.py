"""The Dockerfiles: what a linter says, and that what they copy is there."""

import re
from pathlib import Path

import pytest

from tests.fast.deployment import DEPLOY, run
from vllm_treespec.engine.seams import supported
from vllm_treespec.tools.openmp import NAME

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


def test_the_gpu_image_has_the_vllm_that_ran_on_a_card() -> None:
    """Red when the image takes another vLLM than docs/support.md names for GPUs."""
    text = (DEPLOY / "docker" / "Dockerfile.gpu").read_text()
    (version,) = re.findall(r"^ARG BASE=\S+:v([\d.]+)$", text, re.MULTILINE)
    assert supported(version)
    support = (ROOT / "docs" / "support.md").read_text()
    (row,) = [line for line in support.splitlines() if "engines on one H200" in line]
    assert version.startswith(row.split()[1] + ".")


def test_the_cpu_image_has_intels_openmp_and_large_pages() -> None:
    """Red when the image serves slower than what was published."""
    text = (DEPLOY / "docker" / "Dockerfile.cpu").read_text()
    (venv,) = re.findall(r"^COPY --from=build \S+ (\S+)$", text, re.MULTILINE)
    assert f"LD_PRELOAD={venv}/lib/{NAME} " in text
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 " in text


def test_every_base_of_an_image_can_be_pinned() -> None:
    """Red when a FROM names an image that no argument can replace by a digest."""
    for path in FILES:
        bases = re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)
        assert {*bases} <= {"${BASE}", "${BUILDER}"}
