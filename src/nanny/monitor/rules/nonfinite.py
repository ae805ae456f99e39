"""NaN, infinities and overflow: the first producer, once; those who passed it on are listed under it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...core.finding import Severity
from ...core.formats import FP16
from ...core.numbers import amount
from ...core.step import SiteTable, StepRecord
from ...diagnose.first_nonfinite import Culprit, bad_sites, counts, culprit_of, turned_to_nan
from ...diagnose.history import RunHistory
from ..registry import Observation, rule


def _if_code(code: str, step: StepRecord) -> Iterator[Culprit]:
    culprit = culprit_of(step)
    if culprit is not None and culprit.code == code:
        yield culprit


def _without_consequence(step: StepRecord, culprit: Culprit) -> bool:
    """Seen in a module's output, but neither the loss nor any gradient is touched: distances put to infinity, unused outputs."""
    arrived = step.grads if step.grads is not None else step.output_grads
    if culprit.call is None or step.loss is None or not math.isfinite(step.loss) or arrived is None:
        return False
    return not bad_sites(arrived)


_ELSEWHERE = "look at the other ranks: `nanny summary --db FOLDER` reads the files of all and names the first"


def _marks(culprit: Culprit) -> bool:
    """NaN among numbers, which nothing is computed from: how a program says that something is not known."""
    return culprit.call is not None and 0 < culprit.call.nan < culprit.call.count


_UNTOUCHED = "; loss and gradients are finite, so it has not reached them"


@rule("NAN", Severity.ERROR, needs="nonfinite")
def nan(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A NaN appeared where there was none before.

    Why: it spreads to everything that depends on it; without a GradScaler the next optimizer step writes it into the weights.

    Fix: look at the named module: log or sqrt of a negative, 0/0, inf - inf (a score or exp out of range just before), a fully
    masked softmax row. In fp16 compute that part in FP32 (`with torch.autocast(device, enabled=False)` and `.float()`).
    """
    for culprit in _if_code("NAN", step):
        idle = _without_consequence(step, culprit)
        said = culprit.message + _UNTOUCHED * idle
        hint = _ELSEWHERE * step.from_others
        severity = None if not idle else Severity.INFO if _marks(culprit) else Severity.WARNING
        yield Observation(said, culprit.site, severity=severity, evidence=culprit.evidence, hint=hint)
    first = culprit_of(step)
    turned = turned_to_nan(step, first) if first is not None else None
    if first is not None and turned is not None:
        yield Observation(
            f"the infinity from `{first.site}` becomes NaN here ({counts(turned)})",
            turned.site,
            severity=Severity.WARNING,
            evidence={"from": first.site},
            hint=f"mend `{first.site}` first",
        )


@rule("INF", Severity.ERROR, needs="nonfinite")
def inf(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """An infinity appeared where there was none before.

    Why: the next subtraction or softmax turns it into NaN, and a division by it silently into 0.

    Fix: find what grows without bound or is divided by zero in the named module; add an eps inside the root or the logarithm.
    """
    for culprit in _if_code("INF", step):
        idle = _without_consequence(step, culprit)
        said = culprit.message + _UNTOUCHED * idle
        hint = _ELSEWHERE * step.from_others
        yield Observation(
            said, culprit.site, severity=Severity.INFO if idle else None, evidence=culprit.evidence, hint=hint
        )  # fmt: skip


@rule("OVERFLOW", Severity.ERROR, cause="activation_overflow_fp16", needs="nonfinite")
def overflow(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A module's output left the range of fp16 in the forward pass.

    Why: no loss scale can help, the forward pass does not know it. The infinity becomes NaN in the next softmax or norm.
    """
    for culprit in _if_code("OVERFLOW", step):
        yield Observation(
            f"{culprit.message}; fp16 ends at {FP16.max:,.0f}", culprit.site, value=FP16.overflow_at, limit=FP16.max,
            evidence=culprit.evidence,
            hint="standardise the input in FP32 before the model; fp16 cannot hold it" if culprit.site == "input" else "",
        )  # fmt: skip


@rule("INPUT_NONFINITE", Severity.ERROR, cause="data_nan", needs="nonfinite")
def input_nonfinite(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """The data given to the model is not finite. Precision is not the cause.

    Why: nothing downstream can repair a NaN that came with the batch.
    """
    for culprit in _if_code("INPUT_NONFINITE", step):
        yield Observation(culprit.message, culprit.site, evidence=culprit.evidence)


@rule("WEIGHT_NONFINITE", Severity.ERROR, needs="nonfinite")
def weight_nonfinite(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A weight is NaN or infinite: an earlier update wrote it there, and nothing after it can be right.

    Why: without a GradScaler the optimizer applies whatever the gradients hold.

    Fix: stop, mend the first finding of this run, and go on from a checkpoint before it.
    """
    if run.weights_bad:
        return  # once is enough: from here on every layer is
    for culprit in _if_code("WEIGHT_NONFINITE", step):
        since = f" (gradients or loss were last bad at step {run.last_bad_step})" if run.last_bad_step is not None else ""
        yield Observation(culprit.message + since, culprit.site, evidence=culprit.evidence)


@rule("NEAR_OVERFLOW", Severity.WARNING, needs="outputs")
def near_overflow(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """An fp16 value stands close to 65504.

    Why: the next larger batch or a little growth makes it infinite.

    Fix: as for OVERFLOW, while the run is still healthy.
    """
    if step.bad_calls:
        return
    close = [(site, x) for site, x in _largest_fp16(step.outputs) if np.log2(FP16.max / x) < run.limits.headroom_warn_bits]
    if close:
        site, largest = close[0]  # in the order of execution; the others are mostly those it is handed on to
        also = f", and {amount(len(close) - 1, 'later module')}" if len(close) > 1 else ""
        yield Observation(
            f"reaches {largest:,.0f} in fp16, {np.log2(FP16.max / largest):.1f} bits below the limit {FP16.max:,.0f}{also}", site,
            value=largest, limit=FP16.max, evidence={"passed_on": [name for name, _ in close[1:]]},
        )  # fmt: skip


def _largest_fp16(table: SiteTable | None) -> Iterator[tuple[str, float]]:
    if table is None:
        return
    low, high = np.asarray(table.columns["min"]), np.asarray(table.columns["max"])
    largest = np.maximum(np.abs(low), np.abs(high))
    for i in np.flatnonzero(np.isfinite(largest) & (largest > FP16.max / 8)):
        if table.dtypes[i] == "float16":
            yield table.names[i], float(largest[i])


@rule("BUFFER_NONFINITE", Severity.ERROR, cause="bn_stats_poisoned", needs="buffers")
def buffer_nonfinite(step: StepRecord, run: RunHistory) -> Iterator[Observation]:
    """A buffer (running mean or variance) turned NaN or infinite.

    Why: a step that GradScaler skips has still updated BatchNorm's statistics in its forward pass. Training goes on and looks
    fine; evaluation gives NaN.
    """
    if step.buffers is None:
        return
    low, high = np.asarray(step.buffers.columns["min"]), np.asarray(step.buffers.columns["max"])
    bad = {step.buffers.names[i] for i in np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))}
    for name in sorted(bad - run.bad_buffers):
        yield Observation(
            f"turned non-finite{' in a step that was skipped' if step.skipped else ''}; evaluation will give NaN", name
        )
