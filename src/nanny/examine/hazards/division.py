"""Zeros that low precision made, and what divides by them, takes their logarithm or their root."""

from __future__ import annotations

from ...core.numbers import short
from ...core.ops import DIFFERENCES, LOGARITHMS, LOSS_OPS, NORMS, PROBABILITIES, PRODUCTS, ROOTS, SINGULAR_AT_ZERO
from ..records import Suspect
from . import Step, Verdict, hazard

_TAKE_LOG = LOGARITHMS | {"binary_cross_entropy"}


@hazard("constant_lost", rank=10)
def constant_lost(suspect: Suspect, step: Step) -> Verdict | None:
    """A protective constant (eps) that the format rounds to zero"""
    constant = suspect.numbers.get("constant")
    if suspect.trouble != "zeros" or constant is None or not _broke(suspect, step):
        return None
    form = step.format_of(suspect)
    optimizer = suspect.place.phase == "optimizer"
    return Verdict(
        f"eps {short(constant)} is 0 in {form.name} (at or below {short(form.flush_at)}): it protects nothing; {_then(suspect)}",
        cause="adam_eps_underflow_fp16" if optimizer else "eps_underflow_fp16",
        remedy="keep optimizer state and weights in FP32 (autocast does)" if optimizer else
        "compute this in FP32, or use an eps of 6.1e-5 or more, inside the root",
        value=constant,
        limit=form.flush_at,
        site="optimizer.eps" if optimizer else None,
    )  # fmt: skip


@hazard("saturated_probability", rank=12)
def saturated_probability(suspect: Suspect, step: Step) -> Verdict | None:
    """A probability that low precision rounds to exactly 0 or 1 meets a logarithm"""
    rounded = suspect.trouble == "zeros" and (
        suspect.op in PROBABILITIES or (suspect.op in DIFFERENCES and any(o.producer in PROBABILITIES for o in suspect.operands))
    )
    met = suspect.op in ("binary_cross_entropy", "binary_cross_entropy_backward")
    taken = suspect.op in LOGARITHMS and any(o.producer in PROBABILITIES for o in suspect.operands)
    saturated = suspect.op in PROBABILITIES and bool(set(suspect.next) & _TAKE_LOG)
    wrong = suspect.trouble in ("nonfinite", "error") and (met or taken or saturated)
    if not (rounded or wrong) or suspect.in_reference or not (suspect.destroyed or step.harmful(suspect, certain=True)):
        return None
    form = step.format_of(suspect)
    meets = next((n for n in suspect.next if n in _TAKE_LOG), suspect.op)
    return Verdict(
        f"probabilities are exactly 0 or 1 in {form.name}, and {_then(suspect) if rounded else f'{meets} meets them'}",
        cause="saturated_probability_loss",
        remedy="take the loss on logits: binary_cross_entropy_with_logits, cross_entropy, log_softmax, logsigmoid",
        op=suspect.forward or None,
    )


@hazard("zero_divisor", rank=14)
def zero_divisor(suspect: Suspect, step: Step) -> Verdict | None:
    """A number that low precision made zero, and that is divided by"""
    if suspect.trouble != "zeros" or not _broke(suspect, step):
        return None
    cause = "eps_underflow_fp16"
    if suspect.place.phase == "optimizer":
        cause = "adam_eps_underflow_fp16"
    elif suspect.op in PRODUCTS:
        cause = "product_underflow_fp16"
    elif suspect.op in DIFFERENCES:
        cause = "catastrophic_cancellation"
    form = step.format_of(suspect)
    largest = suspect.numbers.get("flushed_absmax", 0.0)
    return Verdict(
        f"{suspect.op} gives exact zeros in {form.name} where FP32 has up to {short(largest)}, and {_then(suspect)}",
        cause=cause,
        remedy="compute it in FP32, or in logarithms (sums instead of products)",
        value=largest,
        limit=form.flush_at,
        site="optimizer" if suspect.place.phase == "optimizer" else None,
    )


@hazard("singular_backward", rank=40)
def singular_backward(suspect: Suspect, step: Step) -> Verdict | None:
    """The derivative does not exist at this point (root or norm of zero), in FP32 as well"""
    if suspect.trouble != "nonfinite" or not suspect.in_reference or not suspect.destroyed or suspect.place.phase == "optimizer":
        return None
    if suspect.in_backward:
        return Verdict(
            f"the derivative of {suspect.forward or suspect.op} is not finite although forward was: "
            "a root, norm or power of exactly zero",
            cause="singular_gradient",
            remedy="add eps inside the root, or use the library's norm; precision is not the reason",
            op=suspect.forward or None,
        )
    only_gradients = "loss" not in suspect.reached and "output" not in suspect.reached
    from_data = bool(suspect.operands) and all(o.role in ("given", "input") for o in suspect.operands)
    outside = suspect.place.phase == "loop" and not suspect.place.site
    return Verdict(
        f"{suspect.op} makes {'NaN' if suspect.nan else 'infinities'} out of finite numbers, in FP32 as well",
        cause="data_nan" if from_data else "singular_gradient" if only_gradients else "",
        remedy="look at the numbers that go in: precision is not the reason",
        site=("data:target" if set(suspect.next[:1]) & LOSS_OPS else "data") if from_data and outside else None,
    )


@hazard("undefined", rank=50)
def undefined(suspect: Suspect, step: Step) -> Verdict | None:
    """NaN or infinity where FP32 is finite: a root or logarithm of what rounding pushed over the edge"""
    if suspect.trouble != "nonfinite" or suspect.in_reference or not suspect.destroyed or step.from_the_scale(suspect):
        return None
    form = step.format_of(suspect)
    cause = ""
    if suspect.place.phase == "optimizer":
        cause = "adam_eps_underflow_fp16"
    elif suspect.after & DIFFERENCES:
        cause = "catastrophic_cancellation"
    elif suspect.op in SINGULAR_AT_ZERO | ROOTS | NORMS:
        cause = "eps_underflow_fp16"
    return Verdict(
        f"{suspect.op} makes {'NaN' if suspect.nan else 'infinities'} in {form.name}, {short(suspect.reference_absmax)} in FP32",
        cause=cause,
        remedy="compute this part in FP32, and keep its argument away from zero",
        site="optimizer" if suspect.place.phase == "optimizer" else None,
    )


def _broke(suspect: Suspect, step: Step) -> bool:
    return suspect.destroyed or (bool(suspect.then) and step.harmful(suspect))


def _then(suspect: Suspect) -> str:
    ops = list(dict.fromkeys(suspect.then[:8]))
    return f"{', '.join(ops[:3]) or 'what follows'} breaks on it"
