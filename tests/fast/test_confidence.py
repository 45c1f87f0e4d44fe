"""Drafts that are hardly accepted are left out, and the law stays."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.fast.drafting import (
    CountingDraft,
    Path,
    at_temperature,
    draft_of,
    same_trees,
    token_paths,
)
from tests.fast.enumeration import NOTICEABLE, all_trees, law_error, rand
from tests.fast.languages import (
    Language,
    LanguageDraft,
    PlainSampling,
    plain_sampling,
    random_tables,
)
from vllm_treespec.proposers import DynamicTree, Proposer, RsdC, RsdS, Sd
from vllm_treespec.proposers.confidence import Confidence
from vllm_treespec.sampling.laws import SamplingTensors
from vllm_treespec.scorers import recursive_rejection
from vllm_treespec.trees.draft import Draft
from vllm_treespec.trees.tree import TreeBatch

PROPOSERS: dict[str, Any] = {
    "sd": Sd(3, 0.1),
    "rsd_c 2x1": RsdC((2, 1), 0.19),
    "rsd_c 2x2": RsdC((2, 2), 0.3),
    "rsd_s": RsdS(2, 2, 0.19),
}


class OwnProbability(Confidence):
    """Looks at the token that was drawn, also of sampled requests."""

    def of_children(self, probs: Tensor, columns: Tensor) -> Tensor:
        """Log probability of each child's path."""
        values = self.nodes[..., None] + probs.gather(-1, columns).double().log()
        return self.filter.of_drafts(values)


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_draft_must_not_decide_for_itself(name: str) -> None:
    """Red when a lossy choice would pass, or whole trees only are drawn.

    That these proposers are lossless is in ``test_laws.py``.
    """
    proposer = PROPOSERS[name]
    draft, target = random_tables("random", 4 if "2x2" not in name else 3, 3)
    assert len(all_trees(proposer, draft).tree.num_nodes.unique()) > 1
    module = "rsd_s" if isinstance(proposer, RsdS) else "rsd_c"
    with patch(f"vllm_treespec.proposers.{module}.Confidence", OwnProbability):
        drawn = all_trees(proposer, draft)
    assert law_error(recursive_rejection, drawn, target) > NOTICEABLE


def drafted(
    proposer: Proposer, sampling: SamplingTensors, num_reqs: int, can_sync: bool = False
) -> tuple[Draft, int]:
    """Drafts of one random language, and how many levels were read for them."""
    language, _ = random_tables("random", 5, 6)
    counting = CountingDraft(LanguageDraft(language, num_reqs))
    uniforms = rand(num_reqs, proposer.sizes.num_uniforms)
    draft = draft_of(proposer, counting, uniforms, sampling, can_sync=can_sync)
    return draft, len(counting.widths)


ALL: dict[str, Proposer] = {
    "sd": Sd(6, 0.2),
    "rsd_c": RsdC((2, 2, 1, 1, 1, 1), 0.2),
    "rsd_s": RsdS(3, 6, 0.2),
    # Noise makes a path of a sampled request surer than its probability: at 0.2 one of
    # these three is likely enough down to the last level that is read.
    "dynamic": DynamicTree(3, 6, 12, 0.25),
}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_no_level_is_read_in_vain(name: str, greedy: bool) -> None:
    """Red when levels without a draft are read, or leaving them out changes a tree."""
    sampling = at_temperature(0.0, 3) if greedy else plain_sampling(3)
    short, few = drafted(ALL[name], sampling, 3, can_sync=True)
    whole, all_levels = drafted(ALL[name], sampling, 3)
    assert few == int(whole.tree.depths.max()) < all_levels == 5
    assert bool((whole.tree.num_nodes <= short.tree.max_nodes).all())
    assert same_trees(short.tree, whole.tree)


WHOLE: dict[str, Proposer] = {
    "sd": Sd(6),
    "rsd_c": RsdC((2, 2, 1, 1, 1, 1)),
    "rsd_s": RsdS(3, 6),
}


@pytest.mark.parametrize("name", WHOLE)
def test_drafts_of_greedy_requests_are_likely(name: str) -> None:
    """Red when a greedy tree holds an unlikely draft, or lacks a likely one."""
    draft, _ = drafted(ALL[name], at_temperature(0.0), 1)
    whole, _ = drafted(WHOLE[name], at_temperature(0.0), 1)
    language, _ = random_tables("random", 5, 6)
    probs = path_probabilities(whole.tree, language)
    likely = {path for path, p in probs.items() if p >= 0.2}
    assert set(token_paths(draft.tree)) == likely
    assert 1 < len(likely) < len(probs)


@pytest.mark.parametrize("name", WHOLE)
def test_the_likeliest_node_of_a_level_claims_its_path(name: str) -> None:
    """Red when siblings claim twice, or a node claims another one's confidence."""
    sampling = PlainSampling(torch.zeros(1), all_greedy=True)
    draft, _ = drafted(ALL[name], sampling, 1)
    language, _ = random_tables("random", 5, 6)
    probs = path_probabilities(draft.tree, language)
    expected = dict.fromkeys(probs, 0.0)
    for depth in range(1, 1 + int(draft.tree.depths.max())):
        best = max(
            (path for path in probs if len(path) == depth), key=probs.__getitem__
        )
        expected[best] = probs[best]
    assert draft.claims is not None
    assert draft.levels == 6
    claims = draft.claims[0].tolist()
    assert claims[: len(probs)] == pytest.approx(list(expected.values()))
    assert not any(claims[len(probs) :])


@pytest.mark.parametrize("name", WHOLE)
def test_a_drawn_token_does_not_decide_what_is_claimed(name: str) -> None:
    """Red when a sampled request's claims add up to those of the path it drew."""
    sampling = plain_sampling(1)
    draft, _ = drafted(ALL[name], sampling, 1)
    language, _ = random_tables("random", 5, 6)
    assert draft.claims is not None
    first_level = draft.claims[0][draft.tree.depths[0] == 1]
    highest = float(language.table[0].max())
    assert sorted(first_level.tolist())[-1] == pytest.approx(highest)
    assert int((first_level > 0).sum()) == 1


def path_probabilities(tree: TreeBatch, language: Language) -> dict[Path, float]:
    """Draft probability of every path of the first tree, by its tokens."""
    prefixes = language.prefixes(tree)[0].tolist()
    found = [1.0]
    for node in range(1, int(tree.num_nodes[0])):
        parent, token = int(tree.parents[0, node]), int(tree.token_ids[0, node])
        found.append(found[parent] * float(language.table[prefixes[parent], token]))
    return dict(zip(token_paths(tree), found, strict=True))
