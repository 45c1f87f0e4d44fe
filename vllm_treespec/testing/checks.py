"""Checks of a method: its trees, its greedy text, and its sampled text or law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_treespec.config import parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.proposers import ProposerInputs
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.schedule.listed import ListedSchedule
from vllm_treespec.scorers import Rule, TargetLogits
from vllm_treespec.sources.base import ModelSource, Sources
from vllm_treespec.step.method import Method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import (
    PERIOD,
    VOCAB_SIZE,
    Language,
    TableDraft,
    ToyDraftModel,
    ToyHead,
)
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload
from vllm_treespec.trees.sizes import TreeSizes
from vllm_treespec.trees.tree import TreeBatch

# Of a scheduler: trees come back whole; or cut, late, lost, after preemption.
RUNS = ("whole", "all")
# Trees by which the law of drawn drafts is measured, and the text above their roots.
NUM_TREES = 2**16
TEXT = (3, 5)
# Trees by which the two forms of a rule are compared.
NUM_COMPARED = 512
# Standard deviations that a count may be off.
SIGMAS = 5.0


@dataclass(frozen=True)
class Checked:
    """What the trees of a method did while it was checked."""

    num_trees: int
    # draft tokens
    num_accepted: int


def check_method(given: MethodConfig | Mapping[str, Any], seed: int = 0) -> Checked:
    """Check a method with toy models of 7 tokens; it takes seconds and needs no vLLM.

    Trees must be valid and no larger than announced. Greedy text must be that of plain
    decoding. So must sampled text, if the method's rule follows the noise of positions;
    with any other rule the law of the first two tokens must be the target's, measured
    by 65,536 trees. Draft models and heads are toys, their files are not read.

    Args:
        given: a spec-config, as JSON object or validated.
        seed: of the toy models and the requests.

    Raises:
        SpecConfigError: the spec-config is wrong.
        AssertionError: the method is; the message says in which way.

    """
    config = given if isinstance(given, MethodConfig) else parse_spec_config(given)
    num_trees = num_accepted = 0
    for tree in config.scheduled_trees():
        check_sizes(tree.config)
        for habits in RUNS:
            for engine in run_texts(tree.config, HABITS[habits], seed):
                num_trees += engine.accepted.total()
                accepted = engine.accepted.items()
                num_accepted += sum(depth * count for depth, count in accepted)
        if not tree.config.rule.follows_noise and not tree.config.rule.lossy:
            check_law(tree.config, seed)
    assert num_trees, f"{config.name} drafts nothing"
    return Checked(num_trees, num_accepted)


def check_sizes(config: MethodConfig) -> None:
    """Check that a proposer is no larger than its spec-config says without it."""
    proposer = config.proposer()
    built, bounds = asdict(proposer.sizes), asdict(config.sizes)
    for name, bound in bounds.items():
        assert built[name] <= bound, (
            f"{name} of the proposer's sizes is {built[name]}, the spec-config's sizes "
            f"say {bound}"
        )


def run_texts(config: MethodConfig, habits: Habits, seed: int) -> list[FakeEngine]:
    """Answer greedy and sampled requests, and compare with plain decoding.

    Sampled text is compared if the rule follows the noise of positions.
    """
    greedy = make_engine(config, habits, seed)
    check_greedy(greedy, workload(seed))
    sampled = make_engine(config, habits, seed)
    answers = sampled.run(*sampled_requests(seed))
    if config.rule.follows_noise:
        plain = [replace(r, max_drafts=0) for r in sampled_requests(seed)]
        expected = make_engine(config, Habits(), seed).run(*plain)
        assert answers == expected, "sampled text is not that of plain decoding"
    return [greedy, sampled]


def sampled_requests(seed: int) -> list[Request]:
    """Requests at temperature 1, each with a seed."""
    return [
        replace(request, temperature=1.0, seed=number)
        for number, request in enumerate(workload(seed))
    ]


def make_engine(config: MethodConfig, habits: Habits, seed: int) -> FakeEngine:
    """A fake engine with one tree of a method, and toys in place of its models."""
    language = Language(seed)
    method = Method(
        schedule=ListedSchedule(config.with_shape({}).scheduled_trees()),
        proposers=[config.proposer()],
        rule=config.rule,
        batched=False,
        max_trees=config.max_trees,
    )
    models: list[ModelSource] = [ToyDraftModel(language) for _ in config.models]
    if config.head is not None:
        models.append(ToyHead(language))
    sources = Sources(models, config.text_source())
    return FakeEngine(language, method, sources, habits, seed)


def check_law(config: MethodConfig, seed: int) -> None:
    """Check the law of the first two tokens, with whole trees and with cut ones."""
    language, generator = Language(seed), torch.Generator().manual_seed(seed)
    proposer = config.proposer()
    sampling = SamplingTensors(torch.ones(NUM_TREES), all_random=True)

    def uniforms(count: int) -> Tensor:
        shape = NUM_TREES, count
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    draft = proposer.propose(
        ProposerInputs(
            root_token_ids=torch.full((NUM_TREES,), TEXT[1]),
            sampling=sampling,
            uniforms=uniforms(proposer.sizes.num_uniforms),
            draft_models=[
                TableDraft(language.draft, *below_text())
                for _ in range(len(config.models) + (config.head is not None))
            ],
        )
    )
    max_nodes = proposer.sizes.max_nodes
    for num_nodes in {max_nodes, 1 + max_nodes // 2}:
        cut = draft.tree.cut(torch.full_like(draft.tree.num_nodes, num_nodes))
        target = target_logits(language, cut, sampling)
        numbers = uniforms(1 + proposer.sizes.max_draws)
        scored = config.rule.walk(cut, target, numbers)
        compare_law(scored.emitted(cut), language, num_nodes)
        compare_forms(config.rule, cut, target, numbers, proposer.sizes)


def compare_forms(
    rule: Rule, tree: TreeBatch, target: TargetLogits, numbers: Tensor, sizes: TreeSizes
) -> None:
    """Compare a rule's batched form, if it has one, with its walk on some trees."""
    if rule.batched is None:
        return
    rows = torch.arange(NUM_COMPARED)
    some, numbers = tree.select(rows), numbers[rows]
    target = target.select(rows, target.sampling.select(rows))
    walked = rule.walk(some, target, numbers).emitted(some)
    batched = rule.batched(some, target, numbers, sizes).emitted(some)
    assert walked.equal(batched[:, : walked.shape[1]]), (
        f"the forms of the rule {rule.name} emit different tokens"
    )


def below_text() -> tuple[Tensor, Tensor, Tensor]:
    """Length, last token but one and last one of ``TEXT``, each [NUM_TREES, 1]."""
    lengths, above, roots = torch.tensor([[len(TEXT), *TEXT]]).split(1, dim=1)
    shape = NUM_TREES, 1
    return lengths.expand(shape), above.expand(shape), roots.expand(shape)


def target_logits(
    language: Language, tree: TreeBatch, sampling: SamplingTensors
) -> TargetLogits:
    """The target's logits at every node of trees below ``TEXT``."""
    above = tree.token_ids.gather(1, tree.parents.clamp(min=0))
    above[:, 0] = TEXT[0]
    lengths = len(TEXT) + tree.depths
    logits = language.target[lengths % PERIOD, above, tree.token_ids]
    return TargetLogits(
        logits.flatten(0, 1), torch.arange(tree.num_reqs) * tree.max_nodes, sampling
    )


def compare_law(emitted: Tensor, language: Language, num_nodes: int) -> None:
    """Compare the first two of emitted tokens, int64 [n, width], with the target's law.

    A step that emitted one token counts with the target's law of the second.
    """
    first, second = emitted[:, 0], emitted[:, 1]
    start = language.target[len(TEXT) % PERIOD, TEXT[0], TEXT[1]].double().softmax(0)
    after = language.target[(len(TEXT) + 1) % PERIOD, TEXT[1]].double().softmax(1)
    shares = torch.nn.functional.one_hot(second.clamp(min=0), VOCAB_SIZE).double()
    shares = torch.where((second < 0)[:, None], after[first], shares)
    found = torch.zeros_like(after).index_add_(0, first, shares)
    expected = start[:, None] * after * len(emitted)
    off = float(((found - expected).abs() / expected.sqrt()).max())
    assert off < SIGMAS, (
        f"the law of emitted tokens is not the target's: with trees of {num_nodes} "
        f"nodes a count is off by {off:.0f} standard deviations"
    )
