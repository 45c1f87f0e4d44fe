"""A method from outside the package, as docs/dev/write-a-method.md runs it in vLLM."""

import time
from pathlib import Path

from tests.engine.processes import Usage, note
from tests.fast.dev_pages import run, save_blocks

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
LENGTH = "max_model_len=1024,"


def test_the_pages_script_runs(target: str, tmp_path: Path) -> None:
    """Red when the process of an engine does not find a class that this one found."""
    save_blocks("write-a-method.md", tmp_path)
    script = tmp_path / "run.py"
    text = script.read_text("utf-8")
    assert HUB_ID in text
    assert LENGTH in text
    # Another engine may run beside it.
    less = f"{LENGTH} enforce_eager=True, gpu_memory_utilization=0.3,"
    script.write_text(text.replace(HUB_ID, target).replace(LENGTH, less), "utf-8")
    start = time.perf_counter()
    assert "two, three." in run(tmp_path, "run.py")
    note(Usage(1, time.perf_counter() - start))
