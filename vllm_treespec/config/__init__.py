"""Spec-configs: one validated type a method, and what is wrong with one."""

from vllm_treespec.config.methods import HEAD_METHODS, METHODS
from vllm_treespec.config.parse import (
    RENAMED,
    SpecConfigError,
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
    "names_our_method",
    "parse_spec_config",
    "read_spec",
    "unknown_method",
]
