"""Write the spec-config's part of the chart's values schema from our own types.

``python -m deploy.values_schema`` replaces ``$defs`` in ``values.schema.json``; the
rest of that file is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from vllm_treespec.config import METHODS

FILE = Path(__file__).parent / "helm" / "vllm-treespec" / "values.schema.json"


def spec_config_definitions() -> dict[str, Any]:
    """JSON schemas of all spec-configs; ``specConfig`` picks one by its ``method``."""
    types = METHODS.values()
    refs, schema = models_json_schema([(t, "validation") for t in types])
    choices = []
    for name, method_type in METHODS.items():
        is_method = {"properties": {"method": {"const": name}}}
        then = refs[method_type, "validation"]
        choices.append({"if": is_method, "then": then})
    choice = {
        "description": "A spec-config of vllm_treespec; null serves without trees.",
        "type": ["object", "null"],
        "required": ["method"],
        "properties": {"method": {"enum": [*METHODS]}},
    }
    # null has no method, so no choice may ask for one.
    when_object = {"if": {"type": "object"}, "then": {"allOf": choices}}
    return {"specConfig": {**choice, **when_object}, **schema["$defs"]}


def text(schema: dict[str, Any]) -> str:
    """The file's text with the definitions of today."""
    schema = {**schema, "$defs": spec_config_definitions()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(json.loads(FILE.read_text("utf-8"))), "utf-8")
