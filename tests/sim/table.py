"""The table of scenarios; their reasons say what goes wrong where a score falls."""

from __future__ import annotations

from tests.sim import scenarios as of
from tests.sim.drafting import Tree
from tests.sim.scenarios import FIXED_INDEX, HEAD, HYBRID, Scenario

# Whole trees whose rows of a request, root included, are sizes of CUDA graphs.
GRAPH_TREES = (Tree(31, 6, 8), Tree(15, 5, 4), Tree(7, 4, 2))
# Seconds of a level where three of them, with their rows, make a step of one request
# 1.7 times a plain one.
LEVEL = 0.2

FIXED_TREES = (
    Scenario(
        "fixed trees of a head",
        "a choice is far from the best in hindsight, or found late",
        of.fixed((HEAD,), 1200, of.BATCH_SIZES),
        6,
    ),
    Scenario(
        "fixed trees of an index",
        "the same for deeper trees",
        of.fixed((FIXED_INDEX,), 1200, of.BATCH_SIZES),
        6,
    ),
    Scenario(
        "trees bring nothing",
        "trees that cost little are tried for ever",
        of.bring_nothing,
        2,
    ),
    Scenario(
        "requests come and go",
        "each new request gets trees to see what it accepts of them",
        of.come_and_go,
    ),
    Scenario(
        "batch size changes",
        "what one batch size showed is lost, or taken for true at another",
        of.batch_sizes,
        6,
    ),
    Scenario(
        "text gets worse",
        "a tree that became bad is kept",
        of.text_changes(0.9, 0.05),
        2,
    ),
    Scenario(
        "text gets better",
        "a tree that became good is not tried",
        of.text_changes(0.1, 0.9),
        2,
    ),
    Scenario(
        "slow periods",
        "times of a slow period decide after it",
        of.slow_periods,
    ),
    Scenario(
        "short jobs",
        "looking for the best tree costs more than it brings",
        of.fixed((HEAD, FIXED_INDEX), 100, (16,)),
        8,
    ),
    Scenario(
        "one edit among chats",
        "requests without use of trees hide one that has",
        of.one_edit,
    ),
    Scenario(
        "greedy and sampled",
        "what greedy requests accept is expected of sampled ones",
        of.mixed_kinds,
        2,
    ),
    Scenario(
        "limits of requests",
        "cut trees tell what whole ones bring",
        of.limits,
    ),
    Scenario(
        "forwards not timed",
        "60 steps are too few to find a tree",
        of.fixed((HEAD,), 60, of.BATCH_SIZES),
        6,
    ),
    Scenario(
        "forwards timed",
        "nothing is made of forwards that were timed at the start",
        of.fixed((HEAD,), 60, of.BATCH_SIZES, is_timed=True),
        6,
    ),
)

OF_AN_INDEX = (
    Scenario(
        "index, cost of a row",
        "too much or too little is drawn for what rows cost",
        of.pruned,
        8,
    ),
    Scenario(
        "index, branches",
        "steps pay for branches where chains bring nearly as much",
        of.branching,
        2,
    ),
    Scenario(
        "index finds nothing",
        "looking it up costs time in every step",
        of.repeating((600, 0.0)),
    ),
    Scenario(
        "index, 15 % repeats",
        "bad luck in a few steps ends its use",
        of.repeating((600, 0.15)),
    ),
    Scenario(
        "index begins to find",
        "what it found long ago decides that it is not looked up",
        of.repeating((600, 0.0), (400, 0.3)),
    ),
    Scenario(
        "index ends to find",
        "what it found long ago decides that it is looked up",
        of.repeating((600, 0.1), (600, 0.0)),
    ),
)

OF_A_MODEL = (
    Scenario(
        "levels",
        "a constant depth is better than weighed levels",
        of.model_levels(can_sync=True),
        6,
    ),
    Scenario(
        "levels, no sync",
        "a GPU reads too many or too few levels",
        of.model_levels(can_sync=False),
        6,
    ),
    Scenario(
        "levels, no sync, text changes",
        "a depth that was right once is never left",
        of.surer_text,
    ),
    Scenario(
        "model never pays",
        "a slow model is tried again and again",
        of.never_pays,
        2,
    ),
)

OF_BOTH = (
    Scenario(
        "model pays",
        "an index that finds nothing decides against the model",
        of.answers(0.69, LEVEL, 12, 64),
    ),
    Scenario(
        "model does not pay",
        "an index that finds nothing decides for the model",
        of.answers(0.3, LEVEL, 12, 64),
    ),
    Scenario(
        "edits in turn",
        "what an index finds gives hope for the model",
        of.edits_in_turn,
    ),
    Scenario(
        "one size pays",
        "one batch size tells what a model brings at another",
        of.one_size_pays,
        2,
    ),
    Scenario(
        "drift, memory 30",
        "what was slow in a slow minute is not tried in a fast one",
        of.answers(0.6, 0.2, 12, 45, size=8, repeats=0.05, drift=0.3, memory=30),
    ),
    Scenario(
        "drift, memory 100",
        "the same where the model brings more, and speed changes later",
        of.answers(0.8, 0.33, 12, 45, size=8, repeats=0.05, drift=0.3, memory=100),
    ),
    Scenario(
        "cold start",
        "plain steps are judged for long by the first few",
        of.answers(0.51, 0.27, 10, 45, size=8, repeats=0.05, cold=6),
    ),
    Scenario(
        "prompts of 20",
        "a model that must read a short prompt is left out",
        of.answers(0.69, LEVEL, 16, 64, prompt=20),
    ),
    Scenario(
        "prompts of 3,000, long answers",
        "what a prompt takes is not won back by a long answer",
        of.answers(0.69, 0.1, 6, 250, prompt=3000),
    ),
    Scenario(
        "prompts of 3,000, short answers",
        "what a model reads of a prompt counts for nothing",
        of.answers(0.69, LEVEL, 60, 8, prompt=3000),
    ),
)

OF_SHAPES = (
    Scenario(
        "graph sizes, fixed trees",
        "a row is taken for cheaper than its padded size",
        of.graph_sizes(GRAPH_TREES),
        4,
    ),
    Scenario(
        "graph sizes, index and model",
        "the same for pruned trees, where the host cannot wait",
        of.graph_sizes(HYBRID),
        4,
    ),
    Scenario(
        "slow kernel of one row",
        "a plain step of one row is taken for the cheapest",
        of.small_kernel,
        4,
    ),
    Scenario(
        "service",
        "all of it together: arrivals, kinds, prompts and drift",
        of.service,
    ),
)

SCENARIOS = (*FIXED_TREES, *OF_AN_INDEX, *OF_A_MODEL, *OF_BOTH, *OF_SHAPES)
