"""The registry of methods: built in, registered, or installed with other packages."""

from __future__ import annotations

import inspect
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar, get_args

from vllm_treespec.config.base import MethodConfig, SpecConfigError
from vllm_treespec.config.dflash_tree import DFlashTreeConfig
from vllm_treespec.config.eagle_tree import EagleTreeConfig
from vllm_treespec.config.heads import HeadMethodConfig
from vllm_treespec.config.hybrid import HybridConfig
from vllm_treespec.config.lyanna import LyannaConfig
from vllm_treespec.config.medusa_tree import MedusaTreeConfig
from vllm_treespec.config.redrafter import ReDrafterConfig
from vllm_treespec.config.rsd_c import RsdCConfig
from vllm_treespec.config.rsd_s import RsdSConfig
from vllm_treespec.config.sd import SdConfig
from vllm_treespec.config.specinfer import SpecInferConfig
from vllm_treespec.config.spectr import SpecTrConfig
from vllm_treespec.config.suffix_tree import SuffixTreeConfig
from vllm_treespec.config.vllm_names import VLLM_METHODS
from vllm_treespec.heads.names import shown

# Of other packages: each entry point has the method's name and names its class.
GROUP = "vllm_treespec.methods"
NAME = re.compile("[a-z][a-z0-9_]*")
M = TypeVar("M", bound=type[MethodConfig])

# In the order in which messages list them.
BUILT_IN: tuple[type[MethodConfig], ...] = (
    SdConfig,
    RsdCConfig,
    RsdSConfig,
    SpecTrConfig,
    SpecInferConfig,
    SuffixTreeConfig,
    ReDrafterConfig,
    MedusaTreeConfig,
    EagleTreeConfig,
    DFlashTreeConfig,
    LyannaConfig,
    HybridConfig,
)
# By name. Registered methods come last.
METHODS: dict[str, type[MethodConfig]] = {m.method_name(): m for m in BUILT_IN}
# The built-in method that drafts with a head, by kind of head.
HEAD_METHODS = {
    method.HEAD: method.method_name()
    for method in BUILT_IN
    if issubclass(method, HeadMethodConfig)
}


def register_method(method: M) -> M:
    """Let spec-configs of this process name a method; also a decorator of its class.

    A class that was defined anew, as ``importlib.reload`` does it, takes its own place.

    Raises:
        SpecConfigError: it is no method that all of vLLM's processes can import, or the
            name is taken.

    """
    check_method(method)
    name = method.method_name()
    other = METHODS.get(name)
    if other is not None and path_of(other) != path_of(method):
        whose = "a built-in one" if other in BUILT_IN else f"that of {path_of(other)}"
        raise SpecConfigError(
            f"{path_of(method)}: the method '{name}' is there already, {whose}; write "
            f"another name in its key 'method'"
        )
    METHODS[name] = method
    return method


def find_method(name: str) -> type[MethodConfig] | None:
    """The method that a spec-config names, None: there is none of that name.

    Args:
        name: of a method; or of its class, ``module:Class``.

    Raises:
        SpecConfigError: it cannot be imported, is no method, or two have this name.

    """
    if ":" in name:
        return _import_method(name)
    method = METHODS.get(name)
    if method in BUILT_IN:
        # No other package comes between a user and a built-in method.
        return method
    for point in entry_points(group=GROUP):
        if point.name == name:
            _register_installed(point)
    return METHODS.get(name)


def register_installed() -> list[SpecConfigError]:
    """Register the methods of all other packages; return what is wrong with some."""
    problems = []
    for point in entry_points(group=GROUP):
        try:
            _register_installed(point)
        except SpecConfigError as error:
            problems.append(error)
    return problems


def method_names() -> list[str]:
    """Names of all methods that this process knows; imports none of them."""
    others = [point.name for point in entry_points(group=GROUP)]
    # vLLM's methods stay its own, whatever is installed.
    return list(
        dict.fromkeys([*METHODS, *(n for n in others if n not in VLLM_METHODS)])
    )


def reference(method: type[MethodConfig]) -> str:
    """What a spec-config calls a method so that every process finds it."""
    return method.method_name() if method in BUILT_IN else path_of(method)


def path_of(method: type[MethodConfig]) -> str:
    """``module:Class`` of a method."""
    return f"{method.__module__}:{method.__qualname__}"


def check_method(method: Any) -> None:
    """Check that a class is a method that all of vLLM's processes can import.

    Raises:
        SpecConfigError: naming what is missing.

    """
    if not isinstance(method, type) or not issubclass(method, MethodConfig):
        raise SpecConfigError(
            f"{shown(method)} is no method; write a subclass of "
            f"vllm_treespec.config.base.MethodConfig"
        )
    path, field = path_of(method), method.model_fields.get("method")
    names = () if field is None else get_args(field.annotation)
    if len(names) != 1 or not NAME.fullmatch(str(names[0])):
        raise SpecConfigError(
            f"{path} has no key 'method' with a name; write one of small letters, such "
            f'as method: Literal["fan"]'
        )
    if inspect.isabstract(method):
        missing = ", ".join(sorted(method.__abstractmethods__))
        raise SpecConfigError(f"{path} lacks {missing}; write them")
    if names[0] in VLLM_METHODS:
        raise SpecConfigError(
            f"{path}: '{names[0]}' is a method of vLLM's own; write another name in "
            f"its key 'method'"
        )
    in_notebook = method.__module__ == "__main__" and not hasattr(
        sys.modules["__main__"], "__file__"
    )
    if in_notebook or "<locals>" in method.__qualname__:
        where = "in a notebook or at a prompt" if in_notebook else "in a function"
        raise SpecConfigError(
            f"{path} is defined {where}, and vLLM's processes cannot import it; "
            f"write it into a file (in a notebook a cell that begins with %%writefile "
            f"my_method.py), and import it from there"
        )


def _import_method(path: str) -> type[MethodConfig]:
    """Import a method by ``module:Class``, and register it."""
    key = f"speculative_config: 'method' is {shown(path)}"
    try:
        method: Any = resolve_name(path)
    except Exception as error:
        raise SpecConfigError(
            f"{key}, which cannot be imported ({type(error).__name__}: {error}); "
            f"install the package that holds it, or put its folder on PYTHONPATH"
        ) from error
    try:
        register_method(method)
    except SpecConfigError as error:
        raise SpecConfigError(f"{key}: {error}") from None
    return method


def _register_installed(point: EntryPoint) -> None:
    """Import the method of another package, and register it."""
    package = "its package" if point.dist is None else point.dist.name
    where = f"the entry point '{point.name} = {point.value}' of {package} ({GROUP})"
    try:
        method = point.load()
    except Exception as error:
        raise SpecConfigError(
            f"{where} cannot be imported ({type(error).__name__}: {error}); repair "
            f"{package}, or uninstall it"
        ) from error
    try:
        check_method(method)
        if method.method_name() != point.name:
            raise SpecConfigError(
                f"its method is '{method.method_name()}'; give the entry point that "
                f"name"
            )
        register_method(method)
    except SpecConfigError as error:
        raise SpecConfigError(f"{where}: {error}, or uninstall {package}") from None
