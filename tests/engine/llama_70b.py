"""The shape of Llama-2-70B on two ranks over Ray: ``python -m tests.engine.llama_70b``.

Its config is cut to two layers, with random weights that vLLM makes, and a small draft
model. Both ranks need about 7 GB of memory in bfloat16. For trees of the draft model,
trees of earlier text, and without trees it prints JSON: seconds to start and to answer,
tokens, what the ranks counted. No test runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.ray_cluster import ROOT, TwoNodes, environment, write_path

VOCAB_SIZE = 32_000
# meta-llama/Llama-2-70b-hf, but for its 80 layers
TARGET = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
}
DRAFT = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
}
RSD_S = {"method": "rsd_s", "beam_width": 3, "depth": 3, "schedule": "fixed"}
# Random targets repeat themselves: here drafts are accepted.
SUFFIX_TREE = {"method": "suffix_tree", "num_drafts": 6, "schedule": "fixed"}
NUM_PROMPTS, MAX_TOKENS = 2, 16


def write_models(folder: Path) -> None:
    """Write the target's config, and a draft model."""
    config = LlamaConfig(**TARGET, architectures=["LlamaForCausalLM"])
    config.dtype = "bfloat16"
    config.save_pretrained(folder / "target")
    torch.manual_seed(0)
    draft = LlamaForCausalLM(LlamaConfig(**DRAFT)).to(torch.bfloat16)
    draft.save_pretrained(folder / "draft")


def run(folder: Path, spec: dict[str, Any] | None) -> dict[str, Any]:
    """Start an engine and answer a few prompts; what it took."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    llm = LLM(
        model=str(folder / "target"),
        speculative_config=spec,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=NUM_PROMPTS,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=2**28,
    )
    started = time.perf_counter()
    prompts = [
        TokensPrompt(prompt_token_ids=[(31 * i * j + 3) % 31_999 for j in range(1, 33)])
        for i in range(1, NUM_PROMPTS + 1)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    found = {
        "seconds to start": round(started - began, 1),
        "seconds to answer": round(time.perf_counter() - started, 1),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    if spec is not None:
        found["ranks"] = llm.collective_rpc("treespec_stats")
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    """Run it with trees and without, in a process that has the platform plugin."""
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        nodes = TwoNodes()
        with nodes.second():
            for spec in ({**RSD_S, "model": str(folder / "draft")}, SUFFIX_TREE, None):
                name = spec["method"] if spec else "plain"
                print(f"{name}: {json.dumps(run(folder, spec))}", flush=True)
                nodes.give_places_back()
        nodes.stop()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        subprocess.run(
            [sys.executable, "-m", "tests.engine.llama_70b", name],
            cwd=ROOT,
            env=environment(write_path(folder)),
            check=True,
        )


if __name__ == "__main__":
    main()
