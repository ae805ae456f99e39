"""Errors that jump at one operation: digits that cancel, addends that vanish, kernels that add up in 16 bits."""

from __future__ import annotations

from ...core.numbers import share, short
from ...core.ops import CANCEL, DIFFERENCES, MATMULS, READ_LOGITS, SCATTERS, SELECT
from ..records import Suspect
from . import Step, Verdict, hazard


def _jumps(suspect: Suspect, step: Step) -> bool:
    """The error is made here, not has_storage here: healthy errors grow slowly from layer to layer."""
    made = suspect.level >= step.limits.damage_made * suspect.input_level or suspect.repeats >= step.limits.damage_repeats
    return suspect.trouble == "error" and made and suspect.op not in SELECT


def _inherent(suspect: Suspect) -> bool:
    """Gradients and residuals are small differences by nature: near convergence they are mostly rounding, in health too."""
    residual = suspect.op in DIFFERENCES and not suspect.place.site and any(o.role == "given" for o in suspect.operands)
    return suspect.in_backward or residual


@hazard("flush", rank=60)
def flush(suspect: Suspect, step: Step) -> Verdict | None:
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
    scale = step.scale
    if suspect.in_backward:
        cause = "loss_scale_too_low" if scale is not None else "grad_underflow_no_scaling"
        remedy = (
            "raise the loss scale (init_scale, growth_interval)" if cause == "loss_scale_too_low" else "use a GradScaler, or bf16"
        )
    else:
        cause, remedy = "product_underflow_fp16", "compute it in FP32, or in logarithms"
    return Verdict(
        f"{share(flushed)} of {suspect.op}'s results are 0 in fp16, at most {short(suspect.reference_absmax)} in FP32"
        + (f"; {share(suspect.silenced)} of the parameters get no gradient at all" if silent else ""),
        cause=cause,
        remedy=remedy,
        consequence=max(suspect.consequence, suspect.silenced),
        site={"loss_scale_too_low": "scaler.scale", "grad_underflow_no_scaling": "scaler"}.get(cause),
        value=suspect.reference_absmax,
        limit=form.min_normal,
    )


@hazard("accumulation", rank=62)
def accumulation(suspect: Suspect, step: Step) -> Verdict | None:
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
    if fan_in:
        cause, remedy = "low_precision_grad_accumulation", "keep the parameter in FP32, so that its gradients add up in FP32"
    elif suspect.op in SCATTERS:
        cause, remedy = "low_precision_scatter_add", "keep the table in FP32, or scatter x.float()"
    else:
        cause, remedy = "kernel_low_precision_accumulation", "give this operation FP32 inputs (x.float(), autocast disabled)"
    return Verdict(
        f"{suspect.op} adds up in {form.name}: its result is {share(own if own is not None else suspect.plain)} off",
        cause=cause,
        remedy=remedy,
        value=own if own is not None else suspect.plain,
        limit=limit,
    )


@hazard("phase", rank=64)
def phase(suspect: Suspect, step: Step) -> Verdict | None:
    """Sine and cosine of angles that low precision cannot tell apart"""
    error = suspect.numbers.get("phase_error", 0.0)
    if not _jumps(suspect, step) or error < step.limits.damage_phase or not step.harmful(suspect, certain=True):
        return None
    return Verdict(
        f"angles are off by {short(error)} radians, so {suspect.op} is {share(suspect.plain)} wrong",
        cause="position_precision_loss",
        remedy="compute positions and angles in FP32, and cast sine and cosine afterwards",
        value=error,
        limit=step.limits.damage_phase,
    )


@hazard("biased_rounding", rank=65)
def biased_rounding(suspect: Suspect, step: Step) -> Verdict | None:
    """Rounding that goes the same way time after time, so that it adds up instead of averaging out"""
    bias = suspect.numbers.get("bias")
    again = suspect.repeats >= step.limits.damage_repeats and suspect.op in ("mul", "div", "lerp", "addcmul")
    if not _jumps(suspect, step) or bias is None or abs(bias) < step.limits.damage_bias or not again or not step.harmful(suspect):
        return None
    return Verdict(
        f"{suspect.op} rounds the same way in each of {suspect.repeats} repetitions (mean error {bias:+.1f} of its spread)",
        cause="ema_stagnation",
        remedy="keep what is multiplied again and again in FP32",
        value=abs(bias),
        limit=step.limits.damage_bias,
    )


@hazard("cancellation", rank=66)
def cancellation(suspect: Suspect, step: Step) -> Verdict | None:
    """The difference of nearly equal numbers: the digits that were equal are gone, the rest is rounding"""
    logs = "log_softmax" in suspect.after
    largest = max((o.rms for o in suspect.operands), default=0.0)
    gone = suspect.reference_rms / (largest * step.format_of(suspect).unit_roundoff) if largest else 0.0  # in roundoffs
    if not _jumps(suspect, step) or suspect.op not in CANCEL or _inherent(suspect):
        return None
    if not largest or suspect.reference_rms * step.limits.damage_bits_lost > largest:
        return None
    stored_low = suspect.dtype in ("bfloat16", "float16")  # FP32 sums of logits in bf16 are what the remedy makes
    margins = logs and stored_low and gone < 1 and all(o.producer == "sum" for o in suspect.operands)
    certain = stored_low if logs else gone < step.limits.damage_cancelled
    if not margins and not step.harmful(suspect, certain=certain):
        return None
    chosen = _chosen(suspect)
    if chosen:
        return _of_choice(suspect, step, chosen)
    return Verdict(
        f"{suspect.op} of numbers of {short(largest)} leaves {short(suspect.reference_rms)}, {share(suspect.plain)} wrong",
        cause="logprob_rounding" if logs else "catastrophic_cancellation",
        remedy="keep log-probabilities and their sums in FP32" if logs else
        "reformulate (two passes, torch.var, cdist), or compute both sides and the difference in FP32",
        value=suspect.reference_rms / largest,
        limit=1 / step.limits.damage_bits_lost,
        consequence=max(suspect.consequence, step.limits.damage_certain) if margins else None,
    )  # fmt: skip


def _chosen(suspect: Suspect) -> str:
    """What was decided by the damaged numbers: a target, or which way to go."""
    if suspect.target or not suspect.differentiable:
        return "target_in_low_precision"
    return "router_low_precision" if suspect.chose else ""


def _of_choice(suspect: Suspect, step: Step, cause: str) -> Verdict:
    return Verdict(
        f"{suspect.op} stores {short(suspect.reference_absmax)} in {step.format_of(suspect).name}: what varies in it is "
        f"{share(max(suspect.plain, suspect.centred))} wrong, and a choice is made by it",
        cause=cause,
        remedy="compute targets in FP32, outside autocast" if cause == "target_in_low_precision" else
        "compute the scores in FP32 before choosing",
        value=suspect.centred,
        limit=step.limits.diff_centred_warn,
    )  # fmt: skip


@hazard("absorption", rank=68)
def absorption(suspect: Suspect, step: Step) -> Verdict | None:
    """What varies is smaller than the spacing of the numbers that carry it"""
    if not _jumps(suspect, step) or suspect.centred < 2 * suspect.plain or _inherent(suspect) or not step.harmful(suspect):
        return None
    form = step.format_of(suspect)
    chosen = _chosen(suspect)
    if chosen:
        return _of_choice(suspect, step, chosen)
    cause = "scale_imbalance_absorption"
    remedy = "remove the common part or rescale the loud channel before this operation, or compute it in FP32"
    if "log_softmax" in suspect.after:
        cause, remedy = "logprob_rounding", "keep log-probabilities and their sums in FP32"
    elif _small_branch(suspect, step):
        cause, remedy = "residual_absorption", "keep the residual stream in FP32, or normalise it"
    elif suspect.op in ("cumsum", "add") and suspect.repeats >= step.limits.damage_repeats:
        cause, remedy = "absorption_in_accumulator", "accumulate in FP32"
    elif (suspect.op in ("mean", "sum", "mul", "pow", "square") and set(suspect.next) & DIFFERENCES) or (
        suspect.op == "add" and set(suspect.next[:1]) & DIFFERENCES
    ):
        cause, remedy = "catastrophic_cancellation", "reformulate (two passes, torch.var, cdist), or compute it in FP32"
    elif _makes_logits(suspect):
        cause, remedy = "low_precision_output_head", "compute the head in FP32, or remove the common offset of the logits"
    return Verdict(
        f"{suspect.op} stores {short(suspect.reference_absmax)} in {form.name}; what varies is {share(suspect.centred)} wrong",
        cause=cause,
        op=next((n for n in suspect.next if n in DIFFERENCES), None) if cause == "catastrophic_cancellation" else None,
        remedy=remedy,
        value=suspect.centred,
        limit=step.limits.diff_centred_warn,
    )


def _small_branch(suspect: Suspect, step: Step) -> bool:
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


def _one_hot(suspect: Suspect, step: Step) -> bool:
    attention = step.examination.facts.get("attention", {}).get(suspect.place.site, {})
    return attention.get("entropy", 1.0) < step.limits.damage_entropy


@hazard("saturation", rank=58)
def saturation(suspect: Suspect, step: Step) -> Verdict | None:
    """A format without infinity holds the largest number instead"""
    form = step.format_of(suspect)
    if suspect.trouble != "error" or form.bits != 8 or suspect.reference_absmax <= form.max or not step.harmful(suspect):
        return None
    return Verdict(
        f"{short(suspect.reference_absmax)} is beyond {short(form.max)} of {form.name} and is cut off: the scale is too large",
        cause="fp8_scale_stale",
        remedy="take the scale from this tensor (current scaling), or shorten the amax history",
        value=suspect.reference_absmax,
        limit=form.max,
    )


@hazard("amplification", rank=70)
def amplification(suspect: Suspect, step: Step) -> Verdict | None:
    """An operation that makes a large error of small ones"""
    if not _jumps(suspect, step) or _inherent(suspect) or suspect.op in MATMULS or not step.harmful(suspect):
        return None
    chosen = _chosen(suspect)
    if chosen:
        return _of_choice(suspect, step, chosen)
    logs = "log_softmax" in suspect.after
    if logs:
        cause = "logprob_rounding"
    elif suspect.op == "softmax" and _one_hot(suspect, step):
        cause = "attention_entropy_collapse"
    elif suspect.op in ("cumsum", "add") and suspect.repeats >= step.limits.damage_repeats:
        cause = "absorption_in_accumulator"
    else:
        cause = "catastrophic_cancellation" if suspect.after & DIFFERENCES else "scale_imbalance_absorption"
    bias = suspect.numbers.get("bias")
    return Verdict(
        f"{suspect.op} turns an error of {share(suspect.input_level)} into one of {share(suspect.plain)}"
        + (f"; it is biased ({bias:+.1f} of its spread)" if bias is not None and abs(bias) > 0.5 else ""),
        cause=cause,
        remedy="compute this operation and what feeds it in FP32",
        value=suspect.plain,
        limit=suspect.input_level,
    )
