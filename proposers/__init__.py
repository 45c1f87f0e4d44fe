"""Proposers: from committed tokens to a draft tree. One file a method."""

from vllm_treespec.proposers.base import DraftModel, Proposer, ProposerInputs
from vllm_treespec.proposers.dflash import DFlash, DrawnDFlash
from vllm_treespec.proposers.dynamic_tree import DynamicTree
from vllm_treespec.proposers.hybrid import Hybrid
from vllm_treespec.proposers.lyanna import Lyanna
from vllm_treespec.proposers.medusa import Medusa
from vllm_treespec.proposers.redrafter import ReDrafter
from vllm_treespec.proposers.rsd_c import RsdC
from vllm_treespec.proposers.rsd_s import RsdS
from vllm_treespec.proposers.sd import Sd
from vllm_treespec.proposers.specinfer import SpecInfer
from vllm_treespec.proposers.spectr import SpecTr
from vllm_treespec.proposers.static_tree import StaticTree
from vllm_treespec.proposers.stochastic_tree import StochasticTree
from vllm_treespec.proposers.suffix import Suffix

__all__ = [
    "DFlash",
    "DraftModel",
    "DrawnDFlash",
    "DynamicTree",
    "Hybrid",
    "Lyanna",
    "Medusa",
    "Proposer",
    "ProposerInputs",
    "ReDrafter",
    "RsdC",
    "RsdS",
    "Sd",
    "SpecInfer",
    "SpecTr",
    "StaticTree",
    "StochasticTree",
    "Suffix",
]
