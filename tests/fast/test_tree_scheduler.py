"""Our scheduler differs from vLLM's where a structured output has drafts only."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the engine layer imports vLLM")

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)

from tests.fast.small_engine import engine_config, make_request, make_scheduler
from vllm_treespec.batch.stats import StepCounts
from vllm_treespec.engine.scheduler import TreeDraftTokenIds, TreeScheduler

STOCK = 77


class Rising(StructuredOutputGrammar):
    """Texts of ever higher tokens, of 32."""

    def __init__(self) -> None:
        self.tokens = [-1]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on; the walk asks the mask before."""
        assert tokens[0] > self.tokens[-1]
        self.tokens += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Not asked for trees."""
        raise AssertionError

    def rollback(self, num_tokens: int) -> None:
        """Go back."""
        del self.tokens[-num_tokens:]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Allow all higher tokens."""
        bitmask[batch_index] = mask_above(self.tokens[-1])

    def is_terminated(self) -> bool:
        """Never."""
        return False

    def reset(self) -> None:
        """Never."""
        raise AssertionError


def mask_above(token: int) -> int:
    """The mask of all higher tokens, as an int32."""
    return -(1 << (token + 1)) if token < 31 else 0


class Masks(StructuredOutputBackend):
    """Makes masks of 32 tokens."""

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Room for masks."""
        return torch.zeros(max_num_seqs, 1, dtype=torch.int32)

    def compile_grammar(self, *_: object) -> StructuredOutputGrammar:
        """Not asked."""
        raise AssertionError

    def destroy(self) -> None:
        """Hold nothing."""


class Manager(StructuredOutputManager):
    """Fills the masks of requests without a tree with ``STOCK``."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.backend = Masks(config, tokenizer=None, vocab_size=32)

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        """Take all drafts."""
        return tokens

    def grammar_bitmask(
        self, requests: Any, req_ids: list[str], drafts: dict[str, list[int]]
    ) -> np.ndarray:
        """One row a request and one a padding token."""
        padding = [drafts.get(req_id, []) for req_id in req_ids]
        assert all(token == -1 for tokens in padding for token in tokens)
        num_rows = len(req_ids) + sum(map(len, padding))
        return np.full((num_rows, 1), STOCK, dtype=np.int32)


def request(name: str, structured: bool = True) -> Request:
    """A request that has drafts, with a grammar or without."""
    made = make_request(name, regex="a*" if structured else None)
    made.status = RequestStatus.RUNNING
    made.spec_token_ids = [9]
    if structured:
        assert made.structured_output_request is not None
        made.structured_output_request.grammar = Rising()
    return made


@pytest.fixture
def scheduler() -> TreeScheduler:
    """A scheduler with four requests; a fifth one has ended."""
    config = engine_config({"method": "suffix_tree"})
    made = make_scheduler(config, manager=Manager(config))
    names = ("free", "tree", "prompt", "undrafted")
    made.requests = {name: request(name, name != "free") for name in names}
    made.requests["prompt"].is_prefill_chunk = True
    made._parents = {"gone": [0]}
    return made


#            4
#          /   \
#         6     8
#       / | \    \
#      5  9  7    8
DRAFTS = [4, 6, 8, 5, 9, 7, 8]
PARENTS = [0, 1, 1, 2, 2, 2, 3]


def update(scheduler: TreeScheduler) -> None:
    drafts = TreeDraftTokenIds(
        ["free", "tree", "prompt", "undrafted", "gone"],
        [DRAFTS, DRAFTS, [3], [], [1]],
        {"free": PARENTS, "tree": PARENTS, "prompt": [0], "gone": [0]},
        StepCounts(),
    )
    scheduler.update_draft_token_ids(pickle.loads(pickle.dumps(drafts)))


def step(scheduler: TreeScheduler, drafts: dict[str, list[int]]) -> Any:
    output = SchedulerOutput.make_empty()
    output.has_structured_output_requests = True
    output.num_scheduled_tokens = dict.fromkeys(scheduler.requests, 1)
    output.scheduled_spec_decode_tokens = drafts
    return scheduler.get_grammar_bitmask(output)


def test_trees_stay_whole(scheduler: TreeScheduler) -> None:
    """Red when a grammar cuts a tree, or other requests are not left to vLLM."""
    update(scheduler)
    found = {r: q.spec_token_ids for r, q in scheduler.requests.items()}
    assert found == {"free": DRAFTS, "tree": DRAFTS, "prompt": [], "undrafted": []}
    assert "gone" not in scheduler._parents
    scheduler.update_draft_token_ids(DraftTokenIds(["free"], [[1]]))
    assert scheduler.requests["free"].spec_token_ids == [1]


@pytest.mark.parametrize("count", [7, 4])
def test_masks_lie_in_the_order_of_nodes(scheduler: TreeScheduler, count: int) -> None:
    """Red when the rows of trees, cut or whole, and of other requests are mixed up."""
    update(scheduler)
    drafts = {"free": DRAFTS, "tree": DRAFTS[:count]}
    found = step(scheduler, drafts)
    assert found.structured_output_request_ids == ["undrafted", "tree"]
    assert found.num_acceptable_drafts == [0, count]
    tree = [mask_above(token) for token in (-1, 4, 6, 8)] + [-1] * (count - 3)
    if count == 7:
        tree[5:7] = [mask_above(9), mask_above(7)]
    assert found.grammar_bitmask[:, 0].tolist() == [STOCK, *tree]
    assert scheduler.requests["tree"].structured_output_request.grammar.tokens == [-1]


def test_padding_is_no_tree(scheduler: TreeScheduler) -> None:
    """Red when requests that vLLM pads, having one token to read, are walked as trees.

    Preempted ones have had trees: what is left of them must not be looked at.
    """
    update(scheduler)
    found = step(scheduler, {"tree": DRAFTS, "undrafted": [-1, -1, -1]})
    assert found.structured_output_request_ids == ["undrafted", "tree"]
    assert found.num_acceptable_drafts == [0, len(DRAFTS)]
    assert found.grammar_bitmask[:4, 0].tolist() == [STOCK] * 4
    assert len(found.grammar_bitmask) == 4 + 1 + len(DRAFTS)
    found = step(scheduler, {"tree": [-1, -1], "undrafted": [-1]})
    assert (found.grammar_bitmask == STOCK).all()
    assert found.num_acceptable_drafts == [0, 0]


def test_no_trees_means_stock_masks(scheduler: TreeScheduler) -> None:
    """Red when a step without structured drafts is not vLLM's own."""
    update(scheduler)
    found = step(scheduler, {"free": DRAFTS})
    assert found.structured_output_request_ids == ["tree", "undrafted"]
    assert (found.grammar_bitmask == STOCK).all()


def counted(kind: str) -> tuple[StepCounts, SpecDecodingStats]:
    """Both counts of a step of two requests; what happens to the second, see below."""
    config = engine_config({"method": "suffix_tree"})
    made = make_scheduler(config, log_stats=True)
    handed_over = StepCounts(node_counts={8: 1, 4: 1}, accepted={2: 1, 1: 1})
    names = ["tree", "other"]
    for name in names:
        made.add_request(make_request(name))
    made.update_from_output(made.schedule(), output_of(names, [[5], [5]]))
    drafts = {"tree": DRAFTS, "other": DRAFTS[:3]}
    update_with(made, drafts, StepCounts())
    output = made.schedule()
    assert output.scheduled_spec_decode_tokens == drafts
    added: list[StepCounts] = []
    made.counters = SimpleNamespace(add=added.append)  # type: ignore[assignment]
    if kind == "ended in the step":
        made.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    elif kind == "padded":
        output.scheduled_spec_decode_tokens["other"] = [-1] * 3
        handed_over = StepCounts(node_counts={8: 1}, accepted={2: 1})
    outputs = made.update_from_output(
        output, output_of(names, [[4, 6, 3], [4] if kind == "padded" else [4, 1]])
    )
    update_with(made, {}, handed_over)
    update_with(made, {}, StepCounts())
    ours, later = added
    assert later == StepCounts()
    (stats,) = (o.scheduler_stats for o in outputs.values() if o.scheduler_stats)
    assert stats.spec_decoding_stats is not None
    return ours, stats.spec_decoding_stats


def output_of(names: list[str], emitted: list[list[int]]) -> ModelRunnerOutput:
    """What a runner emitted."""
    rows = {name: row for row, name in enumerate(names)}
    return ModelRunnerOutput(names, rows, emitted)


def update_with(
    made: TreeScheduler, drafts: dict[str, list[int]], counts: StepCounts
) -> None:
    """Hand over drafts, and what was counted."""
    parents = {name: [0] * len(of) for name, of in drafts.items()}
    made.update_draft_token_ids(
        TreeDraftTokenIds([*drafts], [*drafts.values()], parents, counts)
    )


@pytest.mark.parametrize(
    ("kind", "num_trees"),
    [("whole", 2), ("ended in the step", 1), ("padded", 1)],
)
def test_both_counts_are_of_the_same_trees(kind: str, num_trees: int) -> None:
    """Red when ours and vLLM's drift apart where requests end, or enter a batch.

    Behind a server a request with a stop string ends while its next step runs: the
    worker scores its tree, and vLLM does not count it. In place of drafts of a request
    with one token to read vLLM sends padding.
    """
    ours, theirs = counted(kind)
    assert ours.trees == theirs.num_drafts == num_trees
    assert ours.nodes - ours.trees == theirs.num_draft_tokens
    accepted = sum(n * trees for n, trees in ours.accepted.items())
    assert accepted == theirs.num_accepted_tokens
