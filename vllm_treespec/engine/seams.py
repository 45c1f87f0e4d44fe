"""Every place of vLLM that we rely on, as one table, checked when we are used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from packaging.version import Version
from rich.console import Console
from rich.table import Table

MIN_VLLM, BELOW_VLLM = "0.32", "0.34"


class SeamError(RuntimeError):
    """The installed vLLM lacks something that draft trees need."""


@dataclass(frozen=True)
class Seam:
    """One attribute of vLLM and what we use it for."""

    module: str
    attribute: str
    purpose: str
    # None: on every device
    device: str | None = None

    def needed_on(self, device: str) -> bool:
        """Whether draft trees need it on ``"cpu"`` or ``"cuda"``."""
        return self.device in (None, device)

    def found(self) -> bool:
        """Whether the running vLLM has it."""
        try:
            place: object = importlib.import_module(self.module)
        except ImportError:
            return False
        for name in self.attribute.split("."):
            if not hasattr(place, name):
                return False
            place = getattr(place, name)
        return True


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_GRAMMAR = "vllm.v1.structured_output.backend_types"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_TRITON_ATTENTION = "vllm.v1.attention.backends.triton_attn"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
SEAMS = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "our method's name becomes stock arguments here (the only function wrapped)",
    ),
    Seam(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        "the runner makes our drafter",
    ),
    Seam(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.init_device",
        "our runner on CPU",
        "cpu",
    ),
    Seam(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.determine_available_memory",
        "room for fork blocks",
        "cpu",
    ),
    Seam(
        "vllm.v1.worker.cpu_model_runner",
        "CPUModelRunner",
        "the runner we extend",
        "cpu",
    ),
    Seam(
        "vllm.v1.worker.gpu_worker", "Worker._make_model_runner", "our runner", "cuda"
    ),
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.determine_available_memory",
        "room for fork blocks",
        "cuda",
    ),
    Seam(
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        "tree attention is compiled",
        "cuda",
    ),
    Seam(_RUNNER, "GPUModelRunner.profile_run", "buffers that last", "cuda"),
    Seam(_RUNNER, "GPUModelRunner._dummy_run", "graphs of draft models", "cuda"),
    Seam(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher.dispatch",
        "graphs of draft models",
        "cuda",
    ),
    Seam(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache_tensors",
        "fork blocks behind the scheduler's blocks",
    ),
    Seam(_RUNNER, "GPUModelRunner._prepare_inputs", "node order and tree positions"),
    Seam(_RUNNER, "GPUModelRunner._update_states", "who is finished"),
    Seam(_RUNNER, "GPUModelRunner._sample", "scoring"),
    Seam(
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        "generators of seeded requests whose prompt is read in chunks",
        "cpu",
    ),
    Seam(_RUNNER, "GPUModelRunner._update_states_after_model_execute", "commit of KV"),
    Seam(_RUNNER, "GPUModelRunner.propose_draft_token_ids", "the next draft trees"),
    Seam(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        "drafting near max_model_len is decided per request",
    ),
    Seam(_RUNNER, "GPUModelRunner.take_draft_token_ids", "trees go to the scheduler"),
    Seam(_SCHEDULER, "Scheduler.update_draft_token_ids", "no grammar cuts a tree"),
    Seam(_SCHEDULER, "Scheduler.get_grammar_bitmask", "a grammar mask for every node"),
    Seam(_GRAMMAR, "StructuredOutputGrammar.fill_bitmask", "the mask after a node"),
    Seam(_GRAMMAR, "StructuredOutputGrammar.accept_tokens", "down a tree"),
    Seam(_GRAMMAR, "StructuredOutputGrammar.rollback", "up a tree"),
    Seam(_GRAMMAR, "StructuredOutputBackend.allocate_token_bitmask", "masks of a tree"),
    Seam(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        "our attention backend",
    ),
    Seam(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "KV of a node goes to every branch",
        "cpu",
    ),
    Seam(
        _CPU_ATTENTION,
        "CPUAttentionMetadataBuilder.build",
        "one sequence a branch",
        "cpu",
    ),
    Seam(
        _TRITON_ATTENTION,
        "TritonAttentionMetadataBuilder.build",
        "masks of a batch",
        "cuda",
    ),
    Seam(_TRITON_ATTENTION, "TritonAttentionImpl.forward", "tree attention", "cuda"),
    Seam("vllm.v1.kv_cache_interface", "KVCacheTensor", "how KV blocks are laid out"),
    Seam("vllm.forward_context", "set_forward_context", "draft model forwards"),
    Seam("vllm.model_executor.model_loader", "get_model", "loading the draft model"),
    Seam(_EMBEDDING, "VocabParallelEmbedding", "the embedding that a head shares"),
    Seam(_EMBEDDING, "ParallelLMHead", "the output layer that a head shares"),
    Seam(
        _EMBEDDING,
        "VocabParallelEmbedding.get_sharded_to_full_mapping",
        "their rows in order, where tensor-parallel ranks hold a part each",
    ),
    Seam(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        "packed linear layers for heads",
        "cpu",
    ),
    Seam("vllm.v1.sample.sampler", "Sampler.gather_logprobs", "logprobs of drafts"),
    Seam(
        "vllm.v1.metrics.prometheus",
        "get_prometheus_registry",
        "our metrics are on the registry that it gives to /metrics",
    ),
)


def supported(version: str) -> bool:
    """Whether a vLLM version is one that draft trees were written for."""
    release = Version(version).release
    return Version(MIN_VLLM).release <= release < Version(BELOW_VLLM).release


def check_seams(device: str) -> None:
    """Check the running vLLM.

    Args:
        device: ``"cpu"`` or ``"cuda"``, whose seams are needed.

    Raises:
        SeamError: naming the version or the missing seam, and the remedy.

    """
    import vllm

    if not supported(vllm.__version__):
        raise SeamError(
            f"vLLM {vllm.__version__} is not supported by vllm_treespec; "
            f"install vllm>={MIN_VLLM},<{BELOW_VLLM}"
        )
    for seam in SEAMS:
        if seam.needed_on(device) and not seam.found():
            raise SeamError(
                f"vLLM {vllm.__version__} has no {seam.module}.{seam.attribute} "
                f"({seam.purpose}); reinstall vllm>={MIN_VLLM},<{BELOW_VLLM}"
            )


def doctor(console: Console) -> bool:
    """Print the seams and what this vLLM offers; return whether all is well."""
    import vllm
    from vllm.platforms import current_platform

    device = current_platform.device_name
    table = Table(title=f"vLLM {vllm.__version__}: what vllm_treespec relies on")
    table.add_column("seam", overflow="fold")
    table.add_column("for")
    table.add_column("device")
    table.add_column("found")
    complete = supported(vllm.__version__)
    for seam in SEAMS:
        found = seam.found()
        complete &= found or not seam.needed_on(device)
        table.add_row(
            f"{seam.module}.{seam.attribute}",
            seam.purpose,
            seam.device or "all",
            "[green]yes[/]" if found else "[red]no[/]",
        )
    console.print(table)
    wanted = f"vllm>={MIN_VLLM},<{BELOW_VLLM}"
    if complete:
        console.print(f"[green]draft trees work with this vLLM[/] ({wanted})")
    else:
        console.print(f"[red]draft trees do not work with this vLLM[/]; use {wanted}")
    return complete
