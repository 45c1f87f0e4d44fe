"""The Python blocks of the pages for developers, as a reader would save them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "dev"
BLOCK = re.compile(r"^```python\n(# ([\w/]+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)


def save_blocks(page: str, folder: Path) -> list[str]:
    """Write every block of a page into the file that its first line names.

    Returns:
        the files' names, in the page's order.

    """
    blocks = BLOCK.findall((PAGES / page).read_text("utf-8"))
    for text, name in blocks:
        (folder / name).write_text(text, "utf-8")
    return [name for _, name in blocks]


def run(folder: Path, *command: str) -> str:
    """Run a Python command in a folder; return what it printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
