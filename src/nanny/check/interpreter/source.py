"""One parsed Python file: its definitions, and a project of such files that import each other.

`says_half` is the cheap pre-filter: a file that never names a half format, autocast or a scaler has no evidence to report on,
unless a program starts there and imports one that does.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from ..walk import SOURCE_FOLDERS
from .torch_names import KNOWN_LIBRARIES
from .uses import NO_USES, Uses, dotted_name, uses_in
from .values import Env, Thing, Value

# what a file must name to have a finding: words that tell by themselves, and those that need a look around them
_PLAIN = (
    *("autocast", "GradScaler", "HalfTensor", "BFloat16Tensor", "float16", "fp16", "bf16", "mixed_precision", "MixedPrecision"),
    *("grad_scaler", "unscale_", "16-mixed", "16-true", "loss_scale", "BCELoss"),
)
_IN_CONTEXT = {
    word: re.compile(pattern)
    for word, pattern in {
        "half": r"\bhalf\b",
        "16": r"\b[fb]f?p?16\b",
        "precision": r"precision\s*=",
        "getattr(": r"getattr\(\s*torch\b",
        "Trainer(": r"\bTrainer\(",  # the format may stand in a settings file
        **{name: rf"\b{name}\b" for name in ("deepspeed", "Accelerator", "Fabric", "fully_shard", "LightningCLI")},
        "binary_cross_entropy": r"binary_cross_entropy\b",
    }.items()
}
MOST_PARSED = 8_000_000  # characters whose trees are kept for the next file that imports them: about 400 MB
_DOCSTRING = re.compile(r"[ \t]*[rRuU]?")
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]*)|import[ \t]+([\w. ,]+))", re.MULTILINE)


def says_half(text: str) -> bool:
    """Whether the code, not only its docstrings, names a half format, autocast, a scaler or what brings one of them."""
    return _names_half(text) and _names_half(_without_docstrings(text))


def starts_program(text: str) -> bool:
    """Whether the file is there to be run, and not only imported."""
    return "__main__" in text


def _names_half(text: str) -> bool:
    # `in` and `find` are twenty times as fast as one large expression
    return any(word in text for word in _PLAIN) or any(
        pattern.search(text, max(at - 3, 0), at + len(word) + 40)
        for word, pattern in _IN_CONTEXT.items()
        for at in _places(text, word)
    )


def _places(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


def _without_docstrings(text: str) -> str:
    """The text without what stands in a string of three quotes at the beginning of a line; all of it where quotes are mixed."""
    if "'''" in text or '\'"""' in text or ("#" in text and re.search(r"#[^\n]*\"\"\"", text)):
        return text
    parts = text.split('"""')
    if len(parts) % 2 == 0:
        return text
    kept = []
    for position, part in enumerate(parts):
        before = parts[position - 1].rpartition("\n")[2] if position else ""
        if position % 2 == 0 or not _DOCSTRING.fullmatch(before):
            kept.append(part)
    return "\n".join(kept)


@dataclass(eq=False, repr=False)
class OwnFunction:
    """A function or method of the project, not yet run."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: WalkedFile
    owner: OwnClass | None = None
    closure: dict[str, Value] | None = None
    runs: int = 0

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<lambda>")

    @property
    def called_as(self) -> str:
        """What a call of it is a call of: the class, for its __init__."""
        return self.owner.name if self.owner is not None and self.name == "__init__" else self.name

    @property
    def decorators(self) -> set[str]:
        """Dotted names, without arguments."""
        found = getattr(self.node, "decorator_list", ())
        return {dotted_name(d.func if isinstance(d, ast.Call) else d) for d in found}


@dataclass(eq=False, repr=False)
class OwnClass:
    node: ast.ClassDef
    module: WalkedFile
    bases: tuple[str, ...] = ()  # dotted names as resolved when the class statement ran
    parents: tuple[OwnClass, ...] = ()
    methods: dict[str, OwnFunction] = field(default_factory=dict)
    attrs: Env = field(default_factory=Env)
    example: Thing | None = None  # the first instance; methods that nobody calls are run on it

    @property
    def name(self) -> str:
        return self.node.name

    def find(self, name: str, depth: int = 0) -> OwnFunction | None:
        if name in self.methods:
            return self.methods[name]
        for parent in self.parents if depth < 6 else ():
            found = parent.find(name, depth + 1)
            if found:
                return found
        return None

    def field_of(self, name: str, depth: int = 0) -> Value | None:
        if name in self.attrs:
            return self.attrs[name]
        for parent in self.parents if depth < 6 else ():
            found = parent.field_of(name, depth + 1)
            if found is not None:
                return found
        return None

    def derives_from(self, names: Collection[str], depth: int = 0) -> bool:
        """Whether a class of one of these names, as the package that defines it calls it, is above this one."""
        if any(base.rpartition(".")[2] in names for base in self.bases):
            return True
        return depth < 6 and any(parent.derives_from(names, depth + 1) for parent in self.parents)

    @property
    def is_module(self) -> bool:
        return self.derives_from(("Module", "LightningModule", "PreTrainedModel", "ModelMixin"))

    @property
    def is_lightning(self) -> bool:
        return self.derives_from(("LightningModule",))


@dataclass(eq=False, repr=False)
class SourceFile:
    """A parsed file; what is known about it does not change."""

    filename: str
    tree: ast.Module
    name: str = ""  # dotted, if part of a project
    text: str = ""

    @cached_property
    def uses(self) -> Uses:
        return uses_in(self.tree)

    @cached_property
    def is_test(self) -> bool:
        """Whether it is a test: it imports what tests are written with, at its top level."""
        imported = {alias.name for s in self.tree.body if isinstance(s, ast.Import) for alias in s.names}
        imported |= {s.module or "" for s in self.tree.body if isinstance(s, ast.ImportFrom)}
        return any(name.partition(".")[0] in ("pytest", "unittest") or name.startswith("torch.testing") for name in imported)


@dataclass(eq=False, repr=False)
class WalkedFile:
    """A file while it is walked: what its body has defined so far. Another walk has one of its own."""

    source: SourceFile
    env: Env = field(default_factory=Env)
    functions: list[OwnFunction] = field(default_factory=list)  # that may be entry points
    lambdas: list[OwnFunction] = field(default_factory=list)  # the others
    classes: list[OwnClass] = field(default_factory=list)
    is_loaded: bool = False
    is_entry: bool = False  # the program starts here: `__name__ == "__main__"`
    is_importing: bool = False  # its body runs because another file imports it

    def __post_init__(self) -> None:
        self.filename, self.tree, self.name = self.source.filename, self.source.tree, self.source.name

    @property
    def uses(self) -> Uses:
        """Of a body that only defines what others use nothing is asked: most imported files are read for a name or two."""
        return NO_USES if self.is_importing else self.source.uses

    @property
    def is_package(self) -> bool:
        return self.filename.endswith("__init__.py")


class Project:
    """The files that are checked together, parsed when first needed."""

    def __init__(self, sources: Mapping[str, str]):
        self.sources = sources
        self._files: dict[str, SourceFile | None] = {}  # what was asked for last at the end; None: a syntax error
        self._parsed = 0  # characters of them
        self._paths: dict[str, str] | None = None
        self._top = ""
        self._resolved: dict[tuple[str, str, int], str | None] = {}

    def parse(self, filename: str) -> SourceFile:
        """The parsed file; raises what `ast.parse` raises. It stays for the next that imports it, until there are too many."""
        file = self._files.pop(filename, None)
        if file is None:
            text = self.sources[filename]
            file = SourceFile(filename, ast.parse(text, filename), _module_name(filename), text)
            self._parsed += len(text)
        self._files[filename] = file
        while self._parsed > MOST_PARSED and len(self._files) > 1:
            oldest = self._files.pop(next(iter(self._files)))
            self._parsed -= len(oldest.text) if oldest is not None else 0
        return file

    def file(self, filename: str) -> SourceFile | None:
        """The same; None if it has a syntax error (reported when that file is checked itself)."""
        if filename in self._files and self._files[filename] is None:
            return None
        try:
            return self.parse(filename)
        except (SyntaxError, ValueError, RecursionError):
            self._files[filename] = None
            return None

    def half_behind(self, filename: str) -> tuple[bool, list[str]]:
        """Whether a file imports one that names a half format, directly or through others; and those that had to be read."""
        seen, waiting = {filename: None}, [filename]
        while waiting:
            importer = waiting.pop()
            for found in self._imports(importer):
                if found in seen:
                    continue
                seen[found] = None
                if says_half(self.sources[found]):
                    return True, list(seen)
                waiting.append(found)
        return False, list(seen)

    def _imports(self, filename: str) -> list[str]:
        """The project's files that a file imports, read from its text: most are never parsed."""
        importer = WalkedFile(SourceFile(filename, ast.Module([], []), _module_name(filename)))
        found = []
        for match in _IMPORT.finditer(self.sources[filename]):
            package, names, modules = match.groups()
            if modules is not None:
                found += [self.resolve(importer, name.split()[0]) for name in modules.split(",") if name.split()]
                continue
            path = package.lstrip(".")
            level = len(package) - len(path)
            inside = [name.split()[0] for name in names.strip("()").split("#")[0].split(",") if name.split()]
            found += [self.resolve(importer, f"{path}.{name}".lstrip("."), level) for name in inside]
            found.append(self.resolve(importer, path, level))
        return [name for name in found if name is not None]

    def resolve(self, importer: WalkedFile, target: str, level: int = 0) -> str | None:
        """The project's file behind `from target import ...` (with leading dots counted by level); None for a library, also
        for one that is known by heart and has its sources here: what is said about a script does not depend on that."""
        key = (importer.filename, target, level)
        if key not in self._resolved:
            is_known = not level and target.partition(".")[0] in KNOWN_LIBRARIES
            self._resolved[key] = None if is_known else self._resolve(importer, target, level)
        return self._resolved[key]

    def _resolve(self, importer: WalkedFile, target: str, level: int) -> str | None:
        beside = getattr(self.sources, "beside", None)  # files that are read only because these import them
        if len(self.sources) < 2 and beside is None:
            return None
        full = target
        if level:
            base = importer.name.split(".")
            keep = len(base) - level + (1 if importer.is_package else 0)
            full = ".".join([*base[: max(keep, 0)], *([target] if target else [])])
        found = self._find(full, importer) if len(self.sources) > 1 else None
        if found is None and beside is not None:
            found = beside(importer.filename, target, level)
        return found

    def _find(self, target: str, importer: WalkedFile) -> str | None:
        if self._paths is None:
            self._paths = {}
            for filename in self.sources:
                self._paths.setdefault(_module_name(filename), filename)
            folders = sorted(name.split(".")[:-1] for name in self._paths)
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(folders[0], folders[-1]))
            self._top = ".".join(part for part, _ in shared)  # the folder that all files are in, if they are named from above
        for name in (target, f"{self._top}.{target}"):
            if name in self._paths:
                return self._paths[name]
        package = importer.name.rpartition(".")[0]
        while True:  # a script imports its neighbours by bare name; the folder above may not be a package
            for folder in ("", *SOURCE_FOLDERS):
                found = self._paths.get(".".join(part for part in (package, folder, target) if part))
                if found is not None and found != importer.filename:  # nothing imports itself
                    return found
            if not package:
                return None
            package = package.rpartition(".")[0]


def _module_name(filename: str) -> str:
    *folders, last = filename.replace("\\", "/").split("/")
    parts = [part for part in (*folders, os.path.splitext(last)[0]) if part not in ("", ".", "..")]
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
