"""The law where float32 ends: nearly greedy draws, denormal numbers, odd logits."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import at_temperature, propose
from tests.fast.enumeration import ALMOST_ONE, LawMeter, Weighted, all_uniforms
from tests.fast.languages import Language
from tests.fast.law_range import (
    COUPLED_DRAW,
    RANGES,
    REJECTION,
    coupled_draw_error,
    flushing,
    rule_errors,
)
from tests.fast.rule_forms import numbers_of, sizes_of
from tests.fast.wrong_rules import REJECTION as RECURSIVE_REJECTION
from tests.tiers import cases
from vllm_treespec.proposers import (
    DynamicTree,
    Medusa,
    Proposer,
    ReDrafter,
    RsdC,
    RsdS,
    Sd,
    SpecTr,
    StaticTree,
    StochasticTree,
)
from vllm_treespec.sampling import laws as sampling
from vllm_treespec.sampling.draws import draw, draw_without_replacement
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import RULES, ScorerOutput, TargetLogits
from vllm_treespec.scorers.greedy import GREEDY_MATCHING
from vllm_treespec.scorers.recursive_rejection import drop
from vllm_treespec.trees.builders import from_parents
from vllm_treespec.trees.tree import TreeBatch

FLOAT32 = 2e-5
WIDTH = 1e-7
NOTICEABLE = 5e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name", RANGES)
def test_law_from_greedy_to_uniform(name: str) -> None:
    """Red when a sum, a ratio or a draw loses the law for small probabilities."""
    for form, error in rule_errors(name, WIDTH).items():
        assert error < FLOAT32, form


# One range for each rule; the same for drafts of two models.
QUICK = (
    "rsd_c [4], recursive rejection",
    "rsd_s 3x1, recursive rejection",
    "spectr 3x1, multi-round",
    "spectr 3x1, k_seq",
)


@pytest.mark.parametrize("name", cases(RANGES, quick=QUICK))
def test_law_where_denormals_are_zero(name: str) -> None:
    """Red when a rule meets numbers that a GPU may round to 0."""
    with flushing(True):
        for form, error in rule_errors(name, WIDTH).items():
            assert error < FLOAT32, form


@pytest.mark.parametrize("form", COUPLED_DRAW)
@pytest.mark.parametrize("flush", [False, True])
def test_law_of_coupled_draw(form: str, flush: bool) -> None:
    """Red when plain draws lose the law for small probabilities."""
    with flushing(flush):
        assert coupled_draw_error(COUPLED_DRAW[form], WIDTH) < FLOAT32


def drop_by_smallest(draft: Tensor, tokens: Tensor) -> Tensor:
    """Forgets that a sum may be denormal."""
    rest = draft.scatter(1, tokens[:, None], 0.0)
    return rest / rest.sum(dim=-1, keepdim=True).clamp(min=1e-38)


@pytest.mark.parametrize("wrong_drop", [drop_by_smallest, drop])
def test_denormals_are_noticed(wrong_drop: object) -> None:
    """Red when the check above could no longer see denormals, in sums or quotients."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(sampling, "SMALLEST", 0.0))
        stack.enter_context(patch.object(RECURSIVE_REJECTION, "drop", wrong_drop))
        errors = rule_errors("rsd_c [4], recursive rejection", WIDTH)
    assert min(errors.values()) > NOTICEABLE


@pytest.mark.parametrize("proposer", [RsdC((2,)), RsdS(3, 1)], ids=["rsd_c", "rsd_s"])
@pytest.mark.parametrize("form", REJECTION)
def test_law_of_a_near_tie_below_a_clear_lead(form: str, proposer: Proposer) -> None:
    """Red when siblings behind a lead of 90 temperatures are accepted too often.

    They were emitted as .426 and .257 in the place of .158 and .524.
    """
    far = [-20.0] * 5
    draft = torch.tensor([[0.0, -9.0, -9.05, *far]]).expand(9, -1)
    target = torch.tensor([[0.0, -0.07, 0.05, *far]]).expand(9, -1)
    at_low_temperature = partial(at_temperature, 0.1)
    # What a float64 softmax would draw: if denormal drafts are left out, fewer trees.
    drawn_from = Language((draft.double() / 0.1).softmax(1))
    uniforms, weights = all_uniforms(proposer, [drawn_from])
    sampling = at_low_temperature(len(weights))
    tree = propose(proposer, Language(draft), uniforms, sampling)
    meter = LawMeter(
        REJECTION[form], Weighted(tree, weights), Language(target), at_low_temperature
    )
    meter.width = WIDTH
    expected = (target[0].double() / 0.1).softmax(0)
    assert (meter.law(1) - expected).abs().max() < FLOAT32


# Logits that have no softmax

NAN, INF = float("nan"), float("inf")
ODD = torch.tensor(
    [[NAN] * 4, [0.0, NAN, 3.0, 1.0], [-INF] * 4, [0.0, 1.0, INF, 2.0], [NAN, 1, 2, 3]]
)
SENSIBLE = torch.tensor([[0.0, 2.0, -INF, 1.0]])


@pytest.mark.parametrize("limited", [False, True])
def test_odd_logits_give_token_0(limited: bool) -> None:
    """Red when NaN, or no possible token, is no distribution, or spreads to others."""
    logits = torch.cat([ODD, SENSIBLE])
    limits = (3, 0.9) if limited else (None, None)
    some = at_temperature(0.7, len(logits), *limits)
    probs = some.probs(logits)
    assert probs[:-1].tolist() == [[1, 0, 0, 0]] * len(ODD)
    assert probs[-1].sum() == pytest.approx(1)
    assert probs[-1, 1] > 0.5
    several = some.probs(logits[:, None].expand(-1, 2, -1))
    assert several.equal(probs[:, None].expand(-1, 2, -1))


@pytest.mark.parametrize("fill", [0.0, NAN])
def test_draws_from_nothing_stay_in_the_vocabulary(fill: float) -> None:
    """Red when a row without a possible token gives a token that does not exist."""
    probs = torch.full((2, 5), fill)
    uniforms = torch.tensor([[0.0, 0.5, 0.9], [ALMOST_ONE] * 3], dtype=torch.float64)
    assert draw(probs, uniforms[:, 0]).tolist() == [0, 0]
    tokens, valid = draw_without_replacement(probs, uniforms)
    assert tokens.tolist() == [[0, 0, 0]] * 2
    assert not valid.any()


METHODS: dict[str, tuple[Proposer, str]] = {
    "sd": (Sd(2), "recursive_rejection"),
    "rsd_c": (RsdC((2, 2)), "recursive_rejection"),
    "rsd_s": (RsdS(3, 2), "recursive_rejection"),
    "spectr": (SpecTr(3, 2), "multi_round"),
    "k_seq": (SpecTr(3, 2), "k_seq"),
    "redrafter": (ReDrafter(3, 2, 5), "coupled_draw"),
    "dynamic_tree": (DynamicTree(3, 3, 6), "coupled_draw"),
    "static_tree": (StaticTree(3, 3, 6), "coupled_draw"),
    "stochastic_tree": (StochasticTree(3, 2, 6), "recursive_rejection"),
    "medusa": (Medusa(4, [[0.5, 0.2], [0.4]]), "coupled_draw"),
}


def odd_language(seed: int, share: float) -> Language:
    """A random language in which this share of the prefixes has odd logits."""
    generator = torch.Generator().manual_seed(seed)
    table = 3 * torch.randn((85, 4), generator=generator)
    odd = torch.rand(85, generator=generator) < share
    rows = torch.randint(len(ODD), (85,), generator=generator)
    return Language(torch.where(odd[:, None], ODD[rows], table))


@pytest.mark.parametrize("name", METHODS)
def test_odd_logits_in_whole_steps(name: str) -> None:
    """Red when NaN or -inf logits crash or hang a method, or emit what is no token."""
    for temperature, share in product((1.0, 0.0, 0.01), (0.3, 1.0)):
        check_step(*METHODS[name], at_temperature(temperature, 50), share)


def check_step(
    proposer: Proposer, rule: str, some: SamplingTensors, share: float
) -> None:
    """Draft and score a batch of odd languages."""
    draft, target = odd_language(0, share), odd_language(1, share)
    generator = torch.Generator().manual_seed(2)

    def rand(count: int) -> Tensor:
        return torch.rand((50, count), generator=generator, dtype=torch.float64)

    tree = propose(proposer, draft, rand(proposer.sizes.num_uniforms), some)
    assert bool((tree.token_ids >= 0).all())
    assert bool((tree.token_ids < 4).all())
    uniforms = rand(1 + max(proposer.sizes.max_draws, proposer.sizes.max_nodes))
    found = scored(tree, target.target_logits(tree, some), uniforms, rule)
    for output in found:
        emitted = output.emitted(tree)
        assert bool(((emitted >= 0).sum(1) == 1 + output.num_accepted).all())
        assert int(emitted.max()) < 4
        assert output.next_token_ids.equal(found[0].next_token_ids)
        assert output.num_accepted.equal(found[0].num_accepted)


def scored(
    tree: TreeBatch, target: TargetLogits, uniforms: Tensor, name: str
) -> list[ScorerOutput]:
    """What the walk and, where there is one, the batched form accept."""
    rule = GREEDY_MATCHING if target.sampling.all_greedy else RULES[name]
    numbers = numbers_of(rule, uniforms)
    outputs = [rule.walk(tree, target, numbers)]
    if rule.batched is not None:
        outputs.append(rule.batched(tree, target, numbers, sizes_of(tree)))
    return outputs


def test_greedy_requests_emit_what_vllm_emits() -> None:
    """Red when a greedy request's odd logits give another token than in vLLM."""
    tree = from_parents([[0]] * len(ODD), [[-1]] * len(ODD))
    greedy = at_temperature(0.0, len(ODD))
    target = TargetLogits(ODD, torch.arange(len(ODD)), greedy)
    for output in scored(tree, target, torch.zeros(0), "recursive_rejection"):
        assert output.next_token_ids.tolist() == ODD.argmax(dim=-1).tolist()
