"""The seam table: it is true of vLLM, and nothing that we use is missing in it."""

import ast
import io
import textwrap
from pathlib import Path

import pytest
import vllm
from rich.console import Console

from tests.fingerprints import installed_sources, names_hash, with_release
from vllm_treespec.engine.seams import (
    BELOW_VLLM,
    MIN_VLLM,
    SEAMS,
    TOPICS,
    SeamError,
    check_seams,
    doctor,
    supported,
)
from vllm_treespec.engine.seams.fingerprints import FINGERPRINTS, SEEN
from vllm_treespec.engine.seams.source_files import SourceFiles, fingerprint

HERE = [seam for seam in SEAMS if seam.needed_in(vllm.__version__)]
REPLACED = [seam for seam in SEAMS if seam.replaced]


@pytest.fixture
def installed() -> SourceFiles:
    """The sources of the installed vLLM."""
    return installed_sources()


def test_seams_of_both_devices_exist() -> None:
    """Red when the locked vLLM lost a seam, also one that only a GPU uses."""
    assert not [s.name for s in HERE if not s.on_instances and not s.exists()]


def test_sources_have_every_seam(installed: SourceFiles) -> None:
    """Red when vLLM renamed a function, class or attribute that we use."""
    assert not [s.name for s in HERE if not installed.has(s.module, s.attribute)]


def test_a_seam_of_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a vLLM is refused for what only another release has, or must have."""
    old, new = (seams_of(release) for release in ("0.32", "0.33"))
    assert old & new == seams_of(None)
    assert any("get_kv_cache_groups" in name for name in old - new)
    assert any("get_kv_cache_config_builder" in name for name in new - old)
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(SeamError, match=r"has no .*get_kv_cache_config_builder"):
        check_seams("cpu")


def seams_of(release: str | None) -> set[str]:
    """Names of the seams needed in a release; None: of those needed in every one."""
    return {
        seam.name
        for seam in SEAMS
        if (seam.needed_in(release) if release else seam.release is None)
    }


def test_no_seam_stands_twice() -> None:
    """Red when the table has two rows for one use of one thing for one purpose."""
    rows = [(seam.kind, seam.name, seam.purpose) for seam in SEAMS]
    assert len(set(rows)) == len(rows)


def test_fingerprints_are_of_the_table() -> None:
    """Red when a replaced function lacks the fingerprint of a supported release."""
    releases = {
        release
        for functions in FINGERPRINTS.values()
        for known in functions.values()
        for release in known
    }
    assert releases == {"0.32", "0.33"} == set(SEEN)
    assert all(supported(release) for release in releases)
    assert min(releases) == MIN_VLLM
    assert not supported(BELOW_VLLM)
    listed = {
        f"{module}.{function}"
        for module, functions in FINGERPRINTS.items()
        for function, known in functions.items()
        if set(known) == releases
    }
    assert listed == {seam.name for seam in REPLACED}


@pytest.mark.parametrize("release", SEEN)
def test_every_seam_was_looked_for(release: str) -> None:
    """Red when a seam is new and nobody looked whether every supported vLLM has it.

    ``python -m tests.fingerprints`` looks, with the sources of each release.
    """
    assert SEEN[release] == names_hash(release)


def test_fingerprints_are_written_anew(installed: SourceFiles) -> None:
    """Red when vLLM changed a function that we override or wrap.

    Or when the command that writes fingerprints would lose or change any.
    """
    assert with_release("0.32", installed) == FINGERPRINTS


STOCK = '''
class Stock:
    """A class."""

    @staticmethod
    def step(count: int = 1) -> int:
        """Do a step."""
        # and count it
        return count + 1
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('        """Do a step."""\n', "", True),
        ('"""Do a step."""', '"""Do two."""', True),
        ("# and count it", "# or not", True),
        ("return count + 1", "return (count+1)", True),
        ("return count + 1", "return count + 2", False),
        ("count: int = 1", "count: int = 2", False),
        ("count: int = 1", "count: int", False),
        (") -> int", ") -> bool", False),
        ("    @staticmethod\n", "", False),
    ],
)
def test_what_changes_a_fingerprint(
    old: str, new: str, same: bool, tmp_path: Path
) -> None:
    """Red when a comment counts as a change of a function, or a change does not."""
    prints = []
    for name, code in (("a", STOCK), ("b", STOCK.replace(old, new))):
        (tmp_path / f"{name}.py").write_text(code)
        prints.append(SourceFiles(tmp_path).fingerprint(name, "Stock.step"))
    assert None not in prints
    assert (prints[0] == prints[1]) is same


def test_fingerprint_of_an_example() -> None:
    """Red when another version of Python, or of our code, has other fingerprints."""
    code = "def f(self, x: int | None = None, *rest):\n    return f'{x}' or [*rest]"
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    assert fingerprint(function) == "0afa310881f95f8f"


def test_where_sources_look(tmp_path: Path) -> None:
    """Red when an attribute is not found where a class or module may have it."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from .base import *\nfrom .user import User")
    (package / "base.py").write_text(
        textwrap.dedent("""
            try:
                from nowhere import thing
            except ImportError:
                thing = None
            class Base:
                field: int
                def __init__(self, other):
                    self.value, other.foreign = 1, 2
            """)
    )
    (package / "user.py").write_text(
        textwrap.dedent("""
            from pkg.base import Base as Parent
            class User(Parent, Generic[T]):
                KIND = 1
                def move(this):
                    this.place: int = 2
                @property
                def size(self): ...
            def attach(layer):
                layer.register_buffer("scale", None)
                layer.linear = 1
            """)
    )
    sources = SourceFiles(tmp_path)
    for name in ("KIND", "move", "place", "size", "field", "value"):
        assert sources.has("pkg", f"User.{name}"), name
        assert sources.has("pkg.user", f"User.{name}"), name
    for name in ("Base.value", "thing", "User"):
        assert sources.has("pkg", name), name
    for name in ("scale", "linear"):
        assert sources.has("pkg.user", f"attach.{name}"), name
    for module, name in [
        ("pkg", "User.foreign"),
        ("pkg", "User.made_up"),
        ("pkg", "Base.KIND"),
        ("pkg", "attach"),
        ("pkg.made_up", "User"),
    ]:
        assert not sources.has(module, name), name


def doctor_says(device: str = "cpu", verbose: bool = False) -> tuple[bool, str]:
    """What the doctor returns, and its text on a wide screen."""
    text = io.StringIO()
    result = doctor(Console(file=text, width=400), device, verbose)
    return result, text.getvalue()


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_doctor_is_content(device: str) -> None:
    """Red when the doctor finds fault with the locked vLLM, or prints more than asked.

    It runs on machines without the device.
    """
    result, text = doctor_says(device)
    assert result
    assert len(text.splitlines()) <= 5
    assert f" on {device}; " in text
    assert "draft trees work with this vLLM" in text


@pytest.mark.usefixtures("parsed")
def test_doctor_lists_seams_if_asked() -> None:
    """Red when a topic of the table is left out, or one seam is not as it was."""
    result, text = doctor_says(verbose=True)
    assert result
    assert all(topic in text for topic in TOPICS)
    assert "DIFFERS" not in text
    assert "as in 0.32" in text
    assert "both" in text
    assert "draft trees work with this vLLM" in text


@pytest.mark.usefixtures("parsed")
def test_doctor_names_a_changed_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a function that vLLM changed is not named, or is an error."""
    known = FINGERPRINTS["vllm.v1.worker.gpu_model_runner"]["GPUModelRunner._sample"]
    for release in known:
        monkeypatch.setitem(known, release, "0" * 16)
    result, text = doctor_says(verbose=True)
    assert result
    assert text.count("DIFFERS") == 1
    assert "1 are unknown" in text
    (line,) = [line for line in text.splitlines() if "make test" in line]
    assert "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample;" in line


@pytest.mark.usefixtures("parsed")
def test_doctor_names_a_lost_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an attribute that vLLM dropped is not named."""
    has = SourceFiles.has

    def without_positions(self: SourceFiles, module: str, attribute: str) -> bool:
        return attribute != "GPUModelRunner.positions" and has(self, module, attribute)

    monkeypatch.setattr(SourceFiles, "has", without_positions)
    result, text = doctor_says(verbose=True)
    assert not result
    assert "no positions" in text
    assert "missing: vllm.v1.worker.gpu_model_runner.GPUModelRunner.positions" in text
    assert "draft trees do not work with this vLLM" in text
