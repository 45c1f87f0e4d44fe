"""What `treespec doctor` says of Intel's OpenMP on a CPU."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vllm_treespec.tools.openmp import NAME, report


@pytest.mark.parametrize(
    ("installed", "preload", "says"),
    [
        (True, "/other.so:{library}", "is preloaded"),
        (True, "/other.so", "start with LD_PRELOAD={library} vllm serve"),
        (True, "/not/there/libiomp5.so", "start with LD_PRELOAD={library} vllm serve"),
        (False, "", "pip install intel-openmp"),
    ],
)
def test_doctor_says_how_to_preload_it(
    installed: bool,
    preload: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a server is slower than published and the doctor does not say so."""
    library = tmp_path / "lib" / NAME
    library.parent.mkdir()
    if installed:
        library.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", preload.format(library=library))
    text = io.StringIO()
    report(Console(file=text, width=80))
    assert says.format(library=library) in text.getvalue()
