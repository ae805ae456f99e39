"""Imports: names bound to other files of the project, which are read where they are used."""

from __future__ import annotations

import ast

from .source import WalkedFile
from .trace import Frame, Trace, Walk
from .values import Value


def bind_import(walk: Walk, frame: Frame, node: ast.Import) -> None:
    for alias in node.names:
        name = alias.asname or alias.name.partition(".")[0]
        frame.env[name] = Value("external", ref=alias.name if alias.asname else name)
        if walk.follows_imports and (alias.asname or "." not in alias.name):
            found = walk.project.resolve(frame.module, alias.name)
            if found is not None:
                frame.env[name] = Value("lazy", ref=(found, "", alias.name))
                _load_for_effect(walk, frame, found, name)


def bind_from_import(walk: Walk, frame: Frame, node: ast.ImportFrom) -> None:
    project = walk.project if walk.follows_imports else None
    target = project.resolve(frame.module, node.module or "", node.level) if project else None
    for alias in node.names:
        name = alias.asname or alias.name
        if name == "*":
            _import_all(walk, frame, target)
            continue
        path = f"{node.module or ''}.{alias.name}".lstrip(".")
        frame.env[name] = Value("external", ref=path)
        inside = project.resolve(frame.module, f"{node.module or ''}.{alias.name}".lstrip("."), node.level) if project else None
        if inside is not None:  # from package import module
            frame.env[name] = Value("lazy", ref=(inside, "", path))
        elif target is not None:
            frame.env[name] = Value("lazy", ref=(target, alias.name, path))
        source = inside or target
        if source is not None:
            _load_for_effect(walk, frame, source, name)


def _load_for_effect(walk: Walk, frame: Frame, filename: str, name: str) -> None:
    """Runs a file that is imported under a name which nobody uses: its classes enter themselves into a registry."""
    if name in frame.module.uses.names or "\n@" not in walk.project.sources[filename]:
        return
    module = _module(walk, filename)
    if module is not None and any(isinstance(s, ast.ClassDef) and s.decorator_list for s in module.tree.body):
        load(walk, module)


def _import_all(walk: Walk, frame: Frame, filename: str | None) -> None:
    """`from lib import *`: every public name that the body of a file of the project binds."""
    module = _module(walk, filename) if filename is not None else None
    if module is None or module is frame.module:
        return
    load(walk, module)
    for name, value in module.env.items():
        if not name.startswith("_") and name.isidentifier():
            frame.env[name] = value


def resolve_lazy(walk: Walk, frame: Frame, value: Value, name: str) -> Value:
    """The definition behind a name imported from another file of the project."""
    filename, attribute, path = value.ref
    target = _module(walk, filename)
    if target is None or target is frame.module:
        return Value("external", ref=path)
    load(walk, target)
    found = target.env.get(attribute) if attribute else Value("project", ref=target)
    if found is not None and found.kind == "lazy":
        found = resolve_lazy(walk, frame, found, attribute) if found is not value else None
    resolved = found if found is not None else Value("external", ref=path)
    frame.env[name] = resolved
    return resolved


def _module(walk: Walk, filename: str) -> WalkedFile | None:
    """A file of the project as this walk sees it; what another walk has defined in it is not known here."""
    if filename not in walk.modules:
        source = walk.project.file(filename)
        walk.modules[filename] = WalkedFile(source) if source is not None else None
    return walk.modules[filename]


def load(walk: Walk, module: WalkedFile) -> None:
    """Runs a module's body once, so that its functions, classes and constants are known."""
    if module.is_loaded:
        return
    module.is_loaded = module.is_importing = True
    inner = Frame(walk.options, module, Trace(f"<import {module.name}>", module), module.env)
    walk.run_block(inner, module.tree.body)
    module.is_importing = False
