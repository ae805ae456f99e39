"""Losses and autocast: a loss that belongs into the region, and binary cross entropy that belongs on logits."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ...core.finding import Finding
from ...core.ops import LAYERS, PAIRWISE_LOSSES
from ..fixers import Change, fixer
from ..interpreter.regions import NO_GRAD
from ..tree import Edit, Tree, argument, dotted_name, method

_SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit")
_BCE, _BCE_LOSS = "torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"


@fixer("REGION_LOSS_OUTSIDE")
def loss_into_region(tree: Tree, finding: Finding) -> Iterator[Change]:
    """The loss joins the block that it follows; else its input becomes float32, which is what autocast would do."""
    call = tree.at(finding, cst.Call)
    if call is None:
        return
    edits = _into_block(tree, call)
    if edits:
        yield Change("compute the loss under autocast", tuple(edits))
    output, target = argument(call, 0, "input"), argument(call, 1, "target")
    if output is not None:
        edits = tree.append_to(output, ".float()")
        if target is not None and _has_half_target(tree, call):
            edits += tree.append_to(target, ".float()")
        yield Change("compute the loss in float32", tuple(edits))


def _has_half_target(tree: Tree, loss: cst.Call) -> bool:
    """Whether the loss compares two tensors of a kind: then the finding means both. Class numbers must stay whole."""
    name = tree.path(loss.func).rpartition(".")[2]
    for assign in tree.all(cst.Assign) if not name else ():
        if any(dotted_name(t.target) == dotted_name(loss.func) for t in assign.targets) and isinstance(assign.value, cst.Call):
            name = tree.path(assign.value.func).rpartition(".")[2]
    return LAYERS.get(name, name) in PAIRWISE_LOSSES


def _into_block(tree: Tree, call: cst.Call) -> list[Edit]:
    """The lines of the statement moved under the `with` right before it."""
    statement = tree.statement(call)
    line = tree.parent(statement)
    block = tree.parent(line) if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    if line is None or not isinstance(block, (cst.IndentedBlock, cst.Module)) or isinstance(statement, cst.Return):
        return []
    position = next(i for i, other in enumerate(block.body) if other is line)
    before = block.body[position - 1] if position else None
    if not isinstance(before, cst.With) or len(before.items) != 1 or not isinstance(before.body, cst.IndentedBlock):
        return []
    opened = before.items[0].item
    if tree.path(opened.func if isinstance(opened, cst.Call) else opened) in NO_GRAD | {"torch.set_grad_enabled"}:
        return []
    inner, outer = tree.indent(before.body.body[0]), tree.indent(before)
    last = before.body.body[-1]
    if isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], (cst.Return, cst.Continue, cst.Break, cst.Raise)):
        return []
    return tree.shift(statement, inner.removeprefix(outer)) or []


@fixer("REGION_BCE")
def bce_on_logits(tree: Tree, finding: Finding) -> Iterator[Change]:
    """The sigmoid goes, and the loss takes logits: a function where it is called, a BCELoss where it is made and called."""
    call = tree.at(finding, cst.Call)
    if call is None:
        return
    if tree.path(call.func) == _BCE:
        new = tree.name_of(f"{_BCE}_with_logits")
        edits = _without_sigmoid(tree, call)
        if edits and new:
            yield Change("use binary_cross_entropy_with_logits", (tree.replace(call.func, new), *edits))
        return
    criterion = dotted_name(call.func)
    made = [a for a in tree.all(cst.Assign) if any(dotted_name(t.target) == criterion for t in a.targets)]
    if not criterion or len(made) != 1 or not isinstance(made[0].value, cst.Call) or tree.path(made[0].value.func) != _BCE_LOSS:
        return
    calls = [c for c in tree.all(cst.Call) if dotted_name(c.func) == criterion]
    mentions = sum(dotted_name(n) == criterion for n in (tree.all(cst.Attribute) if "." in criterion else tree.all(cst.Name)))
    changed = [_without_sigmoid(tree, c) for c in calls]
    new = tree.name_of("torch.nn.BCEWithLogitsLoss")
    if new and all(changed) and mentions == len(calls) + 1:  # one handed on would get probabilities elsewhere
        edits = [edit for part in changed for edit in part]
        yield Change("use BCEWithLogitsLoss", (tree.replace(made[0].value.func, new), *edits))


def logits_of(tree: Tree, value: cst.CSTNode) -> cst.BaseExpression | None:
    """What a sigmoid is taken of, if the expression is one."""
    if not isinstance(value, cst.Call):
        return None
    if tree.path(value.func) in _SIGMOIDS:
        return argument(value, 0, "input")
    if (
        isinstance(value.func, cst.Attribute)
        and value.func.attr.value == "sigmoid"
        and not value.args
        and not tree.path(value.func)
    ):
        return None if method(value)[0] == "self" else value.func.value
    return None


def _without_sigmoid(tree: Tree, loss: cst.Call) -> list[Edit]:
    """The edits that give a loss the logits of its first argument: written there, or in the variable that it is."""
    given = argument(loss, 0, "input")
    if given is None:
        return []
    logits = logits_of(tree, given)
    if logits is not None:
        return [tree.replace(given, tree.code(logits))]
    assign = tree.value_of(given)
    logits = logits_of(tree, assign.value) if assign is not None else None
    if assign is None or logits is None:
        return []
    scope, name = tree.scope(loss), dotted_name(given)
    if len(tree.uses(scope, name)) == 1:
        return [tree.replace(assign.value, tree.code(logits))]
    source = dotted_name(logits)
    if source and not tree.rebound_between(scope, source, tree.end(assign), tree.start(loss)):
        return [tree.replace(given, source)]
    return []
