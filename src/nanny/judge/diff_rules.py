"""From the numbers of `auto_diff` to findings, the first culprit first. No torch: a report is judged from its records alone.

A layer is blamed for its *own* error, and seriously only if the damage reaches the outputs or the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..diff_records import CallDiff, DiffReport, ErrorStats, GradDiff
from ..formats import Format, format_of
from ..limits import Limits
from ..records import Finding, Severity
from ..show.numbers import counted, deviation, listed, share, short

KEEP_WIDE = "keep this part in FP32: with torch.autocast({device!r}, enabled=False): ... on inputs cast with .float()"
DIVISIONS = frozenset(["div", "div_", "reciprocal", "rsqrt", "log", "pow", "linalg_vector_norm", "norm"])
DECISION_OPS = frozenset(["argmax", "argmin", "topk", "sort", "argsort", "multinomial", "searchsorted", "bucketize", "kthvalue"])


def judge_diff(
    report: DiffReport, limits: Limits | None = None, rel_warn: float | None = None, rel_error: float | None = None
) -> tuple[Finding, ...]:
    limits = limits or Limits()
    if report.failure is not None:
        return (_raises(report),)
    found = [
        *_reference_trouble(report),
        *_spoiled(report),
        *_own_errors(report, limits),
        *_integers(report),
        *_accumulated(report, limits),
        *_after_the_cause(report, limits, _gradients(report, limits)),
        *_flips(report, limits),
        *_plain_rule(report, rel_warn, rel_error),
    ]
    return tuple(sorted(found, key=lambda f: -f.severity))


def warn_limit(report: DiffReport, limits: Limits) -> float:
    return limits.rel_l2_warn_roundoffs * format_of(report.target).unit_roundoff


def graded(error: ErrorStats, report: DiffReport, limits: Limits) -> float:
    """The plain error, or the centred one brought to its scale: either may pass `warn_limit`."""
    return max(error.rel_l2, (error.centred or 0.0) * warn_limit(report, limits) / limits.diff_centred_warn)


def gradient_limit(report: DiffReport, limits: Limits) -> float:
    """ReLU signs and max-pool ties flip in health and move gradients: the measured floor knows by how much."""
    return max(limits.diff_grad_warn, limits.diff_floor_times * (report.gradient_floor or 0.0))


def needs_floor(report: DiffReport, limits: Limits) -> bool:
    """Is something large enough to ask what rounding alone would do to this model?"""
    output = max((graded(c.error, report, limits) for c in report.outputs if not c.error.spoiled), default=0.0)
    return output > warn_limit(report, limits) or (report.total is not None and report.total.rel_l2 > limits.diff_grad_warn)


def _raises(report: DiffReport) -> Finding:
    failure = report.failure
    assert failure is not None
    return Finding(
        "TARGET_RAISES",
        Severity.ERROR,
        f"the model runs in FP32, but raises in {report.target}: {failure.message}",
        hint="an operation has no kernel for this type, or types are mixed: cast its inputs with .float()",
        site=failure.site,
    )


def _reference_trouble(report: DiffReport) -> Iterator[Finding]:
    """The FP32 counterfactual: what the reference has too, precision did not cause."""
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


def _spoiled(report: DiffReport) -> Iterator[Finding]:
    """NaN or Inf that the reference does not have, at the call that made it."""
    spoiled = [c for c in report.calls if c.error.spoiled]
    makers = [c for c in spoiled if not c.inputs_spoiled] or spoiled[:1]
    if not makers:
        return
    first = makers[0]
    target = format_of(report.target)
    own_reach = first.error.reference_absmax
    why = _why_not_finite(report, first, target)
    passed_on = [c.name for c in spoiled if c is not first]
    tail = f"; passed on to {listed(passed_on)}" if passed_on else ""
    yield Finding(
        "DIFF_NONFINITE",
        Severity.ERROR,
        f"{first.error.nan} NaN and {first.error.inf} Inf of {first.error.count} in {report.target}, "
        f"finite in {report.reference}: {why}{tail}",
        hint=KEEP_WIDE.format(device=report.device) + "; or normalise, clamp or rescale before it; bf16 has the range of FP32",
        site=first.name,
        value=float(first.error.spoiled),
        evidence={"passed_on": passed_on, "reference_absmax": own_reach},
    )


def _why_not_finite(report: DiffReport, call: CallDiff, target: Format) -> str:
    fault = next((f for f in report.faults if f.site == call.site), None)
    if fault is None:
        reach = call.error.reference_absmax
        if reach >= target.overflow_at:
            return f"the reference reaches {short(reach)}, {target.name} ends at {short(target.max)}"
        return f"an operation inside left the range of {target.name} ({short(target.min_subnormal)} to {short(target.max)})"
    if fault.reference_absmax >= target.overflow_at:
        ends = f"{target.name} ends at {short(target.max)}"
        return f"`{fault.op}` makes the first: the reference reaches {short(fault.reference_absmax)}, {ends}"
    if fault.op in DIVISIONS and fault.input_absmin and fault.input_absmin[-1] == 0:
        return f"`{fault.op}` makes the first: it meets a 0 that is none in the reference"
    return f"`{fault.op}` makes the first, of finite values up to {short(max(fault.input_absmax, default=0.0))}"


def _own_errors(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    limit = warn_limit(report, limits)
    guilty = [
        (c, c.own.worst)
        for c in report.calls
        if c.own is not None and not c.own.spoiled and graded(c.own, report, limits) > limit
    ]
    if not guilty:
        return
    most = max(min(own, 1.0) for _, own in guilty)
    chief = next(c for c, own in guilty if own >= limits.diff_culprit_share * most)
    reach = consequence(report, limits)
    others = [c.name for c, _ in guilty if c is not chief]
    yield _own_error(report, chief, others, reach, limit, limits)


def consequence(report: DiffReport, limits: Limits) -> Severity:
    """How far damage has come: INFO while outputs and gradients are as a healthy model's."""
    output = max((graded(c.error, report, limits) for c in report.outputs), default=0.0)
    largest = max((c.error.worst for c in report.outputs), default=0.0)
    gradient = report.total.rel_l2 if report.total and report.total.rel_l2 > gradient_limit(report, limits) else 0.0
    lost = any(c.error.spoiled for c in report.outputs) or any(g.error.spoiled for g in report.gradients)
    if lost or largest >= limits.rel_l2_error or gradient >= limits.diff_grad_error:
        return Severity.ERROR
    return Severity.WARNING if output > warn_limit(report, limits) or gradient > limits.diff_grad_warn else Severity.INFO


def _own_error(
    report: DiffReport, chief: CallDiff, others: Sequence[str], reach: Severity, limit: float, limits: Limits
) -> Finding:
    own = chief.own
    assert own is not None
    target = format_of(report.target)
    if own.rel_l2 >= (own.centred or 0.0) or own.rel_l2 > limit:
        what = f"its own operations are {deviation(own.rel_l2)} off on exact inputs"
    else:
        what = (
            f"its own operations are only {deviation(own.rel_l2)} off, but that is {deviation(own.centred)} of what varies over "
            f"the batch: a large common part hides it from {target.name}"
        )
    place = _place(chief)
    also = f"; also {listed(list(others))}" if others else ""
    calm = "" if reach > Severity.INFO else "; outputs and gradients do not suffer from it"
    return Finding(
        "LAYER_ERROR",
        reach,
        f"{what}{place}; rounding alone explains {share(target.unit_roundoff)}{also}{calm}",
        hint=KEEP_WIDE.format(device=report.device) + "; look for a difference of close numbers, a large offset, or sums in half",
        site=chief.name,
        value=own.worst,
        limit=limit,
        evidence={"own_rel_l2": own.rel_l2, "own_centred": own.centred, "error_rel_l2": chief.error.rel_l2, "also": list(others)},
    )


def _place(call: CallDiff) -> str:
    """Where along its dimensions the error sits, if it sits somewhere."""
    spots = [d for d in call.dimensions if d.size > 2 and d.error_share > 0.5]
    if not spots:
        return ""
    spot = max(spots, key=lambda d: d.error_share * d.size)
    return f", {share(spot.error_share)} of it at index {spot.index} of dimension {spot.dim}"


def _integers(report: DiffReport) -> Iterator[Finding]:
    for lost in report.integers:
        target = format_of(report.target)
        yield Finding(
            "INTEGERS_ROUNDED",
            Severity.WARNING,
            f"`{lost.op}` makes whole numbers up to {short(lost.largest)} in {target.name}, which is exact only to "
            f"{target.exact_integers}: {share(lost.changed)} of them change",
            hint="keep positions, ids, counts and timesteps in int64 or FP32 until they are scaled",
            site=lost.site,
            value=lost.changed,
        )


def _accumulated(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    """Outputs that are off although no single layer is."""
    limit = warn_limit(report, limits)
    off = [c for c in report.outputs if graded(c.error, report, limits) > limit and not c.error.spoiled]
    blamed = any(c.error.spoiled or (c.own is not None and graded(c.own, report, limits) > limit) for c in report.calls)
    if not off or blamed:
        return
    worst = max(off, key=lambda c: c.error.worst)
    first = next(c for c in report.calls if graded(c.error, report, limits) > limit)
    floor = report.output_floor or 0.0
    amplified = floor * limits.diff_floor_times >= worst.error.worst
    reason = (
        f"rounding each layer's output once changes the {report.reference} output by {share(floor)} too: "
        f"the model amplifies any change"
        if amplified
        else "no single layer makes it: small errors add up"
    )
    yield Finding(
        "ERROR_ADDS_UP",
        Severity.INFO if amplified else Severity.WARNING if worst.error.worst < limits.rel_l2_error else Severity.ERROR,
        f"the output is {deviation(worst.error.worst)} off; the error passes {share(limit)} first at {first.name}; {reason}",
        hint="keep the residual stream or the recurrent state in FP32, or normalise between the layers",
        site=first.name,
        value=worst.error.worst,
        limit=limit,
    )


def _after_the_cause(report: DiffReport, limits: Limits, found: Iterator[Finding]) -> Iterator[Finding]:
    """A gradient that suffers from a layer that is blamed already is information."""
    chief = next((f for f in _own_errors(report, limits) if f.severity > Severity.INFO), None)
    for one in found:
        if chief is not None and one.code != "GRADIENT_NONFINITE":
            one = replace(one, severity=Severity.INFO, message=f"{one.message}; follows from {chief.site}")
        yield one


def _gradients(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    if any(c.error.spoiled for c in report.calls):
        return  # backward only repeats it
    spoiled = [g for g in report.activation_gradients if g.error.spoiled]
    parameters = [g for g in report.gradients if g.error.spoiled]
    if spoiled or parameters:
        yield _gradient_spoiled(report, spoiled, parameters)
        return
    yield from _gradient_lost(report, limits)
    total = report.total
    limit = gradient_limit(report, limits)
    if total is None or total.rel_l2 <= limit:
        return
    worst = max(report.gradients, key=lambda g: g.error.rel_l2 * math.sqrt(g.energy) if g.energy else 0.0)
    source = next((g for g in report.activation_gradients if g.name and g.error.rel_l2 > limit), None)
    floor = deviation(report.gradient_floor)
    since = f"; in backward order it passes {share(limit)} first at {source.name}" if source else ""
    yield Finding(
        "GRADIENT_ERROR",
        Severity.ERROR if total.rel_l2 >= limits.diff_grad_error else Severity.WARNING,
        f"the whole gradient is {deviation(total.rel_l2)} off (rounding each layer once: {floor}), most of it in "
        f"{worst.name} ({deviation(worst.error.rel_l2)}){since}",
        hint="if no layer is blamed above, keep that part in FP32: autocast off around its forward",
        site=worst.name,
        value=total.rel_l2,
        limit=limit,
    )


def _gradient_spoiled(report: DiffReport, spoiled: Sequence[GradDiff], parameters: Sequence[GradDiff]) -> Finding:
    first = (spoiled or parameters)[0]
    clean = [g for g in report.activation_gradients if not g.error.spoiled and g.name and g.order < first.order]
    maker = clean[-1].name if spoiled and clean else first.name  # its output's gradient is the last that is finite
    scale = report.total.loss_scale if report.total else 1.0
    return Finding(
        "GRADIENT_NONFINITE",
        Severity.ERROR,
        f"the forward pass is finite, but its backward makes {first.error.nan} NaN and {first.error.inf} Inf at loss scale "
        f"{short(scale)}, finite in {report.reference}; {counted(len(parameters), 'parameter')} hit",
        hint="a singular backward (sqrt, division, norm at 0) or an overflow: compute it in FP32, with an eps that it can hold",
        site=maker,
        value=float(first.error.spoiled),
        evidence={"parameters": [g.name for g in parameters]},
    )


def _gradient_lost(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    gone = [g for g in report.gradients if g.error.all_zero and g.error.reference_norm > 0]
    weight = sum(g.energy for g in gone)
    if not gone:
        return
    yield Finding(
        "GRADIENT_LOST",
        Severity.ERROR if weight > limits.diff_energy_share else Severity.INFO,
        f"{counted(len(gone), 'parameter')} without any gradient in {report.target} that have one in {report.reference}: "
        f"{listed([g.name for g in gone])}; {share(weight)} of the whole gradient",
        hint="train fp16 with a GradScaler; if it has one, this part's gradient is below its range: rescale it or use bf16",
        site=gone[0].name,
        value=weight,
        limit=limits.diff_energy_share,
    )


def _flips(report: DiffReport, limits: Limits) -> Iterator[Finding]:
    for flip in report.flips:
        if flip.share > limits.diff_flip_warn:
            decides = flip.op in DECISION_OPS
            yield Finding(
                "DECISION_FLIPS",
                Severity.WARNING if decides else Severity.INFO,
                f"`{flip.op}` decides otherwise than in {report.reference} for {share(flip.share)} of {flip.count}",
                hint="compute what is compared (router logits, scores) in FP32" if decides else "",
                site=flip.site,
                value=flip.share,
                limit=limits.diff_flip_warn,
            )


def _plain_rule(report: DiffReport, rel_warn: float | None, rel_error: float | None) -> Iterator[Finding]:
    """The user's own limits of the relative error, for every call."""
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
