"""Engines on vLLM's V2 model runner in this process, for the tests of ``tests/v2``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.metrics.reader import Counter
from vllm.v1.worker.gpu.warmup import warmup_kernels

# Pages are small, so that requests cross them; so is a step, so that prompts come in
# chunks. ``mode`` and ``custom_ops`` leave everything but attention to torch.
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 192,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 48,
    "block_size": 16,
    "kv_cache_memory_bytes": 2**23,
    "enable_prefix_caching": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "NONE", "custom_ops": ["none"]},
    "kernel_config": {"enable_jit_warmup": False},
    "disable_log_stats": False,
}
GREEDY: dict[str, Any] = {"temperature": 0.0}


@dataclass(frozen=True)
class Step:
    """What the scheduler gave the worker for one step, by request."""

    num_tokens: dict[str, int]
    num_drafts: dict[str, int]
    new: tuple[str, ...]


@dataclass
class Engine:
    """A running engine, and its steps so far."""

    llm: LLM
    steps: list[Step] = field(default_factory=list)

    @property
    def config(self) -> Any:
        """The engine's ``VllmConfig``."""
        return self.llm.llm_engine.vllm_config

    @property
    def core(self) -> Any:
        """The engine core."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self.core.scheduler

    @property
    def worker(self) -> Any:
        """The worker."""
        return self.core.model_executor.driver_worker.worker

    @property
    def runner(self) -> Any:
        """The model runner."""
        return self.worker.model_runner

    def generate(
        self,
        prompts: list[list[int]],
        params: dict[str, Any] | list[dict[str, Any]] = GREEDY,
        max_tokens: int = 16,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[list[int]]:
        """Answer prompts, as many at once as the engine takes.

        Args:
            prompts: token ids.
            params: of ``SamplingParams``, for all prompts or for each one.
            max_tokens: of each answer, unless its ``params`` say otherwise.
            adapters: of each prompt, None: without; None: all are without.

        Returns:
            token ids of the answers.

        """
        outputs = self.outputs(prompts, params, max_tokens, adapters)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def outputs(
        self,
        prompts: list[list[int]],
        params: dict[str, Any] | list[dict[str, Any]],
        max_tokens: int,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Do the same, and return all that vLLM says of the answers."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        common = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        return self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            [SamplingParams(**{**common, **one}) for one in each],
            use_tqdm=False,
            lora_request=adapters,
        )

    def warm_up(self) -> None:
        """Run vLLM's warm-up batches, which a card gets before it serves."""
        worker = self.worker
        warmup_kernels(self.runner, worker.execute_model, worker.sample_tokens)

    def count(self, name: str) -> int:
        """Read one of vLLM's counters, such as ``num_preemptions``."""
        (counter,) = [m for m in self.llm.get_metrics() if m.name == f"vllm:{name}"]
        assert isinstance(counter, Counter)
        return int(counter.value)

    def watch_steps(self) -> None:
        """Note every step that the scheduler makes from now on."""
        stock = self.scheduler.schedule

        def schedule(*args: Any, **options: Any) -> Any:
            output = stock(*args, **options)
            self.steps.append(
                Step(
                    dict(output.num_scheduled_tokens),
                    {r: len(d) for r, d in output.scheduled_spec_decode_tokens.items()},
                    tuple(request.req_id for request in output.scheduled_new_reqs),
                )
            )
            return output

        self.scheduler.schedule = schedule


@contextmanager
def engine(
    model: str, spec: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Engine]:
    """Start an engine in this process, and end it.

    Attention that a worker has registered in the place of Triton's ends with it.

    Args:
        model: folder of the target.
        spec: ``speculative_config``, of vLLM or of ours; None for plain decoding.
        arguments: of ``LLM``, over ``ARGUMENTS``.

    """
    llm = LLM(model, speculative_config=spec, **{**ARGUMENTS, **arguments})
    running = Engine(llm)
    running.watch_steps()
    try:
        assert running.config.use_v2_model_runner, "this engine runs on V1"
        yield running
    finally:
        AttentionBackendEnum.TRITON_ATTN.clear_override()
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
