"""Write the schemas again: ``deploy/third_party.sh && python -m tests.crds``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
THIRD_PARTY = HERE.parents[1] / "deploy" / "third_party"


def main() -> None:
    """Write a file for every definition that deploy/third_party.sh has got."""
    for path in sorted(THIRD_PARTY.glob("*/**/*.yaml")):
        if "helm" in path.parts or "chart-helm" in path.parts:
            continue
        definition = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)["spec"]
        versions = {
            version["name"]: without_descriptions(version["schema"]["openAPIV3Schema"])
            for version in definition["versions"]
        }
        kept = {"group": definition["group"], "versions": versions}
        name = f"{definition['names']['kind']}.json"
        (HERE / name).write_text(json.dumps(kept) + "\n")


def without_descriptions(schema: Any) -> Any:
    """A schema without what only people read, which is most of it."""
    if isinstance(schema, list):
        return [without_descriptions(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_descriptions(value)
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str))
    }


if __name__ == "__main__":
    main()
