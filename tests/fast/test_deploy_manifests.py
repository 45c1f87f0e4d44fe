"""Every manifest of deploy/, rendered, against schemas, parsers and our own rules."""

import dataclasses
import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_treespec
from tests.fast.deployment import (
    DEPLOY,
    OTHER_CHARTS,
    SOURCES,
    manifests,
    pods,
    serve_commands,
)
from vllm_treespec.config import parse_spec_config

# Kinds of custom resources, each with its schema.
CRDS = {path.stem: path for path in (Path(__file__).parents[1] / "crds").glob("*.json")}
OUR_SOURCES = [source for source in SOURCES if source not in OTHER_CHARTS]
# Folders that must be writable although the root is not.
WRITABLE = ("/cache", "/tmp", "/dev/shm")


def strict(schema: Any) -> Any:
    """A schema of a custom resource, in which unknown keys are errors."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if "(?i)" in str(made.get("pattern", "")):
        # Go takes the flag anywhere, Python at the front only.
        made["pattern"] = "(?i)" + made["pattern"].replace("(?i)", "")
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    closed = isinstance(schema.get("properties"), dict) and schema.get("type")
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@functools.cache
def custom_check(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """What validates a custom resource."""
    definition = json.loads(CRDS[kind].read_text("utf-8"))
    group, version = api_version.split("/")
    assert definition["group"] == group
    return jsonschema.Draft202012Validator(strict(definition["versions"][version]))


def operator_check(document: dict[str, Any]) -> None:
    """Validate a custom resource; unknown keys are errors."""
    custom_check(document["kind"], document["apiVersion"]).validate(document)


def kubernetes_check(document: dict[str, Any]) -> None:
    """Validate a resource of Kubernetes' own; unknown keys are errors."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="it is not installed (docs/deploy.md)"
    )
    validator.validate(document, validator.latest_version(), strict=True)


@pytest.mark.parametrize("source", SOURCES)
def test_kubernetes_accepts_them(source: str) -> None:
    for document in manifests(source):
        if document["kind"] not in CRDS:
            kubernetes_check(document)


def test_a_wrong_key_in_a_deployment_is_found() -> None:
    """Red when the validation lets unknown keys or wrong types through."""
    (deployment,) = [
        d for d in manifests("kustomize/base") if d["kind"] == "Deployment"
    ]
    for key, value in (("replica", 1), ("replicas", "one")):
        wrong = json.loads(json.dumps(deployment))
        wrong["spec"][key] = value
        with pytest.raises(jsonschema.ValidationError):
            kubernetes_check(wrong)


@pytest.mark.parametrize("source", SOURCES)
def test_operators_accept_their_custom_resources(source: str) -> None:
    custom = [d for d in manifests(source) if d["kind"] in CRDS]
    if not custom:
        pytest.skip(f"{source} has no custom resource")
    for document in custom:
        operator_check(document)


def test_a_wrong_key_in_a_custom_resource_is_found() -> None:
    """Red when the validation lets unknown keys or wrong types through."""
    (group, _) = manifests("lws/leaderworkerset.yaml")
    for key, value in (("sizes", 2), ("size", "two")):
        wrong = json.loads(json.dumps(group))
        wrong["spec"]["leaderWorkerTemplate"][key] = value
        with pytest.raises(jsonschema.ValidationError, match=str(value)):
            operator_check(wrong)


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """The parser of ``vllm serve``."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    return parser


@pytest.mark.parametrize("source", [s for s in SOURCES if not s.startswith("kuberay")])
def test_vllm_and_we_accept_the_arguments(
    source: str, parser: FlexibleArgumentParser
) -> None:
    """Red when vLLM loses an argument, or a spec-config of ours is not valid."""
    commands = serve_commands(source)
    assert commands
    for words in commands:
        arguments = parser.parse_args(["serve", *words])
        ServeSubcommand().validate(arguments)
        parse_spec_config(arguments.speculative_config)


def kuberay_config() -> dict[str, Any]:
    """The model that KubeRay serves."""
    (service, _) = manifests("kuberay/rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (config,) = application["args"]["llm_configs"]
    return config


def ray_serve_config() -> dict[str, Any]:
    """The model that is served without Kubernetes."""
    folder = DEPLOY / "ray-serve"
    (application,) = yaml.safe_load((folder / "serve.yaml").read_text())["applications"]
    (name,) = application["args"]["llm_configs"]
    return yaml.safe_load((folder / name).read_text())


@pytest.mark.parametrize("config", [kuberay_config, ray_serve_config])
def test_ray_passes_arguments_that_exist(config: Callable[[], dict[str, Any]]) -> None:
    found = config()
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert found["engine_kwargs"].keys() <= known - {"model", "served_model_name"}
    parse_spec_config(found["engine_kwargs"]["speculative_config"])
    # Where Ray is not installed it cannot be imported.
    module, _, name = found["server_cls"].partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"class {name}(LLMServer):" in Path(spec.origin).read_text()


@pytest.mark.parametrize("source", SOURCES)
def test_images_have_the_packages_version(source: str) -> None:
    """Red when the package's version changes and a manifest's stays."""
    images = {
        container["image"]
        for document in manifests(source)
        for pod in pods(document)
        for container in pod["containers"]
        if "treespec" in container["image"]
    }
    assert images
    assert {image.rpartition(":")[2] for image in images} == {vllm_treespec.__version__}


@pytest.mark.parametrize("source", OUR_SOURCES)
def test_pods_are_unprivileged_and_write_to_volumes_only(source: str) -> None:
    found = [pod for document in manifests(source) for pod in pods(document)]
    assert found
    for pod in found:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for path in WRITABLE:
                assert "emptyDir" in volumes[mounts[path]], path
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            env = {e["name"]: e.get("value") for e in container["env"]}
            assert env["HOME"] == "/cache"
            assert env["TMPDIR"] == "/tmp"
            assert env["USER"]


@pytest.mark.parametrize("source", [s for s in SOURCES if not s.startswith("kuberay")])
def test_a_start_may_take_a_quarter_of_an_hour(source: str) -> None:
    """A small model starts in 20 to 45 seconds, a large one in minutes.

    A rollout must not be given up before.
    """
    found = []
    for document in manifests(source):
        deadline = document.get("spec", {}).get("progressDeadlineSeconds", 10**9)
        for pod in pods(document):
            for container in pod["containers"]:
                if "treespec" not in container["image"]:
                    continue
                probe = container.get("startupProbe")
                if probe is None:
                    assert "router" in container["name"] or document["kind"] in CRDS
                    continue
                seconds = probe["periodSeconds"] * probe["failureThreshold"]
                assert 900 <= seconds < deadline
                found.append(seconds)
    assert found


@pytest.mark.parametrize("source", SOURCES)
def test_a_claim_of_one_node_has_one_pod_at_a_time(source: str) -> None:
    """Red when an update or an autoscaler starts a pod that waits for a volume."""
    found = manifests(source)
    one_node = {
        document["metadata"]["name"]
        for document in found
        if document["kind"] == "PersistentVolumeClaim"
        and not {*document["spec"]["accessModes"]} & {"ReadWriteMany", "ReadOnlyMany"}
    }
    for document in found:
        for pod in pods(document):
            claims = {
                volume["persistentVolumeClaim"]["claimName"]
                for volume in pod.get("volumes", [])
                if "persistentVolumeClaim" in volume
            }
            if claims & one_node:
                assert document["kind"] == "Deployment"
                assert document["spec"]["strategy"]["type"] == "Recreate"
                assert document["spec"]["replicas"] == 1
                assert "ScaledObject" not in {d["kind"] for d in found}


@pytest.mark.parametrize("source", SOURCES)
def test_a_server_that_ends_with_0_is_started_again(source: str) -> None:
    """vLLM ends with 0 when its engine was killed, too."""
    for document in manifests(source):
        for pod in pods(document):
            assert pod.get("restartPolicy", "Always") == "Always"


def test_rays_dashboard_needs_a_token_and_has_a_policy() -> None:
    """Red when whoever reaches the cluster's network can run programs on it."""
    (service, policy) = manifests("kuberay/rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    for group in groups:
        assert chosen.items() <= group["template"]["metadata"]["labels"].items()
    for rule in policy["spec"]["ingress"]:
        open_to_others = any("podSelector" not in sender for sender in rule["from"])
        if open_to_others or {"podSelector": {}} in rule["from"]:
            assert {port["port"] for port in rule["ports"]} <= {8000, 8080}


def test_other_charts_are_named_by_the_script() -> None:
    """Red when a test reads a chart that the script does not get."""
    script = (Path(__file__).parents[2] / "deploy" / "third_party.sh").read_text()
    for path in OTHER_CHARTS.values():
        folder, _, rest = path.partition("/")
        assert f"get {folder} " in script
        assert rest in script
