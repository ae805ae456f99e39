"""What each rule has earned on code of strangers, and what follows from it.

The numbers are those of the tables in `docs/check-triage.md` and of the field study before them: findings at first contact,
one per repository and cause. `mended` are the wrong ones that a mechanism has removed since. From them follow the default
set and how loud a rule may be; a rule that is not here has told nothing yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.finding import Severity


@dataclass(frozen=True)
class Credit:
    right: int
    wrong: int = 0
    mended: int = 0  # of the wrong ones


CREDIT = {
    "CONFIG_CONFLICT": Credit(1),
    "CONFIG_DOUBLE_SCALING": Credit(0, 1, 1),
    "CONFIG_LOSS_SCALE": Credit(10, 2, 2),
    "CONFIG_REDUCE_DTYPE": Credit(32, 2, 1),
    "CONFIG_TRUE_HALF": Credit(2, 2, 2),
    "HALF_ACCUMULATOR": Credit(2, 5, 5),
    "HALF_CALL": Credit(23, 16, 14),
    "HALF_DEFAULT_DTYPE": Credit(3),
    "HALF_LOSS_INPUT": Credit(1, 3, 2),
    "HALF_NORM": Credit(1, 3, 3),
    "HALF_PARAMETERS": Credit(9, 6, 5),
    "NUM_EPS_UNDERFLOW": Credit(4, 3, 3),
    "NUM_EXP_HALF": Credit(0, 1, 1),
    "NUM_INDEXED_WRITE": Credit(0, 2, 2),
    "NUM_LOGSUMEXP": Credit(0, 1, 1),
    "NUM_LOG_OF_SIGMOID": Credit(2),
    "NUM_MASK_CONSTANT": Credit(1, 1, 0),  # right on a program written by someone who knew no rule, not in the field
    "NUM_NUMPY_BF16": Credit(0, 2, 2),
    "NUM_POSITIONS": Credit(10, 8, 8),
    "NUM_REDUCE_HALF": Credit(1, 10, 9),
    "NUM_SOFTMAX_HALF": Credit(4, 4, 4),
    "NUM_UNSUPPORTED_OP": Credit(0, 1, 0),
    "REGION_BACKWARD_INSIDE": Credit(1, 1, 1),
    "REGION_BCE": Credit(1, 1, 1),
    "REGION_CUSTOM_FUNCTION": Credit(1, 1, 0),
    "REGION_DEVICE": Credit(1, 4, 4),
    "REGION_DTYPE": Credit(0, 1, 1),
    "REGION_ISLAND_STILL_HALF": Credit(3, 1, 1),
    "REGION_LOSS_OUTSIDE": Credit(11, 1, 1),
    "REGION_NO_DEVICE": Credit(1),
    "SCALER_BACKWARD_UNSCALED": Credit(1, 5, 5),
    "SCALER_CLIP_BEFORE_UNSCALE": Credit(17, 3, 3),
    "SCALER_GRADS_STILL_SCALED": Credit(3, 6, 5),
    "SCALER_GRAD_PENALTY": Credit(0, 1, 1),
    "SCALER_IN_ACCUMULATION": Credit(5, 2, 2),
    "SCALER_MISSING": Credit(17, 5, 4),
    "SCALER_NOT_LOADED": Credit(1),
    "SCALER_NOT_SAVED": Credit(111, 7, 4),
    "SCALER_NOT_SHARDED": Credit(7, 1, 1),
    "SCALER_REBUILT": Credit(15, 3, 3),
    "SCALER_SETTINGS": Credit(0, 1, 1),
    "SCALER_STEP_BYPASSED": Credit(1, 4, 4),
    "SCALER_UNSCALE_TWICE": Credit(0, 2, 2),
    "SCALER_UPDATE_MISPLACED": Credit(6, 4, 4),
    "SCALER_WITHOUT_AUTOCAST": Credit(1, 2, 2),
    "SCALER_WITH_BF16": Credit(19, 4, 4),
}


def is_off_by_default(code: str) -> bool:
    """Whether a rule has left the default set: it was wrong, never right, and nothing has mended it."""
    credit = CREDIT.get(code)
    return credit is not None and not credit.right and credit.wrong > credit.mended


def is_trusted(code: str) -> bool:
    """Whether a rule has been right on code of strangers, and wrong at most once for every four times that it was.

    The mended ones count, too: a set of new repositories brings mechanisms of its own.
    """
    credit = CREDIT.get(code)
    return credit is not None and credit.right >= max(1, 4 * credit.wrong)


def loudest(code: str, severity: Severity, is_open: bool = False) -> Severity:
    """What a finding may be told as at most: an ERROR is earned, and what rests on something unknown (`is_open`) is a remark
    unless the rule's guesses have been right."""
    if is_trusted(code):
        return min(severity, Severity.WARNING) if is_open else severity
    return min(severity, Severity.INFO if is_open else Severity.WARNING)
