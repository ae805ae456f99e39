"""Results beyond the range of the format."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.examination import Hazard
from ...core.numbers import number, share, short
from ...core.ops import ATTENTIONS, EXPONENTIALS, LOSS_OPS, MATMULS, PRODUCTS, REDUCTIONS, ROOTS, SOFTMAXES, SQUARES, TWO_TERMS
from ..records import Suspect
from . import ExaminedStep, hazard, hazard_of

_NORM_ENDS = ROOTS | {"reciprocal"}  # what a sum of squares goes on to
_WEIGHS = SOFTMAXES | {"logsumexp"}
_LARGEST_SQUARED = 256  # the square of more leaves fp16 by itself


@hazard("exp_range", rank=20)
def exp_range(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """exp() of a number beyond the logarithm of the largest value"""
    if suspect.trouble != "nonfinite" or suspect.op not in EXPONENTIALS or not _harmful(suspect, step):
        return None
    largest = max((o.absmax for o in suspect.operands), default=0.0)
    form = step.format_of(suspect)
    limit = 11.09 if form.name == "fp16" else 88.7
    return hazard_of(
        suspect,
        f"{suspect.op_name}({short(largest)}) leaves the range of {form.name}: the limit is {limit}",
        form.name,
        "in_reference" if suspect.in_reference else "",
        value=largest,
        limit=limit,
    )


@hazard("overflow", rank=30)
def overflow(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A finite result that the format stores as infinity"""
    if suspect.trouble != "nonfinite" or suspect.in_reference or suspect.place.phase == "optimizer":
        return None
    form = step.format_of(suspect)
    inside = suspect.op in LOSS_OPS | REDUCTIONS and not suspect.nan  # a sum may overflow on its way to a small mean
    ruins = suspect.ruined > 0 and not suspect.in_backward  # one over an infinity is 0: a norm that puts out zeros, and no NaN
    if (suspect.reference_absmax < form.max and not inside) or not (ruins or _harmful(suspect, step)):
        return None
    expected = suspect.reference_absmax
    beyond = (
        f"beyond {number(form.max)} of {form.name}" if expected >= form.max else f"but leaves the range of {form.name} on its way"
    )
    what = f"{suspect.op_name} gives {number(expected)} in FP32, {beyond}"
    traits = set(_traits(suspect, step))
    return hazard_of(
        suspect,
        f"{what}: {share(suspect.share)} of its {suspect.count:,} results become infinite"
        + (f"; {share(suspect.ruined)} of the parameters get no gradient, or a wrong one" if suspect.ruined else ""),
        form.name,
        *sorted(traits),
        consequence=max(suspect.consequence, suspect.ruined),
        value=expected,
        limit=form.max,
        op=suspect.operands[0].producer if "sum_times_constant" in traits else None,
        site="data:input" if "from_data" in traits
        else "loop:clip" if "of_gradients" in traits
        else "scaler.scale" if form.name == "fp16" and "scaled_by_hand" in traits
        else None,
    )  # fmt: skip


def _traits(suspect: Suspect, step: ExaminedStep) -> Iterator[str]:
    """Everything about an overflow that causes ask for; several may hold."""
    op, largest = suspect.op, max((o.rms for o in suspect.operands), default=0.0)
    if suspect.in_backward and step.loss_factor and step.scale is None:
        yield "scaled_by_hand"
    if op in ("to_copy", "copy") and any(o.role in ("input", "given") for o in suspect.operands):
        yield "constant" if suspect.count == 1 else "from_data"
    weighs = any(o.role == "parameter" for o in suspect.operands)
    if (op in MATMULS and suspect.met.keys() & _WEIGHS and not weighs) or op in ATTENTIONS:
        yield "scores"
    if op in LOSS_OPS:
        yield "loss_operation"
    if op in REDUCTIONS:
        yield "reduction"
        if op != "prod" and largest <= _LARGEST_SQUARED:
            yield "small_terms"
    if op in PRODUCTS:
        yield "product"
    square = op in SQUARES or (op == "mul" and bool(suspect.numbers.get("of_itself")))
    if square:
        yield "square"
    if op in TWO_TERMS | {"div"}:
        yield "elementwise"
    if (square or op in REDUCTIONS | PRODUCTS - {"mul"}) and suspect.met.keys() & _NORM_ENDS:
        yield "norm"
    if _sum_times_constant(suspect, step):
        yield "sum_times_constant"
    if suspect.place.is_outside:
        if suspect.of_graph:
            yield "outside"  # in the criterion; what is made of data, or measured, is none
        # the norm of gradients, in the loop's own code: an infinite one clips every gradient to zero
        if op in REDUCTIONS | PRODUCTS and any(o.role == "gradient" for o in suspect.operands):
            yield "of_gradients"


def _harmful(suspect: Suspect, step: ExaminedStep) -> bool:
    return (suspect.destroyed or step.harmful(suspect)) and not step.from_the_scale(suspect)


def _sum_times_constant(suspect: Suspect, step: ExaminedStep) -> bool:
    """The result of a reduction stood so near the end of the range that a small constant factor was enough."""
    if suspect.op != "mul" or len(suspect.operands) != 1 or not suspect.scalars:
        return False
    near = step.format_of(suspect).max / 2**step.limits.headroom_info_bits
    operand = suspect.operands[0]
    return operand.producer in REDUCTIONS and operand.absmax >= near
