"""`torch.cuda.amp` and `torch.cpu.amp` by their new names, with the device as an argument."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ...core.finding import Finding
from ..fixers import Change, fixer
from ..tree import Edit, Tree, dotted_name

_OLD = {f"torch.{device}.amp": device for device in ("cuda", "cpu")}
_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_POSITIONAL = ("enabled", "dtype", "cache_enabled")  # of the old autocast; the new one has the device and the dtype first


@fixer("REGION_DEPRECATED")
def new_amp_names(tree: Tree, finding: Finding) -> Iterator[Change]:
    """A name that was imported changes at its import and at every use; a dotted one where it stands."""
    node = tree.at(finding, cst.Call) or tree.at(finding, cst.Attribute) or tree.at(finding, cst.Name)
    called = node.func if isinstance(node, cst.Call) else node
    if called is None:
        return
    device, name = _old(tree.path(called))
    if not device or _knows_both(tree, called):
        return
    edits = _change_import(tree, called.value) if isinstance(called, cst.Name) else _change_path(tree, device, name, called)
    if edits:
        yield Change(f"use torch.amp.{name}", tuple(edits))


def _knows_both(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether a condition or a `try` around chooses between the old name and the new one: that is for old versions of torch."""
    choices = [n for n in tree.above(node) if isinstance(n, (cst.If, cst.IfExp, cst.Try))]
    new = [n for n in tree.all(cst.Attribute) if tree.path(n).startswith("torch.amp")] if choices else []
    return any(tree.contains(choice, n) for choice in choices for n in new)


def _old(path: str) -> tuple[str, str]:
    """(`cuda`, `autocast`) for `torch.cuda.amp.autocast`."""
    head, _, name = path.rpartition(".")
    return (_OLD.get(head, ""), name) if name in _NAMES else ("", "")


def _change_import(tree: Tree, name: str) -> list[Edit]:
    """The import that brings the name, and every use of all that it brings; nothing where one of them cannot be changed."""
    for node in tree.all(cst.ImportFrom):
        if isinstance(node.names, cst.ImportStar) or node.module is None or node.relative:
            continue
        brought = {dotted_name(a.asname.name if a.asname else a.name): dotted_name(a.name) for a in node.names}
        if name not in brought:
            continue
        device = _OLD.get(dotted_name(node.module), "")
        around = [n for n in tree.above(node) if isinstance(n, (cst.Try, cst.FunctionDef, cst.If, cst.ClassDef))]
        if not device or around or not set(brought.values()) <= set(_NAMES):
            return []
        edits = [tree.replace(node.module, "torch.amp")]
        for local, known in brought.items():
            exported = any(s.value.strip("\"'") == local for s in tree.all(cst.SimpleString))  # in `__all__`, say
            if exported or local in tree.bound_in(tree.module):
                return []
            for use in tree.uses(tree.module, local):
                if any(isinstance(n, (cst.ImportFrom, cst.Import)) for n in tree.above(use)):
                    continue
                changed = _argument(tree, use, device, known)
                if changed is None:
                    return []
                edits += changed
        return edits
    return []


def _change_path(tree: Tree, device: str, name: str, node: cst.CSTNode) -> list[Edit]:
    """One use by its whole path; a GradScaler everywhere in the file, for `isinstance` must go on agreeing."""
    new = tree.name_of(f"torch.amp.{name}")
    if not new:
        return []
    same = (
        [n for n in tree.all(cst.Attribute) if tree.path(n) == f"torch.{device}.amp.{name}"] if name == "GradScaler" else [node]
    )
    edits: list[Edit] = []
    for use in same:
        changed = _argument(tree, use, device, name)
        if changed is None:
            return []
        edits += [tree.replace(use, new), *changed]
    return edits


def _argument(tree: Tree, use: cst.CSTNode, device: str, name: str) -> list[Edit] | None:
    """The device put into one use; None where the use is of a kind that has no place for it."""
    call = tree.parent(use)
    if not isinstance(call, cst.Call) or call.func is not use:
        if name in ("custom_fwd", "custom_bwd") and isinstance(call, cst.Decorator):
            return [Edit(tree.end(use), tree.end(use), f'(device_type="{device}")')]
        return [] if name == "GradScaler" else None
    if any(arg.star for arg in call.args):
        return None
    given = f'device_type="{device}"' if name in ("custom_fwd", "custom_bwd") else f'"{device}"'
    edits = []
    if name == "autocast":
        positional = [arg for arg in call.args if arg.keyword is None]
        starts = [tree.outer(arg.value)[0] for arg in positional]
        edits = [Edit(at, at, f"{word}=") for word, at in zip(_POSITIONAL, starts)]
    elif name.startswith("custom") and any(arg.keyword is None for arg in call.args):
        return None
    first = tree.start(call.args[0]) if call.args else tree.end(call) - 1
    return [Edit(first, first, f"{given}, " if call.args else given), *edits]
