"""The registry of heads: one class a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_treespec.heads.base import Head
from vllm_treespec.heads.dflash import DFlashHead
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.lyanna import LyannaHead
from vllm_treespec.heads.medusa import MedusaHead
from vllm_treespec.heads.redrafter import ReDrafterHead

# By the ``method`` of their config; each takes that config.
HEADS: dict[str, Callable[[Any], Head]] = {
    "redrafter": ReDrafterHead,
    "medusa": MedusaHead,
    "eagle": EagleHead,
    "lyanna": LyannaHead,
    "dflash": DFlashHead,
}
