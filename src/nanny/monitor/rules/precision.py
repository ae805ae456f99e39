"""The precision that was meant, and the precision that ran."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ...core.step import StepRecord
from ...diagnose.history import RunHistory
from ..registry import Observation, rule
from .ownership import breaches, evidence_of, names


@rule("AUTOCAST_NOT_APPLIED", Severity.WARNING, cause="autocast_not_applied", once=True, needs="breaches")
def autocast_not_applied(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """Low precision was meant, and the layers that it is for ran in FP32.

    Why: the model runs outside the autocast block (in another thread, before it, in float64), so the run is as slow and as large
    as without, and tells nothing about how the model does in low precision.
    """
    for one in breaches(step, "full_precision"):
        by, meant, ran = one.traits
        if by == "before":  # which may be meant
            yield Observation(
                f"{one.count} of {one.of} layers that autocast to {meant} would lower ran in {ran} before it was entered: "
                f"{names(one)}",
                one.names[0], severity=Severity.INFO, value=one.count / one.of, evidence=evidence_of(one),
            )  # fmt: skip
            continue
        if by == "thread":
            yield Observation(
                f"{one.count} of {one.of} layers that autocast to {meant} would lower ran in another thread, where it is off: "
                f"{names(one)}",
                one.names[0], value=one.count / one.of, evidence=evidence_of(one),
            )  # fmt: skip
            continue
        how = f"autocast to {meant} was entered" if by == "autocast" else "a GradScaler, which is for float16, scales the loss"
        yield Observation(
            f"{how}, and {one.count} of {one.of} layers that it would lower ran in {ran}: {names(one)}",
            one.names[0], severity=None if by == "autocast" else Severity.INFO,
            value=one.count / one.of, limit=0.5, evidence=evidence_of(one),
        )  # fmt: skip
