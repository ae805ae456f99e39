"""An operation that went wrong, as a dump."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..watch.dump import MOST_BYTES, Dump, save_dump
from ..watch.op_facts import long_name
from .records import OpFault
from .reference import Call

MOST_DUMPS = 20  # of one run


def save_call(folder: Path, call: Call, results: list[Tensor], fault: OpFault) -> Path | None:
    """The path of the inputs; None if they would be too large."""
    args, kwargs = call.inputs
    name = long_name(call.func)
    dump = Dump(
        op=name,
        overload=call.func._overloadname,
        args=args,
        kwargs=kwargs,
        outputs=tuple(results),
        place=fault.place,
        classes=fault.classes,
        kind=fault.kind,
        step=fault.step,
        rank=fault.rank,
    )
    return save_dump(folder, name + (f".rank{fault.rank}" if fault.rank else ""), dump, MOST_BYTES)
