"""Methods from outside the package: how they are registered, found and refused."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

import vllm_treespec
from tests.fast.dev_pages import save_blocks
from vllm_treespec.cli import app
from vllm_treespec.config import METHODS, SpecConfigError, parse_spec_config
from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.methods import BUILT_IN, GROUP
from vllm_treespec.config.parse import names_our_method
from vllm_treespec.config.suffix_tree import SuffixTreeConfig
from vllm_treespec.plugin import stock_arguments
from vllm_treespec.proposers import Proposer
from vllm_treespec.trees.sizes import TreeSizes

PATH = "fan:FanConfig"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forget what a test registered and imported."""
    yield
    for name in METHODS.keys() - {method.method_name() for method in BUILT_IN}:
        del METHODS[name]
    sys.modules.pop("fan", None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path, with fan.py of the page on methods."""
    save_blocks("write-a-method.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def fan(folder: Path) -> ModuleType:
    """The page's fan.py, imported."""
    return importlib.import_module("fan")


@pytest.fixture
def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a package with one entry point."""

    def install(line: str, package: str = "fan-package") -> None:
        info = folder / package / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{line}\n")
        monkeypatch.syspath_prepend(info.parent)

    return install


def refusal(spec: dict[str, Any]) -> str:
    """The one message with which a spec-config is refused."""
    with pytest.raises(SpecConfigError) as error:
        parse_spec_config(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


class Suffixes(SuffixTreeConfig):
    """A method of this file."""

    method: Literal["suffixes"]  # type: ignore[assignment]


class Taken(SuffixTreeConfig):
    """A method with the name of another."""

    method: Literal["fan"]  # type: ignore[assignment]


class OfVllm(SuffixTreeConfig):
    """A method with a name of vLLM's own."""

    method: Literal["ngram"]  # type: ignore[assignment]


class Nameless(SuffixTreeConfig):
    """A method with a name that is none."""

    method: Literal["my:method"]  # type: ignore[assignment]


class HalfDone(MethodConfig):
    """A method without a proposer."""

    method: Literal["half_done"]

    @property
    def sizes(self) -> TreeSizes:
        return TreeSizes(max_nodes=2, max_depth=1, max_width=1, max_leaves=1)


def test_registered_methods_are_known() -> None:
    """Red when register_method does nothing, or settings lose where the class lies."""
    assert not names_our_method({"method": "suffixes"})
    assert vllm_treespec.register_method(Suffixes) is Suffixes
    config = parse_spec_config({"method": "suffixes", "depth": 3})
    assert type(config) is Suffixes
    settings = stock_arguments(config, None, "cpu")["additional_config"]["treespec"]
    assert settings["method"] == f"{__name__}:Suffixes"
    del METHODS["suffixes"]
    assert parse_spec_config(settings) == config, "other processes know no short name"


def test_a_class_is_found_by_its_module(fan: ModuleType) -> None:
    """Red when a spec-config may not name the class, or its keys are not validated."""
    config = parse_spec_config({"method": PATH, "width": 3})
    assert (config.name, config.shape_name) == ("fan", "3x4")
    assert config == parse_spec_config({"method": "fan", "width": 3})
    message = refusal({"method": PATH, "widht": 3})
    assert "method 'fan': 'widht' is not a key of this method" in message
    assert "write 'width'" in message
    assert "39 draft tokens" not in message
    assert "at most 63 fit" in refusal({"method": PATH, "width": 32})


def test_a_reloaded_class_takes_its_place(fan: ModuleType) -> None:
    """Red when a notebook cannot import a method again after a change."""
    before = METHODS["fan"]
    assert importlib.reload(fan).FanConfig is METHODS["fan"] is not before


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            Taken,
            ":Taken: the method 'fan' is there already, that of fan:FanConfig; wri",
        ),
        (OfVllm, ":OfVllm: 'ngram' is a method of vLLM's own; write another name in"),
        (Nameless, ":Nameless has no key 'method' with a name; write one of small"),
        (SuffixTreeConfig.__base__, "IndexConfig has no key 'method' with a name"),
        (HalfDone, ":HalfDone lacks proposer; write them"),
        (Proposer, "Proposer'> is no method; write a subclass of vllm_treespec.config"),
        (7, "7 is no method"),
    ],
)
def test_methods_that_cannot_be(method: Any, says: str, fan: ModuleType) -> None:
    """Red when a wrong class is registered, or the message names no remedy."""
    before = dict(METHODS)
    with pytest.raises(SpecConfigError) as error:
        vllm_treespec.register_method(method)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert before == METHODS


def test_built_in_names_are_taken() -> None:
    """Red when another class comes in place of a built-in method."""

    class Other(SuffixTreeConfig):
        """A method in a function."""

    Other.__qualname__ = "Other"
    with pytest.raises(SpecConfigError, match="already, a built-in one; write another"):
        vllm_treespec.register_method(Other)


def test_classes_that_processes_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an engine fails late on a class of a notebook or of a function."""

    class Inner(Suffixes):
        """A method in a function."""

    with pytest.raises(SpecConfigError, match="Inner is defined in a function, and"):
        vllm_treespec.register_method(Inner)
    monkeypatch.setattr(Suffixes, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(SpecConfigError) as error:
        vllm_treespec.register_method(Suffixes)
    assert "Suffixes is defined in a notebook or at a prompt" in str(error.value)
    assert "%%writefile" in str(error.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:X", "(ModuleNotFoundError: No module named 'no_such_module')"),
        ("fan:Nothing", "(AttributeError: module 'fan' has no attribute 'Nothing')"),
        ("fan:Fan", "'fan:Fan': <class 'fan.Fan'> is no method; write a subclass"),
        (":", "which cannot be imported"),
        ("broken:X", "(ZeroDivisionError: division by zero); install the package"),
    ],
)
def test_classes_that_are_not_there(path: str, says: str, folder: Path) -> None:
    """Red when a slip in a class's name, or an error in its module, goes unnamed."""
    (folder / "broken.py").write_text("1 / 0\n")
    message = refusal({"method": path})
    assert message.startswith(f"speculative_config: 'method' is '{path}'")
    assert says in message


def test_installed_methods_are_known_everywhere(install: Callable[[str], None]) -> None:
    """Red when an entry point is not looked at, or is imported before it is needed."""
    install(f"fan = {PATH}")
    message = refusal({"method": "fam"})
    assert "did you mean 'fan'?" in message
    assert "hybrid, fan (" in message
    assert names_our_method({"method": "fan"})
    assert "fan" not in sys.modules
    config = parse_spec_config({"method": "fan", "depth": 2})
    assert config.shape_name == "2x2"


def test_commands_know_installed_methods(install: Callable[[str], None]) -> None:
    """Red when `treespec methods` or `treespec expand` leaves installed ones out."""
    install(f"fan = {PATH}")
    done = CliRunner().invoke(app, ["methods"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*METHODS]
    chains = "Chains that part at the root, from the request's own text."
    assert lines[-1] == f"fan          {chains} Needs nothing."
    for method in ("fan", PATH):
        done = CliRunner().invoke(app, ["expand", json.dumps({"method": method})])
        assert done.exit_code == 0, done.output
        arguments = json.loads(done.stdout)
        assert arguments["speculative_config"]["num_speculative_tokens"] == 8
        assert arguments["additional_config"]["treespec"]["method"] == PATH


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "fan = no_such_module:X",
            "cannot be imported (ModuleNotFoundError: No module named "
            "'no_such_module'); repair fan-package, or uninstall it",
        ),
        ("fan = fan:Nothing", "(AttributeError: module 'fan' has no attribute"),
        ("fan = fan:Fan", "<class 'fan.Fan'> is no method"),
        ("other = fan:FanConfig", "its method is 'fan'; give the entry point that"),
        (
            f"rsd_s = {__name__}:Suffixes",
            "its method is 'suffixes'; give the entry point that name",
        ),
    ],
)
def test_broken_entry_points_are_named(
    line: str, says: str, install: Callable[[str], None]
) -> None:
    """Red when a package's error is silent, or stands in the way of other methods."""
    install(line)
    done = CliRunner().invoke(app, ["methods"])
    assert done.exit_code == 1
    assert [row.split()[0] for row in done.stdout.splitlines()] == [*METHODS]
    (message,) = done.stderr.splitlines()
    assert message.startswith(
        f"treespec: the entry point '{line}' of fan-package ({GROUP})"
    )
    assert says in message
    assert parse_spec_config({"method": "rsd_s", "model": "m"}).name == "rsd_s"
    name = line.split()[0]
    if name != "rsd_s":
        assert says in refusal({"method": name})


def test_two_packages_with_one_name(
    install: Callable[..., None], fan: ModuleType
) -> None:
    """Red when the package that comes first wins in silence."""
    install(f"fan = {PATH}")
    install(f"fan = {__name__}:Taken", package="other-package")
    message = refusal({"method": "fan"})
    assert "of other-package (" in message
    assert "the method 'fan' is there already, that of fan:FanConfig" in message
    assert "uninstall other-package" in message


def test_vllms_own_methods_stay_its_own(install: Callable[[str], None]) -> None:
    """Red when an installed package takes a method of vLLM's own away."""
    install(f"ngram = {__name__}:OfVllm")
    assert not names_our_method({"method": "ngram"})
    done = CliRunner().invoke(app, ["methods"])
    assert "'ngram' is a method of vLLM's own" in done.stderr
