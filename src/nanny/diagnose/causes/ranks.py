"""Trouble between the processes of a job."""

from __future__ import annotations

from collections.abc import Iterator

from ..records import Diagnosis
from ..registry import CERTAIN, cause
from ..signs import Signs


@cause("replicas_apart", family="not_precision", precision=False)
def replicas_apart(signs: Signs) -> Iterator[Diagnosis]:
    """Replicas of one model hold different numbers: the ranks train different models.

    Confirm: print the sum of the named parameter on every rank after the optimizer step.
    """
    found = signs.evidence.finding("RANKS_APART")
    if found is None:
        return
    by_gradient = found.evidence.get("of") == "grad"
    yield Diagnosis(
        culprit=found.site,
        confidence=CERTAIN,
        evidence=(f"step {found.step}: {found.message}",),
        chain=(
            *(("the gradients were not averaged over the ranks",) if by_gradient else ("an update that not every rank made",)),
            "each rank updates a model of its own",
            "what is averaged belongs to different models",
        ),
        step=found.step,
        precision_caused=False,
    )


@cause("reduce_dtype_low_precision", family="precision_loss")
def reduce_dtype_low_precision(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients of several ranks are added in 16 bits, and the sum is mostly rounding.

    Confirm: reduce in FP32 for some steps; the gradient norm and the loss change at once.
    """
    found = signs.evidence.finding("SUM_ROUNDED")
    if found is None:
        return
    yield Diagnosis(
        culprit=found.site,
        confidence=CERTAIN,
        evidence=(f"step {found.step}: {found.message}",),
        chain=(
            "each rank rounds its gradient, and the collective rounds again with every rank that it adds",
            "what the ranks have in common is small beside what cancels, and is lost in that",
            "the optimizer follows the rounding",
        ),
        step=found.step,
        precision_caused=True,
    )
