"""Spec-configs: one validated type a method, and what is wrong with one."""

from vllm_treespec.config.base import SpecConfigError
from vllm_treespec.config.methods import (
    HEAD_METHODS,
    METHODS,
    find_method,
    reference,
    register_installed,
)
from vllm_treespec.config.parse import (
    RENAMED,
    names_our_method,
    parse_spec_config,
    read_spec,
    unknown_method,
)

__all__ = [
    "HEAD_METHODS",
    "METHODS",
    "RENAMED",
    "SpecConfigError",
    "find_method",
    "names_our_method",
    "parse_spec_config",
    "read_spec",
    "reference",
    "register_installed",
    "unknown_method",
]
