"""Heads that draft from the target's hidden state (no vLLM)."""

from vllm_treespec.heads.base import DraftHead, Head, OutputLayer
from vllm_treespec.heads.checkpoint import head_folder
from vllm_treespec.heads.config import (
    DecoderHeadConfig,
    DFlashHeadConfig,
    EagleHeadConfig,
    HeadConfig,
    HeadError,
    LyannaHeadConfig,
    MedusaHeadConfig,
    ReDrafterHeadConfig,
)
from vllm_treespec.heads.dflash import DFlashHead
from vllm_treespec.heads.eagle import EagleHead
from vllm_treespec.heads.files import (
    build_head,
    load_any_head,
    load_dflash_head,
    load_eagle_head,
    load_head,
    load_lyanna_head,
    read_head_config,
)
from vllm_treespec.heads.lyanna import LyannaHead
from vllm_treespec.heads.medusa import MedusaHead
from vllm_treespec.heads.redrafter import ReDrafterHead
from vllm_treespec.heads.tensors import save_head

__all__ = [
    "DFlashHead",
    "DFlashHeadConfig",
    "DecoderHeadConfig",
    "DraftHead",
    "EagleHead",
    "EagleHeadConfig",
    "Head",
    "HeadConfig",
    "HeadError",
    "LyannaHead",
    "LyannaHeadConfig",
    "MedusaHead",
    "MedusaHeadConfig",
    "OutputLayer",
    "ReDrafterHead",
    "ReDrafterHeadConfig",
    "build_head",
    "head_folder",
    "load_any_head",
    "load_dflash_head",
    "load_eagle_head",
    "load_head",
    "load_lyanna_head",
    "read_head_config",
    "save_head",
]
