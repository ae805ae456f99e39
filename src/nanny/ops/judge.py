"""Why an operation made NaN or Inf, as far as the ranges of its inputs tell, and what to do: a fault as a finding. No torch."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..core.finding import Finding, NannyError, Severity
from ..core.formats import format_of
from ..core.numbers import short
from ..core.ops import DIVISORS, LOGARITHMS, ROOTS, SOFTMAXES, bare_op
from .records import OpFault, TensorNote

IN_WORDS = {
    "mismatch": "differs from its reference",
    "nan": "makes NaN",
    "inf": "makes Inf out of finite numbers",
    "came_in": "reads NaN or Inf from outside",
}


# What `nanny rule` shows.
PAGES: dict[str, tuple[Severity, str]] = {
    "OP_MISMATCH": (
        Severity.ERROR,
        """An operation's result is not what FP32 or FP64 on the CPU makes of the same inputs.

        Why: the kernel is wrong, adds up in too narrow a type, or its result does not fit into the type. Rounding is allowed for:
        by dtype, and by how far a roundoff in every input moves the result.

        Fix: save the call with `nanny trace --compare --dump` and run it alone with `nanny replay`; compute that operation in
        FP32 until the kernel is repaired. If it is expected, name it in `white_list`.
        """,
    ),
    "OP_NONFINITE": (
        Severity.WARNING,
        """An operation made NaN or Inf out of finite numbers, or was given them from outside.

        Why: it is the first of its chain; what only passed the damage on is counted under it. Infinities that were written on
        purpose (masks) do not count until something makes NaN of them. A step that a GradScaler skips shows here, too.

        Fix: look at the smallest and largest input in the log: a product beyond 65504 in fp16, a root or logarithm of a negative
        number, a division by 0. Compute that line in FP32, or clamp its input. For broken data or weights, look before the step.
        """,
    ),
}


class Reason(NamedTuple):
    """Empty where the ranges alone do not tell."""

    why: str = ""
    fix: str = ""


def reason_of(fault: OpFault) -> Reason:
    if fault.kind == "came_in":
        return _came_in(fault)
    if fault.kind == "mismatch" or not fault.outputs or not fault.inputs:
        return Reason()
    name = bare_op(fault.bare_op)
    if not all(map(_finite, fault.inputs)):
        return _of_infinity(name, fault)
    return _of_domain(name, fault) or _of_range(name, fault)


def finding_of(fault: OpFault) -> Finding:
    """A fault as every other command tells it."""
    code = "OP_MISMATCH" if fault.kind == "mismatch" else "OP_NONFINITE"
    gap = fault.gaps[0] if fault.gaps else None
    reason = reason_of(fault)
    why = gap.why if gap is not None else reason.why
    numbers = f"; worst {gap.worst.value:.6g} instead of {gap.worst.reference:.6g}" if gap is not None and gap.worst else ""
    return Finding(
        code=code,
        severity=Severity.ERROR if fault.kind == "mismatch" else Severity.WARNING,
        message=f"{fault.bare_op} {IN_WORDS[fault.kind]} ({fault.place.phase}){numbers}" + (f"; {why}" if why else ""),
        hint=f"nanny replay {fault.dump}" if fault.dump else reason.fix,
        site=fault.culprit,
        step=fault.step,
        rank=fault.rank or None,
        file=fault.place.file,
        line=fault.place.line,
    )


def _came_in(fault: OpFault) -> Reason:
    if fault.place.module == "Parameter":
        return Reason("this weight held NaN or Inf before the watched steps began", "start earlier, or load a sound checkpoint")
    return Reason(
        "it was there before the first watched operation", "look at the batch of this step, or at the rank it came from"
    )


def _of_infinity(name: str, fault: OpFault) -> Reason:
    if name in SOFTMAXES and all(n.maximum is not None and n.maximum < math.inf for n in fault.inputs):
        return Reason(
            "a row of its input is -Inf throughout: a mask that leaves nothing",
            "leave at least one key per row, or mask with a finite number such as torch.finfo(dtype).min",
        )
    if fault.kind == "nan":
        return Reason(
            "an input holds Inf: Inf - Inf, 0 * Inf and Inf / Inf are NaN",
            "mask with a finite number such as torch.finfo(dtype).min, or mask after this operation",
        )
    return Reason()


def _of_domain(name: str, fault: OpFault) -> Reason | None:
    """Divided by zero, or a function where it has no value."""
    divisor = DIVISORS.get(name)
    if divisor is not None and divisor < len(fault.inputs) and 0 in _ends(fault.inputs[divisor]):
        return Reason(f"it divides by argument {divisor}, which holds 0", _fix_of_division(fault))
    low = fault.inputs[0].minimum
    if low is None:
        return None
    if name in LOGARITHMS and name != "log1p" and low <= 0:
        return Reason(f"{name} of {short(low)}", "clamp its input away from 0, or use log_softmax or logsigmoid")
    if name in ROOTS and low < 0:
        return Reason(f"{name} of {short(low)}", "clamp its input at 0: rounding can make a small difference negative")
    return None


def _fix_of_division(fault: OpFault) -> str:
    if fault.outputs[0].dtype != "float16":
        return "add an eps to the divisor, or divide only where it is not 0"
    if fault.place.phase == "optimizer":
        return "keep weights and optimizer state in FP32 (autocast does): an eps of 1e-8 is 0 in float16"
    return "divide in FP32, or add an eps that float16 can hold (1e-8 is 0 there; 1e-4 is not)"


def _of_range(name: str, fault: OpFault) -> Reason:
    out = fault.outputs[0]
    if fault.kind != "inf":
        return Reason()
    try:
        largest = format_of(out.dtype).max
    except NannyError:  # a type without a table, such as complex64
        return Reason()
    ends = f"{out.dtype} ends at {short(largest)}"
    reach = max((abs(v) for note in fault.inputs for v in _ends(note)), default=0.0)
    if name in ("exp", "expm1") and reach > 0:
        return Reason(
            f"exp of {short(reach)}; {ends}", "subtract the maximum first (softmax and logsumexp do), or keep it in FP32"
        )
    if not _can_reach(largest, fault.inputs):
        return Reason()  # a constant did it, which is not noted
    wider = {"float16": ", or keep it in FP32 or BF16", "float32": ""}.get(out.dtype, ", or keep it in FP32")
    fix = f"make the values smaller before it{wider}"
    if fault.place.phase == "backward" and out.dtype == "float16":
        fix = f"once in a while: nothing, the GradScaler lowers its scale; at every step: {fix}"
    return Reason(f"{ends}; the inputs reach {short(reach)}", fix)


def _can_reach(largest: float, inputs: tuple[TensorNote, ...]) -> bool:
    """A sum of products of the two largest inputs, or the square of one."""
    reaches = sorted((max(map(abs, _ends(note)), default=0.0) for note in inputs), reverse=True)
    longest = max((length for note in inputs for length in note.shape), default=1)
    return reaches[0] * max(1.0, reaches[1] if len(reaches) > 1 else reaches[0]) * longest > largest


def _ends(note: TensorNote) -> tuple[float, ...]:
    return () if note.minimum is None or note.maximum is None else (note.minimum, note.maximum)


def _finite(note: TensorNote) -> bool:
    return all(map(math.isfinite, _ends(note)))
