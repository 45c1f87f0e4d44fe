"""Write the SHA-256 of every file that ``cpu.lock`` may install, beside its version.

``python requirements/hashes.py`` asks PyPI by ``uv``: wheels for Linux x86-64, for each
Python that we support. Torch's CPU builds lie on an index of their own: their hashes
stay as they are written.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

LOCK = Path(__file__).with_name("cpu.lock")
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_40"


def wheels(pins: list[str], python: str) -> dict[str, set[str]]:
    """Hashes of the wheels that a Python can install, by normalised name."""
    options = ["--no-config", "--no-deps", "--no-build", "--quiet"]
    options += ["--python-version", python, "--python-platform", PLATFORM]
    command = ["uv", "pip", "compile", "-", *options, "--format", "pylock.toml"]
    done = subprocess.run(
        command, input="\n".join(pins), stdout=subprocess.PIPE, text=True, check=True
    )
    return {
        package["name"]: {wheel["hashes"]["sha256"] for wheel in package["wheels"]}
        for package in tomllib.loads(done.stdout)["packages"]
    }


def main() -> None:
    """Write the lock again."""
    lines = LOCK.read_text("utf-8").splitlines()
    pins = [line.split()[0] for line in lines if not line.startswith(("#", "torch=="))]
    found = [wheels(pins, python) for python in PYTHONS]
    for number, line in enumerate(lines):
        pin = line.split()[0]
        if pin in pins:
            name = re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()
            hashes = sorted(set().union(*(files[name] for files in found)))
            lines[number] = " ".join([pin, *(f"--hash=sha256:{h}" for h in hashes)])
    LOCK.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
