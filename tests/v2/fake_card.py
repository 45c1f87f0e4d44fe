"""Lets vLLM's code for GPUs run on a machine without one: see docs/dev/tests.md.

``install`` comes before anything imports vLLM or Triton's language.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # by which users choose the V2 runner for draft trees
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


def install() -> None:
    """Put stand-ins for a card in the place of torch's and vLLM's."""
    os.environ.update(ENVIRONMENT)
    let_vllm_find_triton()
    set_platform()
    stand_in_for_cuda()
    from tests.v2 import graphs, interpreter, torch_kernels, workers

    interpreter.install()
    workers.install()
    torch_kernels.install()
    graphs.install()


def let_vllm_find_triton() -> None:
    """Report one active driver, which is what vLLM counts; nothing else calls it."""
    from triton.backends import backends

    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")


def set_platform() -> None:
    """Make ours vLLM's platform."""
    from vllm import platforms

    from tests.v2.platform import FakeCard

    platforms._current_platform = FakeCard()


def stand_in_for_cuda() -> None:
    """Replace streams, events, pinned memory and memory's size.

    Importing ``shm`` does it: these are vLLM's own stand-ins for CPUs. Copies to the
    device stay those of a card.
    """
    from vllm.utils import torch_utils

    copy_to_device = torch_utils.async_tensor_h2d
    import vllm.v1.worker.cpu.shm  # noqa: F401

    aliasing = torch_utils.async_tensor_h2d
    for module in list(sys.modules.values()):
        if vars(module).get("async_tensor_h2d") is aliasing:
            vars(module)["async_tensor_h2d"] = copy_to_device

    def capability(device: Any = None) -> tuple[int, int]:
        return (9, 0)

    torch.cuda.get_device_capability = capability
    torch.accelerator.empty_host_cache = lambda: None
