"""Sides of the Lyanna paper's tables and figures, and what each one measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.head_parts import PROFILED
from benchmarks.harness.plan import Engine
from benchmarks.harness.rows import Entry, engines_of_entries
from vllm_treespec.tools import sides as kinds
from vllm_treespec.tools.sides import Cell, Side, side_of_trees

# The paper's tree, section 7.2; 16 draft tokens as in its section 7.3.
TREE = {"top_k": 4, "depth": 3, "num_drafts": 12}
SIXTEEN = {**TREE, "num_drafts": 16}
DEEP = {**TREE, "depth": 5}
MERGED = {**TREE, "resample_drafts": 4}
EAGLE, LYANNA = {"method": "eagle_tree"}, {"method": "lyanna"}
# Prompts repeat between cells: no text of earlier answers is used.
OTHERS = [{"method": "suffix_tree", "max_cached_tokens": 0}]
DRAFT_MODEL = {"method": "sd", "depth": 3}
EAGLE_HOT, LYANNA_HOT = "eagle-hot", "lyanna-hot"
EAGLE_FULL, LYANNA_FULL = "eagle-full", "lyanna-full"
EAGLE_DEFAULT, LYANNA_DEFAULT = "eagle-default", "lyanna-default"
MERGE, REPLACE = "lyanna-merge", "lyanna-replace"
SPEED, DRAFTING, OUTPUT, TABLE1 = PARTS = ("speed", "drafting", "output", "table1")
WITH_LEFTOVERS = "benchmarks.lyanna.engine:with_leftovers"
OUTPUT_LAYER = "benchmarks.lyanna.engine:output_layer"
PROFILED_PROMPTS = 4
ANY_SIZE = 1 << 16


class Kind(NamedTuple):
    """A side that draws trees of a head: one engine for all of them."""

    # of the folders of heads
    head: str
    # its spec-config without the head and the trees
    spec: dict[str, Any]
    # trees, and the largest batch of each
    trees: Sequence[tuple[dict[str, int], int]]


KINDS = {
    EAGLE_HOT: Kind("eagle", EAGLE, [(TREE, ANY_SIZE)]),
    LYANNA_HOT: Kind("lyanna", LYANNA, [(TREE, ANY_SIZE), (SIXTEEN, 2)]),
    EAGLE_FULL: Kind(EAGLE_FULL, EAGLE, [(TREE, 4)]),
    LYANNA_FULL: Kind(LYANNA_FULL, LYANNA, [(TREE, 4)]),
    MERGE: Kind("lyanna", {**LYANNA, "resample": "merge"}, [(MERGED, 2)]),
    REPLACE: Kind("lyanna", {**LYANNA, "resample": "replace"}, [(TREE, 2)]),
}
DRAFTERS = (EAGLE_HOT, LYANNA_HOT, EAGLE_FULL, LYANNA_FULL)
DEFAULTS = {EAGLE_DEFAULT: ("eagle", EAGLE), LYANNA_DEFAULT: ("lyanna", LYANNA)}


def table1_name(folder: str) -> str:
    """Name the side that measures a head for table 1."""
    return f"{TABLE1}-{Path(folder).name}"


def all_sides(
    draft: str | None,
    heads: Mapping[str, str],
    variants: Sequence[str],
    eager: bool,
    stock_depth: int,
) -> list[Side]:
    """Every side that has its model, the most important ones first.

    Args:
        draft: folder of the draft model.
        heads: folders of "eagle", "lyanna", and of both without draft vocabulary.
        variants: folders of Lyanna heads for table 1.
        eager: whether engines run without compiling.
        stock_depth: draft tokens of stock n-gram.

    """
    sides = kinds.plain_sides([eager])
    for name, kind in KINDS.items():
        if kind.head in heads:
            spec = {**kind.spec, "model": heads[kind.head]}
            trees = [tree for tree, _ in kind.trees]
            trees += [DEEP] if name in DRAFTERS else []
            sides.append(side_of_trees(name, spec, trees, enforce_eager=eager))
    for name, (head, spec) in DEFAULTS.items():
        if head in heads:
            spec = {**spec, "model": heads[head], "schedule": "measured"}
            side = kinds.tree_side(spec, eager)
            sides.append(side.model_copy(update={"name": name}))
    others = [*([DRAFT_MODEL] if draft else []), *OTHERS]
    sides += kinds.tree_sides(others, draft, [eager])
    sides += kinds.stock_sides([kinds.NGRAM], stock_depth, [eager])
    for folder in variants:
        spec, name = {**LYANNA, "model": folder}, table1_name(folder)
        sides.append(side_of_trees(name, spec, [SIXTEEN], enforce_eager=eager))
    return sides


def entries_of(
    sides: Sequence[Side], batch_sizes: Sequence[int], num_prompts: int
) -> list[Entry]:
    """All rows and points of these sides."""
    return [
        Entry(side.name, side, cell, part)
        for side in sides
        for part, cell in cells_of(side, batch_sizes, num_prompts)
    ]


def cells_of(
    side: Side, batch_sizes: Sequence[int], num_prompts: int
) -> Iterator[tuple[str, Cell]]:
    """What a side measures, and for which part; table 1 asks all prompts."""
    if side.name.startswith(TABLE1):
        yield TABLE1, Cell(batch_size=1, temperature=0.0, tree=SIXTEEN)
        return
    measure = WITH_LEFTOVERS if side.family == LYANNA["method"] else ""
    trees = KINDS[side.name].trees if side.name in KINDS else [(None, ANY_SIZE)]
    for size in batch_sizes:
        for tree, largest in trees:
            if size <= largest:
                count = max(num_prompts, size)
                asked: dict[str, Any] = {"num_prompts": count, "measure": measure}
                cell = Cell(batch_size=size, temperature=0.0, tree=tree, **asked)
                yield SPEED, cell
    cell = Cell(batch_size=1, temperature=0.0, num_prompts=PROFILED_PROMPTS)
    if side.name in DRAFTERS:
        for tree in (TREE, DEEP):
            profile = {"tree": tree, "measure": PROFILED}
            yield DRAFTING, cell.model_copy(update=profile)
    if side.name in (LYANNA_HOT, LYANNA_FULL):
        yield OUTPUT, cell.model_copy(update={"measure": OUTPUT_LAYER})


def engines_of(
    sides: Sequence[Side], entries: Sequence[Entry], rounds: int
) -> list[Engine]:
    """Make an engine for each side; greedy acceptance of table 1 needs one round."""
    return [
        replace(engine, rounds=1) if engine.side.name.startswith(TABLE1) else engine
        for engine in engines_of_entries(sides, entries, rounds)
    ]
