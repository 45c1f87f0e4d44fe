"""Reading a spec-config, and saying what is wrong with one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_treespec.config.base import MethodConfig, SpecConfigError
from vllm_treespec.config.methods import METHODS, find_method, method_names
from vllm_treespec.heads.names import shown
from vllm_treespec.json_files import parse_json, read_json_object

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Methods of vLLM's own, with the draft trees of the same kind.
OF_VLLM = {
    "suffix": "suffix_tree",
    "ngram": "suffix_tree",
    "ngram_gpu": "suffix_tree",
    "medusa": "medusa_tree",
    "eagle": "eagle_tree",
    "eagle3": "eagle_tree",
    "dflash": "dflash_tree",
    "dspark": "dflash_tree",
    "draft_model": "rsd_s",
}
# Of these, names that methods of ours had before.
RENAMED = ("suffix", "medusa")
# The key in which vLLM's own methods are told how many tokens to draft.
VLLM_SIZE = "num_speculative_tokens"
# Keys of earlier releases, of which there is no other now.
REMOVED = ("sure_match",)
EXAMPLE = '{"method": "suffix_tree"}'


def parse_spec_config(spec: Mapping[str, Any]) -> MethodConfig:
    """Validate a spec-config.

    Raises:
        SpecConfigError: one message that names each wrong key and the remedy.

    """
    if not names_our_method(spec):
        raise unknown_method(spec)
    method = find_method(spec["method"])
    assert method is not None
    try:
        return method.model_validate({**spec, "method": method.method_name()})
    except ValidationError as error:
        raise SpecConfigError(_one_message(error, method)) from None


def read_spec(given: str) -> dict[str, Any]:
    """Read a spec-config from JSON text, or from a JSON file; it is not validated.

    Args:
        given: the text, or the file's name; only text begins with a bracket.

    Raises:
        SpecConfigError: it is no JSON object.

    """
    if given.lstrip()[:1] not in ("{", "["):
        return _read_spec_file(given)
    try:
        spec = parse_json(given, finite=True)
    except ValueError as error:
        raise SpecConfigError(
            f"the spec-config is not JSON ({error}); write it in single quotes, such "
            f"as '{EXAMPLE}'"
        ) from None
    if not isinstance(spec, dict):
        raise SpecConfigError(
            f"the spec-config is no JSON object; write one such as '{EXAMPLE}'"
        )
    return spec


def _read_spec_file(name: str) -> dict[str, Any]:
    if not os.path.isfile(name):
        raise SpecConfigError(
            f"there is no file {shown(name)[1:-1]}; name a JSON file that holds a "
            f"spec-config, or write it in single quotes, such as '{EXAMPLE}'"
        )
    try:
        return read_json_object(Path(name), finite=True)
    except ValueError as error:
        raise SpecConfigError(
            f"{error}; write one JSON object into it, such as {EXAMPLE}"
        ) from None


def names_our_method(spec: Mapping[str, Any]) -> bool:
    """Whether a spec-config names a method of ours, or of a package for ours."""
    method = spec.get("method")
    return isinstance(method, str) and (
        ":" in method or method in METHODS or method in method_names()
    )


def unknown_method(spec: Mapping[str, Any]) -> SpecConfigError:
    """Say that a spec-config names none of our methods, and which one may be meant."""
    known = method_names()
    names = ", ".join(known)
    method = spec.get("method")
    if method is None:
        keys = spec.keys() - {"method"}
        fitting = [n for n, m in METHODS.items() if keys <= m.model_fields.keys()]
        return SpecConfigError(
            f"speculative_config: 'method' is missing; "
            f"write one of {', '.join(fitting) or names}"
        )
    message = f"speculative_config: 'method' is {shown(method)}"
    if not isinstance(method, str):
        return SpecConfigError(f"{message}; write a name, one of {names}")
    if method in OF_VLLM:
        return SpecConfigError(
            f"{message}, a method of vLLM's own, which needs no treespec; "
            f"draft trees of this kind are '{OF_VLLM[method]}'"
        )
    nearest = get_close_matches(method.lower().replace("-", "_"), known, n=1)
    meant = f" (did you mean '{nearest[0]}'?)" if nearest else ""
    return SpecConfigError(
        f"{message}{meant}; write one of {names} (other methods of vLLM's own are for "
        f"`vllm serve` alone)"
    )


def _one_message(error: ValidationError, method: type[MethodConfig]) -> str:
    problems = "; ".join(_problem(found, method) for found in _causes(error.errors()))
    return (
        f"speculative_config for method '{method.method_name()}': {problems} "
        f"(its keys are {', '.join(method.model_fields)})"
    )


def _causes(problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """All problems, but for lists that are too short since their members are wrong."""
    wrong = {at["loc"][:depth] for at in problems for depth in range(len(at["loc"]))}
    return [p for p in problems if p["type"] != "too_short" or p["loc"] not in wrong]


def _problem(problem: ErrorDetails, method: type[MethodConfig]) -> str:
    """What is wrong with one key, and what to write."""
    fields = method.model_fields
    # the members of a union are named in brackets, too
    key = ".".join(str(part) for part in problem["loc"] if "[" not in str(part))
    if problem["type"] == "missing":
        return f"'{key}' is missing; add it"
    if problem["type"] == "extra_forbidden" and key == VLLM_SIZE:
        return f"'{key}' is for vLLM's own methods; write {_size_keys(method)}"
    if problem["type"] == "extra_forbidden":
        near = [] if key in REMOVED else get_close_matches(key, fields, n=1)
        other = f", or write '{near[0]}'" if near else ""
        return f"{shown(key)} is not a key of this method; remove it{other}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    examples = fields[key].examples if key in fields else None
    remedy = f"; write one such as {json.dumps(examples[0])}" if examples else ""
    return f"'{key}' is {shown(problem['input'])}: {message}{remedy}"


def _size_keys(method: type[MethodConfig]) -> str:
    """The keys that say how many tokens a method drafts."""
    shape = method.SHAPE
    keys = ["num_drafts"] if "num_drafts" in shape else shape
    return ", ".join(f"'{key}'" for key in keys if key != "min_probability")
