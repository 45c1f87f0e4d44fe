"""Writes what a release of vLLM has of the seam table.

That is fingerprints of the functions that we replace, and that all seams were found.

For the sources of a release, installed or unpacked (nothing is imported or built)::

    python -m tests.fingerprints 0.33 FOLDER    # FOLDER/vllm/__init__.py exists
    make style

It also names what the seam table has and that release lacks. Read how the functions
that differ have changed, and run ``make test`` with that vLLM, before a commit.
"""

from __future__ import annotations

import argparse
import hashlib
from functools import cache
from pathlib import Path

from vllm_treespec.engine.seams import SEAMS, fingerprints
from vllm_treespec.engine.seams.fingerprints import FINGERPRINTS, SEEN
from vllm_treespec.engine.seams.source_files import SourceFiles

HEADER = '''"""What supported releases of vLLM were seen to have of the seam table.

Written by ``python -m tests.fingerprints``.
"""

# release -> hash of the names of all seams that were found in it
SEEN: dict[str, str] = {seen!r}

# of the functions that we replace: module -> function -> release -> fingerprint
FINGERPRINTS: dict[str, dict[str, dict[str, str]]] = {table!r}
'''


@cache
def installed_sources() -> SourceFiles:
    """The sources of the installed vLLM, which take seconds to read."""
    return SourceFiles.installed()


def names_hash(release: str) -> str:
    """Hash of the names of all seams that a release must have."""
    names = sorted({seam.name for seam in SEAMS if seam.needed_in(release)})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def with_release(
    release: str, sources: SourceFiles
) -> dict[str, dict[str, dict[str, str]]]:
    """The table of fingerprints with those of one release made anew.

    Raises:
        SystemExit: the release lacks a function that we replace.

    """
    table: dict[str, dict[str, dict[str, str]]] = {}
    for seam in SEAMS:
        if not seam.replaced or not seam.needed_in(release):
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
    release = arguments.release
    table = with_release(release, sources)
    missing = [
        seam.name
        for seam in SEAMS
        if seam.needed_in(release) and not sources.has(seam.module, seam.attribute)
    ]
    for name in missing:
        print(f"vLLM {release} has no {name}")
    seen = {**SEEN, release: "" if missing else names_hash(release)}
    text = HEADER.format(seen=seen, table=table)
    Path(fingerprints.__file__).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
