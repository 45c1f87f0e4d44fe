"""The engine's GPU path on a CPU: masks, our kernels in Triton's interpreter.

What differs from a GPU: the worker, writes to the KV cache (stock kernels do not run
in the interpreter), and that all batches run on our kernel.
"""

from itertools import chain
from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import CompilationTimes

from tests.engine.compiler_watch import CompilerWatch
from vllm_treespec.engine.graphed_draft_model import GraphedDraftModel
from vllm_treespec.engine.tree_attention import (
    TreeAttentionBackend,
    TreeAttentionImpl,
    TreeAttentionMetadata,
    TreeAttentionMetadataBuilder,
)
from vllm_treespec.engine.v1.cpu_worker import TreeCPUWorker
from vllm_treespec.engine.v1.gpu_runner import TreeGPUModelRunner
from vllm_treespec.engine.warm_up import warm_up_attention, warm_up_commit
from vllm_treespec.kernels.tree_attention import Workspace


class InterpretedBuilder(TreeAttentionMetadataBuilder):
    """Gives every batch masks; batches of whole trees what the first one got.

    A full CUDA graph replays with the metadata that it was captured with: all that
    changes from step to step must lie in tensors that last.
    """

    num_replays = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.captured: dict[int, TreeAttentionMetadata] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        """Build the metadata of a batch with trees."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.add_masks(metadata)
        num_reqs = common_attn_metadata.num_reqs
        if common_attn_metadata.num_actual_tokens != num_reqs * self.max_tree_nodes:
            return metadata
        if num_reqs in self.captured:
            InterpretedBuilder.num_replays += 1
        return self.captured.setdefault(num_reqs, metadata)


class InterpretedImpl(TreeAttentionImpl):
    """Writes to the KV cache without Triton."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values to their slots."""
        page = kv_cache.shape[2]
        caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        used = slot_mapping >= 0
        slots = slot_mapping[used]
        for cache, new in zip(caches, (key, value), strict=True):
            cache[slots // page, slots % page] = new[: len(used)][used]


class InterpretedBackend(TreeAttentionBackend):
    """Tree attention as a GPU has it."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """Return the implementation."""
        return InterpretedImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        """Return the metadata builder."""
        return InterpretedBuilder


class PaddingDispatcher:
    """Pads as if CUDA graphs of every eighth size had been captured."""

    def dispatch(
        self, num_tokens: int, **options: Any
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """Return no graph, and the padded size."""
        return CUDAGraphMode.NONE, BatchDescriptor(-(-num_tokens // 8) * 8)


class InterpretedRunner(TreeGPUModelRunner, CPUModelRunner):
    """The GPU's runner, on vLLM's CPU runner."""

    drafter: Any

    def profile_run(self, *args: Any, **options: Any) -> None:
        """Run the models once; draft models read padded batches afterwards."""
        super().profile_run(*args, **options)
        masks = self.masks
        for source in self.drafter.paged:
            if isinstance(source, GraphedDraftModel):
                source.prepare(masks.max_tokens, PaddingDispatcher())
        for heads, size in masks.workspaces:
            # A card's number of splits would fill a card: too much for an interpreter.
            masks.workspaces[heads, size] = Workspace(
                masks.max_tokens, heads, size, masks.device, num_splits=2
            )


class InterpretedWorker(TreeCPUWorker):
    """The CPU worker with the GPU's runner and attention."""

    def init_device(self) -> None:
        """Make the runner; attention is chosen when models are loaded."""
        self.watch = CompilerWatch()
        super().init_device()
        self.model_runner.__class__ = InterpretedRunner
        self.model_runner.init_trees()
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            f"{__name__}.{InterpretedBackend.__name__}",
        )

    def load_model(self, **options: Any) -> None:
        """Load the models and profile them, as a GPU worker does."""
        super().load_model(**options)
        self.model_runner.profile_run()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up as a GPU worker does."""
        runner = self.model_runner
        warm_up_attention(runner)
        warm_up_commit(runner.decoder.layout)
        for group in chain.from_iterable(runner.attn_groups):
            group.get_metadata_builder().captured.clear()
        times = super().compile_or_warm_up_model()
        self.watch.serve()
        return times

    def treespec_stats(self, reset: bool = False) -> dict[str, Any]:
        """The worker's totals, how often metadata were replayed, late kernels."""
        return super().treespec_stats(reset) | {
            "replays": InterpretedBuilder.num_replays,
            "late_kernels": self.watch.late,
        }
