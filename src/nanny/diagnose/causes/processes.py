"""Trouble between the processes of a job, and between a step and itself, made once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.examination import operation
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Signs


@cause("replicas_apart", family="not_precision", precision=False)
def replicas_apart(signs: Signs) -> Iterator[Diagnosis]:
    """Replicas of one model hold different numbers: the ranks train different models."""
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
    """Gradients of several ranks are added in 16 bits, and the sum is mostly rounding."""
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


@cause("not_reproducible", family="not_precision", precision=False)
def not_reproducible(signs: Signs) -> Iterator[Diagnosis]:
    """The bad step, run again on the same inputs from the same random state, gives other numbers."""
    for exam, seen in signs.fact("not_reproducible"):
        others = [bad for bad in seen["bad"] if bad is not None]
        decides = len(set(others)) > 1  # bad in one run and not in another
        sure = CERTAIN if decides and seen["every_time"] else LIKELY if decides else POSSIBLE
        device = f" on {seen['device']}, rank {seen['rank']}"
        yield Diagnosis(
            culprit=seen["site"] or (operation(seen["op"]) if seen["op"] else f"device:{seen['device']}"),
            confidence=sure,
            evidence=tuple(_evidence(exam.step, seen, decides, device)),
            chain=("the same inputs", f"other bits out of {seen['op'] or 'the model'}{device}", "loss or gradients not finite"),
            step=exam.step,
            where=seen["where"],
        )
        return


def _evidence(step: int, seen: Mapping[str, Any], decides: bool, device: str) -> Iterator[str]:
    if seen["every_time"]:
        yield f"step {step} was run again twice: `{seen['op']}`{device} gave other bits of the same inputs"
    else:
        first = f", at `{seen['op']}` or before it" if seen["op"] else ""
        yield f"step {step} was run again twice: both gave the same bits, and the step itself{device} others{first}"
    if decides:
        bad = ["not finite" if b else "finite" for b in seen["bad"] if b is not None]
        yield f"the outputs of the model on the same inputs: {', then '.join(bad)}"
    else:
        yield "whether the numbers are finite did not depend on it"
