"""One parsed Python file: its definitions, and a project of such files that import each other.

`says_half` is the cheap pre-filter: a file that never names a half format, autocast or a scaler has no evidence to report on.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from .values import Value

EVIDENCE = re.compile(
    r"autocast|GradScaler|\bhalf\b|HalfTensor|BFloat16Tensor|float16|\b[fb]f?p?16\b|fp16|bf16|mixed_precision|MixedPrecision"
    r"|grad_scaler|unscale_|16-(?:mixed|true)|precision\s*=|loss_scale|BCELoss|binary_cross_entropy\b"
)


_CALL = re.compile(r"[A-Za-z_][\w.]*(?=\()")
_STEPPED = re.compile(r"([A-Za-z_][\w.]*)\.(?:step|unscale_)\(\s*([A-Za-z_][\w.]*)\s*[,)]")
_DEFINITION = re.compile(r"(?:def|class) (\w+)\(")


# Code that makes halves or scales, rather than only asking for a dtype: worth reading what it imports from its own project.
_ACTIVE = re.compile(
    r"(?<!maybe_)autocast\(|GradScaler|\.half\(|\.bfloat16\(|unscale_|(?:to\(|dtype=)torch\.(?:bfloat16|float16|half)\b"
)


def says_half(text: str) -> bool:
    return EVIDENCE.search(text) is not None


@dataclass(eq=False, repr=False)
class FunctionInfo:
    """A function or method of the project, not yet run."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: ModuleInfo
    owner: ClassInfo | None = None
    closure: dict[str, Value] | None = None
    runs: int = 0

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<lambda>")

    @property
    def decorators(self) -> set[str]:
        """Dotted names, without arguments."""
        found = getattr(self.node, "decorator_list", ())
        return {dotted(d.func if isinstance(d, ast.Call) else d) for d in found}


@dataclass(eq=False, repr=False)
class ClassInfo:
    node: ast.ClassDef
    module: ModuleInfo
    bases: tuple[str, ...] = ()  # dotted names as resolved when the class statement ran
    parents: tuple[ClassInfo, ...] = ()
    methods: dict[str, FunctionInfo] = field(default_factory=dict)
    attrs: dict[str, Value] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)  # self.x, shared by all instances
    is_built: bool = False

    @property
    def name(self) -> str:
        return self.node.name

    def find(self, name: str, depth: int = 0) -> FunctionInfo | None:
        if name in self.methods:
            return self.methods[name]
        for parent in self.parents if depth < 6 else ():
            found = parent.find(name, depth + 1)
            if found:
                return found
        return None

    def field_of(self, name: str, depth: int = 0) -> Value | None:
        for table in (self.fields, self.attrs):
            if name in table:
                return table[name]
        for parent in self.parents if depth < 6 else ():
            found = parent.field_of(name, depth + 1)
            if found is not None:
                return found
        return None

    def derives_from(self, suffixes: tuple[str, ...], depth: int = 0) -> bool:
        if any(base.endswith(suffixes) for base in self.bases):
            return True
        return depth < 6 and any(parent.derives_from(suffixes, depth + 1) for parent in self.parents)

    @property
    def is_module(self) -> bool:
        return self.derives_from(("nn.Module", "LightningModule", "PreTrainedModel", ".Module", "ModelMixin"))

    @property
    def is_lightning(self) -> bool:
        return self.derives_from(("LightningModule",))


@dataclass(eq=False, repr=False)
class ModuleInfo:
    filename: str
    text: str
    tree: ast.Module
    name: str = ""  # dotted, if part of a project
    is_package: bool = False
    env: dict[str, Value] = field(default_factory=dict)
    functions: list[FunctionInfo] = field(default_factory=list)
    classes: list[ClassInfo] = field(default_factory=list)
    is_active: bool = False  # makes halves or scales itself
    called: frozenset[str] = frozenset()  # texts of everything that is called: `model`, `self.net`, `loss.backward`
    stepped: frozenset[str] = frozenset()  # last names of what a scaler steps or unscales
    is_loaded: bool = False

    def is_called(self, text: str) -> bool:
        return text in self.called

    def has_method_call(self, text: str, names: tuple[str, ...]) -> bool:
        return any(f"{text}.{name}" in self.called for name in names)

    def uses_as_scaler(self, text: str) -> bool:
        """Whether an object is used as only a GradScaler is: it unscales, or it scales, steps and updates."""
        if not text:
            return False
        return self.has_method_call(text, ("unscale_", "get_scale")) or all(
            f"{text}.{name}" in self.called for name in ("scale", "step", "update")
        )


def parse_module(text: str, filename: str, name: str = "") -> ModuleInfo:
    tree = ast.parse(text, filename)
    called = Counter(_CALL.findall(text))  # also those in comments, but at a hundredth of the cost of walking the tree
    called.subtract(_DEFINITION.findall(text))
    is_package = filename.endswith("__init__.py")
    is_active = _ACTIVE.search(text) is not None
    module = ModuleInfo(filename, text, tree, name, is_package, is_active=is_active, called=frozenset(+called))
    module.stepped = frozenset(
        stepped.rpartition(".")[2]
        for scaler, stepped in _STEPPED.findall(text)
        if "scaler" in scaler.lower() or module.uses_as_scaler(scaler)
    )
    return module


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of names, else the empty string."""
    parts = []
    while type(node) is ast.Attribute:
        parts.append(node.attr)
        node = node.value
    if type(node) is not ast.Name:
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


class Project:
    """The files that are checked together, parsed when first needed."""

    def __init__(self, sources: Mapping[str, str]):
        self.sources = sources
        self._modules: dict[str, ModuleInfo | None] = {}
        self._paths: dict[str, str] | None = None

    def module(self, filename: str) -> ModuleInfo | None:
        """The parsed file; None if it has a syntax error (reported when that file is checked itself)."""
        if filename not in self._modules:
            try:
                self._modules[filename] = parse_module(self.sources[filename], filename, _module_name(filename))
            except (SyntaxError, ValueError, RecursionError):
                self._modules[filename] = None
        return self._modules[filename]

    def resolve(self, importer: ModuleInfo, target: str, level: int = 0) -> str | None:
        """The project's file behind `from target import ...` (with leading dots counted by level)."""
        if len(self.sources) < 2:
            return None
        if level:
            base = importer.name.split(".")
            keep = len(base) - level + (1 if importer.is_package else 0)
            target = ".".join([*base[: max(keep, 0)], *([target] if target else [])])
        return self._find(target, importer)

    def _find(self, target: str, importer: ModuleInfo) -> str | None:
        if self._paths is None:
            self._paths = {}
            for filename in self.sources:
                self._paths.setdefault(_module_name(filename), filename)
        if target in self._paths:
            return self._paths[target]
        package = importer.name.rpartition(".")[0]
        while package:  # a script imports its neighbours by bare name; the folder above may not be a package
            if f"{package}.{target}" in self._paths:
                return self._paths[f"{package}.{target}"]
            package = package.rpartition(".")[0]
        return None


def _module_name(filename: str) -> str:
    parts = [p for p in PurePosixPath(filename.replace("\\", "/")).with_suffix("").parts if p not in ("/", ".", "..")]
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def span(node: ast.AST) -> dict[str, Any]:
    """Line and column of a node as a `Finding` wants them (columns from 1)."""
    return {
        "line": getattr(node, "lineno", 1),
        "column": getattr(node, "col_offset", 0) + 1,
        "end_line": getattr(node, "end_lineno", None),
        "end_column": (getattr(node, "end_col_offset", None) or 0) + 1,
    }
