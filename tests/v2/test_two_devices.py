"""Steps in which a tensor of the host would meet one of a card's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.v2.engines import engine
from tests.v2.prompts import PARAMS
from tests.v2.test_graphs import WITH_GRAPHS
from tests.v2.test_trees import DRAWN, FEW, SHORT, spec_of
from tests.v2.two_devices import DEVICE, NO_NUMBER, two_devices
from vllm_treespec.engine.v2.verify import valid_nodes
from vllm_treespec.sampling import laws

# what reads the text, or is read with it
FURTHER: dict[str, Any] = {
    **PARAMS["narrow"],
    "frequency_penalty": 0.5,
    "min_tokens": 4,
    "logprobs": 2,
}


def test_graphs_and_further_requests(pair: tuple[str, str], tmp_path: Path) -> None:
    """Red when a card would refuse an operation of ours, or let the host wait for it.

    Or when the host reads a copy that has not arrived. Other methods, without graphs:
    test_trees.py.
    """
    spec = spec_of("rsd_s", *DRAWN["rsd_s"], pair, tmp_path)
    with two_devices() as devices, engine(pair[0], spec, **WITH_GRAPHS) as running:
        running.warm_up()
        for params in (PARAMS["greedy"], PARAMS["sampled"], FURTHER):
            running.generate(SHORT, params, FEW)
        assert running.runner.decoder.stats.as_dict()["trees"] > FEW
    assert len(devices.copies) > FEW
    assert not devices.found


def test_what_a_card_refuses_is_found() -> None:
    """Red when the test above would not see a meeting, or a copy that is on its way.

    Or that a step changes what vLLM's copy stream has not read.
    """
    with two_devices() as devices:
        first_rows = torch.tensor([0, 2], device=DEVICE)
        invalid, num_nodes = torch.tensor([False, False]), torch.tensor([2])
        valid_nodes(invalid.to(DEVICE), first_rows, num_nodes.to(DEVICE))
        assert not devices.found
        valid_nodes(invalid, first_rows, num_nodes.to(DEVICE))
        assert {name for name, _ in devices.found} == {"__and__"}
        devices.found.clear()
        logits, top_k = torch.zeros((2, 9), device=DEVICE), torch.tensor([2, 3])
        laws._narrow_law(logits, top_k.to(DEVICE), None)
        assert "__bool__" in {name for name, _ in devices.found}
        event = torch.cuda.Event()
        copy = first_rows.to("cpu", non_blocking=True)
        event.synchronize()
        assert copy.tolist() == [NO_NUMBER] * 2
        event.record()
        event.synchronize()
        assert copy.tolist() == [0, 2]
        torch.cuda.set_stream(torch.cuda.Stream())
        copy = first_rows.to("cpu", non_blocking=True)
        event.record()
        first_rows += 1
        event.synchronize()
        assert copy.tolist() == [1, 3]
