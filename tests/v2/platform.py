"""A platform that is a GPU for vLLM's V2 runner and the CPU for torch."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class FakeCard(CpuPlatform):
    """One card that has the CPU's memory; its kernels are Triton's alone."""

    _enum = PlatformEnum.OOT
    # What the plugin reads: a spec-config gets the GPU's worker.
    device_name = "cuda"

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **options: Any) -> str:
        """Return Triton attention, or what is registered in its place."""
        return AttentionBackendEnum.TRITON_ATTN.get_path()

    @classmethod
    def import_kernels(cls) -> None:
        """Import no kernels: there are none."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        """Return Hopper's."""
        return DeviceCapability(9, 0)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Return an H100's multiprocessors."""
        return 132

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Choose the GPU's worker; async scheduling stays on, unlike on a CPU."""
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        parallel.disable_custom_all_reduce = True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Let engines that are not eager capture graphs."""
        return True

    @classmethod
    def get_global_graph_pool(cls) -> None:
        """Return nothing: graphs share no memory here."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Change no defaults of the command line."""
