"""``treespec doctor``: the seam table, and what the installed vLLM offers of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from vllm_treespec.engine.seams.checks import BELOW_VLLM, MIN_VLLM, supported
from vllm_treespec.engine.seams.fingerprints import FINGERPRINTS
from vllm_treespec.engine.seams.seam import Seam
from vllm_treespec.engine.seams.source_files import SourceFiles
from vllm_treespec.engine.seams.table import SEAMS, TOPICS

DIFFERS = "DIFFERS"


def doctor(console: Console, device: str, verbose: bool = False) -> bool:
    """Print whether draft trees work with this vLLM; return it.

    A function that we replace may differ from those we know: that is a warning.

    Args:
        console: where to.
        device: ``"cpu"`` or ``"cuda"``; this machine needs none.
        verbose: print every seam, too.

    """
    import vllm

    sources = SourceFiles.installed()
    if verbose:
        for topic, seams in TOPICS.items():
            here = [seam for seam in seams if seam.needed_in(vllm.__version__)]
            console.print(topic_table(topic, here, sources))
    needed = [
        seam
        for seam in SEAMS
        if seam.needed_on(device) and seam.needed_in(vllm.__version__)
    ]
    missing = [s.name for s in needed if not sources.has(s.module, s.attribute)]
    replaced = [seam for seam in needed if seam.replaced]
    changed = [s.name for s in replaced if matching_releases(s, sources) == DIFFERS]
    wanted = f"vllm>={MIN_VLLM},<{BELOW_VLLM}"
    console.print(f"vLLM {vllm.__version__} on {device}; supported: {wanted}")
    console.print(f"{len(needed)} parts of vLLM are needed, {len(missing)} are missing")
    for name in missing:
        console.print(f"[red]missing:[/] {name}")
    console.print(f"{len(replaced)} functions are replaced, {len(changed)} are unknown")
    if changed:
        console.print(
            f"[yellow]not as in any vLLM that vllm_treespec was written for:[/] "
            f"{', '.join(changed)}; run make test; then add the fingerprint "
            "(python -m tests.fingerprints)"
        )
    complete = supported(vllm.__version__) and not missing
    if complete:
        console.print("[green]draft trees work with this vLLM[/]")
    else:
        console.print(
            f"[red]draft trees do not work with this vLLM[/]; install {wanted}"
        )
    return complete


def topic_table(topic: str, seams: Sequence[Seam], sources: SourceFiles) -> Table:
    """One topic's seams; those of one owner for one purpose share a row."""
    table = Table(title=topic, title_justify="left", expand=True)
    table.add_column("use")
    table.add_column("seam", overflow="fold", ratio=3)
    table.add_column("for", ratio=2)
    table.add_column("device")
    table.add_column("found", min_width=len("as in 0.00"))
    for key, group in groupby(seams, row_key):
        kind, module, owner, purpose, device = key
        rows = list(group)
        names = ", ".join(seam.attribute.rpartition(".")[2] for seam in rows)
        place = f"{module}\n  {owner}{names}"
        table.add_row(
            kind, place, purpose, device or "all", found_column(rows, sources)
        )
    return table


def row_key(seam: Seam) -> tuple[str, str, str, str, str | None]:
    """What seams that share a row have in common."""
    owner, dot, _ = seam.attribute.rpartition(".")
    return seam.kind, seam.module, owner + dot, seam.purpose, seam.device


def found_column(rows: Sequence[Seam], sources: SourceFiles) -> str:
    """What the installed vLLM has of a row's seams."""
    missing = [s.name for s in rows if not sources.has(s.module, s.attribute)]
    if missing:
        names = ", ".join(name.rpartition(".")[2] for name in missing)
        return "[red]no[/]" if len(rows) == 1 else f"[red]no {names}[/]"
    if not rows[0].replaced:
        return "[green]yes[/]"
    known = matching_releases(rows[0], sources)
    return f"[yellow]{known}[/]" if known == DIFFERS else f"[green]{known}[/]"


def matching_releases(seam: Seam, sources: SourceFiles) -> str:
    """Which vLLM releases have a function as it is here: ``"as in 0.32"``, ``"both"``.

    ``"DIFFERS"`` where none has.
    """
    fingerprint = sources.fingerprint(seam.module, seam.attribute)
    known = FINGERPRINTS[seam.module][seam.attribute]
    releases = [release for release, same in known.items() if same == fingerprint]
    if not releases:
        return DIFFERS
    return f"as in {releases[0]}" if len(releases) == 1 else "both"
