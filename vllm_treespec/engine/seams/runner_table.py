"""The part of the seam table for one step of vLLM's V1 runner."""

from __future__ import annotations

from vllm_treespec.engine.seams.seam import Owner

_RUNNER = Owner("vllm.v1.worker.gpu_model_runner:GPUModelRunner")
_GPU_RUNNER = _RUNNER.on("cuda")
_CPU_RUNNER = Owner("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "cpu")
RUNNER_OVERRIDDEN = (
    *_RUNNER.extended("the runner"),
    *_CPU_RUNNER.extended("the runner on a CPU"),
    *_RUNNER.overrides(
        "initialize_kv_cache_tensors", "fork blocks behind the scheduler's blocks"
    ),
    *_RUNNER.overrides("profile_run", "draft models run once; buffers that last"),
    *_GPU_RUNNER.overrides("_dummy_run", "graphs of draft models"),
    *_RUNNER.overrides("_update_states", "who is finished"),
    *_RUNNER.overrides("_prepare_inputs", "node order and tree positions"),
    *_RUNNER.overrides("_sample", "scoring"),
    *_RUNNER.overrides("_update_states_after_model_execute", "commit of KV"),
    *_RUNNER.on("cpu").overrides(
        "_bookkeeping_sync",
        "generators of seeded requests whose prompt is read in chunks",
    ),
    *_RUNNER.overrides(
        "_input_fits_in_drafter",
        "drafting near max_model_len is decided per request",
    ),
    *_RUNNER.overrides(
        "_get_eagle3_aux_layers_from_config", "the layers that a head reads"
    ),
    *_RUNNER.overrides("propose_draft_token_ids", "the next draft trees"),
    *_RUNNER.overrides("take_draft_token_ids", "trees go to the scheduler"),
)
RUNNER_READ = (
    *_RUNNER.relies("load_model", "it loads our drafter after the target"),
    *_RUNNER.calls("get_kv_cache_spec", "room for fork blocks"),
    *_RUNNER.calls("_dummy_run _sync_device", "forwards are timed at the start"),
    *_RUNNER.reads("model", "forwards are timed at the start: its output layer"),
    *_RUNNER.reads(
        "vllm_config model_config parallel_config scheduler_config "
        "compilation_config device max_model_len max_num_tokens max_num_reqs",
        "the limits of the engine",
    ),
    *_RUNNER.reads("drafter", "vLLM made it from our class"),
    *_RUNNER.reads("sampler", "requests that cannot have trees are sampled by it"),
    *_RUNNER.reads("requests input_batch", "the requests of a step"),
    *_RUNNER.writes(
        "use_aux_hidden_state_outputs", "the layers that a head reads: they are kept"
    ),
    *_RUNNER.relies(
        "_setup_eagle3_aux_hidden_state_outputs", "the target learns which layers"
    ),
    *_RUNNER.reads("discard_request_mask", "requests whose prompt is not complete yet"),
    *_RUNNER.writes(
        "input_ids positions", "node order and tree positions: their contents"
    ),
    *_RUNNER.reads("uses_mrope", "positions with several axes"),
    *_RUNNER.writes("mrope_positions", "tree positions on every axis: contents"),
    *_RUNNER.reads(
        "query_start_loc num_computed_tokens", "where the rows of a request are"
    ),
    *_RUNNER.reads("attn_groups", "metadata of draft models; our builders see trees"),
    *_GPU_RUNNER.reads("cudagraph_dispatcher", "graphs of draft models"),
    *Owner("vllm.config.compilation:CompilationConfig").reads(
        "static_forward_context", "the layers of the models"
    ),
    *Owner("vllm.config.scheduler:SchedulerConfig").reads(
        "max_num_scheduled_tokens policy", "the scheduler's budget of tokens"
    ),
    *Owner("vllm.config.model:ModelConfig").reads(
        "dtype seed", "what the target computes in"
    ),
    *Owner("vllm.config.model:ModelConfig").calls(
        "get_total_num_hidden_layers", "hidden states by layer"
    ),
    *Owner("vllm.config.model:ModelConfig", "cuda").calls(
        "get_num_attention_heads get_head_size get_hidden_size",
        "buffers that last",
    ),
)

_BATCH = Owner("vllm.v1.worker.gpu_input_batch:InputBatch")
_BLOCK_TABLE = Owner("vllm.v1.worker.block_table:BlockTable")
BATCH = (
    *_BATCH.reads("num_reqs req_ids req_id_to_index", "the requests of the batch"),
    *_BATCH.reads(
        "num_computed_tokens_cpu num_tokens_no_spec token_ids_cpu",
        "the tokens of the requests",
    ),
    *_BATCH.reads("temperature_cpu sampling_metadata", "how requests are sampled"),
    *_BATCH.reads(
        "repetition_penalties_cpu frequency_penalties_cpu presence_penalties_cpu "
        "num_prompt_tokens",
        "penalties after every node of a tree",
    ),
    *_BATCH.writes("generators", "those of incomplete prompts are set aside: contents"),
    *_BATCH.writes(
        "logitsprocs logitsprocs_need_output_token_ids",
        "custom logits processors, which the stock runner leaves out",
    ),
    *_BATCH.reads("block_table", "the KV blocks of the requests"),
    *Owner("vllm.v1.worker.block_table:MultiGroupBlockTable").calls(
        "__getitem__", "the block tables of the KV cache groups"
    ),
    *_BLOCK_TABLE.reads(
        "block_table num_blocks_per_row slot_mapping", "the KV blocks of the requests"
    ),
    *_BLOCK_TABLE.calls("get_device_tensor", "the KV blocks of the requests"),
    *Owner("vllm.v1.utils:CpuGpuBuffer").reads("np gpu", "arrays of the batch"),
    *Owner("vllm.v1.worker.gpu_input_batch:CachedRequestState").reads(
        "sampling_params prompt_embeds prompt_token_ids mm_features",
        "which requests draft trees",
    ),
    *Owner("vllm.multimodal.inputs:MultiModalFeatureSpec").reads(
        "modality", "which requests draft trees"
    ),
)

_OUTPUT = "vllm.v1.core.sched.output"
_METADATA = Owner("vllm.v1.sample.metadata:SamplingMetadata")
_SAMPLER = Owner("vllm.v1.sample.sampler:Sampler")
STEP = (
    *Owner(f"{_OUTPUT}:SchedulerOutput").reads(
        "finished_req_ids scheduled_new_reqs scheduled_cached_reqs",
        "which requests came, went and were preempted",
    ),
    *Owner(f"{_OUTPUT}:SchedulerOutput").reads(
        "num_scheduled_tokens scheduled_spec_decode_tokens", "what the target reads"
    ),
    *Owner(f"{_OUTPUT}:SchedulerOutput").reads(
        "preempted_req_ids", "whether trees had the room that they seem to have had"
    ),
    *Owner(f"{_OUTPUT}:NewRequestData").reads("req_id", "which requests came"),
    *Owner(f"{_OUTPUT}:CachedRequestData").reads(
        "resumed_req_ids", "which requests were preempted"
    ),
    *Owner("vllm.sampling_params:SamplingParams").reads(
        "min_p min_tokens logit_bias bad_words allowed_token_ids logprob_token_ids "
        "thinking_token_budget structured_outputs logprobs extra_args",
        "which requests draft trees",
    ),
    *Owner("vllm.sampling_params:SamplingParams").reads(
        "seed", "random numbers of a request"
    ),
    *Owner("vllm.sampling_params:SamplingParams").reads(
        "all_stop_token_ids bad_words_token_ids", "what a request must not emit"
    ),
)
_PROCESSORS = "vllm.v1.sample.logits_processor"
SAMPLING = (
    *Owner(_PROCESSORS).calls(
        "cached_load_custom_logitsprocs LogitsProcessors", "custom logits processors"
    ),
    *Owner(f"{_PROCESSORS}:LogitsProcessors").reads("all", "custom logits processors"),
    *Owner(_PROCESSORS).reads("LogitsProcessor", "named in annotations"),
    *Owner(f"{_PROCESSORS}:AdapterLogitsProcessor").reads(
        "req_info update_state apply", "which requests a custom processor changes"
    ),
    *Owner("vllm.utils.torch_utils").reads("PIN_MEMORY", "custom logits processors"),
    *_METADATA.reads("temperature top_k top_p", "how requests are sampled"),
    *_METADATA.reads("no_penalties", "whether requests have penalties"),
    *_METADATA.writes(
        "generators max_num_logprobs", "requests without a tree are sampled apart"
    ),
    *_METADATA.reads("logprob_token_ids", "logprobs of drafts"),
    *_SAMPLER.calls("forward", "requests that cannot have trees are sampled by it"),
    *_SAMPLER.calls(
        "compute_logprobs gather_logprobs gather_specific_token_logprobs",
        "logprobs of drafts",
    ),
    *_SAMPLER.reads("logprobs_mode", "logprobs of drafts"),
    *Owner("vllm.v1.outputs").calls("SamplerOutput", "what a step emits"),
    *Owner("vllm.v1.outputs:SamplerOutput").reads(
        "sampled_token_ids logprobs_tensors", "what a step emits"
    ),
    *Owner("vllm.v1.outputs").calls(
        "LogprobsTensors", "logprobs of requests without a tree"
    ),
    *Owner("vllm.v1.outputs:LogprobsTensors").reads(
        "logprob_token_ids logprobs selected_token_ranks",
        "logprobs of requests without a tree",
    ),
)
