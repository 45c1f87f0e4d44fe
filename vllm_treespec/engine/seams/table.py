"""The seam table: every function we override or call, every attribute we use.

What the runner and its batch are used for stands in ``runner_table.py``. The tests
compare the table with our code, in both directions.
"""

from __future__ import annotations

from vllm_treespec.engine.seams.runner_table import (
    BATCH,
    RUNNER_OVERRIDDEN,
    RUNNER_READ,
    SAMPLING,
    STEP,
)
from vllm_treespec.engine.seams.seam import Owner, Seam
from vllm_treespec.engine.seams.v2_table import (
    V2_AXES,
    V2_BATCH,
    V2_DRAFT_GRAPHS,
    V2_LORA,
    V2_NODE_PROCESSORS,
    V2_RUNNER,
    V2_SAMPLING,
    V2_SCHEDULER,
)

_ENGINE_ARGS = Owner("vllm.engine.arg_utils:EngineArgs")
_CONFIG = Owner("vllm.config")
_VLLM_CONFIG = Owner("vllm.config.vllm:VllmConfig")
_MODEL_CONFIG = Owner("vllm.config.model:ModelConfig")
_PARALLEL_CONFIG = Owner("vllm.config.parallel:ParallelConfig")
_SCHEDULER_CONFIG = Owner("vllm.config.scheduler:SchedulerConfig")
_SPECULATIVE_CONFIG = Owner("vllm.config.speculative:SpeculativeConfig")
_CACHE_CONFIG = Owner("vllm.config.cache:CacheConfig")
_ATTENTION_CONFIG = Owner("vllm.config.attention:AttentionConfig")
_LOGITS_PROCESSOR = Owner("vllm.v1.sample.logits_processor.interface:LogitsProcessor")
_PLATFORMS = Owner("vllm.platforms")
_PLATFORM = Owner("vllm.platforms.interface:Platform")
ARGUMENTS = (
    *Owner("vllm").reads("__version__", "whether this vLLM is supported"),
    *_ENGINE_ARGS.wraps(
        "create_engine_config",
        "our method's name becomes stock arguments here (the only function wrapped)",
    ),
    *_ENGINE_ARGS.writes(
        "speculative_config worker_cls scheduler_cls additional_config block_size "
        "attention_backend disable_hybrid_kv_cache_manager",
        "the stock arguments that a spec-config stands for",
    ),
    *_ENGINE_ARGS.reads(
        "pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size enable_dbo kv_transfer_config "
        "ec_transfer_config kv_offloading_size async_scheduling kv_cache_dtype "
        "return_sampling_mask attention_config watermark_config aux_output_config "
        "enable_batch_sharded_sampling kv_sharing_fast_prefill",
        "arguments under which draft trees were not tested are refused",
    ),
    *Owner("vllm.config.aux_output:AuxOutputConfig").reads(
        "enable_return_routed_experts", "that would be those of rejected drafts"
    ),
    *_ENGINE_ARGS.reads("disable_log_stats", "whether there are metrics"),
    *_CONFIG.reads("AttentionConfig", "which attention the user asked for"),
    *_ATTENTION_CONFIG.calls(
        "validate_backend_before", "which attention the user asked for"
    ),
    *_ATTENTION_CONFIG.reads(
        "backend backend_per_kind", "which attention the user asked for"
    ),
    *_PLATFORMS.reads("current_platform", "whether this is a CPU or a GPU"),
    *_PLATFORM.reads("device_name", "whether this is a CPU or a GPU"),
    *_PLATFORM.calls("get_device_name", "what kept times belong to"),
    *Owner("vllm.envs").reads("VLLM_CACHE_ROOT", "where times are kept"),
    *_MODEL_CONFIG.reads("dtype enforce_eager", "what kept times belong to"),
    *_CONFIG.reads("VllmConfig", "the config of an engine"),
    *_VLLM_CONFIG.reads(
        "model_config parallel_config scheduler_config speculative_config "
        "structured_outputs_config device_config load_config quant_config "
        "cache_config",
        "the parts of the config",
    ),
    *_VLLM_CONFIG.reads("additional_config", "our settings travel to every worker"),
    *_VLLM_CONFIG.reads("use_v2_model_runner", "which of vLLM's runners runs"),
    *_MODEL_CONFIG.reads(
        "is_hybrid has_inner_state use_mla is_encoder_decoder runner_type "
        "attention_chunk_size is_mm_prefix_lm multimodal_config",
        "targets that draft trees cannot serve are refused",
    ),
    *Owner("vllm.config.multimodal:MultiModalConfig").calls(
        "is_multimodal_pruning_enabled",
        "targets that draft trees cannot serve are refused",
    ),
    *_MODEL_CONFIG.calls("get_sliding_window", "a draft model has a window of its own"),
    *_CACHE_CONFIG.writes("sliding_window", "a draft model has a window of its own"),
    *_CACHE_CONFIG.reads("cache_dtype", "whether models may quantise the KV cache"),
    *_MODEL_CONFIG.reads(
        "model hf_text_config max_model_len trust_remote_code",
        "whether target and draft model or head fit",
    ),
    *_MODEL_CONFIG.calls(
        "get_vocab_size", "whether target and draft model or head fit"
    ),
    *Owner("vllm.transformers_utils.config").calls(
        "get_config", "the sizes of a draft model"
    ),
    *_MODEL_CONFIG.calls(
        "get_diff_sampling_param", "whether the model's defaults hold min_p"
    ),
    *_MODEL_CONFIG.writes(
        "logits_processors", "our check of requests: they may say 'treespec'"
    ),
    *_LOGITS_PROCESSOR.extended("our check of requests"),
    *_LOGITS_PROCESSOR.overrides("validate_params", "our check of requests"),
    *Owner("vllm.v1.sample.logits_processor").relies(
        "validate_logits_processors_parameters",
        "the front-end asks our check about each request",
    ),
    *_PARALLEL_CONFIG.reads(
        "tensor_parallel_size", "whether a draft model can be divided like the target"
    ),
    *_PARALLEL_CONFIG.reads("data_parallel_size", "how many engines count"),
    *_MODEL_CONFIG.reads("is_moe", "whether engines step together"),
    *_SCHEDULER_CONFIG.reads(
        "long_prefill_token_threshold", "chunks that would cut trees are refused"
    ),
    *_SPECULATIVE_CONFIG.reads(
        "num_speculative_tokens", "the nodes of the largest tree"
    ),
    *_SPECULATIVE_CONFIG.relies(
        "method model", "'custom_class' and the class of our drafter"
    ),
    *Owner("vllm.v1.spec_decode.custom_class_proposer").relies(
        "create_custom_proposer", "the runner makes our drafter"
    ),
    *Owner("vllm.config.structured_outputs:StructuredOutputsConfig").reads(
        "reasoning_parser enable_in_reasoning",
        "whether a grammar begins at the end of some reasoning only",
    ),
)

_CPU_WORKER = Owner("vllm.v1.worker.cpu_worker:CPUWorker", "cpu")
_GPU_WORKER = Owner("vllm.v1.worker.gpu_worker:Worker", "cuda")
_WORKER_BASE = Owner("vllm.v1.worker.worker_base")
WORKER = (
    *Owner("vllm.v1.worker.worker_base:WorkerWrapperBase").relies(
        "init_worker", "it makes our worker, whose name is in 'worker_cls'"
    ),
    *_CPU_WORKER.extended("the worker on a CPU"),
    *_CPU_WORKER.overrides("init_device", "our runner on CPU"),
    *_CPU_WORKER.overrides("determine_available_memory", "room for fork blocks"),
    *_CPU_WORKER.overrides("compile_or_warm_up_model", "forwards are timed"),
    *_CPU_WORKER.writes(
        "model_runner", "its class becomes ours: the stock method names its runner"
    ),
    *_GPU_WORKER.extended("the worker on a GPU"),
    *_GPU_WORKER.overrides("_make_model_runner", "our runner"),
    *_GPU_WORKER.overrides("determine_available_memory", "room for fork blocks"),
    *_GPU_WORKER.overrides(
        "compile_or_warm_up_model", "tree attention is compiled, forwards are timed"
    ),
    *_GPU_WORKER.reads("model_runner", "tree attention is compiled"),
    *_WORKER_BASE.reads("CompilationTimes", "named in annotations"),
    *Owner("vllm.v1.worker.worker_base:WorkerBase").reads(
        "vllm_config device cache_config", "what a runner is made with"
    ),
    *Owner("vllm.config.cache:CacheConfig").reads("block_size", "room for fork blocks"),
)

_SCHEDULER = Owner("vllm.v1.core.sched.scheduler:Scheduler")
_OUTPUT = Owner("vllm.v1.core.sched.output")
_GRAMMAR_OUTPUT = Owner("vllm.v1.core.sched.output:GrammarOutput")
_GRAMMAR_BACKEND = Owner("vllm.v1.structured_output.backend_types")
_GRAMMAR = Owner(
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar",
)
_REQUEST = Owner("vllm.v1.request:Request")
_OUTPUTS = Owner("vllm.v1.outputs")
_DRAFT_TOKEN_IDS = Owner("vllm.v1.outputs:DraftTokenIds")
SCHEDULER = (
    *_SCHEDULER_CONFIG.relies(
        "get_scheduler_cls", "it names our scheduler, which is in 'scheduler_cls'"
    ),
    *_SCHEDULER.extended("the scheduler"),
    *_SCHEDULER.overrides("__init__", "room for the trees of structured outputs"),
    *_SCHEDULER.overrides("update_draft_token_ids", "no grammar cuts a tree"),
    *_SCHEDULER.overrides("get_grammar_bitmask", "a grammar mask for every node"),
    *_SCHEDULER.overrides("update_from_output", "which trees vLLM does not count"),
    *_SCHEDULER.overrides("make_spec_decoding_stats", "padding is no tree"),
    *_SCHEDULER.overrides("_handle_stopped_request", "where a session goes on"),
    *_SCHEDULER.reads("vllm_config log_stats", "metrics, if the engine keeps any"),
    *_SCHEDULER.reads("requests structured_output_manager", "grammar masks"),
    *_DRAFT_TOKEN_IDS.extended("drafts travel with their trees"),
    *_DRAFT_TOKEN_IDS.reads("req_ids draft_token_ids", "the drafts"),
    *_REQUEST.writes("spec_token_ids", "the drafts of structured outputs"),
    *_REQUEST.reads("status", "which requests take drafts"),
    *Owner("vllm.v1.request:RequestStatus").reads(
        "RUNNING", "which requests take drafts"
    ),
    *_REQUEST.writes("num_computed_tokens", "where a session goes on"),
    *_REQUEST.reads("num_tokens", "where a session goes on"),
    *_REQUEST.reads("use_structured_output", "which requests have a grammar"),
    *_REQUEST.reads("is_prefill_chunk", "which requests take drafts"),
    *_REQUEST.calls("is_finished", "which trees vLLM does not count"),
    *_REQUEST.reads("structured_output_request", "the grammar of a request"),
    *Owner("vllm.v1.structured_output:StructuredOutputManager").reads(
        "backend", "masks of a tree"
    ),
    *Owner("vllm.v1.structured_output.request:StructuredOutputRequest").reads(
        "grammar", "the grammar of a request"
    ),
    *_GRAMMAR_BACKEND.reads("StructuredOutputGrammar", "the grammar of a request"),
    *_GRAMMAR.calls("fill_bitmask", "the mask after a node"),
    *_GRAMMAR.calls("accept_tokens", "down a tree"),
    *_GRAMMAR.calls("rollback", "up a tree"),
    *_GRAMMAR.calls("is_terminated", "nothing is masked behind its end"),
    *Owner("vllm.v1.structured_output.backend_types:StructuredOutputBackend").calls(
        "allocate_token_bitmask", "masks of a tree"
    ),
    *_OUTPUT.calls("GrammarOutput", "grammar masks"),
    *_GRAMMAR_OUTPUT.reads(
        "structured_output_request_ids grammar_bitmask num_acceptable_drafts",
        "grammar masks of the requests without a tree",
    ),
)

_REGISTRY = Owner("vllm.v1.attention.backends.registry")
_BACKENDS = Owner("vllm.v1.attention.backends.registry:AttentionBackendEnum")
_ATTENTION = Owner("vllm.v1.attention.backend")
_METADATA = Owner("vllm.v1.attention.backend:CommonAttentionMetadata")
_CPU = "vllm.v1.attention.backends.cpu_attn"
_CPU_BACKEND = Owner(f"{_CPU}:CPUAttentionBackend", "cpu")
_CPU_IMPL = Owner(f"{_CPU}:CPUAttentionBackendImpl", "cpu")
_CPU_BUILDER = Owner(f"{_CPU}:CPUAttentionMetadataBuilder", "cpu")
_TRITON = "vllm.v1.attention.backends.triton_attn"
_TRITON_BACKEND = Owner(f"{_TRITON}:TritonAttentionBackend", "cuda")
_TRITON_IMPL = Owner(f"{_TRITON}:TritonAttentionImpl", "cuda")
_TRITON_METADATA = Owner(f"{_TRITON}:TritonAttentionMetadata", "cuda")
_TRITON_BUILDER = Owner(f"{_TRITON}:TritonAttentionMetadataBuilder", "cuda")
_LAYER = "vllm.model_executor.layers.attention.attention"
_CHUNKED = "vllm.model_executor.layers.attention.chunked_local_attention"
ATTENTION = (
    *_REGISTRY.calls("register_backend", "our attention backend"),
    *_BACKENDS.on("cpu").reads("CPU_ATTN", "our attention backend takes its place"),
    *_BACKENDS.on("cuda").reads("TRITON_ATTN", "ours takes its place"),
    *_METADATA.writes(
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound "
        "num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor "
        "slot_mapping positions is_prefilling causal",
        "batches of branches, of draft models, of blocks and of the warm-up",
    ),
    *_ATTENTION.reads("AttentionLayer AttentionMetadata", "named in annotations"),
    *Owner("vllm.v1.attention.backends.utils", "cpu").calls(
        "make_local_attention_virtual_batches", "chunked local attention of branches"
    ),
    *Owner(_CHUNKED, "cpu").reads("ChunkedLocalAttention", "which layers see chunks"),
    *Owner(f"{_CHUNKED}:ChunkedLocalAttention", "cpu").reads(
        "attention_chunk_size", "chunked local attention of branches"
    ),
    *_CPU_BACKEND.extended("attention along branches"),
    *_CPU_BACKEND.overrides("get_impl_cls", "attention along branches"),
    *_CPU_BACKEND.overrides("get_builder_cls", "attention along branches"),
    *_CPU_IMPL.extended("attention along branches"),
    *_CPU_IMPL.overrides("do_kv_cache_update", "KV of a node goes to every branch"),
    *_CPU_BUILDER.extended("attention along branches"),
    *_CPU_BUILDER.overrides("build", "one sequence a branch"),
    *_TRITON_BACKEND.extended("tree attention"),
    *_TRITON_BACKEND.overrides("get_impl_cls", "tree attention"),
    *_TRITON_BACKEND.overrides("get_builder_cls", "tree attention"),
    *_TRITON_BUILDER.extended("masks of a batch"),
    *_TRITON_BUILDER.overrides("build", "masks of a batch"),
    *_TRITON_BUILDER.overrides("build_for_cudagraph_capture", "masks of a graph"),
    *_TRITON_BUILDER.writes("_cudagraph_support", "graphs of batches with trees"),
    *_TRITON_BUILDER.reads("num_heads_q headdim", "room for partial results"),
    *_TRITON_BUILDER.reads("vllm_config", "the nodes of the largest tree"),
    *_TRITON_METADATA.extended("metadata with masks"),
    *_TRITON_METADATA.reads(
        "num_actual_tokens query_start_loc seq_lens block_table max_query_len",
        "arguments of the tree kernel",
    ),
    *_TRITON_IMPL.extended("tree attention"),
    *_TRITON_IMPL.overrides("__init__", "layers that the tree kernel leaves out"),
    *_TRITON_IMPL.overrides("forward", "tree attention"),
    *_TRITON_IMPL.calls("do_kv_cache_update", "contexts of one-pass heads"),
    *_TRITON_IMPL.overrides(
        "fused_output_quant_supported", "the tree kernel quantises no output"
    ),
    *_TRITON_IMPL.writes(
        "supports_quant_query_input", "the tree kernel takes queries as they are"
    ),
    *_TRITON_IMPL.reads(
        "alibi_slopes use_alibi_sqrt attn_type kv_cache_dtype chunk_lookback "
        "kv_sharing_target_layer_name",
        "layers that the tree kernel leaves out",
    ),
    *_TRITON_IMPL.reads(
        "num_heads head_size scale sliding_window sinks logits_soft_cap fp8_dtype "
        "_kv_quant_mode",
        "arguments of the tree kernel",
    ),
    *_ATTENTION.reads("AttentionCGSupport AttentionType", "modes of attention"),
    *Owner("vllm.v1.attention.backend:AttentionCGSupport", "cuda").reads(
        "UNIFORM_BATCH", "graphs of batches with trees"
    ),
    *Owner("vllm.v1.attention.backend:AttentionType", "cuda").reads(
        "DECODER", "layers that the tree kernel leaves out"
    ),
    *Owner("vllm.v1.kv_cache_interface:KVQuantMode", "cuda").reads(
        "NONE FP8_PER_TENSOR", "KV caches that the tree kernel reads"
    ),
    *Owner(f"{_LAYER}:Attention").reads("impl", "our attention in a layer"),
    *Owner(f"{_LAYER}:Attention", "cuda").reads("kv_cache", "tree attention"),
    *Owner(f"{_LAYER}:set_default_quant_scales", "cuda").reads(
        "_k_scale _v_scale", "scales of an 8-bit KV cache"
    ),
)

_KV_CACHE = "vllm.v1.kv_cache_interface"
_GROUP = Owner("vllm.v1.worker.utils:AttentionGroup")
KV_CACHE = (
    *Owner(f"{_KV_CACHE}:KVCacheConfig").writes(
        "num_blocks kv_cache_tensors", "fork blocks behind the scheduler's blocks"
    ),
    *Owner(f"{_KV_CACHE}:KVCacheConfig").reads(
        "kv_cache_groups", "trees lie in every group"
    ),
    *Owner(f"{_KV_CACHE}:KVCacheGroupSpec").reads(
        "kv_cache_spec layer_names", "how KV blocks are laid out"
    ),
    *Owner("vllm.v1.core.kv_cache_utils")
    .of("0.32")
    .calls("get_kv_cache_groups", "room for fork blocks of every group"),
    *Owner("vllm.v1.core.kv_cache_config_builder")
    .of("0.33")
    .calls(
        "get_kv_cache_config_builder KVCacheConfigBuilder.get_kv_cache_groups",
        "room for fork blocks of every group",
    ),
    *_SCHEDULER_CONFIG.writes(
        "disable_hybrid_kv_cache_manager", "whether there are several groups"
    ),
    *_MODEL_CONFIG.calls(
        "get_num_kv_heads get_head_size", "whether a head's layer joins a group"
    ),
    *Owner(f"{_KV_CACHE}:KVCacheSpec").reads(
        "block_size page_size_bytes", "room for fork blocks"
    ),
    *Owner(f"{_KV_CACHE}:KVCacheTensor").writes(
        "size offset layer_stride", "fork blocks behind the scheduler's blocks"
    ),
    *Owner(f"{_KV_CACHE}:KVCacheTensor").reads(
        "block_stride", "whether layers or blocks lie side by side"
    ),
    *Owner(_KV_CACHE).reads(
        "FullAttentionSpec SlidingWindowSpec", "what keeping all tokens costs"
    ),
    *Owner(_KV_CACHE).reads(
        "UniformTypeKVCacheSpecs", "a group of layers with blocks of several sizes"
    ),
    *Owner(f"{_KV_CACHE}:SlidingWindowSpec").reads(
        "sliding_window", "what keeping all tokens costs"
    ),
    *Owner("vllm.v1.worker.utils").reads("AttentionGroup", "named in annotations"),
    *_GROUP.reads("layer_names", "layers with the same metadata"),
    *_GROUP.reads("metadata_builders", "our builders see the trees"),
    *_GROUP.calls("get_metadata_builder", "metadata of draft models"),
    *Owner("vllm.v1.attention.backend:AttentionMetadataBuilder").calls(
        "build", "metadata of draft models"
    ),
)

_INTERFACES = Owner("vllm.model_executor.models.interfaces")
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_LOADER = Owner("vllm.model_executor.model_loader.default_loader:DefaultModelLoader")
_CUDAGRAPH_MODE = Owner("vllm.config.compilation:CUDAGraphMode", "cuda")
LOADING = (
    *_CONFIG.calls("ModelConfig", "the config of a draft model"),
    *_MODEL_CONFIG.writes(
        "model runner tokenizer tokenizer_mode trust_remote_code dtype seed "
        "max_model_len enforce_eager",
        "the config of a draft model",
    ),
    *Owner("vllm.config.utils").calls("replace", "the config of a draft model"),
    *Owner("vllm.config.load:LoadConfig").writes(
        "load_format", "draft models are safetensors"
    ),
    *Owner("vllm.config.device:DeviceConfig").reads("device", "where drafts run"),
    *Owner("vllm.compilation.backends").calls(
        "set_model_tag", "compiled apart from the target"
    ),
    *_LOADER.extended("draft models without all their weights are refused"),
    *_LOADER.overrides("load_weights", "whether all weights of a draft model came"),
    *_LOADER.overrides("get_all_weights", "which tensor does not fit"),
    *_LOADER.overrides(
        "track_weights_loading", "norms of quantised draft models are checked, too"
    ),
    *_LOADER.writes(
        "enable_weights_track", "norms of quantised draft models are checked, too"
    ),
    *_LOADER.calls("load_model", "loading the draft model"),
    *Owner("vllm.model_executor.layers.linear").reads(
        "LinearBase", "whether all weights of a draft model came"
    ),
    *_CONFIG.calls("get_layers_from_vllm_config", "which layers are the draft model's"),
    *Owner("vllm.model_executor.layers.attention_layer_base").reads(
        "AttentionLayerBase", "which layers are the draft model's"
    ),
    *Owner("vllm.forward_context").calls("set_forward_context", "draft model forwards"),
    *Owner("vllm.forward_context", "cuda").reads(
        "BatchDescriptor", "graphs of draft models"
    ),
    *Owner("vllm.forward_context:BatchDescriptor", "cuda").reads(
        "num_tokens", "graphs of draft models"
    ),
    *Owner(
        "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration"
    ).calls("forward compute_logits", "draft model forwards"),
    *Owner("vllm.model_executor.layers.logits_processor").reads(
        "LogitsProcessor", "hot tokens of a draft model"
    ),
    *Owner("vllm.model_executor.layers.logits_processor:LogitsProcessor").reads(
        "scale soft_cap", "logits that are more than an output layer's"
    ),
    *Owner("vllm.v1.attention.backends.utils", "cuda").reads(
        "PAD_SLOT_ID", "padding of graphs writes no KV"
    ),
    *_CONFIG.on("cuda").reads("CUDAGraphMode", "graphs of draft models"),
    *_CUDAGRAPH_MODE.reads("PIECEWISE NONE", "graphs of draft models"),
    *_CUDAGRAPH_MODE.reads("FULL", "which batches have a CUDA graph"),
    *Owner("vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "cuda").calls(
        "dispatch", "graphs of draft models"
    ),
    *_INTERFACES.calls(
        "supports_eagle3", "whether the target hands out its layers' hidden states"
    ),
    *Owner("vllm.model_executor.layers.attention").calls(
        "Attention", "attention of a head"
    ),
    *Owner(f"{_LAYER}:Attention").reads("layer_name", "attention of a head"),
    *Owner(f"{_LAYER}:Attention").writes(
        "sliding_window", "the KV cache keeps all tokens of a head"
    ),
    *Owner(f"{_LAYER}:Attention").calls("forward", "attention of a head"),
    *_CONFIG.calls("set_current_vllm_config", "attention of a head"),
    *Owner("vllm.utils.torch_utils").calls(
        "set_default_torch_dtype", "attention of a head"
    ),
    *Owner(_EMBEDDING).reads(
        "VocabParallelEmbedding", "the embedding that a head shares"
    ),
    *Owner(_EMBEDDING).reads("ParallelLMHead", "the output layer that a head shares"),
    *Owner(_EMBEDDING).reads(
        "UnquantizedEmbeddingMethod", "whether a layer that a head shares is quantised"
    ),
    *Owner(f"{_EMBEDDING}:VocabParallelEmbedding").reads(
        "quant_method", "whether a layer that a head shares is quantised"
    ),
    *Owner(f"{_EMBEDDING}:UnquantizedEmbeddingMethod.create_weights").reads(
        "weight", "the rows that a head shares"
    ),
    *Owner(f"{_EMBEDDING}:VocabParallelEmbedding").calls(
        "get_sharded_to_full_mapping",
        "their rows in order, where tensor-parallel ranks hold a part each",
    ),
    *Owner("vllm.distributed").calls(
        "get_tp_group", "all ranks choose trees by rank 0's times"
    ),
    *Owner("vllm.distributed.parallel_state:GroupCoordinator").calls(
        "broadcast_object", "all ranks choose trees by rank 0's times"
    ),
    *Owner("vllm.distributed.parallel_state:GroupCoordinator").reads(
        "is_first_rank", "rank 0's times are kept"
    ),
    *Owner("vllm.distributed.parallel_state:GroupCoordinator", "cuda").reads(
        "world_size cpu_group", "ranks compare their trees"
    ),
    *Owner("vllm.distributed").calls(
        "tensor_model_parallel_all_gather", "the parts of all ranks"
    ),
    *Owner("vllm.model_executor.layers.utils", "cpu").calls(
        "dispatch_cpu_unquantized_gemm", "packed linear layers for heads"
    ),
    *Owner("vllm._custom_ops", "cpu").calls("rms_norm", "norms of heads"),
    *Owner(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", "cpu"
    ).reads("cpu_linear", "packed linear layers for heads"),
)

_EXECUTOR = Owner("vllm.v1.executor.abstract:Executor")
RAY = (
    *_PARALLEL_CONFIG.writes(
        "distributed_executor_backend", "'ray' gets a class that checks the nodes first"
    ),
    *_PARALLEL_CONFIG.reads("placement_group ray_runtime_env", "which nodes are asked"),
    *_EXECUTOR.extended("it stands for vLLM's Ray executor until nodes are checked"),
    *_EXECUTOR.writes("uses_ray", "it stands for vLLM's Ray executor"),
    *_EXECUTOR.calls("get_class", "vLLM's own Ray executor"),
    *Owner("vllm.v1.executor.ray_utils", "ray").calls(
        "initialize_ray_cluster", "the nodes of an engine"
    ),
    *Owner("vllm.v1.metrics.ray_wrappers", "ray").calls(
        "RayCounterWrapper", "metrics of Ray Serve"
    ),
    *Owner("vllm.v1.metrics.ray_wrappers:RayCounterWrapper", "ray").calls(
        "labels inc", "metrics of Ray Serve"
    ),
    *_VLLM_CONFIG.on("ray").writes("instance_id", "metrics of Ray Serve"),
)

METRICS = (
    *_VLLM_CONFIG.reads("instance_id", "the file of an engine's counters"),
    *_MODEL_CONFIG.reads("served_model_name", "the label 'model_name'"),
    *_PARALLEL_CONFIG.reads("rank data_parallel_index", "which engine counts"),
    *Owner("vllm.v1.metrics.prometheus").relies(
        "get_prometheus_registry",
        "our metrics are on the registry that it gives to /metrics",
    ),
    *Owner("vllm.v1.metrics.reader").relies(
        "get_metrics_snapshot", "LLM.get_metrics shows what begins with 'vllm:'"
    ),
)

TOPICS: dict[str, tuple[Seam, ...]] = {
    "Arguments": ARGUMENTS,
    "Worker": WORKER,
    "Runner: what we override": RUNNER_OVERRIDDEN,
    "Runner: what we call and read": RUNNER_READ,
    "Input batch": BATCH,
    "Scheduler's output": STEP,
    "Sampling": SAMPLING,
    "Scheduler": SCHEDULER,
    "V2 runner": V2_RUNNER,
    "V2 runner's batch": V2_BATCH,
    "V2 runner's axes": V2_AXES,
    "V2 runner's adapters": V2_LORA,
    "V2 runner's graphs of drafts": V2_DRAFT_GRAPHS,
    "V2 runner's sampling": V2_SAMPLING,
    "V2 runner's logits processors": V2_NODE_PROCESSORS,
    "V2 runner's scheduler": V2_SCHEDULER,
    "Attention": ATTENTION,
    "KV cache": KV_CACHE,
    "Loading": LOADING,
    "Ray": RAY,
    "Metrics": METRICS,
}
SEAMS = tuple(seam for seams in TOPICS.values() for seam in seams)
