"""Numbers too small for fp16."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...core.examination import Examination, GradientError
from ...core.formats import FP16
from ...core.numbers import share, short
from ..choose import first_bad_cause
from ..describe import by_first_bad, by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Signs
from .early import scale_sinks

_LEAST = FP16.flush_at / 2.0**24  # what is smaller, no scale that a GradScaler comes to can lift
_RANGE = FP16.min_subnormal / FP16.max  # what is smaller beside the largest, no loss scale can lift


def _worst_loss(signs: Signs) -> tuple[Examination, list[GradientError], float] | None:
    """The examined step with most weights that lost their gradient to zeros: those weights, and their share of all elements.

    By number, not by energy: Adam divides each gradient by its own size, so that a small one counts as much as a large one.
    """
    sizes = signs.facts.sizes
    best: tuple[Examination, list[GradientError], float] | None = None
    for exam in signs.clean_exams:
        known = [g for g in exam.gradients if 0 < g.reference_norm < math.inf and not g.nonfinite]
        largest = max((g.reference_norm for g in known), default=0.0)
        known = [g for g in known if g.reference_norm / math.sqrt(sizes.get(g.name, 1)) > max(_RANGE * largest, _LEAST)]
        gone = [
            g for g in known
            if g.error > signs.limits.diff_grad_error and g.zero_share > g.reference_zero_share + signs.limits.flush_energy_error
        ]  # fmt: skip
        total = sum(sizes.get(g.name, 1) for g in known)
        part = sum(sizes.get(g.name, 1) for g in gone) / total if total else 0.0
        if gone and (best is None or part > best[2]):
            best = exam, gone, part
    return best


def _underflow(signs: Signs, scaled: bool) -> Iterator[Diagnosis]:
    found = _worst_loss(signs)
    if found is None or found[2] < signs.limits.lost_gradient_elements or signs.amp_dtype not in ("float16", ""):
        return
    exam, gone, part = found
    flush = next((h for h in exam.hazards if h.kind == "flush" and h.place.phase == "backward"), None)
    if flush is None and (any(h.cause for h in exam.hazards) or part <= 0.5):
        return  # zeros with another reason, or in a part that a healthy run can spare
    if scaled != (exam.scale is not None and signs.facts.count("scale") > 0):
        return
    whole = [g for g in gone if g.norm == 0]
    worst = max(whole or gone, key=lambda g: g.reference_norm)
    yield Diagnosis(
        culprit="scaler.scale" if scaled else worst.name,
        confidence=CERTAIN,
        evidence=(
            f"step {exam.step}: {len(gone)} gradients, {share(part)} of all elements, lose over half of their size beside FP32",
            f"`{worst.name}`: {share(worst.zero_share)} of its gradient is exactly 0, in FP32 "
            f"{share(worst.reference_zero_share)}; its norm should be {short(worst.reference_norm)}",
            f"fp16 makes 0 of everything up to {short(FP16.flush_at)}; "
            + (f"the loss scale is {exam.scale:g}" if exam.scale else "there is no loss scaling"),
            *((flush.message,) if flush is not None and flush.message else ()),
        ),
        chain=("small gradients of activations", "below 3e-8 fp16 stores 0", "weights get no gradient"),
        step=exam.step,
        precision_caused=True,
    )


@cause("grad_underflow_no_scaling", family="underflow")
def grad_underflow(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients below 3e-8 become 0 in an fp16 backward pass without loss scaling."""
    yield from _underflow(signs, scaled=False)
    yield from _nothing_arrives(signs)


def _nothing_arrives(signs: Signs) -> Iterator[Diagnosis]:
    """What comes back to the model is 0 in fp16 already, at every step, and nobody has compared it (weights in shards)."""
    levels, finding = signs.facts.levels, signs.evidence.finding("UNDERFLOW")
    if finding is None or signs.facts.count("scale") or any(e.gradients for e in signs.clean_exams):
        return
    if not levels or any(g.steps < 3 or g.zeros < g.steps for g in levels) or signs.harmed:
        return
    everywhere = bool(finding.evidence.get("zero")) and finding.evidence.get("zero") == finding.evidence.get("sites")
    _, losses = signs.evidence.curve("loss")
    if not everywhere or not len(losses) or not losses.all():
        return
    yield Diagnosis(
        culprit=finding.evidence["zero"][-1],
        confidence=POSSIBLE,
        evidence=(
            f"all {len(levels)} gradients have been exactly 0 at every step, beside a loss of {short(float(losses[-1]))}",
            f"what comes back into `{finding.evidence['zero'][-1]}` is 0 in fp16 already, and there is no loss scaling",
        ),
        chain=("small gradients of activations", "below 3e-8 fp16 stores 0", "weights get no gradient"),
        step=finding.step,
        precision_caused=True,
    )


@cause("loss_scale_too_low", family="underflow")
def loss_scale_too_low(signs: Signs) -> Iterator[Diagnosis]:
    """There is a GradScaler, but its scale is too small for these gradients."""
    at = signs.first_bad
    if at is None or not at.hint or not signs.scale_search_failed:  # else steps that broke by themselves have brought it down
        yield from _underflow(signs, scaled=True)
    yield from scale_sinks(signs)


@cause("eps_underflow_fp16", family="underflow")
def eps_underflow(signs: Signs) -> Iterator[Diagnosis]:
    """A protecting epsilon (1e-8, 1e-12) is 0 in fp16, so a division or logarithm meets 0."""
    at = signs.first_bad
    if at is not None:
        if first_bad_cause(at, signs) == "eps_underflow_fp16":
            yield by_first_bad(signs, at, CERTAIN if at.source == "examination" else LIKELY)
        elif at.place.phase == "backward" and at.hint == "eps_underflow_fp16" and at.in_reference is False:
            yield by_first_bad(signs, at, CERTAIN)
    else:
        yield from by_hazard(signs, "eps_underflow_fp16")


@cause("product_underflow_fp16", family="underflow")
def product_underflow(signs: Signs) -> Iterator[Diagnosis]:
    """A product of many factors below 1 is 0 in fp16, and its logarithm -inf."""
    at = signs.first_bad
    if at is not None and at.hint == "product_underflow_fp16":
        yield by_first_bad(signs, at, CERTAIN)
    elif at is None:
        yield from by_hazard(signs, "product_underflow_fp16")
