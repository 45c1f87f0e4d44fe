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


def doctor(console: Console) -> bool:
    """Print the seams and what this vLLM offers; return whether all is well.

    A function that we replace may differ from those we know: that is a warning.
    """
    import vllm
    from vllm.platforms import current_platform

    sources = SourceFiles.installed()
    console.print(f"[bold]vLLM {vllm.__version__}: what vllm_treespec relies on[/]")
    for topic, seams in TOPICS.items():
        here = [seam for seam in seams if seam.needed_in(vllm.__version__)]
        console.print(topic_table(topic, here, sources))
    changed = [
        seam.name
        for seam in SEAMS
        if seam.replaced and matching_releases(seam, sources) == DIFFERS
    ]
    if changed:
        console.print(
            f"[yellow]not as in any vLLM that vllm_treespec was written for:[/] "
            f"{', '.join(changed)}; run make test; then add the fingerprint "
            "(python -m tests.fingerprints)"
        )
    complete = supported(vllm.__version__) and all(
        sources.has(seam.module, seam.attribute)
        for seam in SEAMS
        if seam.needed_on(current_platform.device_name)
        and seam.needed_in(vllm.__version__)
    )
    wanted = f"vllm>={MIN_VLLM},<{BELOW_VLLM}"
    if complete:
        console.print(f"[green]draft trees work with this vLLM[/] ({wanted})")
    else:
        console.print(f"[red]draft trees do not work with this vLLM[/]; use {wanted}")
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
