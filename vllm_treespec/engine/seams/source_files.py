"""Finds functions, classes and attributes in vLLM's source files without an import.

An attribute of an instance is found where a method assigns it, which ``hasattr`` on
the class cannot see. The sources of another release can be searched in the same way.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Body = list[ast.stmt]


class Definition(NamedTuple):
    """Where a name is defined."""

    module: str
    node: ast.AST


class SourceFiles:
    """The source files of one vLLM."""

    def __init__(self, root: Path) -> None:
        """Read below ``root``, the folder in which the package ``vllm`` lies."""
        self.root = root
        self._modules: dict[str, Body | None] = {}
        self._found: dict[tuple[str, str], Definition | None] = {}

    @classmethod
    def installed(cls) -> SourceFiles:
        """The sources of the vLLM that this process imports."""
        import vllm

        return cls(Path(vllm.__file__).parents[1])

    def has(self, module: str, attribute: str) -> bool:
        """Whether a module, or a class in it, has an attribute."""
        return self.find(module, attribute) is not None

    def fingerprint(self, module: str, attribute: str) -> str | None:
        """The fingerprint of a function; None when there is none of that name."""
        place = self.find(module, attribute)
        if place is None or not isinstance(place.node, Function):
            return None
        return fingerprint(place.node)

    def find(self, module: str, attribute: str) -> Definition | None:
        """Find ``"NAME"`` or ``"CLASS.NAME"``, in base classes too."""
        key = module, attribute
        if key not in self._found:
            first, *rest = attribute.split(".")
            place = self._in_module(module, first)
            for name in rest:
                place = place and self._in_owner(place, name)
            self._found[key] = place
        return self._found[key]

    def _body(self, module: str) -> Body | None:
        """The statements of a module; None when it is not there."""
        if module not in self._modules:
            file = self._file(module)
            body = None if file is None else ast.parse(file.read_bytes()).body
            self._modules[module] = body
        return self._modules[module]

    def _file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split("."))
        files = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in files if file.exists()), None)

    def _in_module(self, module: str, name: str) -> Definition | None:
        """Find a name that a module defines, or imports from a vLLM module."""
        for statement in flat(self._body(module) or []):
            if defines(statement, name):
                return Definition(module, statement)
            if not isinstance(statement, ast.ImportFrom):
                continue
            source = self._imported_module(module, statement)
            for alias in statement.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    wanted = name if alias.name == "*" else alias.name
                    place = self._in_module(source, wanted)
                    if place is not None:
                        return place
        return None

    def _imported_module(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that a ``from ... import`` of a module names."""
        if not statement.level:
            return statement.module or ""
        file = self._file(module)
        is_package = file is not None and file.name == "__init__.py"
        parts = module.split(".")
        kept = parts[: len(parts) - statement.level + is_package]
        return ".".join([*kept, *(statement.module or "").split(".")]).rstrip(".")

    def _in_owner(self, owner: Definition, name: str) -> Definition | None:
        """Find a name in a class or its bases, or among what a function assigns."""
        if not isinstance(owner.node, ast.ClassDef):
            assigned = name in assigned_attributes(owner.node)
            return owner if assigned else None
        for statement in flat(owner.node.body):
            if defines(statement, name):
                return Definition(owner.module, statement)
        for statement in flat(owner.node.body):
            if isinstance(statement, Function):
                first = [argument.arg for argument in statement.args.args[:1]]
                if name in assigned_attributes(statement, *first):
                    return Definition(owner.module, statement)
        for base in self._bases(owner):
            place = self._in_owner(base, name)
            if place is not None:
                return place
        return None

    def _bases(self, owner: Definition) -> Iterator[Definition]:
        """The base classes that vLLM defines."""
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                place = self._in_module(owner.module, base.id)
                if place is not None and isinstance(place.node, ast.ClassDef):
                    yield place


def flat(body: Body) -> Iterator[ast.stmt]:
    """The statements of a body, those under ``if`` and ``try`` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from flat([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [line for handler in statement.handlers for line in handler.body]
            yield from flat([*statement.body, *handlers, *statement.orelse])


def defines(statement: ast.stmt, name: str) -> bool:
    """Whether a statement defines a name: a function, a class or a variable."""
    if isinstance(statement, Function | ast.ClassDef):
        return statement.name == name
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def assigned_attributes(node: ast.AST, owner: str | None = None) -> set[str]:
    """Names of the attributes that a piece of code assigns.

    Args:
        node: the code.
        owner: name of the object whose attributes count; None: of any object.

    """
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            value, name = part.value, part.attr
        elif (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in ("register_parameter", "register_buffer")
            and isinstance(part.args[0], ast.Constant)
        ):
            value, name = part.func.value, str(part.args[0].value)
        else:
            continue
        if owner is None or (isinstance(value, ast.Name) and value.id == owner):
            names.add(name)
    return names


def fingerprint(function: Function) -> str:
    """16 hex digits that change with a function's code.

    Comments, layout and the docstring do not count; decorators and the signature do.
    """
    lines = [normalised(part) for part in body_without_docstring(function)]
    text = "\n".join(
        [
            type(function).__name__,
            function.name,
            normalised(function.args),
            *(normalised(decorator) for decorator in function.decorator_list),
            normalised(function.returns),
            *lines,
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def body_without_docstring(function: Function) -> Body:
    """The statements of a function but for its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    return function.body if docstring is None else function.body[1:]


def normalised(value: object) -> str:
    """A syntax tree as text, the same in all versions of Python.

    Empty fields are left out: newer versions have more of them.
    """
    if isinstance(value, list):
        return "[" + ", ".join(map(normalised, value)) + "]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [
        f"{name}={normalised(field)}"
        for name, field in ast.iter_fields(value)
        if field is not None and field != []
    ]
    return f"{type(value).__name__}({', '.join(fields)})"
