"""Results beyond the range of the format."""

from __future__ import annotations

from ...core.numbers import share, short
from ...core.ops import ATTENTIONS, EXPONENTIALS, LOSS_OPS, MATMULS, PRODUCTS, REDUCTIONS, ROOTS, SOFTMAXES
from ..records import Suspect
from . import Step, Verdict, hazard

_NORM_ENDS = ROOTS | {"reciprocal"}  # what a sum of squares goes on to
_WEIGHS = SOFTMAXES | {"logsumexp"}
_WIDE = "compute it in FP32 (x.float(), autocast disabled around it) or in bf16, or normalise, clamp or rescale what goes in"


@hazard("exp_range", rank=20)
def exp_range(suspect: Suspect, step: Step) -> Verdict | None:
    """exp() of a number beyond the logarithm of the largest value"""
    if suspect.trouble != "nonfinite" or suspect.op not in EXPONENTIALS or not _harmful(suspect, step):
        return None
    largest = max((o.absmax for o in suspect.operands), default=0.0)
    form = step.format_of(suspect)
    limit = 11.09 if form.name == "fp16" else 88.7
    return Verdict(
        f"{suspect.op}({short(largest)}) leaves the range of {form.name}: the limit is {limit}",
        cause="exp_overflow_fp16" if form.name == "fp16" and not suspect.in_reference else "",
        remedy="subtract the maximum first (logsumexp, softmax), clamp the input, or compute it in FP32",
        value=largest,
        limit=limit,
    )


@hazard("overflow", rank=30)
def overflow(suspect: Suspect, step: Step) -> Verdict | None:
    """A finite result that the format stores as infinity"""
    if suspect.trouble != "nonfinite" or suspect.in_reference or suspect.place.phase == "optimizer":
        return None
    form = step.format_of(suspect)
    inside = suspect.op in LOSS_OPS | REDUCTIONS and not suspect.nan  # a sum may overflow on its way to a small mean
    if (suspect.reference_absmax < form.max and not inside) or not _harmful(suspect, step):
        return None
    expected = suspect.reference_absmax
    beyond = (
        f"beyond {short(form.max)} of {form.name}" if expected >= form.max else f"but leaves the range of {form.name} on its way"
    )
    what = f"{suspect.op} gives {short(expected)} in FP32, {beyond}"
    return Verdict(
        f"{what}: {share(suspect.share)} of its {suspect.count} results become infinite",
        cause=_cause(suspect, step),
        remedy=_remedy(suspect, step),
        value=expected,
        limit=form.max,
        op=_sum_times_constant(suspect, step) or None,
        site="data:input" if _from_data(suspect) else "loop:clip" if _of_gradients(suspect) else _scaler(suspect, step),
    )


def _scaler(suspect: Suspect, step: Step) -> str | None:
    return "scaler.scale" if _cause(suspect, step) == "static_loss_scale_overflow" else None


def _of_gradients(suspect: Suspect) -> bool:
    """The norm of gradients, in the loop's own code: an infinite one clips every gradient to zero."""
    outside = suspect.place.phase == "loop" and not suspect.place.site
    return outside and suspect.op in REDUCTIONS | PRODUCTS and any(o.role == "gradient" for o in suspect.operands)


def _harmful(suspect: Suspect, step: Step) -> bool:
    return (suspect.destroyed or step.harmful(suspect)) and not step.from_the_scale(suspect)


def _sum_times_constant(suspect: Suspect, step: Step) -> str:
    """The reduction, if its result stood so near the end of the range that a small constant factor was enough."""
    if suspect.op != "mul" or len(suspect.operands) != 1 or not suspect.scalars:
        return ""
    near = step.format_of(suspect).max / 2**step.limits.headroom_info_bits
    operand = suspect.operands[0]
    return operand.producer if operand.producer in REDUCTIONS and operand.absmax >= near else ""


def _from_data(suspect: Suspect) -> bool:
    return suspect.op in ("to_copy", "copy") and any(o.role in ("input", "given") for o in suspect.operands)


def _cause(suspect: Suspect, step: Step) -> str:
    if step.format_of(suspect).name != "fp16":
        return ""
    if suspect.in_backward:
        return "static_loss_scale_overflow" if step.loss_factor and step.scale is None else "activation_overflow_fp16"
    if _from_data(suspect):
        return "input_out_of_range_fp16"
    in_loss = suspect.place.phase == "loop" and not suspect.place.site
    weighs = any(o.role == "parameter" for o in suspect.operands)
    if (suspect.op in MATMULS and suspect.met.keys() & _WEIGHS and not weighs) or suspect.op in ATTENTIONS:
        return "attention_logit_overflow_fp16"
    if suspect.op in LOSS_OPS:
        return "loss_computed_in_fp16"
    if _of_gradients(suspect):
        return "grad_norm_overflow_fp16"
    if _sum_times_constant(suspect, step):
        return "reduction_overflow_fp16"
    squares = suspect.op in ("pow", "square") or (suspect.op == "mul" and suspect.numbers.get("of_itself"))
    largest = max((o.rms for o in suspect.operands), default=0.0)
    if suspect.op in REDUCTIONS and suspect.op != "prod" and largest <= 256:
        return "norm_square_overflow_fp16" if suspect.met.keys() & _NORM_ENDS and not in_loss else "reduction_overflow_fp16"
    if in_loss and (squares or suspect.op in REDUCTIONS | {"sub", "add", "div"}):
        return "loss_computed_in_fp16"
    if suspect.op in PRODUCTS | REDUCTIONS and suspect.met.keys() & _NORM_ENDS:
        return "norm_square_overflow_fp16"
    if suspect.op in REDUCTIONS:
        return "reduction_overflow_fp16"
    return "product_overflow_fp16" if suspect.op in PRODUCTS else "activation_overflow_fp16"


_REMEDIES = {
    "static_loss_scale_overflow": "use torch.amp.GradScaler, which finds the scale, instead of a fixed factor",
    "input_out_of_range_fp16": "standardise the feature in FP32 before it enters the model",
    "attention_logit_overflow_fp16": "divide queries by sqrt(d) before the product, normalise both, or keep scores in FP32",
    "loss_computed_in_fp16": "compute the loss on prediction.float(), or inside autocast",
    "grad_norm_overflow_fp16": "compute the norm of gradients in FP32",
    "norm_square_overflow_fp16": "square x.float(), or use the library's norm",
    "reduction_overflow_fp16": "reduce in FP32: .sum(dtype=torch.float32)",
}


def _remedy(suspect: Suspect, step: Step) -> str:
    return _REMEDIES.get(_cause(suspect, step), _WIDE)
