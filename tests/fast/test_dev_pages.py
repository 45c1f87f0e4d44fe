"""The pages for developers do what they say when they are followed literally."""

from pathlib import Path

import pytest

from tests.fast.dev_pages import PAGES, run, save_blocks
from tests.tiers import cases

MOST_WORDS = {
    "write-a-method.md": 900,
    "write-a-rule.md": 500,
    "write-a-source.md": 500,
}


@pytest.mark.parametrize("page", cases(MOST_WORDS, quick=["write-a-method.md"]))
def test_blocks_run_as_they_stand(page: str, tmp_path: Path) -> None:
    """Red when a name or a signature on the page is not the code's any more."""
    names = save_blocks(page, tmp_path)
    assert "check.py" in names
    assert "num_trees=" in run(tmp_path, "check.py")
    tests = [name for name in names if name.startswith("test_")]
    if tests:
        run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


@pytest.mark.parametrize("page", MOST_WORDS)
def test_pages_are_short(page: str) -> None:
    """Red when a page grows: move what it says elsewhere."""
    assert len((PAGES / page).read_text("utf-8").split()) <= MOST_WORDS[page]
