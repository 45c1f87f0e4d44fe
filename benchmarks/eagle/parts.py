"""Sides and cells: which heads draw which trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.eagle.plain_step import IN_TURN, PLAIN_STEP
from benchmarks.harness import options
from benchmarks.harness.head_parts import PROFILED
from benchmarks.harness.models import Models
from benchmarks.harness.plan import Engine
from benchmarks.harness.rows import Entry, engines_of_entries
from benchmarks.workloads import sides_of
from vllm_treespec.config import METHODS
from vllm_treespec.config.heads import HeadMethodConfig
from vllm_treespec.tools.sides import Cell, Side, side_of_trees, tree_side

MEDUSA = "medusa_tree"
BEAMS, REDRAFTER_DYNAMIC = REDRAFTER = ("redrafter-beams", "redrafter-dynamic")
DYNAMIC, STATIC, STOCHASTIC = EAGLE = (
    "eagle_tree-dynamic",
    "eagle_tree-static",
    "eagle_tree-stochastic",
)
DFLASH = "dflash_tree"
# An engine each; its spec-config without the head and the trees.
KINDS: dict[str, dict[str, Any]] = {
    MEDUSA: {"method": "medusa_tree"},
    BEAMS: {"method": "redrafter", "tree": "beams"},
    REDRAFTER_DYNAMIC: {"method": "redrafter"},
    DYNAMIC: {"method": "eagle_tree", "tree": "dynamic"},
    STATIC: {"method": "eagle_tree", "tree": "static"},
    STOCHASTIC: {"method": "eagle_tree", "tree": "stochastic"},
    DFLASH: {"method": "dflash_tree"},
}
# width x levels x draft tokens, in the order of each method's keys
EAGLE_TREES = "4x2x5,4x3x8,4x4x16"
# as many siblings as fit: the best tree of this head
REDRAFTER_TREES = "5x2x5,8x3x8,16x4x16"
BEAM_TREES = "4x2x5"
# the first one is a chain
DFLASH_TREES = "1x5x5,8x5x8,8x7x16"
# How often the plain step's cell answers each prompt.
PLAIN_STEP_REPEATS = 4


def trees_of(text: str, option: str, keys: Sequence[str]) -> list[dict[str, int]]:
    """Read trees as 4x3x8; ValueError names the option."""
    trees = []
    for word in options.words(text):
        sizes = word.split("x")
        if len(sizes) != len(keys) or not all(size.isdecimal() for size in sizes):
            form = " x ".join(keys)
            raise ValueError(f"{option}: {word!r} is no tree; write {form}, as 4x3x8")
        trees.append(dict(zip(keys, map(int, sizes), strict=True)))
    return trees


def trees_by_kind(
    eagle: str, redrafter: str, dflash: str
) -> dict[str, list[dict[str, int]]]:
    """Trees of each kind; Medusa's have as many draft tokens as EAGLE's."""
    eagle_keys, beam_keys = (
        METHODS["eagle_tree"].SHAPE[:3],
        METHODS["redrafter"].SHAPE[:3],
    )
    trees = trees_of(eagle, "--trees", eagle_keys)
    return {
        MEDUSA: [{"num_drafts": tree["num_drafts"]} for tree in trees],
        BEAMS: trees_of(BEAM_TREES, "", beam_keys),
        REDRAFTER_DYNAMIC: trees_of(redrafter, "--redrafter-trees", beam_keys),
        **dict.fromkeys(EAGLE, trees),
        DFLASH: trees_of(dflash, "--dflash-trees", METHODS[DFLASH].SHAPE[:3]),
    }


def all_sides(
    models: Models,
    trees: Mapping[str, Sequence[dict[str, int]]],
    eager: bool,
    stock_depth: int,
) -> list[Side]:
    """Every side that has its model; those of KINDS have their kind's name."""
    methods = ["suffix_tree", *(("sd", "rsd_s") if models.draft else ())]
    specs = [{"method": method} for method in methods]
    sides = sides_of(specs, models, stock_depth, [eager])
    for kind, spec in KINDS.items():
        method = METHODS[spec["method"]]
        assert issubclass(method, HeadMethodConfig)
        if method.HEAD in models.heads:
            spec = {**spec, "model": models.heads[method.HEAD]}
            sides.append(side_of_trees(kind, spec, trees[kind], enforce_eager=eager))
    if "eagle" in models.heads:
        spec = {"method": "eagle_tree", "model": models.heads["eagle"]}
        plain = tree_side(spec, eager)
        sides.append(plain.model_copy(update={"name": PLAIN_STEP}))
    return sides


def entries_of(
    sides: Sequence[Side],
    trees: Mapping[str, Sequence[dict[str, int]]],
    temperatures: Sequence[float],
) -> list[Entry]:
    """The rows of the table: each side with each of its trees, by temperature."""
    return [
        Entry(side.name, side, cell)
        for temperature in temperatures
        for side in sides
        if side.name != PLAIN_STEP and not (side.greedy_only and temperature)
        for cell in cells_of(side, trees, temperature)
    ]


def cells_of(
    side: Side, trees: Mapping[str, Sequence[dict[str, int]]], temperature: float
) -> list[Cell]:
    """The cells of a side at a temperature, one for each of its trees."""
    cell = Cell(batch_size=1, temperature=temperature)
    if side.name not in trees:
        return [cell]
    measure = PROFILED if side.name in EAGLE else ""
    return [
        cell.model_copy(update={"tree": tree, "measure": measure})
        for tree in trees[side.name]
    ]


def engines_of(
    sides: Sequence[Side], entries: Sequence[Entry], num_prompts: int, rounds: int
) -> list[Engine]:
    """Make an engine for each side, with all its cells."""
    asked: dict[str, Any] = {
        "num_prompts": PLAIN_STEP_REPEATS * num_prompts,
        "measure": IN_TURN,
    }
    cell = Cell(batch_size=1, temperature=0.0, **asked)
    steps = [Entry(s.name, s, cell) for s in sides if s.name == PLAIN_STEP]
    return engines_of_entries(sides, [*entries, *steps], rounds)
