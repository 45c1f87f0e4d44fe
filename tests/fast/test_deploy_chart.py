"""Our Helm chart: what it renders, what it refuses, what belongs together."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import vllm_treespec
from deploy import values_schema
from tests.fast.deployment import (
    CHART,
    DEPLOY,
    EXAMPLES,
    documents,
    example,
    run,
    run_any,
)
from vllm_treespec.config import METHODS

SMALL = ["--set", "image.repository=r", "--set", "model=m"]
ON_MANY_NODES = ["--set", "storage.models.accessModes={ReadWriteMany}"]
DRAFTER = ["--set", "storage.drafter.existingClaim=d"]


def schema() -> dict[str, Any]:
    return json.loads(values_schema.FILE.read_text("utf-8"))


def default_values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


def rendered(kind: str, *values: str) -> dict[str, Any]:
    text = run("helm", "template", "t", CHART, *SMALL, *values)
    (found,) = [d for d in documents(text) if d["kind"] == kind]
    return found


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


def test_the_schema_takes_every_method() -> None:
    check = jsonschema.validators.validator_for(schema())(schema())
    for spec in (None, *specs()):
        check.validate({**default_values(), "specConfig": spec})


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
        (["--set", "kind=LeaderWorkerSet"], "storage.models.accessModes: 2 pods"),
        (["--set", "storage.models.readOnly=true"], "existingClaim too"),
        (["--set", "replicas=2"], "storage.models.accessModes: 2 pods"),
        (["--set", "autoscaling.kind=keda"], "storage.models.accessModes: 4 pods"),
        ([*ON_MANY_NODES, *DRAFTER, "--set", "replicas=2"], "storage.drafter.access"),
        (["--set", "strategy.type=RollingUpdate"], "strategy.type RollingUpdate"),
        (["--set", "ingress.enabled=true"], "ingress.host is empty"),
        (["--set", "service.type=LoadBalancer"], "add an ipBlock to networkPolicy"),
        (["--set", "image.digest=sha256:0"], "/image/digest"),
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


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ([], "Recreate"),
        (ON_MANY_NODES, "RollingUpdate"),
        ([*ON_MANY_NODES, *DRAFTER], "Recreate"),
        ([*ON_MANY_NODES, "--set", "strategy.type=Recreate"], "Recreate"),
    ],
)
def test_no_new_pod_waits_for_the_old_ones_volume(
    values: list[str], strategy: str
) -> None:
    """Red when an update starts a second pod beside a claim of one node."""
    deployment = rendered("Deployment", *values)
    assert deployment["spec"]["strategy"]["type"] == strategy


def test_the_network_policy_lets_the_ingress_controller_in() -> None:
    """Red when the chart makes an Ingress that its own policy shuts out."""
    values = ["--set", "ingress.enabled=true,ingress.host=h"]
    (rule,) = rendered("Ingress", *values)["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "t"
    policy = rendered("NetworkPolicy", *values)
    assert {"kubernetes.io/metadata.name": "ingress-nginx"} in [
        sender.get("namespaceSelector", {}).get("matchLabels")
        for rule in policy["spec"]["ingress"]
        for sender in rule["from"]
    ]


def test_pods_take_a_digest_and_what_a_user_adds() -> None:
    digest = "sha256:" + "0" * 64
    volume = {"name": "more", "emptyDir": {}}
    mount = {"name": "more", "mountPath": "/more"}
    first = {"name": "fetch", "image": "i"}
    values = {
        "image": {"repository": "r", "tag": "t", "digest": digest},
        "extraVolumes": [volume],
        "extraVolumeMounts": [mount],
        "initContainers": [first],
    }
    flags = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    options = [word for flag in flags for word in ("--set-json", flag)]
    pod = rendered("Deployment", *options)["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"r@{digest}"
    assert volume in pod["volumes"]
    assert mount in pod["containers"][0]["volumeMounts"]
    assert pod["initContainers"] == [first]


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
