"""What was wrong before the first operation, and masks."""

from __future__ import annotations

from ...core.numbers import share
from ..records import Suspect
from . import Step, Verdict, hazard


@hazard("given_nonfinite", rank=5)
def given_nonfinite(suspect: Suspect, step: Step) -> Verdict | None:
    """Data, weights or buffers that were NaN or infinite before the step"""
    if suspect.trouble != "given" or not suspect.destroyed:
        return None
    operand = suspect.operands[0]
    what = "NaN" if suspect.nan else "infinite"
    if operand.role == "parameter":
        return Verdict(
            f"the weights {operand.name} are {what} before the step begins: an earlier step destroyed them",
            remedy="go back to a checkpoint, and examine the step that destroys them",
            site=operand.name,
        )
    if operand.role == "buffer":
        return Verdict(
            f"the buffer {operand.name} is {what}: a step that was skipped has still written into it",
            cause="bn_stats_poisoned",
            remedy="restore the buffer, and keep non-finite batches away from it",
            site=operand.name.rpartition(".")[0] or operand.name,
        )
    if operand.role == "gradient":
        return Verdict(
            f"the gradient of {operand.name} is {what} before backward adds to it: it was not cleared after a skipped step",
            cause="stale_inf_grads",
            remedy="call optimizer.zero_grad() in every iteration, also after a step that the scaler skipped",
            site="loop:zero_grad",
        )
    site = "data:input" if operand.role == "input" else "data:target" if suspect.place.phase == "loop" else "data"
    return Verdict(
        f"the {'input' if operand.role == 'input' else 'data'} is {what} before any operation touches it",
        cause="data_nan",
        remedy="check the batch with torch.isfinite before training on it",
        site=site,
    )


@hazard("masked_rows", rank=8)
def masked_rows(suspect: Suspect, step: Step) -> Verdict | None:
    """Softmax over rows in which everything is masked"""
    rows = suspect.numbers.get("masked_rows", 0.0)
    if suspect.trouble != "nonfinite" or not rows or not suspect.destroyed:
        return None
    return Verdict(
        f"{share(rows)} of the rows of {suspect.op} are -inf throughout, which gives NaN",
        cause="mask_inf_full_row",
        remedy="leave at least one key per row, mask with a finite number of the format, or give a boolean mask to SDPA",
        value=rows,
        limit=0.0,
    )
