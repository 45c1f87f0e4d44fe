"""What a request says of draft trees: ``extra_args={"treespec": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_treespec.config.base import MAX_DRAFTS
from vllm_treespec.heads.names import shown
from vllm_treespec.json_files import parse_json

KEY = "treespec"
WHERE = f"extra_args (vllm_xargs over HTTP), '{KEY}'"
EXAMPLE = (
    f'write {{"{KEY}": {{"enabled": false}}}}, over HTTP the inner object as text: '
    rf'{{"{KEY}": "{{\"enabled\": false}}"}}'
)


class RequestOptionsError(ValueError):
    """A request says something of draft trees that cannot be."""


class RequestOptions(BaseModel):
    """What a request may say of draft trees."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(default=True, description="whether it may have trees")
    max_drafts: int = Field(
        default=MAX_DRAFTS, ge=0, description="draft tokens of a tree, at most"
    )

    @property
    def limit(self) -> int:
        """Draft tokens that a tree may have; 0: no tree."""
        return min(self.max_drafts, MAX_DRAFTS) if self.enabled else 0


def drafts_allowed(allowed: bool) -> dict[str, Any]:
    """Sampling parameters of a request that may have drafts, or must have none."""
    return {"extra_args": {KEY: {"enabled": allowed}}}


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Read what a request says of draft trees.

    Args:
        extra_args: of its sampling parameters. ``"treespec"`` holds a dict or, since
            vLLM's server takes no nested objects there, a dict as JSON text.

    Raises:
        RequestOptionsError: naming each wrong key and the remedy.

    """
    if not extra_args:
        return RequestOptions()
    for key in extra_args:
        if key != KEY and str(key).startswith(KEY):
            raise RequestOptionsError(
                f"extra_args (vllm_xargs over HTTP): there is no {shown(key)}; "
                f"{EXAMPLE}"
            )
    given = extra_args.get(KEY, {})
    try:
        options = parse_json(given) if isinstance(given, str) else given
    except ValueError:
        raise RequestOptionsError(
            f"{WHERE} is {shown(given)}, which is not JSON; {EXAMPLE}"
        ) from None
    if not isinstance(options, dict):
        raise RequestOptionsError(f"{WHERE} is {shown(given)}; {EXAMPLE}")
    try:
        return RequestOptions.model_validate(options)
    except ValidationError as error:
        raise RequestOptionsError(one_message(error)) from None


def one_message(error: ValidationError) -> str:
    """Name every wrong key."""
    problems = []
    for problem in error.errors():
        key = shown(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            problems.append(f"{key} is not one of its keys; remove it")
        else:
            value = shown(problem["input"])
            problems.append(f"{key} is {value}: {problem['msg']}")
    keys = ", ".join(RequestOptions.model_fields)
    return f"{WHERE}: {'; '.join(problems)} (its keys are {keys})"
