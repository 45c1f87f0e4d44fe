"""Writes the fingerprints of the vLLM functions that we replace.

For the sources of a release, installed or unpacked (nothing is imported or built)::

    python -m tests.fingerprints 0.33 FOLDER    # FOLDER/vllm/__init__.py exists
    make style

It also names what the seam table has and that release lacks. Read how the functions
that differ have changed, and run ``make test`` with that vLLM, before a commit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_treespec.engine.seams import SEAMS, fingerprints
from vllm_treespec.engine.seams.fingerprints import FINGERPRINTS
from vllm_treespec.engine.seams.source_files import SourceFiles

HEADER = '''"""Fingerprints of the vLLM functions that we replace, by supported release.

Written by ``python -m tests.fingerprints``.
"""

# module -> function -> release -> fingerprint
FINGERPRINTS: dict[str, dict[str, dict[str, str]]] = '''


def with_release(
    release: str, sources: SourceFiles
) -> dict[str, dict[str, dict[str, str]]]:
    """The table of fingerprints with those of one release made anew.

    Raises:
        SystemExit: the release lacks a function that we replace.

    """
    table: dict[str, dict[str, dict[str, str]]] = {}
    for seam in SEAMS:
        if not seam.replaced:
            continue
        fingerprint = sources.fingerprint(seam.module, seam.attribute)
        if fingerprint is None:
            raise SystemExit(f"vLLM {release} has no function {seam.name}")
        known = FINGERPRINTS.get(seam.module, {}).get(seam.attribute, {})
        releases = {**known, release: fingerprint}
        table.setdefault(seam.module, {})[seam.attribute] = releases
    return table


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.fingerprints")
    parser.add_argument("release", help="for example 0.33")
    parser.add_argument("folder", type=Path, help="in which the package vllm lies")
    arguments = parser.parse_args()
    sources = SourceFiles(arguments.folder)
    for seam in SEAMS:
        needed = seam.needed_in(arguments.release)
        if needed and not sources.has(seam.module, seam.attribute):
            print(f"vLLM {arguments.release} has no {seam.name}")
    table = with_release(arguments.release, sources)
    Path(fingerprints.__file__).write_text(f"{HEADER}{table!r}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
