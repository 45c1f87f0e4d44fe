"""The part of the seam table for vLLM's V2 runner and its asynchronous scheduler."""

from __future__ import annotations

from vllm_treespec.engine.seams.seam import Owner

_V2 = "vllm.v1.worker.gpu"
_RUNNER = Owner(f"{_V2}.model_runner:GPUModelRunner", "cuda")
_STATE = Owner(f"{_V2}.model_runner:ExecuteModelState", "cuda")
_BATCH = Owner(f"{_V2}.input_batch:InputBatch", "cuda")
_OUTPUT = Owner(f"{_V2}.async_utils:AsyncOutput", "cuda")
V2_RUNNER = (
    *_RUNNER.extended("the runner"),
    *_RUNNER.overrides("load_model", "draft models are loaded; trees are verified"),
    *_RUNNER.overrides("initialize_kv_cache", "room for fork blocks"),
    *_RUNNER.overrides("profile_run", "draft models are measured, too"),
    *_RUNNER.overrides("execute_model", "a step begins by drawing its trees"),
    *_RUNNER.overrides("finish_requests", "requests that ended have no trees"),
    *_RUNNER.overrides("add_requests", "texts and blocks of requests on the host"),
    *_RUNNER.overrides("update_requests", "blocks of requests on the host"),
    *_RUNNER.overrides("prepare_inputs", "which CUDA graph a step replays"),
    *_RUNNER.overrides("prepare_attn", "nodes have masks and positions"),
    *_RUNNER.overrides("prepare_dummy_attn", "a run without requests has no masks"),
    *_RUNNER.overrides("sample_tokens", "the step's tokens are awaited later"),
    *_RUNNER.overrides("postprocess_sampled", "the accepted path's KV is moved"),
    *_RUNNER.overrides("take_draft_token_ids", "trees for grammar masks"),
    *_RUNNER.calls("get_kv_cache_spec", "room for fork blocks"),
    *_RUNNER.calls("_dummy_run", "forwards are timed at the start"),
    *_RUNNER.writes("speculator", "drafts are drawn later"),
    *_RUNNER.writes("lora_state", "adapters of every node"),
    *_RUNNER.writes("rejection_sampler", "trees are verified"),
    *_RUNNER.writes("use_aux_hidden_state_outputs", "hidden states for heads"),
    *_RUNNER.reads(
        "vllm_config model_config parallel_config compilation_config kv_cache_config "
        "device model vocab_size max_model_len max_num_tokens max_num_reqs "
        "num_speculative_steps attn_groups kernel_block_sizes",
        "what the decoder is made with",
    ),
    *Owner("vllm.model_executor.models.interfaces:SupportsEagle3", "cuda").calls(
        "set_aux_hidden_state_layers", "hidden states for heads"
    ),
    *_RUNNER.reads("cudagraph_manager", "which batches have a CUDA graph"),
    *_RUNNER.reads("lora_config lora_state", "which batches have a CUDA graph"),
    *Owner(f"{_V2}.cudagraph_utils:ModelCudaGraphManager", "cuda").calls(
        "dispatch", "which batches have a CUDA graph"
    ),
    *Owner(f"{_V2}.cudagraph_utils:BatchExecutionDescriptor", "cuda").reads(
        "cg_mode num_reqs num_tokens", "which batches have a CUDA graph"
    ),
    *Owner(f"{_V2}.lora_utils", "cuda").calls(
        "get_num_active_loras_for_dispatch", "which batches have a CUDA graph"
    ),
    *_RUNNER.reads("sampler", "draws after every node"),
    *_RUNNER.reads("req_states block_tables", "the requests' rows"),
    *_RUNNER.reads("execute_model_state", "a step's batch and hidden states"),
    *_STATE.reads(
        "input_batch hidden_states aux_hidden_states",
        "a step's batch and hidden states",
    ),
    *_OUTPUT.reads(
        "model_runner_output copy_event sampled_token_ids num_sampled_tokens_np",
        "a step's tokens",
    ),
)
_GRAPHS = Owner(f"{_V2}.cudagraph_utils:CudaGraphManager", "cuda")
V2_DRAFT_GRAPHS = (
    *_GRAPHS.extended("trees are drawn in CUDA graphs"),
    *_GRAPHS.overrides("__init__ _init_candidates", "graphs that draw trees"),
    *_GRAPHS.writes("_capture_descs", "graphs that draw trees"),
    *_GRAPHS.calls("capture run_fullgraph", "graphs that draw trees"),
    *_GRAPHS.reads("graphs", "trees are drawn in CUDA graphs"),
    *Owner("vllm.config:CUDAGraphMode", "cuda").calls(
        "has_full_cudagraphs", "whether trees are drawn in CUDA graphs"
    ),
    *Owner(f"{_V2}.cudagraph_utils:BatchExecutionDescriptor", "cuda").extended(
        "graphs that draw trees"
    ),
)
_STATES = Owner(f"{_V2}.states:RequestState", "cuda")
_TABLES = Owner(f"{_V2}.block_table:BlockTables", "cuda")
_OUTPUT_OF_SCHEDULER = Owner("vllm.v1.core.sched.output:SchedulerOutput", "cuda")
_NEW_REQUEST = Owner("vllm.v1.core.sched.output:NewRequestData", "cuda")
_CACHED_REQUESTS = Owner("vllm.v1.core.sched.output:CachedRequestData", "cuda")
_BUFFERS = f"{_V2}.buffer_utils"
V2_BATCH = (
    *_BATCH.reads(
        "req_ids num_reqs idx_mapping idx_mapping_np num_scheduled_tokens "
        "query_start_loc num_computed_tokens_np prefill_len_np is_prefilling_np "
        "input_ids positions logits_indices",
        "the requests of a step",
    ),
    *_BATCH.reads(
        "expanded_idx_mapping expanded_local_pos seq_lens seq_lens_cpu_upper_bound "
        "cu_num_logits cu_num_logits_np",
        "the rows of logits",
    ),
    *_STATES.reads("req_id_to_index num_computed_tokens prefill_len", "requests' rows"),
    *_STATES.writes("draft_tokens", "the drafts of a step"),
    *_TABLES.reads("block_tables input_block_tables slot_mappings", "where KV lies"),
    *Owner(f"{_BUFFERS}:StagedWriteTensor", "cuda").reads("gpu", "requests' rows"),
    *Owner(f"{_BUFFERS}:UvaBackedTensor", "cuda").reads("np gpu", "requests' rows"),
    *_OUTPUT_OF_SCHEDULER.writes(
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens",
        "placeholders are trimmed to trees",
    ),
    *_OUTPUT_OF_SCHEDULER.reads(
        "scheduled_new_reqs scheduled_cached_reqs finished_req_ids preempted_req_ids",
        "which requests come and go",
    ),
    *_OUTPUT_OF_SCHEDULER.reads(
        "has_structured_output_requests", "whether trees must be on the host"
    ),
    *_NEW_REQUEST.reads(
        "req_id prefill_token_ids prompt_len block_ids sampling_params",
        "a request that comes",
    ),
    *_CACHED_REQUESTS.reads("req_ids new_block_ids", "blocks of requests on the host"),
)
_ROPE = Owner(f"{_V2}.mm.rope:RopeState", "cuda")
V2_AXES = (
    *_RUNNER.reads("model_state", "positions with several axes"),
    *Owner("vllm.config.model:ModelConfig", "cuda").reads(
        "uses_mrope", "positions with several axes"
    ),
    *Owner(f"{_V2}.model_states.default:DefaultModelState", "cuda").reads(
        "rope_state", "positions with several axes"
    ),
    *_ROPE.extended("tree positions on every axis"),
    *_ROPE.overrides("prepare_positions", "tree positions on every axis"),
    *_ROPE.writes("positions", "tree positions on every axis: contents"),
)
_LORA = Owner(f"{_V2}.lora_utils:LoraState", "cuda")
V2_LORA = (
    *_LORA.extended("adapters of every node"),
    *_LORA.overrides("__init__", "adapters of every node"),
    *_LORA.overrides("make_lora_inputs", "adapters of every node"),
)
_SAMPLER = Owner(f"{_V2}.sample.sampler:Sampler", "cuda")
_SAMPLING_STATES = Owner(f"{_V2}.sample.states:SamplingStates", "cuda")
_PROCESSOR = Owner(f"{_V2}.sample.logits_processor.interface:LogitsProcessor", "cuda")
V2_SAMPLING = (
    *_SAMPLER.calls("sample", "a token after every node"),
    *_SAMPLER.calls("apply_sampling_params", "logits that drawn trees are verified by"),
    *_SAMPLER.calls("get_logprobs_dims", "logprobs of drafts"),
    *_SAMPLER.reads("sampling_states logprobs_mode compute_nans", "how to sample"),
    *_SAMPLER.reads("logprob_token_ids_state", "logprobs of drafts"),
    *_SAMPLER.reads("logits_processors thinking_budget_state", "nodes have own texts"),
    *_SAMPLER.reads("needs_logits_processing", "how many requests may run"),
    *_SAMPLING_STATES.reads("temperature seeds", "how requests are sampled"),
    *_SAMPLING_STATES.calls("get_top_k_top_p", "how requests are sampled"),
    *Owner(f"{_V2}.sample.logprob", "cuda").calls(
        "compute_topk_scores", "logprobs of drafts"
    ),
    *Owner(f"{_V2}.metrics.logits", "cuda").calls("get_num_nans", "as the stock one"),
    *Owner(f"{_V2}.input_batch", "cuda").calls(
        "get_num_sampled_and_rejected", "what a step emits"
    ),
    *Owner(f"{_V2}.sample.output", "cuda").calls("SamplerOutput", "what a step emits"),
    *_PROCESSOR.extended("our check of requests"),
    *_PROCESSOR.overrides("validate_params", "our check of requests"),
    *_PROCESSOR.overrides("add_request", "our check changes no request"),
    *_PROCESSOR.overrides("apply", "our check changes no request"),
    *_PROCESSOR.overrides(
        "__init__ apply_staged_writes", "custom processors are watched"
    ),
    *Owner(f"{_V2}.sample.logit_bias", "cuda").reads(
        "LogitBiasState", "which processors are vLLM's own"
    ),
)
_PENALTIES = Owner(f"{_V2}.sample.penalties:PenaltiesState", "cuda")
_BAD_WORDS = Owner(f"{_V2}.sample.bad_words:BadWordsState", "cuda")
_THINKING = Owner(f"{_V2}.sample.thinking_budget:ThinkingBudgetState", "cuda")
V2_NODE_PROCESSORS = (
    *_PENALTIES.extended("penalties of a node's own path"),
    *_PENALTIES.overrides("apply", "penalties of a node's own path"),
    *_PENALTIES.reads(
        "use_penalty repetition_penalty frequency_penalty presence_penalty "
        "output_bin_counts",
        "penalties of a node's own path",
    ),
    *Owner(f"{_V2}.sample.penalties", "cuda").calls(
        "apply_penalties", "penalties of a node's own path"
    ),
    *_BAD_WORDS.extended("bad words behind a node's own path"),
    *_BAD_WORDS.overrides("add_request", "how long a request's words are"),
    *_BAD_WORDS.overrides("apply", "bad words behind a node's own path"),
    *_BAD_WORDS.reads(
        "req_states num_bad_words bad_word_token_ids bad_word_offsets",
        "bad words behind a node's own path",
    ),
    *Owner(f"{_V2}.sample.bad_words", "cuda").calls(
        "apply_bad_words", "bad words behind a node's own path"
    ),
    *_THINKING.extended("thinking on a node's own path"),
    *_THINKING.overrides("apply", "thinking on a node's own path"),
    *_THINKING.reads(
        "req_states enabled use_thinking_budget thinking_token_budget "
        "cached_last_start cached_last_end reasoning_start_token_ids "
        "natural_reasoning_end_token_ids reasoning_end_token_ids",
        "thinking on a node's own path",
    ),
    *Owner(f"{_V2}.sample.logits_processor.interface:LogitsContext", "cuda").reads(
        "expanded_idx_mapping expanded_local_pos idx_mapping_np input_ids",
        "the rows of logits",
    ),
    *_STATES.reads("all_token_ids total_len prompt_len", "texts of requests"),
)
_SCHEDULER = Owner("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "cuda")
_STOCK = Owner("vllm.v1.core.sched.scheduler:Scheduler", "cuda")
V2_SCHEDULER = (
    *_SCHEDULER.extended("the asynchronous scheduler"),
    *_SCHEDULER.overrides("__init__", "room for the trees of structured outputs"),
    *_SCHEDULER.overrides("_update_after_schedule", "placeholders for trees"),
    *_STOCK.overrides("update_draft_token_ids_in_output", "no grammar cuts a tree"),
    *_STOCK.reads("running num_spec_tokens scheduler_config", "how many placeholders"),
    *Owner("vllm.v1.request:Request", "cuda").reads(
        "sampling_params", "which requests have placeholders"
    ),
    *_OUTPUT_OF_SCHEDULER.writes("num_invalid_spec_tokens", "trees stay whole"),
    *_OUTPUT_OF_SCHEDULER.writes(
        "num_spec_tokens_to_schedule", "placeholders go by request"
    ),
)
