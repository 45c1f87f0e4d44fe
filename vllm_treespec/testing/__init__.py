"""Tests of a method of one's own: a fake engine with toy models, without vLLM."""

from vllm_treespec.testing.checks import Checked, check_method
from vllm_treespec.testing.fake_engine import FakeEngine
from vllm_treespec.testing.fake_scheduler import Habits, Request
from vllm_treespec.testing.toy_models import Language, ToyDraftModel, ToyHead
from vllm_treespec.testing.workloads import HABITS, check_greedy, workload

__all__ = [
    "HABITS",
    "Checked",
    "FakeEngine",
    "Habits",
    "Language",
    "Request",
    "ToyDraftModel",
    "ToyHead",
    "check_greedy",
    "check_method",
    "workload",
]
