"""From the numbers of `auto_diff` to findings, the first culprit first. No torch: a report is judged from its records alone.

A layer is blamed for its *own* error, and seriously only if the damage reaches the outputs or the gradients. The docstring of the
function that makes a finding is its page of `nanny rule`; INTEGERS_ROUNDED has the page of `nanny tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..core.finding import Finding, Severity
from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..core.numbers import amount, deviation, join_names, share, short
from ..core.ops import DECISIONS, NORMS, SINGULAR_AT_ZERO
from ..core.registry import Pages, docstring_page
from .blame import (
    Blame,
    confirming_trial,
    consequence,
    first_culprit,
    first_fault,
    gradient_limit,
    largest_error,
    loss_is_spoiled,
    named_site,
    site_of_op,
    warn_limit,
)
from .records import LOSS, CallDiff, DiffReport, GradDiff, NonfiniteOp

LOOK_FOR = "look for a difference of close numbers, a large offset, or sums in half"
IN_THE_LOSS = "compute the loss in FP32 from output.float(), and from logits, not from probabilities that round to 0 or 1"

PAGES: Pages = {}
page = partial(docstring_page, PAGES)


def judge_diff(report: DiffReport, limits: Limits, rel_warn: float | None, rel_error: float | None) -> tuple[Finding, ...]:
    if report.failure is not None:
        return (target_raises(report),)
    found = [
        *reference_nonfinite(report),
        *diff_nonfinite(report),
        *loss_nonfinite(report),
        *layer_error(report, limits),
        *integers_rounded(report, limits),
        *error_adds_up(report, limits),
        *gradient_nonfinite(report, limits),
        *gradient_lost(report, limits),
        *gradient_error(report, limits),
        *decision_flips(report, limits),
        *above_asked_limit(report, rel_warn, rel_error),
    ]
    return tuple(sorted(found, key=lambda f: -f.severity))


def keep_wide(report: DiffReport) -> str:
    if report.policy == "full":
        return "keep this part in FP32: its weights with .float(), on inputs cast with .float()"
    return f"keep this part in FP32: with torch.autocast({report.device!r}, enabled=False): ... on inputs cast with .float()"


@page("TARGET_RAISES", Severity.ERROR)
def target_raises(report: DiffReport) -> Finding:
    """The model runs in FP32 but raises in the target precision.

    Why: an operation has no kernel for the type, or two types meet in one operation. The site is the innermost module that
    raised.

    Fix: cast the inputs of that operation with .float(), or keep the module out of autocast.
    """
    failure = report.failure
    assert failure is not None
    return Finding(
        "TARGET_RAISES",
        Severity.ERROR,
        f"the model runs in FP32, but raises in {report.target}: {failure.message}",
        hint="an operation has no kernel for this type, or types are mixed: cast its inputs with .float()",
        site=failure.site,
    )


@page("REFERENCE_NONFINITE", Severity.WARNING)
def reference_nonfinite(report: DiffReport) -> Iterator[Finding]:
    """The FP32 reference has NaN or Inf at the same place: precision is not the cause.

    Why: a logarithm or root of 0, a division by 0, broken data or broken weights look the same in every format.

    Fix: look at the inputs and the code of the named module; changing the format will not help.
    """
    if report.input_nan:
        yield Finding(
            "REFERENCE_NONFINITE",
            Severity.WARNING,
            f"the sample holds {report.input_nan} NaN: precision is not the cause of what follows",
            hint="look at the data; save a sample without NaN to learn about precision",
            site="data:input",
            value=float(report.input_nan),
        )
        return
    bad = [c for c in report.calls if c.error.reference_nan]
    infinite = [c for c in report.outputs if c.error.reference_inf]
    if not bad and not infinite:
        return
    first = (bad or infinite)[0]
    what = f"{first.error.reference_nan} NaN" if first.error.reference_nan else f"{first.error.reference_inf} infinities"
    yield Finding(
        "REFERENCE_NONFINITE",
        Severity.WARNING,
        f"the {report.reference} reference has {what} here too: precision is not the cause",
        hint="look for the cause in the data, the weights or the code (log or sqrt of 0, division by 0), not in the format",
        site=first.name,
        value=float(first.error.reference_nan or first.error.reference_inf),
    )


@page("DIFF_NONFINITE", Severity.ERROR)
def diff_nonfinite(report: DiffReport) -> Iterator[Finding]:
    """A module makes NaN or Inf where the reference stays finite.

    Why: a result left the range of the format, or a small number became 0 and was divided by. The named module made it; the
    ones that only passed it on are listed behind it.

    Fix: keep that part in FP32, normalise or rescale before it, or use an eps that the format can hold (2**-24 in fp16).
    """
    spoiled = [c for c in report.calls if c.error.spoiled]
    makers = [c for c in spoiled if not c.inputs_spoiled] or spoiled[:1]
    if not makers:
        return
    first = makers[0]
    target = format_of(report.target)
    own_reach = first.error.reference_absmax
    why = _why_not_finite(report, first, target)
    passed_on = [c.name for c in spoiled if c is not first]
    tail = f"; passed on to {join_names(passed_on)}" if passed_on else ""
    yield Finding(
        "DIFF_NONFINITE",
        Severity.ERROR,
        f"{first.error.nan} NaN and {first.error.inf} Inf of {first.error.count} in {report.target}, "
        f"finite in {report.reference}: {why}{tail}",
        hint=keep_wide(report) + "; or normalise, clamp or rescale before it; bf16 has the range of FP32",
        site=named_site(report, first),
        value=float(first.error.spoiled),
        evidence={"passed_on": passed_on, "reference_absmax": own_reach},
    )


@page("LOSS_NONFINITE", Severity.ERROR)
def loss_nonfinite(report: DiffReport) -> Iterator[Finding]:
    """The outputs are finite, but the loss is not, while the reference loss is.

    Why: squares, sums or exponentials in the loss function left the range of the format. The operation that made the first
    NaN or Inf is named (`op:pow`).

    Fix: compute the loss in FP32: loss_fn(output.float(), target), with the target in FP32 too.
    """
    if not loss_is_spoiled(report) or any(c.error.spoiled for c in report.calls):
        return
    fault = first_fault(report, LOSS)
    why = _why_of_fault(fault, format_of(report.target)) if fault else f"an operation in it left the range of {report.target}"
    yield Finding(
        "LOSS_NONFINITE",
        Severity.ERROR,
        f"the outputs are finite, but the loss is {short(report.loss)} "
        f"({report.reference}: {short(report.reference_loss, 6)}): {why}",
        hint="compute the loss in FP32: loss_fn(output.float(), target)",
        site=site_of_op(LOSS, fault.op) if fault else LOSS,
        value=report.loss,
    )


def _why_not_finite(report: DiffReport, call: CallDiff, target: Format) -> str:
    fault = first_fault(report, call.site)
    if fault is not None:
        return _why_of_fault(fault, target)
    reach = call.error.reference_absmax
    if reach >= target.overflow_at:
        return f"the reference reaches {short(reach)}, {target.name} ends at {short(target.max)}"
    return f"an operation inside left the range of {target.name} ({short(target.min_subnormal)} to {short(target.max)})"


def _why_of_fault(fault: NonfiniteOp, target: Format) -> str:
    if fault.reference_absmax >= target.overflow_at:
        ends = f"{target.name} ends at {short(target.max)}"
        return f"`{fault.op}` makes the first: the reference reaches {short(fault.reference_absmax)}, {ends}"
    if fault.op in SINGULAR_AT_ZERO | NORMS and fault.input_absmin and fault.input_absmin[-1] == 0:
        return f"`{fault.op}` makes the first: it meets a 0 that is none in the reference"
    return f"`{fault.op}` makes the first, of finite values up to {short(max(fault.input_absmax, default=0.0))}"


@page("LAYER_ERROR", Severity.WARNING)
def layer_error(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """A module's own operations lose far more than rounding explains.

    Why: on exact inputs, in the target precision, its result is off by more than 25 roundoffs, or by more than a quarter of
    what varies over the batch. Typical: a difference of close numbers, a large offset, a sum kept in half. Where several
    stand out, runs with one of them kept in FP32 tell which is behind it. Code of the model's own forward or of the loss is
    named by its operation (`op:sub`). Information as long as neither outputs nor gradients suffer, an error when they are
    destroyed.

    Fix: keep the module in FP32 (`nanny diff --advise` finds the smallest set), or rewrite the formula.
    """
    blame = first_culprit(report, limits)
    if blame is not None:
        yield _own_error(report, blame, consequence(report, limits), limits)


def _own_error(report: DiffReport, blame: Blame, reach: Severity, limits: Limits) -> Finding:
    target = format_of(report.target)
    limit = warn_limit(report, limits)
    whose = "its own operations are" if blame.module else "the operations of the model's own forward are"
    if blame.module == LOSS:
        whose = "the loss function makes gradients of exact outputs that are"
    if blame.plain >= (blame.centred or 0.0) or blame.plain > limit:
        what = f"{whose} {deviation(blame.plain)} off" + (" on exact inputs" if blame.module != LOSS else "")
    else:
        what = (
            f"{whose} only {deviation(blame.plain)} off, but that is {deviation(blame.centred)} of what varies over "
            f"the batch: a large common part hides it from {target.name}"
        )
    begins = f", from `{blame.op}` on" if blame.op and blame.module not in ("", LOSS) else ""
    place = _place(blame.call) if blame.call else ""
    also = f"; also {join_names(list(blame.others))}" if blame.others else ""
    calm = "" if reach > Severity.INFO else "; outputs and gradients do not suffer from it"
    return Finding(
        "LAYER_ERROR",
        reach,
        f"{what}{begins}{place}; rounding alone explains {share(target.unit_roundoff)}{_with_it_wide(blame)}{also}{calm}",
        hint=IN_THE_LOSS if blame.module == LOSS else f"{keep_wide(report)}; {LOOK_FOR}",
        site=blame.site,
        value=blame.worst,
        limit=limit,
        evidence={"own_rel_l2": blame.plain, "own_centred": blame.centred, "op": blame.op, "also": list(blame.others)},
    )


def _with_it_wide(blame: Blame) -> str:
    trial = blame.trial
    if trial is None:
        return ""
    gradient = f", the gradient's {deviation(trial.gradient)}" if trial.gradient is not None else ""
    return f"; with it in FP32 the output error is {deviation(trial.output)}{gradient}"


def _place(call: CallDiff) -> str:
    """Where along its dimensions the error sits, if it sits somewhere."""
    spots = [d for d in call.dimensions if d.size > 2 and d.error_share > 0.5]
    if not spots:
        return ""
    spot = max(spots, key=lambda d: d.error_share * d.size)
    return f", {share(spot.error_share)} of it at index {spot.index} of dimension {spot.dim}"


def integers_rounded(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """Serious where something suffers: whole numbers may also be plain features, for which a roundoff is no harm."""
    suffering = {
        c.site for c in report.calls if c.own is not None and largest_error(c.own, report, limits) > warn_limit(report, limits)
    }
    for lost in report.integers:
        target = format_of(report.target)
        matters = lost.site in suffering or consequence(report, limits) > Severity.INFO
        yield Finding(
            "INTEGERS_ROUNDED",
            Severity.WARNING if matters else Severity.INFO,
            f"`{lost.op}` makes whole numbers up to {short(lost.largest)} in {target.name}, which is exact only to "
            f"{target.exact_integers}: {share(lost.changed)} of them change",
            hint="keep positions, ids, counts and timesteps in int64 or FP32 until they are scaled",
            site=site_of_op(lost.site, lost.op),
            value=lost.changed,
        )


@page("ERROR_ADDS_UP", Severity.WARNING)
def error_adds_up(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """The output is far off although no single module is to blame.

    Why: small errors of many layers add up, or the model amplifies any change. In the second case it is information: rounding
    each layer's output once, in FP32, does as much.

    Fix: keep the residual stream or the recurrent state in FP32, or normalise between layers.
    """
    limit = warn_limit(report, limits)
    off = [c for c in report.outputs if largest_error(c.error, report, limits) > limit and not c.error.spoiled]
    blamed = any(c.error.spoiled for c in report.calls) or first_culprit(report, limits) is not None
    if not off or blamed:
        return
    worst = max(off, key=lambda c: c.error.worst)
    first = next(c for c in report.calls if largest_error(c.error, report, limits) > limit)
    floor = report.output_floor or 0.0
    amplified = floor * limits.diff_floor_times >= worst.error.worst
    reason = (
        f"rounding each layer's output once changes the {report.reference} output by {share(floor)} too: "
        f"the model amplifies any change"
        if amplified
        else "no single layer makes it: small errors add up"
    )
    severity = Severity.WARNING if worst.error.worst < limits.rel_l2_error else Severity.ERROR
    if amplified or worst.error.worst < limits.rel_mark_error:
        severity = Severity.INFO
    yield Finding(
        "ERROR_ADDS_UP",
        severity,
        f"the output is {deviation(worst.error.worst)} off; the error passes {share(limit)} first at {first.name}; {reason}",
        hint="keep the residual stream or the recurrent state in FP32, or normalise between the layers",
        site=first.name,
        value=worst.error.worst,
        limit=limit,
    )


@page("GRADIENT_NONFINITE", Severity.ERROR)
def gradient_nonfinite(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """The forward pass is finite, but gradients have NaN or Inf that the reference gradients do not have.

    Why: a singular backward (root, division or norm at 0), or a product beyond the range at every loss scale that was tried.

    Fix: compute that part in FP32, with an eps that the format can hold.
    """
    spoiled = [g for g in report.activation_gradients if g.error.spoiled]
    parameters = [g for g in report.gradients if g.error.spoiled]
    if any(c.error.spoiled for c in report.calls) or not (spoiled or parameters):
        return  # backward only repeats what forward made
    first = (spoiled or parameters)[0]
    clean = [g for g in report.activation_gradients if not g.error.spoiled and g.name and g.order < first.order]
    maker = clean[-1].name if spoiled and clean else first.name  # its output's gradient is the last that is finite
    fault = next((f for f in report.faults if f.backward), None)
    why = ""
    if fault is not None:
        maker = site_of_op(fault.site, fault.op)
        why = f"; {_why_of_fault(fault, format_of(report.target))}"
    scale = report.total.loss_scale if report.total else 1.0
    found = Finding(
        "GRADIENT_NONFINITE",
        Severity.ERROR,
        f"the forward pass is finite, but its backward makes {first.error.nan} NaN and {first.error.inf} Inf at loss scale "
        f"{short(scale)}, finite in {report.reference}; {amount(len(parameters), 'parameter')} hit{why}",
        hint="a singular backward (sqrt, division, norm at 0) or an overflow: compute it in FP32, with an eps that it can hold",
        site=maker,
        value=float(first.error.spoiled),
        evidence={"parameters": [g.name for g in parameters]},
    )
    yield _after_the_cause(report, limits, found) if loss_is_spoiled(report) else found


def _gradients_are_finite(report: DiffReport) -> bool:
    gradients = (*report.activation_gradients, *report.gradients)
    return not any(g.error.spoiled for g in gradients) and not any(c.error.spoiled for c in report.calls)


@page("GRADIENT_LOST", Severity.ERROR)
def gradient_lost(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """Parameters without any gradient that have one in the reference.

    Why: every element became 0 on the way back. Information if these parameters hold less than 1 % of the gradient's energy.

    Fix: train fp16 with a GradScaler; rescale that part of the loss, or use bf16.
    """
    gone = [g for g in report.gradients if g.error.all_zero and g.error.reference_norm > 0]
    if not gone or not _gradients_are_finite(report):
        return
    weight = sum(g.energy for g in gone)
    is_residue = (report.gradient_floor or 0.0) >= 1  # near an optimum: what is left of terms that cancel
    fault = first_fault(report, LOSS) or first_fault(report, "")
    why = f"; {_why_of_fault(fault, format_of(report.target))}" if fault else ""
    found = Finding(
        "GRADIENT_LOST",
        Severity.ERROR if weight > limits.diff_energy_share and not is_residue else Severity.INFO,
        f"{amount(len(gone), 'parameter')} without any gradient in {report.target} that have one in {report.reference}: "
        f"{join_names([g.name for g in gone])}; {share(weight)} of the whole gradient{why}",
        hint="train fp16 with a GradScaler; if it has one, this part's gradient is below its range: rescale it or use bf16",
        site=site_of_op("", fault.op) if fault else gone[0].name,
        value=weight,
        limit=limits.diff_energy_share,
    )
    yield _after_the_cause(report, limits, found)


@page("GRADIENT_ERROR", Severity.WARNING)
def gradient_error(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """The whole gradient is far from the reference gradient.

    Why: it is off by more than 5 %, and by more than twice what a change of one rounding in inputs and weights does to this
    model (ReLU signs and max-pool ties flip in health, and near an optimum the terms of a gradient cancel).

    Fix: see the layer that is blamed; if there is none, keep the named part in FP32.
    """
    total = report.total
    limit = gradient_limit(report, limits)
    if total is None or total.rel_l2 <= limit or not _gradients_are_finite(report):
        return
    worst = max(report.gradients, key=lambda g: g.error.rel_l2 * math.sqrt(g.energy) if g.energy else 0.0)
    source = next((g for g in report.activation_gradients if g.name and g.error.rel_l2 > limit), None)
    floor = deviation(report.gradient_floor)
    since = f"; in backward order it passes {share(limit)} first at {source.name}" if source else ""
    site, reason = _maker_of_gradient_error(report, limits, worst)
    found = Finding(
        "GRADIENT_ERROR",
        Severity.ERROR if total.rel_l2 >= limits.diff_grad_error else Severity.WARNING,
        f"the whole gradient is {deviation(total.rel_l2)} off (a change of one rounding moves it by {floor}), most of it in "
        f"{worst.name} ({deviation(worst.error.rel_l2)}){since}{reason}",
        hint=f"{keep_wide(report)}, so that its gradient is computed and summed in FP32 too",
        site=site,
        value=total.rel_l2,
        limit=limit,
    )
    yield _after_the_cause(report, limits, found)


def _maker_of_gradient_error(report: DiffReport, limits: Limits, worst: GradDiff) -> tuple[str, str]:
    """The parameter whose own gradient sum is off, the module whose backward is, or the one that a trial run names."""
    assert report.total is not None
    own = sum(g.energy * g.own**2 for g in report.gradients if g.own is not None)
    if math.sqrt(own) >= report.total.rel_l2 / 2:
        most = max((g for g in report.gradients if g.own is not None), key=lambda g: g.energy * (g.own or 0.0) ** 2)
        return most.name, f"; the sum behind the gradient of {most.name} is itself {deviation(most.own)} off on exact gradients"
    trial = confirming_trial(report, limits)
    if trial is not None:
        return trial.site, f"; with {trial.site} in FP32 it is {deviation(trial.gradient)}"
    loud = [g for g in report.activation_gradients if g.own is not None and g.own > warn_limit(report, limits)]
    if loud and loud[0].own_site not in ("", LOSS):
        return loud[0].own_site, f"; the backward of {loud[0].own_site} is itself {deviation(loud[0].own)} off on exact gradients"
    return worst.name, ""


def _after_the_cause(report: DiffReport, limits: Limits, found: Finding) -> Finding:
    """A gradient that suffers from a layer or a loss that is blamed already is information."""
    blamed = [*loss_nonfinite(report), *(f for f in layer_error(report, limits) if f.severity > Severity.INFO)]
    if not blamed:
        return found
    return replace(found, severity=Severity.INFO, message=f"{found.message}; follows from {blamed[0].site}", hint="")


@page("DECISION_FLIPS", Severity.WARNING)
def decision_flips(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """A choice (argmax, top-k, sorting, sampling) falls otherwise than in the reference.

    Why: rounding ties or swaps close scores; a router then sends tokens to other experts. Comparisons are information.

    Fix: compute what is compared in FP32.
    """
    for flip in report.flips:
        if flip.share > limits.diff_flip_warn:
            decides = flip.op in DECISIONS
            yield Finding(
                "DECISION_FLIPS",
                Severity.WARNING if decides else Severity.INFO,
                f"`{flip.op}` decides otherwise than in {report.reference} for {share(flip.share)} of {flip.count}",
                hint="compute what is compared (router logits, scores) in FP32" if decides else "",
                site=site_of_op(flip.site, flip.op),
                value=flip.share,
                limit=limits.diff_flip_warn,
            )


@page("REL_ERROR", Severity.WARNING)
def above_asked_limit(report: DiffReport, rel_warn: float | None, rel_error: float | None) -> Iterator[Finding]:
    """A module's relative error is above the limit that was asked for with --rel-warn or --rel-error.

    Why: the limit is the user's. Plain limits such as 1 % fire on healthy models too, so there is none by default.

    Fix: see the columns `own` and `inherited`: only the first is the module's doing.
    """
    for call in report.calls:
        over_error = rel_error is not None and call.error.rel_l2 > rel_error
        over_warn = rel_warn is not None and call.error.rel_l2 > rel_warn
        if over_error or over_warn:
            limit = rel_error if over_error else rel_warn
            yield Finding(
                "REL_ERROR",
                Severity.ERROR if over_error else Severity.WARNING,
                f"relative error {deviation(call.error.rel_l2)}, above the limit of {share(limit)} that was asked for",
                site=call.name,
                value=call.error.rel_l2,
                limit=limit,
            )
