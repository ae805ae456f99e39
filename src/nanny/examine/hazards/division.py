"""Zeros that low precision made, and what divides by them, takes their logarithm or their root."""

from __future__ import annotations

from ...core.examination import Hazard
from ...core.numbers import number, short
from ...core.ops import (
    CASTS,
    DIFFERENCES,
    DIVISIONS,
    LOGARITHMS,
    LOSS_OPS,
    NORMS,
    PARTIAL,
    PROBABILITIES,
    PRODUCTS,
    ROOTS,
    SINGULAR_AT_ONE,
    SINGULAR_AT_ZERO,
)
from ..records import Suspect
from . import ExaminedStep, hazard, hazard_of

_TAKE_LOG = LOGARITHMS | {"binary_cross_entropy"}


@hazard("constant_lost", rank=10)
def constant_lost(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A protective constant (eps) that the format rounds to zero"""
    constant = suspect.numbers.get("constant")
    if suspect.trouble != "zeros" or constant is None or not _broke(suspect, step):
        return None
    form = step.format_of(suspect)
    what = f"eps {short(constant)}" if constant else "the constant that is added here"
    return hazard_of(
        suspect,
        f"{what} is 0 in {form.name} (at or below {short(form.flush_at)}): it protects nothing; {_victims(suspect)}",
        value=constant,
        limit=form.flush_at,
        site="optimizer.eps" if suspect.place.phase == "optimizer" else None,
    )


@hazard("saturated_probability", rank=12)
def saturated_probability(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A probability that low precision rounds to exactly 0 or 1 meets a logarithm"""
    rounded = suspect.trouble == "zeros" and (
        suspect.op in PROBABILITIES
        or (suspect.op in DIFFERENCES and any(o.producer in PROBABILITIES for o in suspect.operands))
        or _is_complement(suspect)
    )
    met = suspect.op in ("binary_cross_entropy", "binary_cross_entropy_backward")
    steep = suspect.op in CASTS and any(o.producer == "binary_cross_entropy_backward" for o in suspect.operands)  # 1 / p
    taken = suspect.op in LOGARITHMS and any(o.producer in PROBABILITIES for o in suspect.operands)
    saturated = suspect.op in PROBABILITIES and bool(set(suspect.next) & _TAKE_LOG)
    wrong = suspect.trouble in ("nonfinite", "error") and (met or taken or saturated)
    wrong = wrong or (suspect.trouble == "nonfinite" and steep and not step.from_the_scale(suspect))
    if not (rounded or wrong) or suspect.in_reference or not (suspect.destroyed or step.harmful(suspect, certain=True)):
        return None
    form = step.format_of(suspect)
    meets = next((n for n in suspect.next if n in _TAKE_LOG), suspect.op)
    said = f"probabilities are exactly 0 or 1 in {form.name}, and {_victims(suspect) if rounded else f'{meets} meets them'}"
    return hazard_of(
        suspect,
        f"probabilities are so near 0 or 1 that the derivative of the loss leaves {form.name}" if steep else said,
        op="binary_cross_entropy_backward" if steep else suspect.forward or None,
    )


def _is_complement(suspect: Suspect) -> bool:
    """1 - p whose logarithm is taken, of a p that was kept away from 1 by less than the format can say."""
    return suspect.op in DIFFERENCES and suspect.scalars[:1] == (1.0,) and bool(set(suspect.next) & _TAKE_LOG)


@hazard("zero_divisor", rank=14)
def zero_divisor(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A number that low precision made zero, and that is divided by"""
    times = suspect.numbers.get("times", 0.0)
    too_long = times >= step.limits.damage_update
    if suspect.trouble != "zeros" or not (too_long or _broke(suspect, step)):
        return None
    made_by = "product" if suspect.op in PRODUCTS else "difference" if suspect.op in DIFFERENCES else ""
    form = step.format_of(suspect)
    largest = suspect.numbers.get("flushed_absmax", 0.0)
    follows = f"an update that divides by them is {short(times)} times as long as in FP32" if too_long else _victims(suspect)
    said = f"{suspect.op_name} gives exact zeros in {form.name} where FP32 has up to {short(largest)}, and {follows}"
    if suspect.numbers.get("flushed"):
        name = next((f"`{o.name}`" for o in suspect.operands if o.name), "a tensor")
        smallest = short(suspect.numbers["smallest"])
        said = f"{name} lost numbers to 0 when it was stored in {form.name} (it goes down to {smallest}), and {_victims(suspect)}"
    return hazard_of(
        suspect,
        said,
        made_by,
        "flushed" if suspect.numbers.get("flushed") else "",
        value=largest,
        limit=form.flush_at,
        consequence=1.0 if too_long else None,
        site="optimizer" if suspect.place.phase == "optimizer" else None,
    )


@hazard("singular_backward", rank=40)
def singular_backward(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """The derivative does not exist at this point (root or norm of zero), in FP32 as well"""
    if suspect.trouble != "nonfinite" or not suspect.in_reference or not suspect.destroyed or suspect.place.phase == "optimizer":
        return None
    if suspect.in_backward:
        return hazard_of(
            suspect,
            f"the derivative of {suspect.forward or suspect.op_name} is not finite although forward was: "
            "a root, norm or power of exactly zero",
            op=suspect.forward or None,
        )
    only_gradients = "loss" not in suspect.reached and "output" not in suspect.reached
    infinite = [o for o in suspect.operands if o.nonfinite]
    loaded = any(o.role in ("given", "input") for o in infinite)  # -inf as masks have it, but a layer was fed with it
    meant = bool(infinite) and not loaded  # a mask that was averaged or subtracted
    source = "infinities in the data" if loaded else "infinities that the program filled in" if meant else "finite numbers"
    if suspect.numbers.get("stored"):
        source = "numbers that were stored in 16 bits before the step"
    target = suspect.place.is_outside and bool(set(suspect.next[:1]) & LOSS_OPS)  # else it is the program's own arithmetic
    of_data = target and bool(suspect.operands) and all(o.role in ("given", "input") for o in suspect.operands)
    what, together = "NaN" if suspect.nan else "infinities", bool(suspect.numbers.get("fell_together"))
    if suspect.numbers.get("opaque"):
        said = f"{suspect.op_name}, an operator of the program's own, makes {what} out of {source}; it is not run a second time"
        return hazard_of(suspect, said, "opaque")
    return hazard_of(
        suspect,
        f"{suspect.op_name} makes {what} out of {source}, of which several fell on the same one"
        if together
        else f"{suspect.op_name} makes {what} out of {source}, in FP32 as well",
        "fell_together" if together else "",
        "from_data" if loaded or of_data else "",
        "infinite_data" if loaded else "",
        "only_gradients" if only_gradients else "",
        ""
        if suspect.nan and not meant and suspect.op not in PARTIAL
        else "range"
        if _exceeds_every_format(suspect)
        else "partial",
        site="data:target" if of_data else "data:input" if loaded else None,
    )


def _exceeds_every_format(suspect: Suspect) -> bool:
    """Numbers for which the operation is defined, and whose result no format holds: 1e30 squared, 1 over 1e-40."""
    if suspect.nan or any(o.nonfinite for o in suspect.operands):
        return False
    if suspect.op in PRODUCTS:
        return all(s > 0 for s in suspect.scalars) and any(o.absmax > 1 for o in suspect.operands)
    divisor = suspect.operands[-1:] if suspect.op in DIVISIONS else ()
    return suspect.op not in PARTIAL or any(o.absmin > 0 for o in divisor)


@hazard("undefined", rank=50)
def undefined(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """NaN or infinity where FP32 is finite: a root or logarithm of what rounding pushed over the edge"""
    if suspect.trouble != "nonfinite" or suspect.in_reference or not suspect.destroyed or step.from_the_scale(suspect):
        return None
    form, what = step.format_of(suspect), "NaN" if suspect.nan else "infinities"
    return hazard_of(
        suspect,
        f"{suspect.op_name} makes {what} in {form.name}, {number(suspect.reference_absmax)} in FP32",
        "after_difference" if suspect.after & DIFFERENCES else "",
        "singular" if suspect.op in SINGULAR_AT_ZERO | SINGULAR_AT_ONE | ROOTS | NORMS else "",
        site="optimizer" if suspect.place.phase == "optimizer" else None,
    )


def _broke(suspect: Suspect, step: ExaminedStep) -> bool:
    return suspect.destroyed or (bool(suspect.then) and step.harmful(suspect))


def _victims(suspect: Suspect) -> str:
    ops = list(dict.fromkeys(suspect.then[:8]))
    return f"{', '.join(ops[:3]) or 'what follows'} breaks on it"
