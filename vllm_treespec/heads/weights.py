"""Whether files of weights are whole, read from their headers alone."""

from pathlib import Path

from safetensors import SafetensorError, safe_open


def weights_problem(path: Path) -> str | None:
    """What is wrong with a safetensors file; None when its size fits its header."""
    try:
        with safe_open(path, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{path} is cut short or is no safetensors file ({error})"
