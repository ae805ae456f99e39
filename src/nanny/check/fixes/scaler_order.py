"""Gradients that are used while still scaled: `scaler.unscale_(optimizer)` comes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from ...core.finding import Finding
from ..fixers import Change, fixer
from ..tree import LOOPS, Edit, Tree, argument, dotted_name, method


@dataclass(frozen=True)
class Step:
    """A `scaler.step(optimizer)` in the text."""

    scaler: str
    optimizer: str
    call: cst.Call


@fixer("SCALER_CLIP_BEFORE_UNSCALE", "SCALER_GRADS_STILL_SCALED")
def unscale_first(tree: Tree, finding: Finding) -> Iterator[Change]:
    """Between the scaled backward and the step: in the function at hand, in one that calls it, or in a method by `self`."""
    node = tree.at(finding, cst.Call) or tree.at(finding, cst.Attribute)
    if node is None:
        return
    yield from _in_function(tree, node)
    scope = tree.scope(node)
    if not isinstance(scope, cst.FunctionDef):
        return
    for call in tree.all(cst.Call):
        if dotted_name(call.func) in (scope.name.value, f"self.{scope.name.value}") and tree.scope(call) is not scope:
            yield from _in_function(tree, call)
    pairs = {(s.scaler, s.optimizer) for s in steps_in(tree) if _is_own(tree, scope, s)}
    if len(pairs) == 1:
        scaler, optimizer = pairs.pop()
        edit = tree.before(_out_of_loops(tree, node, scope), f"{scaler}.unscale_({optimizer})")
        if edit is not None:
            yield Change(f"call {scaler}.unscale_({optimizer}) first", (edit,))


def steps_in(tree: Tree, scope: cst.CSTNode | None = None) -> list[Step]:
    """Every `scaler.step(optimizer)` whose scaler scales a loss somewhere in this file."""
    calls = tree.all(cst.Call)
    scalers = {method(c)[0] for c in calls if method(c)[1] == "scale"} - {""}
    found = []
    for call in calls if scope is None else tree.all(cst.Call, scope):
        scaler, name = method(call)
        optimizer = dotted_name(first) if name == "step" and (first := argument(call, 0, "optimizer")) is not None else ""
        if optimizer and scaler in scalers:
            found.append(Step(scaler, optimizer, call))
    return found


def _in_function(tree: Tree, node: cst.CSTNode) -> Iterator[Change]:
    scope, here = tree.scope(node), tree.start(node)
    calls = tree.all(cst.Call, scope)
    scaled = [c for c in calls if method(c)[1] == "scale" and tree.end(c) < here]
    if not scaled:
        return
    scaler = method(scaled[-1])[0]
    ends = [tree.start(c) for c in calls if method(c) in ((scaler, "scale"), (scaler, "update")) and tree.start(c) > here]
    steps = [s for s in steps_in(tree, scope) if s.scaler == scaler and here < tree.start(s.call) < min(ends, default=1 << 60)]
    step = _step_of(tree, node, steps)
    if step is None or any(method(c) == (scaler, "get_scale") and _is_factor(tree, c) for c in calls):
        return  # with get_scale() the program may divide by hand
    anchor = _out_of_loops(tree, node, scope, step.call)
    code = _with_guards(tree, anchor, scaled[-1], step)
    edit = tree.before(anchor, code) if code else None
    if edit is None:
        return
    late = [c for c in calls if method(c) == (scaler, "unscale_") and here < tree.start(c) < tree.start(step.call)]
    moved = [tree.without(tree.statement(c)) for c in late]
    edits: list[Edit] = [e for e in moved if e is not None]
    if len(edits) == len(late):
        yield Change(f"call {scaler}.unscale_({step.optimizer}) first", (edit, *edits))


def _step_of(tree: Tree, node: cst.CSTNode, steps: list[Step]) -> Step | None:
    """The step that the gradients at hand are meant for; of several optimizers, the one made from the same model's parameters."""
    if len({s.optimizer for s in steps}) < 2:
        return steps[0] if steps else None
    models = {dotted_name(n.value) for n in tree.all(cst.Attribute) if n.attr.value == "parameters" and tree.contains(node, n)}
    made = {dotted_name(a.targets[0].target): a.value for a in tree.all(cst.Assign)}
    fits = [s for s in steps if (value := made.get(s.optimizer)) is not None and _models(tree, value) == models]
    return fits[0] if models and len({s.optimizer for s in fits}) == 1 else None


def _models(tree: Tree, made: cst.CSTNode) -> set[str]:
    return {dotted_name(n.value) for n in tree.all(cst.Attribute) if n.attr.value == "parameters" and tree.contains(made, n)}


def _is_factor(tree: Tree, call: cst.Call) -> bool:
    parent = tree.parent(call)
    return isinstance(parent, (cst.BinaryOperation, cst.AugAssign, cst.Assign)) or (
        isinstance(parent, cst.Arg) and method(tree.parent(parent) or call)[1] in ("div_", "mul_", "div", "mul")
    )


def _out_of_loops(tree: Tree, node: cst.CSTNode, scope: cst.CSTNode, step: cst.CSTNode | None = None) -> cst.CSTNode:
    """The statement to come first: outside loops over parameters, for unscale_ may run only once."""
    anchor = tree.statement(node)
    for around in tree.above(node):
        if around is scope:
            break
        if isinstance(around, LOOPS) and not (step is not None and tree.contains(around, step)):
            anchor = around
    return anchor


def _with_guards(tree: Tree, anchor: cst.CSTNode, scaled: cst.CSTNode, step: Step) -> str:
    """The call, under the condition that both the scaled backward and the step have; empty where it would not run once a step."""
    call = f"{step.scaler}.unscale_({step.optimizer})"
    loops = [n for n in tree.above(step.call) if isinstance(n, LOOPS) and not tree.contains(n, anchor)]
    if loops:
        loop = loops[0]
        if len(loops) > 1 or not isinstance(loop, cst.For) or dotted_name(loop.target) != step.optimizer:
            return ""
        call = f"for {tree.code(loop.target)} in {tree.code(loop.iter)}:\n{tree.deeper(anchor)}{call}"
    tests = [_tests(tree, n, anchor) for n in (scaled, step.call)]
    if not tests[0] and not tests[1]:
        return call
    if tests[0] != tests[1] or len(tests[0]) != 1 or loops or "(" in tests[0][0]:
        return ""
    return f"if {tests[0][0]}:\n{tree.deeper(anchor)}{call}"


def _tests(tree: Tree, node: cst.CSTNode, anchor: cst.CSTNode) -> list[str]:
    """The conditions that `node` has and `anchor` has not; one that cannot be turned round for an `else` is `(`."""
    ifs = [n for n in tree.above(node) if isinstance(n, (cst.If, cst.IfExp)) and not tree.contains(n, anchor)]
    return [tree.code(n.test) if tree.contains(n.body, node) else _opposite(tree, n.test) for n in ifs]


def _opposite(tree: Tree, test: cst.BaseExpression) -> str:
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return tree.code(test.expression)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1 and isinstance(test.comparisons[0].operator, cst.Is):
        return f"{tree.code(test.left)} is not {tree.code(test.comparisons[0].comparator)}"
    return "("


def _is_own(tree: Tree, function: cst.FunctionDef, step: Step) -> bool:
    """Whether a step by `self` belongs to the object whose method this is: its class, or one above it in this file."""
    mine, other = tree.owner(function), tree.owner(step.call)
    if mine is None or other is None or not (step.scaler.startswith("self.") and step.optimizer.startswith("self.")):
        return False
    classes = {c.name.value: c for c in tree.all(cst.ClassDef)}
    line, seen = [mine], set()
    while line:
        current = line.pop()
        if current is other:
            return True
        seen.add(current.name.value)
        line += [classes[name] for base in current.bases if (name := dotted_name(base.value)) in classes and name not in seen]
    return False


@fixer("SCALER_UPDATE_MISSING")
def update_last(tree: Tree, finding: Finding) -> Iterator[Change]:
    """`scaler.update()` after the last step of the block."""
    call = tree.at(finding, cst.Call)
    step = next((s for s in steps_in(tree) if s.call is call), None)
    if step is None:
        return
    block = tree.block(step.call)
    last = [s.call for s in steps_in(tree) if s.scaler == step.scaler and tree.block(s.call) is block][-1]
    edit = tree.after(tree.statement(last), f"{step.scaler}.update()")
    if edit is not None:
        yield Change(f"call {step.scaler}.update() after the step", (edit,))
