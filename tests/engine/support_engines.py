"""Rows of the support matrix about the engine and its models."""

from __future__ import annotations

from typing import Any

from tests.engine.support_checks import (
    HERE,
    TEXTS,
    Arguments,
    Model,
    Outcome,
    Own,
    Row,
    Same,
)

TREE, REFUSED = Outcome.TREE, Outcome.REFUSED
KINDS = "tests/engine/test_model_kinds.py"
GROUPS = "tests/engine/test_kv_groups.py"
IMAGES = "tests/engine/test_images.py"
READABLE = "tests/fast/test_images.py"
ENGINE = (
    Row(
        "prefix caching",
        TREE,
        Own(f"{HERE}::test_prefix_cache"),
    ),
    Row(
        "chunked prefill",
        TREE,
        Same(
            ({}, {"max_tokens": 40}, {"max_tokens": 40}),
            (280, TEXTS[1], TEXTS[2]),
            alone=True,
        ),
    ),
    Row(
        "preemption",
        TREE,
        Own(f"{HERE}::test_preemption"),
    ),
    Row(
        "priority scheduling",
        TREE,
        Same(
            ({"max_tokens": 30},) * 3,
            job={"priorities": [2, 1, 0]},
            engine="tight",
            alone=True,
        ),
    ),
    Row(
        "LoRA on the target",
        TREE,
        Own(f"{HERE}::test_lora"),
        "a draft model runs without the adapter",
    ),
    Row(
        "async scheduling",
        REFUSED,
        Arguments({"async_scheduling": True}, "async_scheduling=True"),
        "V1: off by default with our methods",
        gpu="V1: the same; V2: drafts trees",
    ),
    Row(
        "prompt embeddings",
        Outcome.PLAIN,
        Own("tests/engine/test_per_request.py::test_prompt_embeddings"),
        "only requests with embeddings",
    ),
    Row(
        "quantised KV cache",
        REFUSED,
        Arguments({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        gpu="drafts trees: fp8, one scale a tensor; not run",
    ),
    Row(
        "KV connectors",
        REFUSED,
        Arguments(
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                }
            },
            "kv_transfer_config=",
        ),
    ),
    Row(
        "encoder cache connectors",
        REFUSED,
        Arguments(
            {
                "ec_transfer_config": {
                    "ec_connector": "ECExampleConnector",
                    "ec_role": "ec_consumer",
                }
            },
            "ec_transfer_config=",
        ),
    ),
    Row(
        "KV offloading",
        REFUSED,
        Arguments({"kv_offloading_size": 1.0}, "kv_offloading_size=1.0"),
    ),
    Row(
        "tensor parallel",
        TREE,
        Own("tests/engine/test_tensor_parallel.py::test_two_ranks_answer_as_one"),
        "the number of ranks must divide a draft model's heads",
    ),
    Row(
        "pipeline parallel",
        REFUSED,
        Arguments({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
    ),
    Row(
        "data parallel",
        TREE,
        Own("tests/engine/test_data_parallel.py::test_two_engines_answer_as_one"),
        "each engine has an index and a schedule of its own",
    ),
    Row(
        "data parallel for mixtures of experts",
        REFUSED,
        Own(
            "tests/engine/test_refusals.py::test_experts_in_several_engines_are_refused"
        ),
        "their engines step together; run one engine a replica",
    ),
    Row(
        "prefill context parallel",
        REFUSED,
        Arguments({"prefill_context_parallel_size": 2}, "prefill_context_parallel"),
    ),
    Row(
        "decode context parallel",
        REFUSED,
        Arguments({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
    ),
    Row(
        "dual batch overlap",
        REFUSED,
        Arguments({"enable_dbo": True}, "enable_dbo=True"),
    ),
    Row(
        "batch-sharded sampling",
        REFUSED,
        Arguments(
            {"enable_batch_sharded_sampling": True},
            "enable_batch_sharded_sampling=True",
        ),
    ),
    Row(
        "fast prefill",
        REFUSED,
        Arguments({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill=True"),
    ),
    Row(
        "watermarks",
        REFUSED,
        Arguments({"watermark_config": {"algorithm": "gumbel"}}, "watermark_config="),
    ),
    Row(
        "routed experts",
        REFUSED,
        Arguments({"enable_return_routed_experts": True}, "routed_experts=True"),
    ),
    Row(
        "prompt chunks shorter than a tree",
        REFUSED,
        Arguments(
            {"long_prefill_token_threshold": 2}, "long_prefill_token_threshold=2"
        ),
        "`long_prefill_token_threshold`: 0, or at least the nodes of a tree",
    ),
    Row(
        "another worker class",
        REFUSED,
        Arguments({"worker_cls": "some.Worker"}, "worker_cls='some.Worker'"),
    ),
    Row(
        "another scheduler class",
        REFUSED,
        Arguments(
            {"scheduler_cls": "some.Scheduler"}, "scheduler_cls='some.Scheduler'"
        ),
    ),
    Row(
        "several KV cache groups for a draft model",
        REFUSED,
        Arguments(
            {"disable_hybrid_kv_cache_manager": False},
            "disable_hybrid_kv_cache_manager=False",
        ),
        "leave `disable_hybrid_kv_cache_manager` out: [we set it](dev/layouts.md)",
    ),
    Row(
        "other keys in speculative_config",
        REFUSED,
        Arguments(
            {"speculative_config": {"num_speculative_tokens": 5}},
            "'num_speculative_tokens' is for vLLM's own methods",
        ),
    ),
)

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 49152,
}


def small(model_type: str, architecture: str, **config: object) -> dict[str, Any]:
    """The config.json of a small model of some architecture."""
    return {
        **_SMALL,
        "model_type": model_type,
        "architectures": [architecture],
        **config,
    }


MODELS = (
    Row(
        "multi-head latent attention (MLA)",
        REFUSED,
        Model(
            small(
                "deepseek_v2",
                "DeepseekV2ForCausalLM",
                kv_lora_rank=16,
                q_lora_rank=None,
                qk_nope_head_dim=16,
                qk_rope_head_dim=16,
                v_head_dim=16,
            ),
            "multi-head latent attention",
        ),
    ),
    Row(
        "state-space models (Mamba)",
        REFUSED,
        Model(
            small("mamba", "MambaForCausalLM", state_size=16),
            "a hybrid or state-space model",
        ),
    ),
    Row(
        "hybrid models",
        REFUSED,
        Model(
            small(
                "falcon_h1",
                "FalconH1ForCausalLM",
                mamba_d_ssm=64,
                mamba_n_heads=4,
                mamba_d_head=16,
                mamba_d_state=16,
            ),
            "a hybrid or state-space model",
        ),
    ),
    Row(
        "sliding-window attention",
        TREE,
        Own(f"{KINDS}::test_tokens_equal_plain"),
    ),
    Row(
        "sliding windows in some layers (Gemma 3)",
        TREE,
        Own(f"{KINDS}::test_tokens_equal_plain"),
        "with a draft model every layer keeps the KV of all tokens; the log says what "
        "that costs",
    ),
    Row(
        "several KV cache groups (windows in some layers)",
        TREE,
        Own(f"{GROUPS}::test_tokens_equal_plain"),
        "without draft models; [heads where their layer fits](dev/layouts.md)",
    ),
    Row(
        "attention sinks (GPT-OSS)",
        TREE,
        Own(f"{KINDS}::test_tokens_equal_plain"),
        "with windows in some layers, as above",
    ),
    Row(
        "chunked local attention (Llama 4, text only)",
        TREE,
        Own(f"{KINDS}::test_tokens_equal_plain"),
        gpu="refused at start-up",
    ),
    Row(
        "images in prompts (Qwen2.5-VL with M-RoPE, Gemma 3)",
        TREE,
        Own(f"{IMAGES}::test_tokens_equal_plain"),
        "[every method](#images-in-prompts)",
    ),
    Row(
        "video, audio and other inputs in prompts",
        Outcome.PLAIN,
        Own(f"{READABLE}::test_other_inputs_than_images_get_no_drafts"),
        "requests without them draft trees; no engine has run it",
    ),
    Row(
        "images whose tokens see each other in both directions (Gemma 3)",
        TREE,
        Own(f"{READABLE}::test_what_a_gpu_would_read_otherwise_is_refused"),
        "stock vLLM on a CPU reads them causally, and so do we",
        "refused at start-up",
    ),
    Row(
        "multimodal draft models",
        REFUSED,
        Own(f"{IMAGES}::test_draft_models_with_images_are_named"),
        "a draft model reads token ids only",
    ),
    Row(
        "pruning of videos (`video_pruning_rate`)",
        REFUSED,
        Own(f"{READABLE}::test_pruning_is_refused"),
    ),
    Row(
        "encoder-decoder models",
        REFUSED,
        Model(
            {
                "model_type": "bart",
                "architectures": ["BartForConditionalGeneration"],
                "d_model": 64,
                "vocab_size": 49152,
            },
            "an encoder-decoder model",
        ),
    ),
    Row(
        "pooling models",
        REFUSED,
        Model(
            small("llama", "LlamaForCausalLM"),
            "a pooling model",
            {"runner": "pooling", "convert": "embed"},
        ),
    ),
    Row(
        "quantised target weights: compressed-tensors int8, fp8 and int4, GPTQ, AWQ",
        TREE,
        Own(f"{KINDS}::test_tokens_equal_plain"),
        "4 bit on a CPU: bfloat16 only. int8 activations depend on the batch, in stock "
        "vLLM too",
    ),
    Row(
        "quantised draft models",
        TREE,
        Own(f"{KINDS}::test_tokens_equal_plain"),
    ),
    Row(
        "a head on a target whose output layer or embedding is quantised",
        REFUSED,
        Own(f"{KINDS}::test_quantised_output_layers_are_named"),
        "a head trained with `--own-output` works",
    ),
    Row(
        "quantised KV cache that a checkpoint asks for (`kv_cache_scheme`)",
        REFUSED,
        Model(
            small(
                "llama",
                "LlamaForCausalLM",
                quantization_config={
                    "quant_method": "compressed-tensors",
                    "format": "int-quantized",
                    "config_groups": {},
                    "kv_cache_scheme": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "tensor",
                        "symmetric": True,
                        "dynamic": False,
                    },
                },
            ),
            "'kv_cache_scheme'",
        ),
        "`--kv-cache-dtype bfloat16` overrides it",
        "drafts trees, not run; refused for a draft model",
    ),
)
