"""Where the first bad number of a forward pass arose, read afterwards from what autograd kept for backward.

Needs no hooks during the step: only when a loss turns out NaN or infinite is its graph walked, inputs first. Nodes that saved a
bad tensor lie behind the producer, nodes that saved good ones before it. Not done where somebody packs saved tensors
(checkpointing, offloading): looking would trigger his recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.ops import ADDITIVE, HARMLESS, NO_SLOPE, SHIFTS
from ..core.step import Autopsy
from ..measure import transfer
from ..watch.bad_lines import assignments_behind_backward, reads_bad
from ..watch.names import Held
from ..watch.tensors import is_plain, is_readable, kept_by, short_dtype, tensors_in

MOST_NODES = 100_000
_LARGEST_SCALE = 2.0**24
MOST_BACK = 8
MOST_OPERATIONS_OF_A_LOSS = 8
MOST_OPERATIONS_BEHIND = 32  # between a scaled loss and backward
_OUTPUTS = ("_saved_result", "_saved_output")
# operations that can be done again from what they kept: the names of their inputs, and how
_AGAIN: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "addmm": (("_saved_mat1", "_saved_mat2"), torch.matmul),
    "mm": (("_saved_self", "_saved_mat2"), torch.matmul),
    "bmm": (("_saved_self", "_saved_mat2"), torch.matmul),
    "mul": (("_saved_self", "_saved_other"), torch.mul),
    "div": (("_saved_self", "_saved_other"), torch.div),
    "log": (("_saved_self",), torch.log),
}
_WALKED = HARMLESS | ADDITIVE | {"mul", "div", "to_copy"}  # the last ones may make one, but kept nothing to tell
_THROUGH = ("t", "transpose", "permute", "to_copy", "view", "expand", "reshape_alias", "unsqueeze")


@torch.no_grad()
def first_nonfinite(root: Tensor, parameters: Mapping[int, str]) -> Autopsy | None:
    """The operation that made the first NaN or +Inf on the way to `root`, and the parameters nearest before it."""
    if root.grad_fn is None:
        return None
    good: dict[Any, int] = {}
    seen = {"dtype": short_dtype(root.dtype), "nan": bool(root.isnan().any())}
    return _first_kept(root.grad_fn, parameters, good) or _autopsy_of(root.grad_fn, parameters, seen, good)


@torch.no_grad()
def hidden_nonfinite(graph: Any, parameters: Mapping[int, str]) -> Autopsy | None:
    """The same for a loss that does not show it, while its backward runs: from what that has not reached yet."""
    return _first_kept(graph, parameters, {})


def _first_kept(root: Any, parameters: Mapping[int, str], good: dict[Any, int]) -> Autopsy | None:
    """`good` gets the nodes before it, all with good tensors, in order."""
    for node in _nodes_after_their_inputs(root):
        bad, role = _bad_tensor(node)
        if bad is None:
            good[node] = len(good)
            continue
        seen: dict[str, Any] = {"dtype": short_dtype(bad.dtype), "nan": bool(bad.isnan().any())}
        if role.startswith(_OUTPUTS):
            return _autopsy_of(node, parameters, seen, good)
        direct = [n for n, _ in node.next_functions if n is not None]
        poisoned = [w for n in direct if (w := _weight(n)) is not None and not _is_good(w)]
        if poisoned:
            name = parameters.get(id(poisoned[0]), "")
            return Autopsy(op=_op(node), after=name, weight=name, **seen)
        if _has_no_maker(node, role):
            own = next((parameters.get(id(w), "") for n in direct if (w := _weight(n)) is not None), "")
            return Autopsy(op=_op(node), inside=own, from_data=True, is_factor=True, sure=False, takes_in=True, **seen)
        maker = _latest(node, good)
        if maker is not None and not (role == "_saved_target" and len(direct) == 1):  # else a loss, and what it compares with
            return _autopsy_of(maker, parameters, seen, good)
        return Autopsy(op=_op(node), after=_nearest(node, parameters), from_data=True, **seen)
    return None


@torch.no_grad()  # else torch would save what is looked at, through hooks of the program's own
def bad_from_outside(weights: Mapping[str, Tensor], given: Sequence[Tensor]) -> Autopsy | None:
    """Where the graph does not tell: weights that are not finite, or else a batch that is not. -Inf alone is a mask."""
    for name, weight in weights.items():
        if is_readable(weight) and not bool(weight.isfinite().all()):
            return Autopsy("weights", weight=name, dtype=short_dtype(weight.dtype))
    for tensor in given:
        if is_readable(tensor) and bool((tensor.isnan() | tensor.isposinf()).any()):
            return Autopsy("input", from_data=True, dtype=short_dtype(tensor.dtype), nan=bool(tensor.isnan().any()))
    return None


def autopsy_of_loss(
    root: Tensor,
    parameters: Mapping[int, str],
    owners: Mapping[int, Held],
    given: Sequence[Tensor],
    drawn: Sequence[Tensor],
    packed: bool,
    receives: bool,
    compiled: bool,
) -> Autopsy | None:
    """By the graph of the loss; where that does not tell, or is one node of a compiled function, by what went in.

    `drawn`: what loaders gave last; `packed`: the program keeps saved tensors elsewhere; `receives`: what the model is
    given comes from another process.
    """
    received = bad_from_outside({}, given) if receives else None
    if received is not None:
        return received  # what a stage is given has a graph of its own, on another rank
    found = None if packed else first_nonfinite(root, parameters)
    if found is not None and found.sure:
        return found
    weights = {name: p for key, name in parameters.items() if (p := owners[key]()) is not None}
    outside = bad_from_outside(weights, given)
    if outside is None and found is not None and found.takes_in:
        outside = taken_in(found, drawn)
    return outside or (None if compiled else found)


def singular_operation(root: Any, parameters: Mapping[int, str]) -> Autopsy | None:
    """What most likely broke backward, of a graph whose backward has run: the nearest to the loss that can be singular."""
    order, level = {root: None}, [root]
    while level and len(order) < MOST_NODES:
        following = {c: None for node in level for c, _ in node.next_functions if c is not None and c not in order}
        order |= following
        level = list(following)
    for kinds in NO_SLOPE:
        found = next((node for node in order if _op(node) in kinds), None)
        if found is not None:
            return Autopsy(op=_op(found), after=_nearest(found, parameters), sure=False)
    return None


@torch.no_grad()
def taken_in(met: Autopsy, drawn: Sequence[Tensor]) -> Autopsy | None:
    """What an operation met beside its graph: a line of the program made it of finite numbers, or it came with the batch.

    `drawn`: what loaders gave last. Without them the lines tell what they read, which the program may have computed before.
    """
    lines = (line for line in assignments_behind_backward() if not line.has_graph)
    made = next((line for line in lines if not any(t._version for t in tensors_in(line.result))), None)  # not written to since
    if made is not None:
        line = {"variable": made.variable, "file": made.file, "line": made.line, "source": made.source}
        return replace(met, from_data=False, is_factor=True, sure=True, takes_in=False, **line)  # type: ignore[arg-type]
    # a batch may be bad where nobody reads it: what is added fits into the result
    if bad_from_outside({}, [t for t in drawn if not met.count or (t.numel() and met.count % t.numel() == 0)]) is not None:
        return replace(met, from_data=True, is_factor=False, sure=True)
    return replace(met, from_data=True, is_factor=True) if met.is_factor or reads_bad() else None


def _has_no_maker(node: Any, role: str) -> bool:
    """A factor or divisor of which the graph knows no maker: data, or what the program computed without gradients."""
    slot = {"_saved_self": 0, "_saved_other": 1}.get(role)
    return slot is not None and len(node.next_functions) == 2 and node.next_functions[slot][0] is None


def _latest(node: Any, good: Mapping[Any, int]) -> Any:
    """The input of a node that was computed last and is not just a weight."""
    makers = [n for n, _ in node.next_functions if n in good and _weight(n) is None]
    return max(makers, key=good.__getitem__, default=None)


def _maker_behind(node: Any, good: Mapping[Any, int]) -> tuple[Any, Tensor | None]:
    """The bad number may have come into a node that kept only its output, or nothing: walks back over such nodes.

    Where an operation can be done again from its inputs, that decides: its result is bad, and comes back too, or it is good, and
    one of the operations after it made the bad number.
    """
    chain = [node]  # all of these handle the bad number; the last one may have made it
    for _ in range(MOST_BACK):
        back = chain[-1]
        result = _computed_again(back)
        if result is not None:
            if not bool(result.isfinite().all()):
                return back, result
            chain.pop()  # its result was good
            break
        before = _latest(back, good) if _op(back) in _WALKED or back is node else None
        if before is None:
            break
        chain.append(before)
    by_zero = next((n for n in chain if _divides_by_zero(n)), None)
    if by_zero is not None:
        return by_zero, None
    # of those that may have made it, the nearest to where it was seen is the safest to name
    return next((n for n in chain if _op(n) not in HARMLESS and not _shrinks(n)), node), None


def _shrinks(node: Any) -> bool:
    """A product with numbers of at most 1, a division by 1 and more: it makes no infinity of finite numbers. Nor does a scale of
    the loss, in formats that end far beyond it."""
    other = kept_by(node, "_saved_other") if _op(node) in ("mul", "div") else None
    if not isinstance(other, Tensor) or not (is_readable(other) or (other.dim() == 0 and is_plain(other))) or not other.numel():
        return False  # a plain number is kept as a tensor too
    low, high = torch.aminmax(other.detach().abs())
    made = getattr(node, "_input_metadata", ())
    most = _LARGEST_SCALE if other.dim() == 0 and made and made[0].dtype in (torch.float32, torch.float64) else 1.0
    return bool(high <= most) if _op(node) == "mul" else bool(low >= 1 / most)


def _inputs_kept(node: Any) -> list[Tensor]:
    """The inputs of an operation that can be done again, if autograd kept them all and they are still there; else nothing."""
    names, _ = _AGAIN.get(_op(node), ((), None))
    found = [kept_by(node, name) for name in names]
    return found if found and all(isinstance(f, Tensor) and is_readable(f) for f in found) else []


def _computed_again(node: Any) -> Tensor | None:
    inputs = _inputs_kept(node)
    return _AGAIN[_op(node)][1](*(f.detach() for f in inputs)) if inputs and all(_is_good(f) for f in inputs) else None


def _size_in_fp32(node: Any) -> float | None:
    """How large the result is where it fits."""
    inputs = _inputs_kept(node)
    if not inputs:
        return None
    low, high = torch.aminmax(_AGAIN[_op(node)][1](*(f.detach().float() for f in inputs)))
    return max(abs(low.item()), abs(high.item()))


def _nodes_after_their_inputs(root: Any) -> Iterator[Any]:
    """Depth first, each node once, after everything it depends on."""
    seen = {root}
    stack = [(root, iter([n for n, _ in root.next_functions if n is not None]))]
    while stack and len(seen) < MOST_NODES:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter([n for n, _ in child.next_functions if n is not None])))
                break
        else:
            stack.pop()
            yield node


def _bad_tensor(node: Any) -> tuple[Tensor | None, str]:
    """A tensor that the node saved and that is bad, and in what role; inputs go before outputs."""
    found: tuple[Tensor | None, str] = (None, "")
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        value = kept_by(node, name)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, Tensor) and not _is_good(tensor):
                if not name.startswith(_OUTPUTS):
                    return tensor, name
                found = tensor, name
    return found


def _is_good(tensor: Tensor) -> bool:
    """Neither NaN nor +Inf; -Inf is what masks are made of. A weight that FSDP2 has let go of is not there to be read."""
    if not is_readable(tensor):
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool((low == low) & (high < float("inf")))


def _weight(node: Any) -> Tensor | None:
    """The leaf tensor behind a node, looking through transposes and casts, which stand between a weight and its matmul."""
    while node is not None and not hasattr(node, "variable"):
        if _op(node) not in _THROUGH or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None if node is None else node.variable


def _op(node: Any) -> str:
    """`LogBackward0` as `log`."""
    name = type(node).__name__.partition("Backward")[0]
    starts = [c.isupper() and i > 0 and not (c == "D" and name[i - 1].isdigit()) for i, c in enumerate(name)]  # nll_loss2d
    return "".join(f"_{c.lower()}" if starts[i] else c.lower() for i, c in enumerate(name))


def _autopsy_of(node: Any, parameters: Mapping[int, str], seen: Mapping[str, Any], good: Mapping[Any, int]) -> Autopsy:
    maker, result = _maker_behind(node, good)
    if result is not None:
        seen = {"dtype": short_dtype(result.dtype), "nan": bool(result.isnan().any())}
    kept = {n: t for n in dir(maker) if n.startswith("_saved_") and isinstance(t := kept_by(maker, n), Tensor)}
    infinite = any(is_readable(t) and bool(t.isneginf().any()) for n, t in kept.items() if not n.startswith(_OUTPUTS))
    sure = result is not None or (bool(kept) and not infinite)  # a -Inf that went in may be a mask, or the bad number itself
    weights = [w for n, _ in maker.next_functions if (w := _weight(n)) is not None and id(w) in parameters]
    poisoned = next((parameters[id(w)] for w in weights if not _is_good(w)), "")
    if seen["dtype"] == "float16":
        seen = {**seen, "size": _size_in_fp32(maker)}
    inside = parameters[id(weights[0])] if weights else ""
    after, by_zero = _nearest(maker, parameters), _divides_by_zero(maker)
    takes_in = result is None and _op(maker) in SHIFTS & ADDITIVE and any(n is None for n, _ in maker.next_functions)
    made = getattr(maker, "_input_metadata", ()) if takes_in else ()
    return Autopsy(
        op=_op(maker), inside=inside, after=after, weight=poisoned, sure=sure, by_zero=by_zero, takes_in=takes_in,
        count=math.prod(made[0].shape) if made else 0, **seen
    )  # fmt: skip


def _divides_by_zero(node: Any) -> bool:
    by = kept_by(node, "_saved_other") if _op(node) == "div" else None
    return isinstance(by, Tensor) and is_readable(by) and by.dtype in (torch.float32, torch.float64) and bool((by == 0).any())


def _nearest(node: Any, parameters: Mapping[int, str]) -> str:
    """The parameter met first when walking back: the last layer that the data went through."""
    seen, level = {node}, [node]
    while level:
        following = []
        for one in level:
            for child, _ in one.next_functions:
                weight = _weight(child)
                if weight is not None and id(weight) in parameters:
                    return parameters[id(weight)]
                if child is not None and child not in seen:
                    seen.add(child)
                    following.append(child)
        level = following
    return ""


def terms_of(node: Any) -> int:
    """How many elements the last sum adds up; 0 if there is none near, as in a mean."""
    near, most = [node], 0
    for _ in range(MOST_OPERATIONS_OF_A_LOSS):
        if not near:
            break
        now = near.pop(0)
        name = "" if now is None else now.name()
        if name in ("SumBackward0", "SumBackward1"):
            most = max(most, math.prod(now._saved_self_sym_sizes))
        elif name in _OF_SCALARS:
            near.extend(parent for parent, _ in now.next_functions if parent is not None)
    return most


_OF_SCALARS = frozenset(["AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0"])


def factor_of(root: Tensor) -> float | None:
    """The plain number by which a loss was multiplied last, if it was."""
    node = root.grad_fn
    if node is None or type(node).__name__ != "MulBackward0":
        return None
    other = kept_by(node, "_saved_other")
    if isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad and transfer.reads_freely(other.device):
        return float(other)
    return None


def reached_by(root: Any, parameters: Mapping[int, str]) -> set[int]:
    """The parameters to which a backward pass from here would go, by identity."""
    seen, level, found = {root}, [root], set()
    while level and len(seen) < MOST_NODES:
        weights = (w for node in level if (w := _weight(node)) is not None)
        found |= {id(w) for w in weights if id(w) in parameters}
        level = list({c: None for node in level for c, _ in node.next_functions if c is not None and c not in seen})
        seen.update(level)
    return found


def among_nearest(node: Any, made: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Those whose operation is this one or one of a few before it."""
    near: list[Any] = [node] if made else []
    found: list[tuple[Any, Any]] = []
    for _ in range(MOST_OPERATIONS_BEHIND):
        if not near or len(found) == len(made):
            break
        now = near.pop(0)
        hit = next((one for one in made if one[0] is now), None)
        if hit is not None:
            found.append(hit)
        else:
            near.extend(parent for parent, _ in now.next_functions if parent is not None)
    return found
