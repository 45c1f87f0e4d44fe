"""Heads that draft from the target's hidden state (torch only)."""

from vllm_treespec.heads.base import DraftHead, OutputLayer
from vllm_treespec.heads.config import (
    HeadConfig,
    HeadError,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
    read_head_config,
)
from vllm_treespec.heads.files import build_head, load_head, save_head
from vllm_treespec.heads.medusa import MedusaHead
from vllm_treespec.heads.redrafter import ReDrafterHead

__all__ = [
    "DraftHead",
    "HeadConfig",
    "HeadError",
    "MedusaHead",
    "MedusaHeadConfig",
    "OutputLayer",
    "ReDrafterHead",
    "ReDrafterHeadConfig",
    "build_head",
    "load_head",
    "read_head_config",
    "save_head",
]
