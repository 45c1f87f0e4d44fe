"""Reading a spec-config, and saying what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.methods import METHODS

# Methods that got another name, because the old one is a method of vLLM's own.
RENAMED = {"suffix": "suffix_tree", "medusa": "medusa_tree"}


class SpecConfigError(ValueError):
    """A spec-config that cannot work; the message names the key and the remedy."""


def parse_spec_config(spec: Mapping[str, Any]) -> MethodConfig:
    """Validate a spec-config.

    Raises:
        SpecConfigError: one message that names each wrong key and the remedy.

    """
    if not names_our_method(spec):
        raise unknown_method(spec)
    method = spec["method"]
    try:
        return METHODS[method].model_validate(dict(spec))
    except ValidationError as error:
        raise SpecConfigError(_one_message(error, method)) from None


def read_spec_file(path: Path) -> dict[str, Any]:
    """Read a spec-config from a JSON file; it is not validated.

    Raises:
        SpecConfigError: when the file holds no JSON object.

    """
    try:
        spec = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise SpecConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); "
            f"save it as UTF-8"
        ) from None
    except ValueError as error:
        raise SpecConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise SpecConfigError(f"{path} must hold one JSON object, a spec-config")
    return spec


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's; write a finite number")


def names_our_method(spec: Mapping[str, Any]) -> bool:
    """Whether a spec-config names one of our methods."""
    method = spec.get("method")
    return isinstance(method, str) and method in METHODS


def unknown_method(spec: Mapping[str, Any]) -> SpecConfigError:
    """Say that a spec-config names none of our methods, and which one may be meant."""
    names = ", ".join(METHODS)
    method = spec.get("method")
    if method is None:
        keys = spec.keys() - {"method"}
        fitting = [n for n, m in METHODS.items() if keys <= m.model_fields.keys()]
        return SpecConfigError(
            f"speculative_config: 'method' is missing; "
            f"write one of {', '.join(fitting) or names}"
        )
    message = f"speculative_config: 'method' is {method!r}"
    if not isinstance(method, str):
        return SpecConfigError(f"{message}; write a name, one of {names}")
    if method in RENAMED:
        return SpecConfigError(
            f"{message}, the name of another method, of vLLM's own; "
            f"draft trees of this kind are '{RENAMED[method]}'"
        )
    nearest = get_close_matches(method.lower().replace("-", "_"), METHODS, n=1)
    meant = f" (did you mean '{nearest[0]}'?)" if nearest else ""
    return SpecConfigError(
        f"{message}{meant}; write one of {names}, or a method of vLLM's own"
    )


def _one_message(error: ValidationError, method: str) -> str:
    method_type = METHODS[method]
    problems = []
    for problem in error.errors():
        # pydantic names the members of a union, too
        parts = [str(part) for part in problem["loc"] if "[" not in str(part)]
        key = ".".join(parts)
        if problem["type"] == "extra_forbidden":
            problems.append(f"'{key}' is not a key of this method; remove it")
        elif problem["type"] == "missing":
            problems.append(f"'{key}' is missing; add it")
        else:
            message = str(problem["msg"]).removeprefix("Value error, ")
            key = f"'{key}' is {problem['input']!r}: " if key else ""
            problems.append(key + message)
    return (
        f"speculative_config for method '{method}': {'; '.join(problems)} "
        f"(its keys are {', '.join(method_type.model_fields)})"
    )
