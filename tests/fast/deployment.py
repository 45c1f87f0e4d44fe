"""What deploy/ holds, rendered: for the tests of charts and manifests.

Tools that are not installed skip the tests that need them. docs/deploy.md says how to
get them.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "vllm-treespec"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
THIRD_PARTY = DEPLOY / "third_party"
# A file of values, and the chart of another project that it is for.
OTHER_CHARTS = {
    "vllm-chart/values.yaml": "vllm/examples/deployment/chart-helm",
    "production-stack/values.yaml": "production-stack/helm",
}
# What the LeaderWorkerSet operator sets in the second pod of a group.
GROUP = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "treespec-0",
}

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """Path of a command line tool, from this environment or the machine."""
    here = Path(sys.executable).parent / name
    path = str(here) if here.is_file() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (docs/deploy.md)")
    return path


def run(name: str, *arguments: str | Path) -> str:
    """Run a tool; the test fails with the tool's own words."""
    done = run_any(name, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def run_any(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool that may fail."""
    command = [tool(name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=DEPLOY)


def third_party(path: str) -> Path:
    """A file of another project, which deploy/third_party.sh gets."""
    found = THIRD_PARTY / path
    if not found.exists():
        pytest.skip(f"{path} is not there; run deploy/third_party.sh")
    return found


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def example(name: str) -> list[Manifest]:
    """What our chart makes of one of its examples."""
    values = CHART / "examples" / name
    return documents(run("helm", "template", "treespec", CHART, "--values", values))


def _other_chart(values: str) -> list[Manifest]:
    """What another project's chart makes of our values; its dependencies left out.

    Helm wants them on disk also where they are switched off.
    """
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / "chart"
        shutil.copytree(third_party(OTHER_CHARTS[values]), chart)
        about = yaml.safe_load((chart / "Chart.yaml").read_text())
        about.pop("dependencies", None)
        (chart / "Chart.yaml").write_text(yaml.safe_dump(about))
        (chart / "Chart.lock").unlink(missing_ok=True)
        values_file = DEPLOY / values
        return documents(
            run("helm", "template", "treespec", chart, "--values", values_file)
        )


SOURCES = {
    **{
        f"helm: {path.name}": functools.partial(example, path.name) for path in EXAMPLES
    },
    **{values: functools.partial(_other_chart, values) for values in OTHER_CHARTS},
    **{
        f"kustomize/{folder}": functools.partial(
            lambda folder: documents(run("kubectl", "kustomize", folder)),
            DEPLOY / "kustomize" / folder,
        )
        for folder in ("base", "gpu")
    },
    **{
        path: functools.partial(
            lambda path: documents((DEPLOY / path).read_text()), path
        )
        for path in ("lws/leaderworkerset.yaml", "kuberay/rayservice.yaml")
    },
}


@functools.cache
def manifests(source: str) -> list[Manifest]:
    """All documents of a source, by its name in ``SOURCES``."""
    return SOURCES[source]()


def pods(node: Any) -> Iterator[Manifest]:
    """Specifications of pods, anywhere in a document."""
    if isinstance(node, list):
        for item in node:
            yield from pods(item)
    elif isinstance(node, dict):
        if "containers" in node:
            yield node
        else:
            for item in node.values():
                yield from pods(item)


def serve_commands(source: str) -> list[list[str]]:
    """Arguments of every ``vllm serve`` as they stand when a pod runs it."""
    commands = []
    for document in manifests(source):
        for pod in pods(document):
            for container in pod["containers"]:
                words = [*container.get("command", []), *container.get("args", [])]
                env = {e["name"]: e.get("value", "") for e in container.get("env", [])}
                if words[:2] == ["sh", "-c"]:
                    words = _shell_words(words[2], GROUP | env)
                if words[:2] == ["vllm", "serve"]:
                    expand = functools.partial(re.sub, r"\$\((\w+)\)", _of(GROUP))
                    commands.append([expand(word) for word in words[2:]])
    return commands


def _of(variables: dict[str, str]) -> Any:
    return lambda match: variables[match[1]]


def _shell_words(script: str, variables: dict[str, str]) -> list[str]:
    """The words of ``exec vllm serve ...``, as a shell splits them."""
    words = []
    for word in shlex.split(script.removeprefix("exec "), posix=False):
        bare = word.strip('"').removeprefix("$")
        if word.strip('"').startswith("$"):
            value = variables.get(bare, "")
            words += [value] if value else []
        else:
            words.append(word)
    return words
