"""Steps that do not come out the same twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.examination import operation
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Signs


@cause("not_reproducible", family="not_precision", precision=False)
def not_reproducible(signs: Signs) -> Iterator[Diagnosis]:
    """The bad step, run again on the same inputs from the same random state, gives other numbers.

    Confirm: run the named operation twice on the same tensors and compare with torch.equal; then on another machine.
    """
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
