"""What each rule has earned on code of strangers, and what follows from it: how loud it may be.

The numbers are those of the table in `docs/check-triage.md`: findings at first contact, one per repository and cause. What was
wrong counts also where a mechanism has removed it since, and what was unclear (true, but no harm seen) was no help either.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.finding import Severity


@dataclass(frozen=True)
class Credit:
    right: int
    wrong: int = 0
    unclear: int = 0


NONE = Credit(0)
WARNS = 0.7  # of what it told was right; from higher bars fewer and no better ones pass, see the page
CREDIT = {
    "CONFIG_CONFLICT": Credit(1),
    "CONFIG_DOUBLE_SCALING": Credit(0, 1),
    "CONFIG_LOSS_SCALE": Credit(11, 2, 1),
    "CONFIG_REDUCE_DTYPE": Credit(34, 2),
    "CONFIG_TRUE_HALF": Credit(2, 2),
    "HALF_ACCUMULATOR": Credit(2, 5),
    "HALF_CALL": Credit(26, 17, 3),
    "HALF_DEFAULT_DTYPE": Credit(3),
    "HALF_LOSS_INPUT": Credit(1, 3, 1),
    "HALF_NORM": Credit(1, 3),
    "HALF_PARAMETERS": Credit(11, 6, 5),
    "NUM_EPS_UNDERFLOW": Credit(4, 3, 2),
    "NUM_EXP_HALF": Credit(0, 1),
    "NUM_INDEXED_WRITE": Credit(0, 2),
    "NUM_LOGSUMEXP": Credit(0, 1),
    "NUM_LOG_OF_SIGMOID": Credit(2, 0, 2),
    "NUM_MASK_CONSTANT": Credit(1, 1),  # right on a program written by someone who knew no rule, not in the field
    "NUM_NUMPY_BF16": Credit(0, 2),
    "NUM_POSITIONS": Credit(10, 8, 2),
    "NUM_REDUCE_HALF": Credit(1, 10, 4),
    "NUM_SOFTMAX_HALF": Credit(5, 4, 3),
    "NUM_UNSUPPORTED_OP": Credit(0, 1),
    "REGION_BACKWARD_INSIDE": Credit(1, 1, 27),
    "REGION_BCE": Credit(1, 1),
    "REGION_CUSTOM_FUNCTION": Credit(1, 1),
    "REGION_DEVICE": Credit(1, 4),
    "REGION_ISLAND_STILL_HALF": Credit(3, 1),
    "REGION_LOSS_OUTSIDE": Credit(12, 1, 1),
    "REGION_NO_DEVICE": Credit(2),
    "SCALER_BACKWARD_UNSCALED": Credit(1, 5),
    "SCALER_CLIP_BEFORE_UNSCALE": Credit(19, 3),
    "SCALER_GRADS_STILL_SCALED": Credit(3, 6),
    "SCALER_GRAD_PENALTY": Credit(0, 1, 1),
    "SCALER_IN_ACCUMULATION": Credit(5, 2),
    "SCALER_MISSING": Credit(19, 5, 3),
    "SCALER_NOT_LOADED": Credit(1, 0, 1),
    "SCALER_NOT_SAVED": Credit(122, 7, 29),
    "SCALER_NOT_SHARDED": Credit(7, 1, 1),
    "SCALER_REBUILT": Credit(17, 3),
    "SCALER_SETTINGS": Credit(0, 1),
    "SCALER_STEP_BYPASSED": Credit(1, 4),
    "SCALER_UNSCALE_TWICE": Credit(0, 2),
    "SCALER_UPDATE_MISPLACED": Credit(6, 4),
    "SCALER_WITHOUT_AUTOCAST": Credit(1, 2),
    "SCALER_WITH_BF16": Credit(23, 4, 1),
}


def is_trusted(code: str) -> bool:
    """Whether a rule has been right on code of strangers, and wrong at most once for every four times that it was."""
    credit = CREDIT.get(code, NONE)
    return credit.right >= max(1, 4 * credit.wrong)


def may_warn(code: str) -> bool:
    """Whether enough of what a rule has told on code of strangers was worth being told."""
    credit = CREDIT.get(code, NONE)
    return credit.right > 0 and credit.right >= WARNS * (credit.right + credit.wrong + credit.unclear)


def loudest(code: str, severity: Severity, is_open: bool = False, is_proven: bool = False) -> Severity:
    """What a finding may be told as at most: an ERROR and a WARNING are earned, what rests on something unknown (`is_open`) is
    told one step lower, and what the code in sight proves is a WARNING whatever its rule has earned."""
    most = Severity.INFO
    if may_warn(code):
        most = Severity.ERROR if is_trusted(code) else Severity.WARNING
    elif is_proven:
        most = Severity.WARNING
    return min(severity, Severity(max(most - is_open, Severity.INFO)))
