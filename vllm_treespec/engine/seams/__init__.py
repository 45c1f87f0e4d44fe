"""What we rely on in vLLM: a table, its check at start-up, and ``treespec doctor``."""

from vllm_treespec.engine.seams.checks import (
    BELOW_VLLM,
    MIN_VLLM,
    SeamError,
    check_seams,
    supported,
)
from vllm_treespec.engine.seams.doctor import doctor
from vllm_treespec.engine.seams.seam import Kind, Seam
from vllm_treespec.engine.seams.source_files import SourceFiles
from vllm_treespec.engine.seams.table import SEAMS, TOPICS

__all__ = [
    "BELOW_VLLM",
    "MIN_VLLM",
    "SEAMS",
    "TOPICS",
    "Kind",
    "Seam",
    "SeamError",
    "SourceFiles",
    "check_seams",
    "doctor",
    "supported",
]
