"""What rounding does at one operation: digits that cancel, addends that vanish, whole numbers that collide, choices that fall
otherwise, kernels that add up in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...core.examination import Hazard
from ...core.formats import HALVES
from ...core.numbers import number, share, short
from ...core.ops import CANCEL, CASTS, DIFFERENCES, MATMULS, PERIODIC, READ_LOGITS, SCATTERS, SELECT
from ..records import Suspect
from . import ExaminedStep, hazard, hazard_of


def _jumps(suspect: Suspect, step: ExaminedStep) -> bool:
    """The error is made here, not has_storage here: healthy errors grow slowly from layer to layer."""
    made = suspect.level >= step.limits.damage_made * suspect.input_level or suspect.repeats >= step.limits.damage_repeats
    return suspect.trouble == "error" and made and suspect.op not in SELECT


def _inherent(suspect: Suspect) -> bool:
    """Gradients and residuals are small differences by nature: near convergence they are mostly rounding, in health too."""
    residual = suspect.op in DIFFERENCES and not suspect.place.site and any(o.role == "given" for o in suspect.operands)
    return suspect.in_backward or residual


@hazard("flush", rank=60)
def flush(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Values below the smallest number of the format become zero, or lose their digits"""
    form = step.format_of(suspect)
    lost = suspect.numbers.get("flushed_energy", 0.0)
    below = suspect.numbers.get("below_normal_energy", 0.0)
    if not _jumps(suspect, step) or form.name != "fp16" or max(lost, below) < step.limits.flush_energy_warn:
        return None
    silent = suspect.silenced >= step.limits.flush_energy_error
    if suspect.reference_absmax >= form.min_normal or not (silent or step.harmful(suspect, certain=True)):
        return None
    flushed = suspect.numbers.get("flushed_share", 0.0)
    scaler = None if not suspect.in_backward else "scaler.scale" if step.scale is not None else "scaler"
    return hazard_of(
        suspect,
        f"{share(flushed)} of {suspect.op_name}'s results are 0 in fp16, at most {short(suspect.reference_absmax)} in FP32"
        + (f"; {share(suspect.silenced)} of the parameters get no gradient at all" if silent else ""),
        "scaled" if step.scale is not None else "",
        "cast_weight" if suspect.op in CASTS and any(o.role == "parameter" for o in suspect.operands) else "",
        consequence=max(suspect.consequence, suspect.silenced),
        site=scaler,
        value=suspect.reference_absmax,
        limit=form.min_normal,
    )


@hazard("accumulation", rank=62)
def accumulation(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A kernel, or autograd itself, adds many terms up in the storage format"""
    form = step.format_of(suspect)
    own = suspect.own
    alone = (
        suspect.trouble == "error"
        and suspect.op in SCATTERS
        and own is not None
        and own >= suspect.plain / step.limits.damage_made
    )
    if not alone and not _jumps(suspect, step):
        return None
    if own is None and suspect.op in SCATTERS:
        own = suspect.plain
    limit = step.limits.rel_l2_warn_roundoffs * form.unit_roundoff
    fan_in = (
        suspect.in_backward and suspect.op == "add" and suspect.repeats >= step.limits.damage_repeats and step.harmful(suspect)
    )
    if not fan_in and (own is None or own < limit or suspect.op in ("to_copy", "copy", "mul", "div")):
        return None
    if not suspect.reached or not (step.harmful(suspect, certain=True) or (own or 0.0) > step.limits.diff_centred_warn):
        return None
    return hazard_of(
        suspect,
        f"{suspect.op_name} adds up in {form.name}: its result is {share(own if own is not None else suspect.plain)} off",
        "fan_in" if fan_in else "scatter" if suspect.op in SCATTERS else "",
        site=next(iter(suspect.reached)) if fan_in and not suspect.place.site and len(suspect.reached) == 1 else None,
        value=own if own is not None else suspect.plain,
        limit=limit,
    )


@hazard("phase", rank=64)
def phase(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Sine and cosine of angles that low precision cannot tell apart"""
    error = suspect.numbers.get("phase_error", 0.0)
    if not _jumps(suspect, step) or error < step.limits.damage_phase or not step.harmful(suspect, certain=True):
        return None
    return hazard_of(
        suspect,
        f"angles are off by {short(error)} radians, so {suspect.op_name} is {share(suspect.plain)} wrong",
        value=error,
        limit=step.limits.damage_phase,
    )


@hazard("biased_rounding", rank=65)
def biased_rounding(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Rounding that goes the same way time after time, so that it adds up instead of averaging out"""
    bias = suspect.numbers.get("bias")
    again = suspect.repeats >= step.limits.damage_repeats and suspect.op in ("mul", "div", "lerp", "addcmul")
    if not _jumps(suspect, step) or bias is None or abs(bias) < step.limits.damage_bias or not again or not step.harmful(suspect):
        return None
    return hazard_of(
        suspect,
        f"{suspect.op_name} rounds the same way in each of {suspect.repeats} repetitions (mean error {bias:+.1f} of its spread)",
        value=abs(bias),
        limit=step.limits.damage_bias,
    )


@hazard("cancellation", rank=66)
def cancellation(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """The difference of nearly equal numbers: the digits that were equal are gone, the rest is rounding"""
    logs = "log_softmax" in suspect.after
    largest = max((o.rms for o in suspect.operands), default=0.0)
    gone = suspect.reference_rms / (largest * step.format_of(suspect).unit_roundoff) if largest else 0.0  # in roundoffs
    if not _jumps(suspect, step) or suspect.op not in CANCEL or _inherent(suspect):
        return None
    if not largest or suspect.reference_rms * step.limits.damage_bits_lost > largest:
        return None
    stored_low = suspect.dtype in HALVES  # FP32 sums of logits in bf16 are what the remedy makes
    margins = logs and stored_low and gone < 1 and all(o.producer == "sum" for o in suspect.operands)
    certain = stored_low if logs else gone < step.limits.damage_cancelled or suspect.plain >= step.limits.damage_cancelled_error
    if not margins and not step.harmful(suspect, certain=certain):
        return None
    if _kind_of_choice(suspect):
        return _of_choice(suspect, step)
    return hazard_of(
        suspect,
        f"{suspect.op_name} of numbers of {short(largest)} leaves {short(suspect.reference_rms)}, {share(suspect.plain)} wrong",
        *_traits(suspect, step),
        value=suspect.reference_rms / largest,
        limit=1 / step.limits.damage_bits_lost,
        consequence=max(suspect.consequence, step.limits.damage_certain) if margins else None,
    )


def _kind_of_choice(suspect: Suspect) -> str:
    """What was decided by the damaged numbers: a target, or which way to go."""
    return "target" if suspect.target or not suspect.differentiable else "choice" if suspect.chose else ""


def _of_choice(suspect: Suspect, step: ExaminedStep) -> Hazard:
    return hazard_of(
        suspect,
        f"{suspect.op_name} stores {short(suspect.reference_absmax)} in {step.format_of(suspect).name}: what varies in it is "
        f"{share(max(suspect.plain, suspect.centred))} wrong, and a choice is made by it",
        _kind_of_choice(suspect),
        value=suspect.centred,
        limit=step.limits.diff_centred_warn,
    )


def _traits(suspect: Suspect, step: ExaminedStep) -> Iterator[str]:
    """What tells the causes of finite but wrong results apart; several may hold."""
    if "log_softmax" in suspect.after:
        yield "log_probabilities"
    if _small_branch(suspect, step):
        yield "small_branch"
    if suspect.op in ("cumsum", "add") and suspect.repeats >= step.limits.damage_repeats:
        yield "running_sum"
    if suspect.cancelled or (suspect.op == "add" and set(suspect.next[:1]) & DIFFERENCES):
        yield "before_difference"
    if suspect.after & DIFFERENCES:
        yield "after_difference"
    if _makes_logits(suspect):
        yield "logits"
    if suspect.op == "softmax" and _one_hot(suspect, step):
        yield "one_hot_attention"


@hazard("absorption", rank=68)
def absorption(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """What varies is smaller than the spacing of the numbers that carry it"""
    if not _jumps(suspect, step) or suspect.centred < 2 * suspect.plain or _inherent(suspect) or not step.harmful(suspect):
        return None
    if _kind_of_choice(suspect):
        return _of_choice(suspect, step)
    traits = tuple(_traits(suspect, step))
    # the difference is what a user has written; the sum of squares before it is what was rounded
    first = next((trait for trait in traits if trait != "after_difference"), "")
    named = next((n for n in suspect.met if n in DIFFERENCES), None) if first == "before_difference" else None
    return hazard_of(
        suspect,
        f"{suspect.op_name} stores {short(suspect.reference_absmax)} in {step.format_of(suspect).name}; what varies is "
        f"{share(suspect.centred)} wrong",
        *traits,
        op=named,
        value=suspect.centred,
        limit=step.limits.diff_centred_warn,
    )


def _small_branch(suspect: Suspect, step: ExaminedStep) -> bool:
    """A stream and a branch that was computed from it, too small to be added without loss."""
    sizes = [o.rms for o in suspect.operands]
    if not suspect.residual or len(sizes) != 2 or suspect.op != "add" or suspect.repeats >= step.limits.damage_repeats:
        return False
    return min(sizes) < step.limits.damage_branch * step.format_of(suspect).unit_roundoff * max(sizes)


def _makes_logits(suspect: Suspect) -> bool:
    """The last projection before probabilities or a loss, or the cast of its weights or its bias."""
    if suspect.op in MATMULS | {"add"}:
        return bool(set(suspect.next[:1]) & READ_LOGITS)
    weighs = suspect.op == "to_copy" and any(o.role == "parameter" for o in suspect.operands)
    return weighs and bool(set(suspect.next[:1]) & MATMULS) and bool(set(suspect.next[1:2]) & READ_LOGITS)


def _one_hot(suspect: Suspect, step: ExaminedStep) -> bool:
    attention = step.examination.facts.get("attention", {}).get(suspect.place.site, {})
    return attention.get("entropy", 1.0) < step.limits.damage_entropy


def _below_chance(suspect: Suspect) -> bool:
    """A spread estimated from n samples is off by 1 / sqrt(2 (n - 1)) by chance: another batch differs by more than FP32 does."""
    samples = suspect.numbers.get("samples", 0.0)
    return samples > 1 and suspect.plain < 1 / math.sqrt(2 * (samples - 1))


@hazard("saturation", rank=58)
def saturation(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A format without infinity holds the largest number instead"""
    form = step.format_of(suspect)
    if (
        suspect.trouble not in ("error", "saturated")
        or form.bits != 8
        or suspect.reference_absmax <= form.max
        or not step.harmful(suspect)
    ):
        return None
    return hazard_of(
        suspect,
        f"{number(suspect.reference_absmax)} is beyond {number(form.max)} of {form.name} and is cut off: the scale is too large",
        value=suspect.reference_absmax,
        limit=form.max,
    )


@hazard("amplification", rank=70)
def amplification(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """An operation that makes a large error of small ones"""
    if not _jumps(suspect, step) or _inherent(suspect) or suspect.op in MATMULS or not step.harmful(suspect):
        return None
    if _below_chance(suspect):
        return None
    if _kind_of_choice(suspect):
        return _of_choice(suspect, step)
    bias = suspect.numbers.get("bias")
    return hazard_of(
        suspect,
        f"{suspect.op_name} turns an error of {share(suspect.input_level)} into one of {share(suspect.plain)}"
        + (f"; it is biased ({bias:+.1f} of its spread)" if bias is not None and abs(bias) > 0.5 else ""),
        *_traits(suspect, step),
        value=suspect.plain,
        limit=suspect.input_level,
    )


@hazard("integers", rank=16)
def integers(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """Whole numbers (ids, positions, counts) beyond what the format counts exactly"""
    stored = suspect.numbers.get("stored", False) and bool(suspect.met)
    if suspect.trouble != "integers" or not (stored or suspect.destroyed or step.harmful(suspect, certain=True)):
        return None
    form = step.format_of(suspect)
    largest, collisions = suspect.numbers["largest"], suspect.numbers["collisions"]
    angles = bool(suspect.met.keys() & PERIODIC) and not suspect.wide_angle  # rounded before there was an angle
    return hazard_of(
        suspect,
        f"whole numbers up to {largest:.0f} in {form.name}, which is exact to {form.exact_integers}: "
        + (
            f"{share(suspect.share)} of them are beyond, and {suspect.next[0]} looks them up"
            if stored
            else f"{share(suspect.share)} change, {share(collisions)} fall together"
        ),
        "angle" if angles else "",
        value=largest,
        limit=float(form.exact_integers),
        consequence=max(suspect.consequence, suspect.share) if stored else None,
        site="data:input" if any(o.role == "input" for o in suspect.operands) and not suspect.place.site else None,
    )


@hazard("decision", rank=18)
def decision(suspect: Suspect, step: ExaminedStep) -> Hazard | None:
    """A choice (argmax, top-k, comparison) that FP32 makes differently"""
    if suspect.trouble != "decision" or not step.harmful(suspect, certain=True):
        return None
    ties = suspect.numbers.get("ties", 0.0)
    if suspect.share < step.limits.damage_flips and ties < step.limits.damage_ties:
        return None
    return hazard_of(
        suspect,
        f"{suspect.op_name} decides {share(suspect.share)} of {suspect.count} cases differently from FP32"
        + (f"; {share(ties)} of the choices are ties" if ties else ""),
        "target" if suspect.target or not suspect.differentiable else "",
        value=suspect.share,
        limit=step.limits.damage_flips,
    )
