"""Names of methods that are vLLM's own: no method of ours may have one."""

# SpeculativeMethod in vllm/config/speculative.py of vLLM 0.32 and 0.33.
VLLM_METHODS = frozenset(
    {
        *("ngram", "ngram_gpu", "draft_model", "suffix", "custom_class", "medusa"),
        *("eagle", "eagle3", "extract_hidden_states", "dflash", "dspark", "mtp"),
        *("mlp_speculator", "deepseek_mtp", "dots3_note_mtp", "mimo_mtp"),
        *("mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp"),
        *("ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp"),
        *("qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp"),
        *("bailing_hybrid_v3_mtp", "bailing_hybrid_mtp", "minimax_m3_mtp"),
        *("kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp"),
        *("hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp", "glm5_next_mtp"),
    }
)
