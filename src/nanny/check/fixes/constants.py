"""Mask constants: the lowest (or highest) number that the tensor's own format has."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ...core.finding import Finding
from ..fixers import Change, fixer
from ..tree import Edit, Tree, argument, dotted_name, method

Expression = cst.BaseExpression


@fixer("NUM_MASK_CONSTANT")
def limit_of_the_format(tree: Tree, finding: Finding) -> Iterator[Change]:
    """`torch.finfo(x.dtype).min` for a number that is put in; one that is added stays a matter of taste."""
    finfo, imported = tree.reach("torch.finfo")
    found = _put_in(tree, finding)
    if not finfo or found is None:
        return
    number, tensor, dtype = found
    end = _end(tree, number)
    if not end:
        return
    is_safe = tree.at(finding, cst.BinaryOperation) is None
    if dtype is not None:
        yield Change(
            "use the format's own limit", (tree.replace(number, f"{finfo}({tree.code(dtype)}).{end}"), *imported), is_safe
        )
    elif tensor is not None and (name := dotted_name(tensor)):
        yield Change("use the format's own limit", (tree.replace(number, f"{finfo}({name}.dtype).{end}"), *imported), is_safe)
    else:
        split = _named_first(tree, tensor, number, finfo, end) if tensor is not None else None
        if split is not None:
            yield Change("use the format's own limit", (*split, *imported), is_safe)
        half, more = tree.reach("torch.float16")  # its limits exist in every format
        if half:
            edits = (tree.replace(number, f"{finfo}({half}).{end}"), *(imported or more))
            yield Change("use the limit of float16", edits, is_safe=False)


def _put_in(tree: Tree, finding: Finding) -> tuple[Expression, Expression | None, Expression | None] | None:
    """The number, the tensor that it is put into, and the dtype where that is written instead."""
    written = tree.written_by(finding)
    if written is not None:
        return written[1], written[0], None
    pair = tree.at(finding, cst.BinaryOperation)
    if pair is not None:
        sides = (pair.left, pair.right)
        numbers = [side for side in sides if _end(tree, side) == "min"]  # a large factor above 0 is no mask
        return (numbers[0], sides[0] if numbers[0] is sides[1] else sides[1], None) if len(numbers) == 1 else None
    call = tree.at(finding, cst.Call)
    if call is None:
        return None
    is_function = bool(tree.path(call.func))
    name = method(call)[1] or dotted_name(call.func)
    tensor = argument(call, 0, "input") if is_function else getattr(call.func, "value", None)
    shift = 0 if is_function else -1
    if name in ("masked_fill", "masked_fill_"):
        number = argument(call, 2 + shift, "value")
    elif name == "where":
        sides_ = [argument(call, 1, "input"), argument(call, 2, "other")] if is_function else [tensor, argument(call, 1, "other")]
        numbers = [side for side in sides_ if side is not None and _end(tree, side)]
        if len(numbers) != 1 or None in sides_:
            return None
        number = numbers[0]
        tensor = next(side for side in sides_ if side is not number)
    elif name == "fill_":
        number = argument(call, 1 + shift, "value")
    elif name in ("full_like", "new_full"):
        number = argument(call, 1, "fill_value")
    elif name == "full":
        number, tensor = argument(call, 1, "fill_value"), None
    else:
        return None
    dtype = argument(call, 99, "dtype")
    return (number, tensor, dtype) if number is not None and (tensor is not None or dtype is not None) else None


def _end(tree: Tree, node: cst.CSTNode, depth: int = 0) -> str:
    """`min` for a number below 0, `max` for one above; empty for what is no number or cannot be followed."""
    if isinstance(node, (cst.Float, cst.Integer)):
        return "max"
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        return {"min": "max", "max": "min"}.get(_end(tree, node.expression, depth), "")
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Power, cst.Multiply, cst.Divide)):
        left, right = _end(tree, node.left, depth), _end(tree, node.right, depth)
        if isinstance(node.operator, cst.Power):
            return left if left == "max" and right else ""
        return ("max" if left == right else "min") if left and right else ""
    if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Call) and tree.path(node.value.func) == "torch.finfo":
        return node.attr.value if node.attr.value in ("min", "max") else ""
    if isinstance(node, cst.Call) and len(node.args) == 1 and dotted_name(node.func) in ("float", "int"):
        return _end(tree, node.args[0].value, depth)
    name = dotted_name(node)
    if not name or depth > 3:
        return ""
    found = {_end(tree, value, depth + 1) for value in _values(tree, name)}
    return found.pop() if len(found) == 1 else ""


def _values(tree: Tree, name: str) -> Iterator[cst.CSTNode]:
    """Everything that the file gives a name: assignments, defaults, a class's own attribute for `self.name`."""
    last = name.rpartition(".")[2] if name.startswith("self.") else name
    for assign in tree.all(cst.Assign):
        if any(dotted_name(t.target) in (name, last) for t in assign.targets):
            yield assign.value
    for typed in tree.all(cst.AnnAssign):
        if typed.value is not None and dotted_name(typed.target) in (name, last):
            yield typed.value
    for param in tree.all(cst.Param):
        if param.name.value == name and param.default is not None:
            yield param.default


def _named_first(tree: Tree, tensor: cst.BaseExpression, number: cst.CSTNode, finfo: str, end: str) -> list[Edit] | None:
    """`x = (a @ b).masked_fill(m, -1e9)` in two lines: the name first gets the tensor, so that its format can be asked."""
    statement = tree.statement(number)
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0].target
    start, stop = tree.outer(tensor)
    if not isinstance(target, cst.Name) or start != tree.outer(statement.value)[0] or statement.value.lpar:
        return None
    if any(n.value == target.value and tree.start(n) >= stop for n in tree.all(cst.Name) if tree.contains(statement.value, n)):
        return None
    value = tree.text[tree.start(tensor) : tree.end(tensor)] if "\n" not in tree.code(tensor) else tree.code(tensor)
    first = tree.before(statement, f"{target.value} = {value}")
    if first is None or first.text.endswith("; "):
        return None
    return [first, Edit(start, stop, target.value), tree.replace(number, f"{finfo}({target.value}.dtype).{end}")]
