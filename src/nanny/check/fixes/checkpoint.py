"""The scaler's state beside the optimizer's: saved with it, and loaded where that is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from ...core.finding import Finding
from ..fixers import Change, fixer
from ..tree import Edit, Tree, argument, dotted_name, method
from .scaler_order import Step, steps_in


@dataclass(frozen=True)
class SavedState:
    """The optimizer's state in a checkpoint: its key, and the edit that puts another entry after it."""

    optimizer: str
    key: str
    node: cst.CSTNode


@fixer("SCALER_NOT_SAVED")
def save_the_scaler(tree: Tree, finding: Finding) -> Iterator[Change]:
    """Adds the scaler's state to the dict that is saved, and loads it where the optimizer's state is loaded from such a dict."""
    call = tree.at(finding, cst.Call)
    saved = argument(call, 0, "obj") if call is not None else None
    if call is None or saved is None:
        return
    for entry in _entries(tree, saved):
        for scaler in _scalers_at(tree, entry.node):
            key = _key_beside(entry, scaler)
            edits = [_saving(tree, entry, key, scaler, _may_be_none(tree, scaler))]
            edits += [_loading(tree, load, key, scaler) for load in _loads(tree, entry)]
            if None not in edits:
                yield Change(f"save and load the state of {scaler}", tuple(e for e in edits if e is not None))
        yield from _by_parameter(tree, entry)


def _by_parameter(tree: Tree, entry: SavedState) -> Iterator[Change]:
    """A function that saves what it is given also gets the scaler, from every call in this file; others may go without."""
    function = tree.scope(entry.node)
    last_name = entry.optimizer.rpartition(".")[2]
    names = {s.scaler for s in steps_in(tree) if "." not in s.scaler and s.optimizer.rpartition(".")[2] == last_name}
    if not isinstance(function, cst.FunctionDef) or tree.owner(function) is not None or len(names) != 1 or _loads(tree, entry):
        return
    scaler = names.pop()
    parameters, uses = function.params, tree.uses(tree.module, function.name.value)
    calls = [parent for use in uses if isinstance(parent := tree.parent(use), cst.Call) and parent.func is use]
    if not calls or len(calls) != len(uses) or scaler in tree.bound_in(function) or not parameters.params:
        return
    if parameters.star_kwarg is not None or parameters.kwonly_params or isinstance(parameters.star_arg, cst.Param):
        return
    if not all(call.args and not any(a.star for a in call.args) and tree.sees(call, scaler) for call in calls):
        return
    last = parameters.params[-1]
    end = max(tree.outer(part)[1] for part in (last.name, last.default, last.annotation) if part is not None)
    ends = [tree.outer(call.args[-1].value)[1] for call in calls]
    saving = _saving(tree, entry, _key_beside(entry, scaler), scaler, may_be_none=True)
    if saving is not None:
        edits = (Edit(end, end, f", {scaler}=None"), saving, *(Edit(at, at, f", {scaler}={scaler}") for at in ends))
        yield Change(f"save the state of {scaler}", edits)


def _entries(tree: Tree, saved: cst.CSTNode) -> Iterator[SavedState]:
    """Where the optimizer's state gets into what is saved: in the dict itself, in the variable, or in what a method returns."""
    if isinstance(saved, cst.Name):
        scope = tree.scope(saved)
        for assign in tree.all(cst.Assign, scope):
            target = assign.targets[0].target
            if isinstance(target, cst.Subscript) and dotted_name(target.value) == saved.value and _state_of(assign.value):
                yield SavedState(_state_of(assign.value), _index(target), assign)
            elif dotted_name(target) == saved.value and not isinstance(assign.value, cst.Name):
                yield from _entries(tree, assign.value)
    elif isinstance(saved, cst.Dict):
        for element in saved.elements:
            if isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString) and _state_of(element.value):
                yield SavedState(_state_of(element.value), element.key.value, element)
    elif isinstance(saved, cst.Call) and dotted_name(saved.func) == "dict":
        for arg in saved.args:
            if arg.keyword is not None and _state_of(arg.value):
                yield SavedState(_state_of(arg.value), f'"{arg.keyword.value}"', arg)
    elif isinstance(saved, cst.Call) and method(saved)[0] == "self":
        owner = tree.owner(saved)
        for function in tree.all(cst.FunctionDef):
            if function.name.value == method(saved)[1] and tree.owner(function) is owner:
                for back in tree.all(cst.Return, function):
                    if back.value is not None and not isinstance(back.value, cst.Call):
                        yield from _entries(tree, back.value)


def _state_of(value: cst.CSTNode) -> str:
    """`optimizer` for `optimizer.state_dict()`."""
    owner, name = method(value)
    return owner if name == "state_dict" else ""


def _index(node: cst.Subscript) -> str:
    index = node.slice[0].slice
    return index.value.value if isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString) else ""


def _scalers_at(tree: Tree, node: cst.CSTNode) -> Iterator[str]:
    """The scaler by a name that is known where the checkpoint is made; the optimizer in the entry must be one that it steps."""
    optimizer = _state_of(getattr(node, "value", node))
    last = optimizer.rpartition(".")[2]
    steps = [s for s in steps_in(tree) if s.optimizer.rpartition(".")[2] == last]
    yield from dict.fromkeys(name for s in steps if (name := _name_here(tree, node, s)))


def _name_here(tree: Tree, node: cst.CSTNode, step: Step) -> str:
    owner = tree.owner(node)
    if not step.scaler.startswith("self."):
        if tree.sees(node, step.scaler):
            return step.scaler
    elif owner is not None and owner is tree.owner(step.call):
        return step.scaler
    own = f"self.{step.scaler.rpartition('.')[2]}"
    methods = [f for f in tree.all(cst.FunctionDef) if owner is not None and tree.owner(f) is owner]
    return own if any(own in tree.bound_in(f) for f in methods) else ""


def _key_beside(entry: SavedState, scaler: str) -> str:
    """`"scaler_state_dict"` beside `"optimizer_state_dict"`, in the same quotes."""
    quote, name = entry.key[:1], entry.key.strip("\"'")
    stem, own = entry.optimizer.rpartition(".")[2], scaler.rpartition(".")[2]
    return f"{quote}{name.replace(stem, own) if stem in name else 'scaler'}{quote}"


def _may_be_none(tree: Tree, scaler: str) -> bool:
    """Whether the program asks if there is a scaler, or makes one only sometimes."""
    for test in tree.all(cst.Comparison):
        if dotted_name(test.left) == scaler and dotted_name(test.comparisons[0].comparator) == "None":
            return True
    if any(dotted_name(test) == scaler for test in (*(n.test for n in tree.all(cst.If)), *(n.test for n in tree.all(cst.IfExp)))):
        return True
    for assign in tree.all(cst.Assign):
        if any(dotted_name(t.target) == scaler for t in assign.targets) and (
            isinstance(assign.value, cst.IfExp) or dotted_name(assign.value) == "None"
        ):
            return True
    for parameter in tree.all(cst.Param):
        if parameter.name.value == scaler:
            hint = tree.code(parameter.annotation.annotation) if parameter.annotation is not None else ""
            given = dotted_name(parameter.default) if parameter.default is not None else ""
            if given == "None" or "None" in hint or "Optional" in hint:
                return True
    return False


def _saving(tree: Tree, entry: SavedState, key: str, scaler: str, may_be_none: bool) -> Edit | None:
    state = f"{scaler}.state_dict()"
    if may_be_none:
        state += f" if {scaler} is not None else None"
    node = entry.node
    if isinstance(node, cst.Assign):
        target = node.targets[0].target
        return tree.after(node, f"{tree.code(target.value)}[{key}] = {state}") if isinstance(target, cst.Subscript) else None
    if isinstance(node, cst.Arg):
        name = key.strip("\"'")
        text = f"{name}={state}" if name.isidentifier() else ""
    else:
        text = f"{key}: {state}"
    around = tree.parent(node)
    if not text or around is None or key in tree.code(around):
        return None
    end = tree.outer(node.value)[1]  # type: ignore[attr-defined]
    begins = tree.text[tree.text.rfind("\n", 0, tree.start(node)) + 1 : tree.start(node)]
    return Edit(end, end, f",\n{begins}{text}" if not begins.strip() else f", {text}")


def _loads(tree: Tree, entry: SavedState) -> list[cst.Call]:
    """Where the state of an optimizer of that name is loaded."""
    last = entry.optimizer.rpartition(".")[2]
    return [c for c in tree.all(cst.Call) if method(c)[1] == "load_state_dict" and method(c)[0].rpartition(".")[2] == last]


def _loading(tree: Tree, load: cst.Call, key: str, scaler: str) -> Edit | None:
    """Loads the scaler's state if the checkpoint has one: older ones have not, and that of a disabled scaler is empty."""
    given = argument(load, 0, "state_dict")
    if not isinstance(given, cst.Subscript) or not dotted_name(given.value):
        return None
    name = scaler
    if not tree.sees(load, name):
        return None
    if name.startswith("self.") and not any(
        name in tree.bound_in(f) for f in tree.all(cst.FunctionDef) if tree.owner(f) is tree.owner(load)
    ):
        return None
    box = dotted_name(given.value)
    test = f"{name} is not None and {box}.get({key})" if _may_be_none(tree, name) else f"{box}.get({key})"
    if f"{box}[{key}]" in tree.text:
        return None
    return tree.after(tree.statement(load), f"if {test}:\n{tree.deeper(load)}{name}.load_state_dict({box}[{key}])")
