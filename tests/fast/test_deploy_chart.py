"""Our Helm chart: what it renders, what it refuses, what belongs together."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import vllm_treespec
from deploy import values_schema
from tests.fast.deployment import CHART, DEPLOY, EXAMPLES, example, run, run_any
from vllm_treespec.config import METHODS

SMALL = ["--set", "image.repository=r", "--set", "model=m"]


def schema() -> dict[str, Any]:
    return json.loads(values_schema.FILE.read_text("utf-8"))


def default_values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


def refusal(*values: str) -> str:
    done = run_any("helm", "template", "t", CHART, *SMALL, *values)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_the_schema_is_that_of_our_types() -> None:
    """Red when a method's keys change: run ``python -m deploy.values_schema``."""
    text = values_schema.FILE.read_text("utf-8")
    assert text == values_schema.text(json.loads(text))


def test_every_value_is_in_the_schema() -> None:
    """Red when a value is added to values.yaml only, or to the schema only."""

    def keys(schema: dict[str, Any], values: Any, path: str) -> None:
        if schema.get("additionalProperties") is not False:
            return
        known = {key for key in schema["properties"] if key != "global"}
        assert known >= values.keys(), path
        for key, value in values.items():
            keys(schema["properties"][key], value, f"{path}.{key}")

    keys(schema(), default_values(), "values")
    assert {*schema()["properties"]} - {*default_values()} == {"global"}
    jsonschema.validate(default_values(), schema())


def specs() -> list[dict[str, Any]]:
    drafts = [{"model": "a", "branching_factors": [2, 1]}, {"model": "b"}]
    needed = {"specinfer": {"drafts": drafts}, "suffix_tree": {}}
    return [{"method": name, **needed.get(name, {"model": "m"})} for name in METHODS]


@pytest.mark.parametrize("spec", [None, *specs()], ids=str)
def test_the_schema_takes_every_method(spec: dict[str, Any] | None) -> None:
    jsonschema.validate({**default_values(), "specConfig": spec}, schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_pass_helms_own_check(path: Path) -> None:
    run("helm", "lint", "--strict", CHART, "--values", path)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["--set", "specConfig.method=suffix"], "/specConfig/method"),
        (["--set", "specConfig.dept=3"], "'dept' not allowed"),
        (["--set", "specConfig.depth=0"], "/specConfig/depth"),
        (["--set", "specConfig.method=rsd_s"], "missing property 'model'"),
        (["--set", "extraArgs={--speculative-config,x}"], "/extraArgs/0"),
        (["--set", "replica=2"], "'replica' not allowed"),
        (["--set", "device=tpu"], "/device"),
        (["--set", "model="], "model is empty: name"),
        (["--set", "image.repository="], "image.repository is empty: build"),
        (["--set", "kind=LeaderWorkerSet,device=cpu"], "set device: cuda"),
        (["--set", "kind=LeaderWorkerSet"], "set [ReadWriteMany]"),
        (["--set", "storage.models.readOnly=true"], "existingClaim too"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_wrong_values_are_refused_by_name(values: list[str], says: str) -> None:
    assert says in refusal(*values)


def test_the_version_is_the_packages() -> None:
    """Red when the package's version changes and the chart's stays."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert about["appVersion"] == vllm_treespec.__version__


def test_without_a_spec_config_vllm_serves_plainly() -> None:
    none = ["--set-json", "specConfig=null"]
    assert "speculative" not in run("helm", "template", "t", CHART, *SMALL, *none)


def test_board_and_rules_are_installed_as_they_are() -> None:
    """Red when the chart's links, or how it indents what they hold, break."""
    installed = {
        document["kind"]: document
        for document in example("gpu.yaml")
        if document["kind"] in ("ConfigMap", "PrometheusRule")
    }
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules.yaml").read_text("utf-8"))
    assert installed["PrometheusRule"]["spec"] == rules
    board = (DEPLOY / "monitoring" / "board.json").read_text("utf-8")
    (shown,) = installed["ConfigMap"]["data"].values()
    assert json.loads(shown) == json.loads(board)


def test_a_group_divides_the_target_over_all_its_gpus() -> None:
    (group,) = [d for d in example("gpu-group.yaml") if d["kind"] == "LeaderWorkerSet"]
    parts = group["spec"]["leaderWorkerTemplate"]
    for role in ("leader", "worker"):
        (container,) = parts[f"{role}Template"]["spec"]["containers"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        ranks = container["args"][container["args"].index("--tensor-parallel-size") + 1]
        assert int(ranks) == gpus * parts["size"] == 8
        assert ("--headless" in container["args"]) == (role == "worker")
        assert ("startupProbe" in container) == (role == "leader")
