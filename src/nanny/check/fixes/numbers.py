"""Operations that need float32: `.float()` where the half value comes in, and the stable form of a formula where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from ...core.finding import Finding, Severity
from ...core.ops import FORMULA_FUNCTIONS
from ..fixers import Change, fixer
from ..tree import Edit, Tree, apply_edits, argument, dotted_name, method
from .region import logits_of

_DIMENSIONS = (cst.Integer, cst.UnaryOperation, cst.Tuple, cst.List)


def operand(tree: Tree, call: cst.Call) -> cst.BaseExpression | None:
    """The tensor that an operation works on: `x` in `torch.sum(x)`, `x.sum(-1)` and `self.softmax(x)`."""
    if tree.path(call.func) or not isinstance(call.func, cst.Attribute) or _is_self(call):
        return argument(call, 0, "input")
    first = argument(call, 0)
    is_method = first is None or isinstance(first, _DIMENSIONS) or dotted_name(first) in ("dim", "axis", "None")
    return call.func.value if is_method else first


_ELEMENTWISE = (cst.Multiply, cst.Divide, cst.Add, cst.Subtract, cst.Power)


def source(tree: Tree, value: cst.BaseExpression) -> cst.BaseExpression:
    """Where to turn to float32 so that a whole formula runs in it: `x` in `(x * x)`, for the square overflows before the sum."""
    for _ in range(20):
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, _ELEMENTWISE):
            value = value.right if is_number(tree, value.left) else value.left
        elif isinstance(value, cst.UnaryOperation):
            value = value.expression
        elif isinstance(value, cst.Call) and _method_name(value) in FORMULA_FUNCTIONS and not _is_self(value):
            inner = operand(tree, value)
            if inner is None:
                return value
            value = inner
        else:
            return value
    return value


def _method_name(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def _is_self(call: cst.Call) -> bool:
    return method(call)[0] in ("self", "cls")


def _in_place(call: cst.Call) -> bool:
    name = method(call)[1] or dotted_name(call.func)
    return name.endswith("_") or any(arg.keyword is not None and arg.keyword.value == "out" for arg in call.args)


def mixes_freely(finding: Finding) -> bool:
    """Under autocast a float32 result meets half tensors without harm: products cast it, everything else promotes."""
    return "autocast" in finding.evidence


def _float_change(tree: Tree, value: cst.BaseExpression, is_safe: bool) -> Change:
    return Change("compute it in float32", tuple(tree.append_to(source(tree, value), ".float()")), is_safe, rests_on(tree, value))


def rests_on(tree: Tree, value: cst.CSTNode) -> tuple[tuple[int, int], ...]:
    """The assignments before an expression that its variables come from, through other variables too."""
    here = tree.start(value)
    earlier = [a for a in tree.all(cst.Assign, tree.scope(value)) if tree.end(a) < here]
    wanted, found = {n.value for n in tree.names_in(value)}, []
    for assign in reversed(earlier):
        if any(n.value in wanted for target in assign.targets for n in tree.names_in(target)):
            found.append((tree.start(assign), tree.end(assign)))
            wanted |= {n.value for n in tree.names_in(assign.value)}
    return tuple(found)


@fixer("NUM_REDUCE_HALF", "NUM_EXP_HALF", "NUM_UNSUPPORTED_OP")
def in_float32(tree: Tree, finding: Finding) -> Iterator[Change]:
    """The operand becomes float32, and the result with it. An operation that raises without loses nothing by it."""
    call = tree.at(finding, cst.Call)
    value = operand(tree, call) if call is not None and not _in_place(call) else None
    if value is not None:
        raises = finding.code == "NUM_UNSUPPORTED_OP" and finding.severity > Severity.INFO
        yield _float_change(tree, value, raises or mixes_freely(finding))


@fixer("NUM_SOFTMAX_HALF")
def softmax_in_float32(tree: Tree, finding: Finding) -> Iterator[Change]:
    """Outside autocast the result goes back to the operand's format: a half matrix product after it would raise."""
    call = tree.at(finding, cst.Call)
    value = operand(tree, call) if call is not None else None
    if call is None or value is None:
        return
    edits = tree.append_to(value, ".float()")
    if mixes_freely(finding) or _names_log(call):
        yield Change("compute it in float32", tuple(edits), mixes_freely(finding), rests_on(tree, value))
    elif dotted_name(value):
        back = tree.append_to(call, f".to({dotted_name(value)}.dtype)")
        yield Change("compute it in float32", (*edits, *back), False, rests_on(tree, value))
    else:
        yield Change("compute it in float32", tuple(edits), False, rests_on(tree, value))


def _names_log(call: cst.Call) -> bool:
    return (method(call)[1] or dotted_name(call.func)).rpartition(".")[2] == "log_softmax"


@fixer("NUM_EPS_UNDERFLOW")
def eps_in_float32(tree: Tree, finding: Finding) -> Iterator[Change]:
    """What the eps is added to, or compared with, becomes float32; there 1e-8 is not 0."""
    call = tree.at(finding, cst.Call)
    if call is not None:
        value = argument(call, 0, "input") if tree.path(call.func) else getattr(call.func, "value", None)
        if value is not None and not _in_place(call) and not _is_self(call):
            yield _float_change(tree, value, mixes_freely(finding))
        return
    added = tree.at(finding, cst.BinaryOperation)
    if added is None or not isinstance(added.operator, cst.Add):
        return
    tensor = added.right if is_number(tree, added.left) else added.left
    yield _float_change(tree, tensor, mixes_freely(finding))


def is_number(tree: Tree, node: cst.CSTNode) -> bool:
    """A number as it is written, or a name that the file gives one."""
    if isinstance(node, cst.UnaryOperation):
        return is_number(tree, node.expression)
    if isinstance(node, (cst.Float, cst.Integer)):
        return True
    name = dotted_name(node)
    return bool(name) and any(
        isinstance(a.value, (cst.Float, cst.Integer))
        and any(dotted_name(t.target) in (name, name.partition(".")[2]) for t in a.targets)
        for a in tree.all(cst.Assign)
    )


@fixer("NUM_LOG_OF_SOFTMAX", "NUM_LOG_OF_SIGMOID", "NUM_LOGSUMEXP")
def stable_logarithm(tree: Tree, finding: Finding) -> Iterator[Change]:
    """log_softmax, logsigmoid or logsumexp, in float32, where the two steps stand in one expression or share a variable."""
    call = tree.at(finding, cst.Call)
    inner = operand(tree, call) if call is not None else None
    if call is None or inner is None or _in_place(call):
        return
    sign = ""
    if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.Subtract):
        if tree.code(inner.left) not in ("1", "1.0"):
            return
        sign, inner = "-", inner.right
    assign = tree.value_of(inner)
    found = _stable(tree, finding.code, assign.value if assign is not None else inner, sign)
    if found is None:
        return
    tensor, before, after = found
    edits: list[Edit] = [tree.replace(call, f"{before}{_float(tree, tensor)}{after}")]
    if assign is not None:
        scope, name = tree.scope(call), dotted_name(inner)
        is_only_use = len(tree.uses(scope, name)) == 1
        if dotted_name(tensor):
            if tree.rebound_between(scope, dotted_name(tensor), tree.end(assign), tree.start(call)):
                return
            gone = tree.without(assign) if is_only_use else None
            if is_only_use and gone is None:
                return
            edits += [gone] if gone is not None else []
        elif is_only_use:  # the variable keeps what comes before, computed where it was
            edits = [tree.replace(assign.value, tree.code(tensor)), tree.replace(call, f"{before}{name}.float(){after}")]
        else:
            return
    yield Change("use the stable form in float32", tuple(edits), mixes_freely(finding))


def _stable(tree: Tree, code: str, made: cst.CSTNode, sign: str) -> tuple[cst.BaseExpression, str, str] | None:
    """The tensor in `made`, and the text around it for its stable logarithm (or that of 1 minus it); None for other forms."""
    if not isinstance(made, cst.Call):
        return None
    if code == "NUM_LOG_OF_SIGMOID":
        logits, name = logits_of(tree, made), tree.name_of("torch.nn.functional.logsigmoid")
        return (logits, f"{name}({sign}", ")") if logits is not None and name else None
    tensor = operand(tree, made)
    if sign or tensor is None or not isinstance(made.func, cst.Attribute):
        return None
    called = made.func.attr
    if code == "NUM_LOG_OF_SOFTMAX" and called.value == "softmax":
        start, end = tree.outer(tensor)
        if start < tree.start(called):  # x.softmax(-1)
            return tensor, "", f".log_softmax{tree.text[tree.end(called) : tree.end(made)]}"
        before = f"{tree.text[tree.start(made) : tree.start(called)]}log_softmax{tree.text[tree.end(called) : start]}"
        return tensor, before, tree.text[end : tree.end(made)]
    name = tree.name_of("torch.logsumexp")
    if code == "NUM_LOGSUMEXP" and called.value == "sum" and isinstance(tensor, cst.Call) and name and _is_exp(tensor):
        exponent = operand(tree, tensor)
        rest = [tree.text[tree.start(a) : tree.outer(a.value)[1]] for a in made.args if a.value is not tensor]
        return (exponent, f"{name}(", f", {', '.join(rest)})") if exponent is not None and rest else None
    return None


def _is_exp(call: cst.Call) -> bool:
    return (_method_name(call) or dotted_name(call.func)) == "exp"


def _float(tree: Tree, node: cst.CSTNode) -> str:
    start, _ = tree.outer(node)
    return apply_edits(
        tree.code(node), [replace(e, start=e.start - start, end=e.end - start) for e in tree.append_to(node, ".float()")]
    )
