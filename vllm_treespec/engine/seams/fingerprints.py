"""What supported releases of vLLM were seen to have of the seam table.

Written by ``python -m tests.fingerprints``.
"""

# release -> hash of the names of all seams that were found in it
SEEN: dict[str, str] = {"0.32": "beee3e1230b77bec", "0.33": "2136ed88877d2b5c"}

# of the functions that we replace: module -> function -> release -> fingerprint
FINGERPRINTS: dict[str, dict[str, dict[str, str]]] = {
    "vllm.engine.arg_utils": {
        "EngineArgs.create_engine_config": {
            "0.32": "08b942e957be1152",
            "0.33": "b0ac450724c2286c",
        }
    },
    "vllm.v1.sample.logits_processor.interface": {
        "LogitsProcessor.validate_params": {
            "0.32": "3aeb90631be1356e",
            "0.33": "3aeb90631be1356e",
        }
    },
    "vllm.v1.worker.cpu_worker": {
        "CPUWorker.init_device": {
            "0.32": "0b2996cf62ae64ee",
            "0.33": "0b2996cf62ae64ee",
        },
        "CPUWorker.determine_available_memory": {
            "0.32": "7f56a7a23a2b71d6",
            "0.33": "2e52c042bd7c47fc",
        },
        "CPUWorker.compile_or_warm_up_model": {
            "0.32": "364a9a6aa0ebd47a",
            "0.33": "271ffc80fcca5288",
        },
    },
    "vllm.v1.worker.gpu_worker": {
        "Worker._make_model_runner": {
            "0.32": "bdd87630c3fcec1a",
            "0.33": "bdd87630c3fcec1a",
        },
        "Worker.determine_available_memory": {
            "0.32": "8e6b908096b6a8d6",
            "0.33": "09bd9cc6165e5abb",
        },
        "Worker.compile_or_warm_up_model": {
            "0.32": "70cf98a8c482eefb",
            "0.33": "3b0e074e46d1d151",
        },
    },
    "vllm.v1.worker.gpu_model_runner": {
        "GPUModelRunner.initialize_kv_cache_tensors": {
            "0.32": "e0137d219cf873ee",
            "0.33": "e0137d219cf873ee",
        },
        "GPUModelRunner.profile_run": {
            "0.32": "3a331839603a589c",
            "0.33": "3a331839603a589c",
        },
        "GPUModelRunner._dummy_run": {
            "0.32": "f307992ca8621377",
            "0.33": "f307992ca8621377",
        },
        "GPUModelRunner._update_states": {
            "0.32": "afd00d5250e6e1e1",
            "0.33": "afd00d5250e6e1e1",
        },
        "GPUModelRunner._prepare_inputs": {
            "0.32": "c61d122b1d2d4ac7",
            "0.33": "c61d122b1d2d4ac7",
        },
        "GPUModelRunner._sample": {
            "0.32": "230f50d61f0ac5db",
            "0.33": "230f50d61f0ac5db",
        },
        "GPUModelRunner._update_states_after_model_execute": {
            "0.32": "066c44e840d28b30",
            "0.33": "066c44e840d28b30",
        },
        "GPUModelRunner._bookkeeping_sync": {
            "0.32": "f22cd65f7c51fcdc",
            "0.33": "f22cd65f7c51fcdc",
        },
        "GPUModelRunner._input_fits_in_drafter": {
            "0.32": "e80e93519bb2801d",
            "0.33": "e80e93519bb2801d",
        },
        "GPUModelRunner._get_eagle3_aux_layers_from_config": {
            "0.33": "d1ab862948fee082",
            "0.32": "d1ab862948fee082",
        },
        "GPUModelRunner.propose_draft_token_ids": {
            "0.32": "9fb2624a60de9a37",
            "0.33": "c1fd76a0224c775a",
        },
        "GPUModelRunner.take_draft_token_ids": {
            "0.32": "7ffa76d21097b747",
            "0.33": "7ffa76d21097b747",
        },
    },
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.__init__": {"0.32": "3e7f67bc6f8162fd", "0.33": "962f3e71e3a55920"},
        "Scheduler.update_draft_token_ids": {
            "0.32": "2481dfb648ad7638",
            "0.33": "2481dfb648ad7638",
        },
        "Scheduler.get_grammar_bitmask": {
            "0.32": "eaf68339d2b801a1",
            "0.33": "eaf68339d2b801a1",
        },
        "Scheduler.update_from_output": {
            "0.32": "0d412a4f970232ba",
            "0.33": "2cc546e83f98f394",
        },
        "Scheduler.make_spec_decoding_stats": {
            "0.32": "0357de2cf9244bd1",
            "0.33": "0357de2cf9244bd1",
        },
        "Scheduler._handle_stopped_request": {
            "0.32": "3e301d6f6441e40e",
            "0.33": "a0a036a9b5cad08a",
        },
        "Scheduler.update_draft_token_ids_in_output": {
            "0.32": "811067fd0875a4b6",
            "0.33": "811067fd0875a4b6",
        },
    },
    "vllm.v1.worker.gpu.model_runner": {
        "GPUModelRunner.load_model": {
            "0.32": "5fdaceafd08a6fe6",
            "0.33": "5af00765daae4aef",
        },
        "GPUModelRunner.initialize_kv_cache": {
            "0.32": "d911011a0f1e8a76",
            "0.33": "694ec2f1df070ff0",
        },
        "GPUModelRunner.profile_run": {
            "0.32": "fdfbf01832d1a97a",
            "0.33": "fdfbf01832d1a97a",
        },
        "GPUModelRunner.execute_model": {
            "0.32": "c46c4f74b7605519",
            "0.33": "1c458d772a24d867",
        },
        "GPUModelRunner.finish_requests": {
            "0.32": "5566bf08a253b424",
            "0.33": "5566bf08a253b424",
        },
        "GPUModelRunner.add_requests": {
            "0.32": "76d1040ddeff236b",
            "0.33": "76d1040ddeff236b",
        },
        "GPUModelRunner.update_requests": {
            "0.32": "85bc7b640d534b4a",
            "0.33": "85bc7b640d534b4a",
        },
        "GPUModelRunner.prepare_inputs": {
            "0.32": "53855579bd32779c",
            "0.33": "cc80d3d8537b3ba1",
        },
        "GPUModelRunner.prepare_attn": {
            "0.32": "1c3c56b3245eb628",
            "0.33": "eafc6ba7f7c1b83d",
        },
        "GPUModelRunner.prepare_dummy_attn": {
            "0.32": "32af2554d4ae1fa5",
            "0.33": "32af2554d4ae1fa5",
        },
        "GPUModelRunner.sample_tokens": {
            "0.32": "f4f5af4536d94189",
            "0.33": "78b000080fff61bb",
        },
        "GPUModelRunner.postprocess_sampled": {
            "0.32": "2d9e5e7c2f021d57",
            "0.33": "dfabf18058416360",
        },
        "GPUModelRunner.take_draft_token_ids": {
            "0.32": "3beb9ecca4aa8ca4",
            "0.33": "3beb9ecca4aa8ca4",
        },
    },
    "vllm.v1.worker.gpu.mm.rope": {
        "RopeState.prepare_positions": {
            "0.32": "889da6b3a1a318bc",
            "0.33": "889da6b3a1a318bc",
        }
    },
    "vllm.v1.worker.gpu.lora_utils": {
        "LoraState.__init__": {"0.32": "ed9ad79e1f1296cd", "0.33": "ed9ad79e1f1296cd"},
        "LoraState.make_lora_inputs": {
            "0.32": "c96af81339401db8",
            "0.33": "c96af81339401db8",
        },
    },
    "vllm.v1.worker.gpu.cudagraph_utils": {
        "CudaGraphManager.__init__": {
            "0.32": "6acc3c7c18ee7c49",
            "0.33": "6acc3c7c18ee7c49",
        },
        "CudaGraphManager._init_candidates": {
            "0.32": "e95b0765e29b68df",
            "0.33": "e95b0765e29b68df",
        },
    },
    "vllm.v1.worker.gpu.sample.logits_processor.interface": {
        "LogitsProcessor.validate_params": {
            "0.32": "dc8e6800e9095d28",
            "0.33": "dc8e6800e9095d28",
        },
        "LogitsProcessor.add_request": {
            "0.32": "94161cfa13bdac03",
            "0.33": "94161cfa13bdac03",
        },
        "LogitsProcessor.apply": {
            "0.32": "2b21d37f9b411f83",
            "0.33": "2b21d37f9b411f83",
        },
        "LogitsProcessor.__init__": {
            "0.32": "af089f1b5ea63728",
            "0.33": "af089f1b5ea63728",
        },
        "LogitsProcessor.apply_staged_writes": {
            "0.32": "53a1238a615319e8",
            "0.33": "53a1238a615319e8",
        },
    },
    "vllm.v1.worker.gpu.sample.penalties": {
        "PenaltiesState.apply": {"0.32": "e2dbb8dd1c1b2b9d", "0.33": "e2dbb8dd1c1b2b9d"}
    },
    "vllm.v1.worker.gpu.sample.bad_words": {
        "BadWordsState.add_request": {
            "0.32": "5679490301e5d85f",
            "0.33": "5679490301e5d85f",
        },
        "BadWordsState.apply": {"0.32": "1aa336b8ccce8ef9", "0.33": "1aa336b8ccce8ef9"},
    },
    "vllm.v1.worker.gpu.sample.thinking_budget": {
        "ThinkingBudgetState.apply": {
            "0.32": "2c1f287d6ab7b23a",
            "0.33": "2c1f287d6ab7b23a",
        }
    },
    "vllm.v1.core.sched.async_scheduler": {
        "AsyncScheduler.__init__": {
            "0.32": "e8b45c29ad353a95",
            "0.33": "e8b45c29ad353a95",
        },
        "AsyncScheduler._update_after_schedule": {
            "0.32": "00bffb3dab9634c9",
            "0.33": "00bffb3dab9634c9",
        },
    },
    "vllm.v1.attention.backends.cpu_attn": {
        "CPUAttentionBackend.get_impl_cls": {
            "0.32": "bdc5f6168d2d70e5",
            "0.33": "bdc5f6168d2d70e5",
        },
        "CPUAttentionBackend.get_builder_cls": {
            "0.32": "37d16cb585b6e64f",
            "0.33": "37d16cb585b6e64f",
        },
        "CPUAttentionBackendImpl.do_kv_cache_update": {
            "0.32": "c732434130cb9dd0",
            "0.33": "c732434130cb9dd0",
        },
        "CPUAttentionMetadataBuilder.build": {
            "0.32": "3fb727e80684bd61",
            "0.33": "3fb727e80684bd61",
        },
    },
    "vllm.v1.attention.backends.triton_attn": {
        "TritonAttentionBackend.get_impl_cls": {
            "0.32": "951fe05db236fa62",
            "0.33": "951fe05db236fa62",
        },
        "TritonAttentionBackend.get_builder_cls": {
            "0.32": "e224f6273bf15dd7",
            "0.33": "e224f6273bf15dd7",
        },
        "TritonAttentionMetadataBuilder.build": {
            "0.32": "677df89cf9ac6ed9",
            "0.33": "677df89cf9ac6ed9",
        },
        "TritonAttentionMetadataBuilder.build_for_cudagraph_capture": {
            "0.32": "b1df01973bd6c0f3",
            "0.33": "b1df01973bd6c0f3",
        },
        "TritonAttentionImpl.__init__": {
            "0.32": "3eba7f4c5f771c5b",
            "0.33": "0651e3474c72e8c1",
        },
        "TritonAttentionImpl.forward": {
            "0.32": "e409c6455de58c31",
            "0.33": "ffaf5c43f8f730ff",
        },
        "TritonAttentionImpl.fused_output_quant_supported": {
            "0.32": "ea4033338a5b661a",
            "0.33": "ea4033338a5b661a",
        },
    },
    "vllm.model_executor.model_loader.default_loader": {
        "DefaultModelLoader.load_weights": {
            "0.32": "918df7733ea84b5d",
            "0.33": "918df7733ea84b5d",
        },
        "DefaultModelLoader.get_all_weights": {
            "0.32": "aca5f32625e4468d",
            "0.33": "aca5f32625e4468d",
        },
        "DefaultModelLoader.track_weights_loading": {
            "0.32": "60454aefbcf5ccf6",
            "0.33": "60454aefbcf5ccf6",
        },
    },
}
