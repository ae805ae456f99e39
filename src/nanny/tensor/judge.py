"""From the numbers of `analyze_tensor` to findings and advice. No torch: the same rules judge a stored report.

One function per code. Severity follows energy and consequence: an element count alone is never a finding, and what would only
happen in a reduction that may never be done is a warning at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..core.finding import Finding, Severity
from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..core.numbers import share, short
from ..core.registry import Pages, docstring_page
from .records import RangeFit, Reduction, Resolution, TensorReport

Judge = Callable[[TensorReport, Format, Limits], Iterator[Finding]]


PAGES: Pages = {}
_RULES: list[Judge] = []


def rule(code: str, severity: Severity) -> Callable[[Judge], Judge]:
    def register(function: Judge) -> Judge:
        _RULES.append(function)
        return docstring_page(PAGES, code, severity)(function)

    return register


def judge_tensor(report: TensorReport, limits: Limits | None = None) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    target = format_of(report.target)
    limits = limits or Limits()
    found = [finding for one in _RULES for finding in one(report, target, limits)]
    return tuple(sorted(found, key=lambda finding: -finding.severity))


def advise(reduction: Reduction, target: Format) -> str:
    """What to do about an accumulator that was seen to swallow terms of one sign; empty where nothing was seen.

    Nobody accumulates in 8 bits, so for those formats the numbers are in the table and that is all.
    """
    limits, r = Limits(), reduction
    lossy = r.swallowed >= limits.swallowed_mass_warn and r.accumulator_error >= limits.reduction_error_warn
    if target.bits == 8 or r.op == "mean" or not lossy or (r.op == "sum" and not _one_sign(r, limits)):
        return ""
    what = "sum" if r.op == "sum" else "sum of squares"
    seen = "" if r.accumulator_terms == r.terms else f" (seen on the first {r.accumulator_terms} of {r.terms} terms)"
    return (
        f"{r.op} over dim={r.dim} in FP32: {share(r.swallowed)} of the mass of the {what} is swallowed by a {target.name} "
        f"accumulator, its result is {_off(r.accumulator_error)}{seen}{_library_note(r)}"
    )


def _one_sign(r: Reduction, limits: Limits) -> bool:
    """Terms of mixed sign cancel; then the accumulator's error is noise around nothing, and no mass was lost for good."""
    return r.condition is not None and r.condition < limits.one_sign_condition


def _off(error: float) -> str:
    return "not finite" if error == float("inf") else f"{share(error)} off"


def _library_note(r: Reduction) -> str:
    call = "torch.linalg.vector_norm" if r.op == "norm" else f"torch.{r.op}"
    if r.library_error is None:
        return f"; {call} has no kernel for this format"
    if r.library_overflow:
        return ""
    return f"; {call} itself accumulates wider and is {_off(r.library_error)}"


def _finding(
    report: TensorReport, code: str, severity: Severity, message: str, hint: str, value: float | None = None,
    limit: float | None = None, **evidence: Any,
) -> Finding:  # fmt: skip
    return Finding(code, severity, message, hint, site=report.name, value=value, limit=limit, evidence=evidence)


@rule("NONFINITE_VALUES", Severity.ERROR)
def nonfinite_source(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """The tensor holds NaN or infinity before any cast.

    Why: no format repairs it; whatever made it is upstream. Minus infinity alone is how attention masks are written.

    Fix: find the first operation that made it (`nanny run`), or clean the data.
    """
    v = report.values
    bad = v.nan + v.posinf + v.neginf
    if not bad:
        return
    mask = not v.nan and not v.posinf
    parts = [f"{n} {name}" for n, name in ((v.nan, "NaN"), (v.posinf, "+Inf"), (v.neginf, "-Inf")) if n]
    yield _finding(
        report, "NONFINITE_VALUES", Severity.INFO if mask else Severity.ERROR,
        f"{' and '.join(parts)} among {v.count} elements, before any cast",
        "fine if this is an attention mask and no row is masked whole" if mask
        else "no format repairs this: find the operation that made them, the numbers below are about the finite rest",
        value=bad / v.count,
    )  # fmt: skip


@rule("CAST_OVERFLOW", Severity.ERROR)
def cast_overflow(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """Finite values leave the range of the target format.

    Why: they become infinity (in e4m3, which has none, the largest value or NaN), and one infinity is enough to make a NaN.

    Fix: scale down by a power of two, or take a format with a wider range (bf16).
    """
    fit = report.ranges[0]
    if fit.overflowed <= limits.overflow_share_error:
        return
    becomes = "infinity" if target.has_inf else f"{short(target.max)}, or NaN on other hardware"
    yield _finding(
        report, "CAST_OVERFLOW", Severity.ERROR,
        f"{share(fit.overflowed)} of {fit.count} values ({share(fit.overflowed_energy)} of the energy) are too large for "
        f"{target.name} and become {becomes}: largest magnitude {short(report.values.absmax)}, the format ends at "
        f"{short(target.max)}",
        _range_hint(fit, target),
        value=fit.overflowed, limit=limits.overflow_share_error, absmax=report.values.absmax,
        energy=fit.overflowed_energy,
    )  # fmt: skip


@rule("LOW_HEADROOM", Severity.WARNING)
def low_headroom(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """The largest value is close to the end of FP16.

    Why: activations and gradients grow during training; a doubling away from infinity is no margin. FP8 is scaled to its end on
    purpose and BF16 has no end in practice, so both are left out.

    Fix: bf16, or normalise before this point.
    """
    bits = report.ranges[0].headroom_bits
    if target.name != "fp16" or bits is None or report.ranges[0].overflowed or bits >= limits.headroom_info_bits:
        return
    near = bits < limits.headroom_warn_bits
    yield _finding(
        report, "LOW_HEADROOM", Severity.WARNING if near else Severity.INFO,
        f"largest magnitude {short(report.values.absmax)}, and fp16 ends at 65504: {max(bits, 0.0):.2g} bits of headroom",
        f"use bf16, or scale or normalise before this point: {max(2.0**bits, 1.0):.2g} times larger is infinity",
        value=bits, limit=limits.headroom_warn_bits if near else limits.headroom_info_bits,
    )  # fmt: skip


@rule("CAST_FLUSH", Severity.ERROR)
def cast_flush(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """Values that matter become zero.

    Why: below half the smallest subnormal a cast gives 0. Judged by energy: on a log-normal tensor a third of the elements may
    flush and hold nothing.

    Fix: multiply by a power of two inside the stated window (loss scaling, for gradients), or bf16.
    """
    fit = report.ranges[0]
    whole = fit.count > 0 and fit.flushed == 1
    if not whole and fit.flushed_energy < limits.flush_energy_warn:
        return
    severe = whole or fit.flushed_energy >= limits.flush_energy_error
    lost = "the whole tensor is lost" if whole else f"with {share(fit.flushed_energy)} of the energy"
    yield _finding(
        report, "CAST_FLUSH", Severity.ERROR if severe else Severity.WARNING,
        f"{share(fit.flushed)} of {fit.count} non-zero values become 0 in {target.name} (at or below "
        f"{short(target.flush_at)}): {lost}",
        _range_hint(fit, target),
        value=fit.flushed_energy, limit=limits.flush_energy_error if severe else limits.flush_energy_warn,
        flushed=fit.flushed,
    )  # fmt: skip


@rule("CAST_SUBNORMAL", Severity.ERROR)
def cast_subnormal(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """Most of the tensor lies where the format has only a few bits left, and the measured error shows it.

    Why: subnormals have a fixed spacing, so the relative error grows to 100 % towards the bottom.

    Fix: as for values that become zero: a power-of-two scale, or bf16.
    """
    fit, error = report.ranges[0], report.resolution.rel_l2
    limit = rel_l2_warn(target, limits)
    if fit.subnormal_energy < limits.subnormal_energy_warn or error < limit or fit.flushed_energy >= limits.flush_energy_warn:
        return
    yield _finding(
        report, "CAST_SUBNORMAL", Severity.ERROR if error >= limits.rel_l2_error else Severity.WARNING,
        f"{share(fit.subnormal_energy)} of the energy is below {short(target.min_normal)}, where {target.name} has few bits "
        f"left: the cast is {share(error)} off (relative L2), in the normal range it would be about "
        f"{share(target.unit_roundoff * 0.43)}",
        _range_hint(fit, target),
        value=error, limit=limit, subnormal_energy=fit.subnormal_energy,
    )  # fmt: skip


def rel_l2_warn(target: Format, limits: Limits) -> float:
    """A number of roundoffs, but never above the error limit: fp8 alone is coarse by design."""
    return min(limits.rel_l2_warn_roundoffs * target.unit_roundoff, limits.rel_l2_error)


@rule("VARIATION_LOST", Severity.ERROR)
def variation_lost(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """A large common offset with a small variation: the format's spacing there is wider than what varies.

    Why: the relative error looks perfect, but the information is in the differences, and those are rounded away.

    Fix: subtract the offset before the cast, or keep this tensor in FP32.
    """
    r = report.resolution
    if r.spacing_ratio is None or report.values.rms < target.min_normal:
        return
    ratio = r.spacing_ratio if r.spacing_ratio_median is None else r.spacing_ratio_median
    some = (r.positions_lost or 0.0) >= limits.positions_lost_warn
    warn = max(limits.spacing_ratio_warn, limits.spacing_ratio_roundoffs * target.unit_roundoff)
    gone = max(limits.spacing_ratio_error, 2 * warn)
    vector = sum(size > 1 for size in report.shape) < 2  # no batch, and healthy gains around 1 vary little
    if ratio < (gone if vector else warn) and not some:
        return
    if r.same_dtype or r.exact:
        severity = Severity.INFO
    else:
        severity = Severity.ERROR if ratio >= gone and not vector else Severity.WARNING
    centred = "" if r.centred is None else f"; the cast error is {share(r.centred)} of the varying part"
    yield _finding(
        report, "VARIATION_LOST", severity,
        _variation(r, target, ratio) + centred,
        "subtract the common offset before the cast, or keep this tensor in FP32",
        value=ratio, limit=gone if ratio >= gone else warn, centred=r.centred, varying=r.varying,
        positions_lost=r.positions_lost,
    )  # fmt: skip


def _variation(r: Resolution, target: Format, ratio: float) -> str:
    if r.positions_lost is None:
        return (
            f"the values vary over dim {r.varying_dim} by {share(r.varying)} of their size, and the steps of {target.name} "
            f"there are {short(ratio)} times that variation"
        )
    return (
        f"small variation on a large offset: the steps of {target.name} are {short(ratio)} times the variation over "
        f"dim {r.varying_dim} at a typical position, and wider than it at {share(r.positions_lost)} of the positions"
    )


@rule("INTEGERS_ROUNDED", Severity.ERROR)
def integers_rounded(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """Whole numbers (ids, positions, timesteps, counts) that the format cannot tell apart.

    Why: all integers are exact only up to 2**p: 256 in bf16, 2048 in fp16. Beyond, neighbours collapse.

    Fix: keep integers in an integer type or FP32.
    """
    n = report.resolution.integers
    if n is None or not n.changed:
        return
    severity = Severity.ERROR if n.collisions >= limits.rel_mark_error else Severity.WARNING
    if target.bits == 8 or (n.distinct < limits.integers_distinct_warn and not n.collisions):
        severity = Severity.INFO
    together = f", {n.distinct} distinct values become {n.distinct_after}" if n.distinct_after < n.distinct else ""
    yield _finding(
        report, "INTEGERS_ROUNDED", severity,
        f"all values are integers, {target.name} holds them exactly only up to {target.exact_integers}: {share(n.changed)} "
        f"become another integer{together}",
        "if these are ids, positions, timesteps or counts, keep them in an integer type or FP32",
        value=n.collisions, limit=0.0, changed=n.changed, distinct=n.distinct, distinct_after=n.distinct_after,
    )  # fmt: skip


@rule("SCALE_IMBALANCE", Severity.WARNING)
def scale_imbalance(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """Indices of very different size that a reduction would add up: the small half does not survive in the result.

    Why: the sum is stored with the spacing of its largest term (absorption). Without such a reduction there is no harm.

    Fix: bring the indices to one scale, or reduce in FP32 and keep the result there.
    """
    for r in report.reductions:
        if r.small_half_error is None or r.small_half_ratio is None or target.bits == 8:
            continue
        notable = limits.imbalance_notable_roundoffs / target.unit_roundoff
        if r.small_half_ratio < notable or r.small_half_error < limits.spacing_ratio_warn or r.library_overflow:
            continue
        top = next((d.top for d in report.dimensions if d.dim == r.dim), ())
        who = f" (index {top[0].index} dominates: rms {short(top[0].rms)})" if top else ""
        yield _finding(
            report, "SCALE_IMBALANCE", Severity.WARNING,
            f"summed over dim={r.dim} in {target.name}, the smaller half of its {r.terms} indices is "
            f"{'lost' if r.small_half_error >= 1 else 'blurred'}: the result's error is {short(r.small_half_error)} times what "
            f"they add up to; the largest index is {short(r.small_half_ratio)} times a typical small one{who}",
            f"if dim={r.dim} is ever reduced or mixed (sum, mean, norm, matmul): bring its indices to one scale first, or "
            f"reduce in FP32 and keep the result in FP32",
            value=r.small_half_error, limit=limits.spacing_ratio_warn, dim=r.dim, ratio=r.small_half_ratio,
        )  # fmt: skip


@rule("REDUCTION_OVERFLOW", Severity.WARNING)
def reduction_overflow(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """A sum or norm of values that all fit does not fit itself.

    Why: torch accumulates wider but stores the result in the input's type; dividing by that infinity then gives a silent 0.

    Fix: `x.sum(dim, dtype=torch.float32)`, or `mean` where it will do.
    """
    over = [r for r in report.reductions if r.library_overflow]
    if not over:
        return
    seen = "; ".join(
        f"{r.op} over dim={r.dim}: {r.library_overflow} of {r.results} results, of {r.terms} terms each" for r in over
    )
    first = over[0]
    yield _finding(
        report, "REDUCTION_OVERFLOW", Severity.WARNING,
        f"every term fits into {target.name}, the result in torch's own kernel does not: {seen}",
        f"if it is ever reduced, reduce in FP32: x.sum(dim={first.dim}, dtype=torch.float32)" if first.op == "sum"
        else f"if it is ever reduced, reduce in FP32: x.float() before the {first.op} over dim={first.dim}",
        value=max(r.library_overflow / r.results for r in over), limit=0.0, dims=sorted({r.dim for r in over}),
    )  # fmt: skip


@rule("REDUCTION_ERROR", Severity.ERROR)
def reduction_error(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """torch's own reduction is further off than rounding the terms explains.

    Why: some kernels accumulate in the storage type.

    Fix: reduce in FP32.
    """
    for r in report.reductions:
        error = r.library_error
        if error is None or r.library_overflow or error < limits.reduction_error_warn:
            continue
        cast = max(target.unit_roundoff, report.resolution.rel_l2)
        last = target.spacing(r.result_rms) / r.result_rms if r.result_rms else 1.0
        explained = limits.reduction_slack * (r.condition or 1.0) * cast + last
        if error <= explained:
            continue
        yield _finding(
            report, "REDUCTION_ERROR", Severity.ERROR if error >= limits.reduction_error_error else Severity.WARNING,
            f"torch's {r.op} over dim={r.dim} on {target.name} is {_off(error)} (float64 reference); rounding of the terms "
            f"explains {share(explained)}",
            f"reduce dim={r.dim} in FP32",
            value=error, limit=limits.reduction_error_warn, dim=r.dim, op=r.op,
        )  # fmt: skip


@rule("ACCUMULATOR_STALL", Severity.INFO)
def accumulator_stall(report: TensorReport, target: Format, limits: Limits) -> Iterator[Finding]:
    """A count that stops: equal terms added one by one in the target format.

    Why: at 2**p times the term (256 in bf16, 2048 in fp16) the next term is half a step and rounds away, for ever. torch.sum
    does not suffer from it; `acc += x`, scatter-type backward passes and gradient accumulation do.

    Fix: count in an integer or in FP32.
    """
    for r in report.reductions:
        if r.op != "sum" or not r.equal_terms or target.bits == 8 or r.swallowed < limits.swallowed_mass_error:
            continue
        yield _finding(
            report, "ACCUMULATOR_STALL", Severity.INFO,
            f"all non-zero terms over dim={r.dim} are equal: a {target.name} accumulator stops after {target.exact_integers} of "
            f"them and swallowed {share(r.swallowed)} of the sum{_library_note(r)}",
            "count in an integer or in FP32 wherever this is added up by hand (acc += x)",
            value=r.swallowed, limit=limits.swallowed_mass_error, dim=r.dim,
        )  # fmt: skip


def _range_hint(fit: RangeFit, target: Format) -> str:
    low, high = fit.scale_low, fit.scale_high
    other = "" if target.name == "bf16" else ", or use bf16"
    if low is None or high is None:
        return f"keep this tensor in FP32{other}"
    if low > high:
        return (
            f"no single scale fits: the values span {low - high} bits more than {target.name} has; scale per channel or tile, "
            f"or keep this tensor in FP32{other}"
        )
    window = f"2**{low}" if low == high else f"2**{low} to 2**{high}"
    return f"multiply by a power of two before the cast: {window} fits{other}"
