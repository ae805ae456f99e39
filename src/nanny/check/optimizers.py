"""Optimizers: which calls build one, and whose parameters it gets."""

from __future__ import annotations

import ast
import re

from .source import ClassInfo
from .trace import Frame
from .values import UNKNOWN, Thing, Value, ancestors

_OPTIMIZER = re.compile(
    r"^(?:\w*(?:Adam|AdamW|SGD|RMSprop|Adagrad|Adadelta|Lion|LAMB|Lamb|Adafactor|LBFGS|Rprop|ASGD|Muon)\w*|Optimizer)$"
)


def is_optimizer(path: str, last: str) -> bool:
    if last.endswith(("LR", "Scheduler")):
        return False
    return (path.startswith("torch.optim.") and "." not in path[12:]) or _OPTIMIZER.match(last) is not None


def optimizer_base(info: ClassInfo) -> str:
    """`AdamW` for a class of the project that derives from torch.optim.AdamW; empty if it is no such class."""
    names = [base for base in info.bases if is_optimizer(base, base.rpartition(".")[2])]
    found = next((n.rpartition(".")[2] for n in names if not n.endswith("Optimizer")), "")
    return found or next((b for parent in info.parents if parent is not info and (b := optimizer_base(parent))), "")


def new_optimizer(frame: Frame, node: ast.Call, last: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    params = args[0] if args else kwargs.get("params", UNKNOWN)
    owners = parameter_owners(params)
    for owner in owners:
        owner.is_trained = True
    value = Value("optimizer", ref=last, inputs=(params,), thing=Thing("", "optimizer"), line=node.lineno, node=node)
    return frame.emit("optimizer.new", node, (params, *args[1:]), kwargs, value)


def parameter_owners(params: Value) -> list[Thing]:
    """The modules (or parameters) whose tensors are handed to an optimizer or a clip."""
    found: list[Thing] = []
    stack = [params]
    while stack:
        for value in ancestors(stack.pop()):
            if (value.op in ("parameters", "named_parameters", "parameter") and value.thing is not None) or (
                value.kind in ("instance", "module") and value.thing is not None
            ):
                found.append(value.thing)
            if value.kind == "dict" and isinstance(value.ref, dict) and len(found) < 50:
                stack.extend(v for v in value.ref.values() if isinstance(v, Value))
    return found
