"""One-pass heads on the V2 runner: blocks under masks, read before the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dense_dflash import DenseDFlash
from tests.heads import write_head
from tests.v2.engines import GREEDY, engine
from tests.v2.prompts import PROMPTS
from vllm_treespec.batch.unseen import StepTrees

DEPTH = 3
# shorter than most texts
WINDOWS: dict[str, dict[str, Any]] = {
    # the other layer sees all of a block, and all before it
    "causal window": {"sliding_layers": (0,), "sliding_causal": True},
    "windows": {"sliding_layers": (0, 1)},
}


@pytest.mark.parametrize("windows", WINDOWS)
def test_chains_follow_from_the_text(
    windows: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a block misses a token, or sees a row that its mask should hide.

    Red, too, when a window is another one, or a layer has another's masks.

    Two requests run beside one another, with prompts in chunks.
    """
    head = write_head(
        tmp_path / "head",
        "dflash",
        hidden_size=128,
        vocab_size=256,
        layer_ids=(0,),
        form="dflash",
        block_size=1 + DEPTH,
        markov_rank=0,
        sliding_window=7,
        **WINDOWS[windows],
    )
    reference = DenseDFlash(target, head)
    spec = {"method": "dflash_tree", "model": head, "top_k": 1, "depth": DEPTH}
    drafts: list[tuple[list[int], list[int]]] = []
    with engine(target, {**spec, "schedule": "fixed"}) as running:
        seen = StepTrees.seen

        def noting(self: StepTrees, batch: Any) -> Any:
            step = seen(self, batch)
            if step.trees is not None:
                roots = zip(
                    step.trees.host_reqs, step.trees.root_positions, strict=True
                )
                for tree, (req, root) in enumerate(roots):
                    text = batch.token_ids[req, : root + 1].tolist()
                    drafts.append((text, step.trees.drafts(tree)[0]))
            return step

        monkeypatch.setattr(StepTrees, "seen", noting)
        running.generate(PROMPTS[:2], GREEDY, 8)
    assert len(drafts) > 10
    wrong = [text for text, found in drafts if found != reference.chain(text, DEPTH)]
    assert not wrong
