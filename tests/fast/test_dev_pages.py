"""The pages for developers do what they say when they are followed literally."""

from pathlib import Path

import pytest

from tests.fast.dev_pages import PAGES, run, save_blocks

MOST_WORDS = {
    "write-a-method.md": 900,
    "write-a-rule.md": 500,
    "write-a-source.md": 500,
}


# What a reader does, in one process: one import of torch.
AS_A_READER = """
import runpy, sys, pytest
sys.path.insert(0, "")
runpy.run_path("check.py", run_name="__main__")
print("vLLM was imported:", "vllm" in sys.modules)
tests = sys.argv[1:]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]) if tests else 0)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("page", MOST_WORDS)
def test_blocks_run_as_they_stand(page: str, tmp_path: Path) -> None:
    """Red when a name or a signature on the page is not the code's any more."""
    names = save_blocks(page, tmp_path)
    assert "check.py" in names
    tests = [name for name in names if name.startswith("test_")]
    printed = run(tmp_path, "-c", AS_A_READER, *tests)
    assert "num_trees=" in printed
    assert "vLLM was imported: False" in printed, "the check needs a whole vLLM"


@pytest.mark.parametrize("page", MOST_WORDS)
def test_pages_are_short(page: str) -> None:
    """Red when a page grows: move what it says elsewhere."""
    assert len((PAGES / page).read_text("utf-8").split()) <= MOST_WORDS[page]
