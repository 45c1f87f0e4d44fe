"""Which engine tests `make test` runs; all others are thorough.

One test for each way of laying trees out, source of drafts and rule:

| layout | source | rule | test |
|---|---|---|---|
| branches | draft model | recursive rejection | support_matrix, schedule[rsd_c] |
| branches | draft model | K-SEQ | methods[spectr], sampling_law[spectr] |
| branches | two draft models | multi-round | methods[specinfer] |
| branches | index | coupled draw | methods[suffix_tree] |
| branches | index and draft model | coupled draw | greedy[hybrid], schedule[hybrid] |
| branches | head | coupled draw | schedule[redrafter], methods[medusa_tree] |
| branches | head with context | coupled draw | eagle, dflash, lyanna, schedule |
| branches | head with context | recursive rejection | sampling_law[eagle-stochastic] |
| masks | draft model | recursive rejection | interpreted_kernel[rsd_s] |
| masks | head with context | coupled draw | interpreted_kernel[eagle_tree] |
| masks, KV cache groups | index | coupled draw | interpreted_kernel[write_gemma] |
| branches, KV cache groups | index, head with context | coupled draw | kv_groups |
| branches, two ranks | head with context | coupled draw | tensor_parallel[eagle_tree] |
"""

from __future__ import annotations

import re

NOTHING = r"(?!)"
# By file what the names of quick tests contain; all tests of other files are quick.
QUICK = {
    "test_greedy.py": r"\[hybrid\]",
    # those of the engines with a small KV cache are thorough
    "test_support_matrix.py": (
        r"^(?!.*(preemption|lora|small_caches"
        r"|same_answers\[(thinking|logprobs_mode|priority)))"
    ),
    "test_interpreted_kernel.py": (
        r"cpu_path\[(rsd_s|eagle_tree)\]|windows_and_sinks\[write_gemma\]"
    ),
    "test_dflash.py": r"\[dspark(-alone)?\]",
    "test_tensor_parallel.py": r"\[eagle_tree\]",
    "test_data_parallel.py": NOTHING,
    "test_kv_groups.py": (
        r"equal_plain\[(gemma-suffix_tree|gpt_oss-eagle_tree)\]"
        r"|preemption\[gpt_oss-eagle_tree\]|who_gets|other_sizes"
    ),
    "test_model_kinds.py": (
        r"equal_plain\[(int8-own draft|window-suffix_tree|sinks-eagle_tree)\]"
        r"|kinds_matter\[window\]"
    ),
    "test_images.py": r"equal_plain\[qwen2\.5-vl-rsd_c\]|matter\[qwen2\.5-vl\]",
    "test_sampling_law.py": r"\[(spectr|eagle-stochastic)\]",
    "test_per_request.py": NOTHING,
    "test_soak.py": NOTHING,
    "test_ray.py": NOTHING,
    "test_ray_serve.py": NOTHING,
    "test_batch.py": r"^(?!.*_over_ray)",
}
# By file what the names of thorough tests contain that CI leaves out: other tests of
# the file run the same code of ours. `make test-all` runs them.
RARE = {
    "test_greedy.py": (
        r"\[(sd|rsd_c|spectr|specinfer|suffix_tree|medusa_tree|dflash_tree|lyanna"
        r"|redrafter|redrafter-dynamic|hybrid-eagle)\]"
    ),
    "test_support_matrix.py": r"\[(redrafter|eagle_tree|lyanna)\]",
    "test_model_kinds.py": "",
    "test_kv_groups.py": r"drafts_the_same|mixed_batches\[gemma|-lyanna\]",
    "test_interpreted_kernel.py": r"\[(spectr|lyanna)\]",
    "test_ray.py": r"\[rsd_s\]",
    "test_sampling_law.py": r"\[rsd_s\]",
    "test_images.py": r"equal_plain\[gemma3-(rsd_c|redrafter)",
    "test_tensor_parallel.py": r"\[(redrafter|dflash_tree|lyanna)\]",
    "test_data_parallel.py": r"\[rsd_s\]",
    "test_dflash.py": r"\[(jetspec|windows|dflash[-\]]|dflash2-|causal window-beside)",
    "test_ray_serve.py": "",
}


def is_rare(file: str, test: str) -> bool:
    """Whether CI leaves a test out, named with its parameters."""
    return re.search(RARE.get(file, NOTHING), test) is not None


def is_quick(file: str, test: str) -> bool:
    """Whether `make test` runs a test, named with its parameters."""
    return re.search(QUICK.get(file, ""), test) is not None
