"""The law where float32 ends: nearly greedy draws, denormal numbers, odd logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.at_once_rules import drawing, rejection, shape_of
from tests.fast.enumeration import Scorer, Weighted, token_uniforms
from tests.fast.languages import Language, LanguageDraft
from tests.fast.law_range import (
    RANGES,
    REJECTION,
    TARGET_DRAW,
    CaseTrees,
    flushing,
    rule_errors,
    target_draw_error,
)
from tests.fast.wrong_scorers import WALK
from vllm_treespec import sampling
from vllm_treespec.proposers import (
    Medusa,
    Proposer,
    ProposerInputs,
    ReDrafter,
    RsdC,
    RsdS,
    Sd,
    SpecTr,
)
from vllm_treespec.sampling import SamplingTensors, draw, draw_without_replacement
from vllm_treespec.scorers import (
    SCORERS,
    ScorerOutput,
    TargetLogits,
    at_once,
    greedy_matching,
    k_seq,
)
from vllm_treespec.scorers.at_once import greedy_at_once
from vllm_treespec.scorers.recursive_rejection import drop

FLOAT32 = 2e-5
WIDTH = 1e-7
NOTICEABLE = 5e-4


@pytest.mark.parametrize("name", RANGES)
def test_law_from_greedy_to_uniform(name: str) -> None:
    """Red when a sum, a ratio or a draw loses the law for small probabilities."""
    for form, error in rule_errors(name, WIDTH).items():
        assert error < FLOAT32, form


@pytest.mark.parametrize("name", RANGES)
def test_law_where_denormals_are_zero(name: str) -> None:
    """Red when a rule meets numbers that a GPU may round to 0."""
    with flushing(True):
        for form, error in rule_errors(name, WIDTH).items():
            assert error < FLOAT32, form


@pytest.mark.parametrize("form", TARGET_DRAW)
@pytest.mark.parametrize("flush", [False, True])
def test_law_of_target_draw(form: str, flush: bool) -> None:
    """Red when plain draws lose the law for small probabilities."""
    with flushing(flush):
        assert target_draw_error(TARGET_DRAW[form], WIDTH) < FLOAT32


def drop_by_smallest(draft: Tensor, tokens: Tensor) -> Tensor:
    """Forgets that a sum may be denormal."""
    rest = draft.scatter(1, tokens[:, None], 0.0)
    return rest / rest.sum(dim=-1, keepdim=True).clamp(min=1e-38)


@pytest.mark.parametrize("wrong_drop", [drop_by_smallest, drop])
def test_denormals_are_noticed(wrong_drop: object) -> None:
    """Red when the check above could no longer see denormals, in sums or quotients."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(sampling, "SMALLEST", 0.0))
        for module in (WALK, at_once):
            stack.enter_context(patch.object(module, "drop", wrong_drop))
        errors = rule_errors("rsd_c [4], recursive rejection", WIDTH)
    assert min(errors.values()) > NOTICEABLE
