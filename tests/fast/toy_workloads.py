"""Methods, habits of a scheduler and requests for whole steps of a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.fast.toy_chains import ToyChainHead
from tests.fast.toy_pairs import ToyPairHead
from tests.tiers import grid
from vllm_treespec.proposers import (
    DynamicTree,
    Hybrid,
    Lyanna,
    Proposer,
    RsdC,
    RsdS,
    Sd,
    StochasticTree,
    Suffix,
)
from vllm_treespec.schedule.base import Schedule, ScheduledTree
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.scorers import RULES
from vllm_treespec.sources.base import Sources
from vllm_treespec.sources.chain import ChainMemory, Resample
from vllm_treespec.sources.suffix_index import SuffixIndex
from vllm_treespec.step.method import Method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits
from vllm_treespec.testing.toy_models import (
    Language,
    ToyDraftModel,
    ToyHead,
)
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.source import Source

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "rsd_s": lambda: RsdS(beam_width=3, depth=3),
    "rsd_c": lambda: RsdC((3, 2, 1)),
    "sd": lambda: Sd(depth=4),
    "dynamic_tree": lambda: DynamicTree(top_k=3, depth=3, num_drafts=7),
    "stochastic_tree": lambda: StochasticTree(top_k=3, depth=3, num_drafts=7),
    "suffix_tree": lambda: Suffix(num_drafts=8, depth=5, min_probability=0.0),
    "head": lambda: RsdS(beam_width=2, depth=3),
    "pairs": lambda: RsdS(beam_width=3, depth=3),
    "lyanna_replace": lambda: Lyanna(DynamicTree(3, 3, 9)),
    # Toy chains know no more when they are fresh: the second tree is a wider one.
    "lyanna_merge": lambda: Lyanna(DynamicTree(2, 3, 4), DynamicTree(4, 2, 6)),
    "hybrid": lambda: Hybrid(8, depth=5, top_k=3, model_depth=3, min_probability=0.0),
}
# For fewer tests.
MORE_PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "lyanna_drawn": lambda: Lyanna(StochasticTree(3, 3, 7)),
    "hybrid_alone": lambda: Hybrid(
        8, depth=5, top_k=3, model_depth=0, min_probability=0.0
    ),
    "hybrid_head": PROPOSERS["hybrid"],
    "hybrid_pairs": PROPOSERS["hybrid"],
    "hybrid_chains": PROPOSERS["hybrid"],
}
NOT_DRAWN = (
    *("suffix_tree", "head", "dynamic_tree"),
    *("lyanna_replace", "lyanna_merge"),
    *("hybrid", "hybrid_alone", "hybrid_head", "hybrid_pairs", "hybrid_chains"),
)
# Names, habits and whether there are masks, for tests of what requests ask for.
SOME_ENGINES = grid(
    ["rsd_s", "suffix_tree", "hybrid"],
    ["whole", "all"],
    [False, True],
    quick=lambda *case: case in (("rsd_s", "all", True), ("hybrid", "whole", False)),
)
# How they use what a step leaves over.
RESAMPLE: dict[str, Resample] = {
    "lyanna_replace": "replace",
    "lyanna_merge": "merge",
    "lyanna_drawn": "replace",
}


@dataclass(frozen=True)
class Scheduled:
    """A tree of a schedule that is never given up."""

    batch_size: int
    sizes: TreeSizes
    name: str = "toy"
    min_acceptance_length: float = 1.0
    sources: Source = Source.MODEL
    prunes_by_cost: bool = False

    def has_shape(self, shape: Mapping[str, object]) -> bool:
        """Nobody asks for a shape."""
        raise NotImplementedError


def sources_of(name: str, language: Language) -> Sources:
    """What a method draws from."""
    index = SuffixIndex(depth=5, max_match=6, max_cached_tokens=100)
    if name == "suffix_tree":
        return Sources(text=index)
    if name == "hybrid_chains":
        return Sources([ToyChainHead(language, ChainMemory("off", 1))], index)
    if name.startswith("hybrid"):
        beside = name.removeprefix("hybrid").removeprefix("_")
        return replace(sources_of(beside, language), text=index)
    if name in RESAMPLE:
        return Sources([ToyChainHead(language, ChainMemory(RESAMPLE[name], 1))])
    if name == "head":
        return Sources([ToyHead(language)])
    toy = ToyPairHead if name == "pairs" else ToyDraftModel
    return Sources([toy(language)])


def drafting_sources(proposer: Proposer) -> Source:
    """What drafts a proposer's trees."""
    if isinstance(proposer, Hybrid) and proposer.model is not None:
        return Source.INDEX | Source.MODEL
    return Source.INDEX if isinstance(proposer, Hybrid | Suffix) else Source.MODEL


def make_method(
    proposers: Sequence[Proposer],
    rule: str,
    batch_sizes: Sequence[int] = (1000,),
    max_trees: int = 16,
    batched: bool = False,
    make_schedule: Callable[[Sequence[ScheduledTree]], Schedule] = ListedSchedule,
) -> Method:
    """A method with one tree of the schedule a batch size.

    Trees that an index drafts may be pruned, as those of its spec-configs.
    """
    trees = []
    for size, proposer in zip(batch_sizes, proposers, strict=True):
        sources = drafting_sources(proposer)
        prunes = Source.INDEX in sources
        trees.append(Scheduled(size, proposer.sizes, "toy", 1.0, sources, prunes))
    return Method(
        schedule=make_schedule(trees),
        proposers=proposers,
        rule=RULES[rule],
        batched=batched,
        max_trees=max_trees,
    )


def make_engine(
    name: str,
    habits: Habits,
    seed: int = 0,
    *,
    max_trees: int = 16,
    masks: bool = False,
    rank: int = 0,
    make_schedule: Callable[[Sequence[ScheduledTree]], Schedule] = ListedSchedule,
) -> FakeEngine:
    """An engine for one method; with masks it scores all nodes, as on a GPU."""
    language = Language(seed)
    rule = "coupled_draw" if name in NOT_DRAWN else "recursive_rejection"
    proposer = (PROPOSERS | MORE_PROPOSERS)[name]()
    method = make_method(
        [proposer],
        rule,
        max_trees=max_trees,
        batched=masks,
        make_schedule=make_schedule,
    )
    return FakeEngine(
        language,
        method,
        sources_of(name, language),
        habits,
        seed,
        rank=rank,
        masks=masks,
    )
