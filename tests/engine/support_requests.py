"""Rows of the support matrix about requests."""

from __future__ import annotations

from typing import Any

from tests.engine.support_checks import (
    DEPTH,
    HERE,
    MAX_MODEL_LEN,
    TEXTS,
    Arguments,
    Outcome,
    Own,
    Request,
    Row,
    Same,
)

PER_REQUEST = "tests/engine/test_per_request.py"
TREE, PLAIN = Outcome.TREE, Outcome.PLAIN
REFUSED, BY_VLLM = Outcome.REFUSED, Outcome.REFUSED_BY_VLLM
# Greedy answers that end by themselves: "No." and "The answer is 4."
CHAT = (
    "<|im_start|>user\nIs water wet? Answer yes or no.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
SUM = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = (
    "<|im_start|>user\nDescribe a person as JSON with name and age."
    "<|im_end|>\n<|im_start|>assistant\n"
)
LIST_GRAMMAR = 'root ::= word (", " word)* "."\nword ::= [a-z]+'


def structured(constraint: dict[str, Any], max_tokens: int = 60) -> Same:
    """A structured-output row: one constrained request, one free beside it."""
    params = {"structured_outputs": constraint, "max_tokens": max_tokens}
    return Same((params, {}), (ASK, TEXTS[0]))


SAMPLING = (
    Row(
        "temperature, top_k, top_p per request",
        TREE,
        Same(
            (
                {"temperature": 0.9, "top_k": 20},
                {},
                {"temperature": 0.7, "top_p": 0.9},
                {},
                {"temperature": 1.0},
                {},
            ),
            TEXTS * 2,
        ),
        "sampled answers follow [the target's distribution](exactness.md)",
        "seen at temperatures 0 and 1",
    ),
    Row(
        "seed",
        TREE,
        Own(f"{HERE}::test_seeds"),
        "[which methods repeat an answer](exactness.md); another answer than stock "
        "vLLM's, from the same distribution",
        "seen",
    ),
    Row(
        "n > 1",
        TREE,
        Own(f"{HERE}::test_several_answers"),
    ),
    Row(
        "stop strings",
        TREE,
        Same(
            (
                {"stop": ["France", "Paris"]},
                {"stop": ["return"], "include_stop_str_in_output": True},
                {"stop": [" 12", "13"]},
            )
        ),
    ),
    Row(
        "stop token ids",
        TREE,
        Same(({"stop_token_ids": [30, 284, 253]}, {"stop_token_ids": [198]}, {})),
    ),
    Row(
        "end of sequence, ignore_eos",
        TREE,
        Same(({}, {"ignore_eos": True}, {}), (SUM, SUM, CHAT)),
    ),
    Row(
        "max_tokens",
        TREE,
        Same(
            tuple({"max_tokens": n, "ignore_eos": True} for n in (1, 2, 3, 5, 7, 11)),
            TEXTS * 2,
        ),
    ),
    Row(
        "min_tokens",
        TREE,
        Same(({"min_tokens": 12}, {"min_tokens": 5}, {}), (SUM, CHAT, SUM)),
        "together with structured output: no drafts",
    ),
    Row(
        "presence, frequency, repetition penalty",
        TREE,
        Same(
            (
                {"presence_penalty": 0.8},
                {"frequency_penalty": 0.6},
                {"repetition_penalty": 1.3},
                {},
            ),
            (*TEXTS, TEXTS[2]),
        ),
        "each node has [those of its own path](#penalties-and-forbidden-tokens)",
    ),
    Row(
        "bad_words",
        TREE,
        Same(({"bad_words": ["Paris", " Paris"]}, {"bad_words": ["return"]}, {})),
    ),
    Row(
        "allowed_token_ids",
        TREE,
        Same(({"allowed_token_ids": list(range(200, 900))}, {}, {})),
    ),
    Row(
        "thinking_token_budget",
        PLAIN,
        Same(
            ({"thinking_token_budget": 5}, {}, {}),
            (CHAT + "<think>", *TEXTS[1:]),
            engine="tight",
        ),
    ),
    Row(
        "repetition_detection",
        TREE,
        Same(
            (
                {
                    "repetition_detection": {
                        "max_pattern_size": 4,
                        "min_pattern_size": 1,
                        "min_count": 3,
                    },
                    "max_tokens": 48,
                },
                {},
            ),
            ("la la la la la la", TEXTS[0]),
        ),
    ),
    Row(
        "min_p",
        BY_VLLM,
        Request({"min_p": 0.1}, "not yet supported with speculative decoding"),
        "[what to do](#refused-by-vllm)",
    ),
    Row(
        "logit_bias",
        BY_VLLM,
        Request({"logit_bias": {7: 2.0}}, "not yet supported with speculative"),
        "`allowed_token_ids` or `bad_words` may do instead",
    ),
    Row(
        "trace_decode_token_ids",
        BY_VLLM,
        Request({"trace_decode_token_ids": [5, 6]}, "not supported with speculative"),
    ),
    Row(
        "custom logits processors",
        PLAIN,
        Own(f"{PER_REQUEST}::test_custom_logits_processors"),
        "[which requests](#custom-logits-processors)",
    ),
    Row(
        "`treespec` in `extra_args` (`vllm_xargs`)",
        TREE,
        Own(f"{PER_REQUEST}::test_limits_of_requests"),
        "[fewer drafts, or none, for one request](spec-config.md)",
    ),
    Row(
        "wrong keys or values in `treespec`",
        Outcome.REFUSED_REQUEST,
        Own(f"{PER_REQUEST}::test_wrong_arguments_are_refused"),
        "HTTP 400; the engine goes on",
    ),
)

ANSWERS = (
    Row(
        "logprobs",
        TREE,
        Same(
            ({"logprobs": 0}, {"logprobs": 3}, {"logprobs": 1}),
            compare=("token_ids", "logprobs"),
        ),
        "those of the target",
    ),
    Row(
        "prompt_logprobs",
        TREE,
        Same(
            ({"prompt_logprobs": 2}, {"prompt_logprobs": 0, "logprobs": 2}, {}),
            compare=("token_ids", "logprobs", "prompt_logprobs"),
        ),
    ),
    Row(
        "logprob_token_ids",
        PLAIN,
        Same(
            ({"logprob_token_ids": [5, 6, 7]}, {}, {}),
            alone=True,
            compare=("token_ids", "logprobs"),
        ),
    ),
    Row(
        "logprobs_mode=raw_logits",
        TREE,
        Same(
            ({"logprobs": 2, "max_tokens": 12}, {}, {}),
            engine="tight",
            compare=("token_ids", "logprobs"),
        ),
    ),
    Row(
        "logprobs_mode=processed_*",
        PLAIN,
        Own(f"{PER_REQUEST}::test_processed_logprobs"),
        "only requests that ask for logprobs; the others draft trees",
    ),
    Row(
        "return_sampling_mask",
        REFUSED,
        Arguments({"return_sampling_mask": True}, "return_sampling_mask=True"),
        "only vLLM's V2 model runner has it",
    ),
    Row(
        "streaming",
        TREE,
        Same(
            ({"ignore_eos": True}, {"max_tokens": 9}, {"stop": ["12"]}),
            job={"run": "stream"},
            compare=("token_ids", "text", "finish_reason"),
        ),
    ),
    Row(
        "abort in mid-answer",
        TREE,
        Own(f"{HERE}::test_abort"),
    ),
    Row(
        "input that comes in parts (`StreamingInput`)",
        TREE,
        Own("tests/engine/test_greedy.py::test_sessions"),
        "each turn is a request of its own",
    ),
    Row(
        "beam search",
        PLAIN,
        Same(
            ({"beam_width": 3, "max_tokens": 5},),
            job={"run": "beams"},
            compare=("token_ids", "others"),
        ),
        "vLLM asks for one token at a time",
    ),
    Row(
        "prompts at max_model_len and below",
        TREE,
        Same(
            ({"max_tokens": 40, "ignore_eos": True},) * 3,
            (MAX_MODEL_LEN - 1, MAX_MODEL_LEN - DEPTH, MAX_MODEL_LEN - DEPTH - 12),
        ),
        "no drafts for the last tokens, where a tree would not fit",
    ),
)

GRAMMARS = (
    Row(
        "JSON schema",
        TREE,
        structured({"json": PERSON}),
        "each node has the mask of its own path; xgrammar, guidance, outlines",
    ),
    Row(
        "regex",
        TREE,
        structured({"regex": r"[A-Z][a-z]{2,8} is \d{1,3} years old\."}),
    ),
    Row(
        "grammar",
        TREE,
        structured({"grammar": LIST_GRAMMAR}, max_tokens=24),
    ),
    Row(
        "choice",
        TREE,
        structured({"choice": ["a happy young person", "a happy old person"]}),
    ),
    Row(
        "after reasoning (`reasoning_parser`)",
        PLAIN,
        Own("tests/fast/test_grammar_masks.py::test_grammars_after_reasoning"),
        "with `enable_in_reasoning`: trees",
    ),
)
