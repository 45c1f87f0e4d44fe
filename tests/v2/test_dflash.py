"""One-pass heads on the V2 runner: blocks under masks, read before the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dense_dflash import DenseDFlash
from tests.heads import write_head
from tests.v2.engines import GREEDY, engine
from tests.v2.prompts import PROMPTS

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
        decoder = running.runner.decoder
        draft = decoder.draft

        def noting(batch: Any) -> Any:
            proposal = draft(batch)
            if proposal is not None:
                for row, req in enumerate(proposal.reqs):
                    text = batch.token_ids[req, : batch.end[req] + 1]
                    drafts.append((text.tolist(), proposal.token_ids[row].tolist()))
            return proposal

        monkeypatch.setattr(decoder, "draft", noting)
        running.generate(PROMPTS[:2], GREEDY, 8)
    assert len(drafts) > 10
    wrong = [text for text, found in drafts if found != reference.chain(text, DEPTH)]
    assert not wrong
