"""vLLM's GPU model runner with draft trees."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_treespec.engine.masked_draft_model import PIECEWISE, MaskedDraftModel
from vllm_treespec.engine.rehearsal import rehearse
from vllm_treespec.engine.v1.runner import TreeRunnerMixin


class TreeGPUModelRunner(TreeRunnerMixin, GPUModelRunner):
    """vLLM's V1 GPU model runner with draft trees.

    The target's CUDA graphs are stock: full ones for batches in which every request
    brings the largest tree, piecewise ones for others. Draft models get piecewise
    graphs of the same sizes, captured beside the target's.
    """

    def profile_run(self, *args: Any, **options: Any) -> None:
        """Run the models once, and draw and score trees."""
        super().profile_run(*args, **options)
        model_config = self.model_config
        num_reqs = min(self.drafter.config.max_trees, self.max_num_reqs)
        hidden = torch.zeros(
            (num_reqs, model_config.get_hidden_size()),
            dtype=model_config.dtype,
            device=self.device,
        )
        rehearse(self.drafter, num_reqs, model_config.get_vocab_size(), hidden)

    @torch.inference_mode()
    def _dummy_run(self, num_tokens: int, *args: Any, **options: Any) -> Any:
        """Run the target, and before and while piecewise graphs are captured, drafts.

        vLLM names the mode in those runs only; whole trees have graphs of the
        target's alone. With LoRA vLLM has graphs for batches with adapters only, which
        drafts are not: they run without.
        """
        outputs = super()._dummy_run(num_tokens, *args, **options)
        mode = options.get("cudagraph_runtime_mode")
        if mode in PIECEWISE and not options.get("uniform_decode"):
            mode, desc = self.cudagraph_dispatcher.dispatch(
                num_tokens, valid_modes={mode, CUDAGraphMode.NONE}
            )
            for draft_model in self.drafter.draft_models:
                assert isinstance(draft_model, MaskedDraftModel)
                draft_model.dummy_run(mode, desc)
        return outputs
