"""Facts of the floating-point formats, and the layout of exponent histograms.

All constants follow from (significant bits, exponent range); `tests/core/test_formats.py` checks each against torch's own casts.
No torch here: stored histograms are judged without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .finding import NannyError


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals."""

    name: str
    torch_name: str
    bits: int
    significand: int  # p: significant bits, the implicit one included
    min_exponent: int  # of the smallest normal: 2 ** min_exponent
    max: float  # largest finite value
    has_inf: bool = True  # without, torch's cast clamps a value out of range to the largest finite one

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0 ** (1 - self.significand)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a value in the normal range."""
        return 2.0**-self.significand

    @property
    def min_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.significand + 1)

    @property
    def flush_at(self) -> float:
        """Magnitudes at or below this round to zero (ties go to even)."""
        return self.min_subnormal / 2

    @property
    def overflow_at(self) -> float:
        """The smallest magnitude that leaves the finite range; the largest that still fits where there is no infinity.

        Ties go to even: half a spacing above 65504 (odd significand) is infinity, half a spacing above 448 (even) is 448.
        """
        return self.max + self.spacing(self.max) / 2

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1

    @property
    def exact_integers(self) -> int:
        """All integers up to this magnitude are exact."""
        return 1 << self.significand

    def spacing(self, value: float) -> float:
        """Distance between neighbouring values of the format at this magnitude (one ulp)."""
        if value == 0 or not math.isfinite(value):
            return self.min_subnormal
        exponent = min(max(math.frexp(abs(value))[1] - 1, self.min_exponent), self.max_exponent)
        return 2.0 ** (exponent - self.significand + 1)


FP16 = Format("fp16", "float16", 16, 11, -14, 65504.0)
BF16 = Format("bf16", "bfloat16", 16, 8, -126, (2 - 2.0**-7) * 2.0**127)
FP8_E4M3 = Format("fp8_e4m3", "float8_e4m3fn", 8, 4, -6, 448.0, has_inf=False)
FP8_E5M2 = Format("fp8_e5m2", "float8_e5m2", 8, 3, -14, 57344.0)
FP32 = Format("fp32", "float32", 32, 24, -126, (2 - 2.0**-23) * 2.0**127)
FP64 = Format("fp64", "float64", 64, 53, -1022, 1.7976931348623157e308)

HALVES = (FP16.torch_name, BF16.torch_name)
NARROW = (*HALVES, FP8_E4M3.torch_name, FP8_E5M2.torch_name)  # what weights round back to
FORMATS = {f.name: f for f in (FP16, BF16, FP8_E4M3, FP8_E5M2, FP32, FP64)}
TARGETS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
_BY_TORCH_NAME = {f.torch_name: f for f in FORMATS.values()} | {"half": FP16, "float": FP32, "double": FP64}


def format_of(name: object) -> Format:
    """The format of a short name (`fp16`), a torch name (`torch.float16`, `float16`) or a `torch.dtype`."""
    text = str(name).removeprefix("torch.").lower()
    found = FORMATS.get(text) or _BY_TORCH_NAME.get(text)
    if found is None:
        raise NannyError(f"unknown floating-point format {text!r}; use one of: {', '.join(FORMATS)}")
    return found


def short_name(dtype: str) -> str:
    """`bf16` for `bfloat16`; what is no floating-point format, such as `int64`, keeps its name."""
    return _BY_TORCH_NAME[dtype].name if dtype in _BY_TORCH_NAME else dtype


# The exponent histogram: one bin per binary order of magnitude of fp32, so that one sample answers for every narrower format and
# every power-of-two scale. A value x falls into the bin of floor(log2|x|); fp32's own subnormals share one bin.
LOWEST_EXPONENT = -126
HIGHEST_EXPONENT = 127
ZERO_BIN = 0
BELOW_BIN = 1  # non-zero, below 2**-126
FIRST_BIN = 2  # 2**-126 up to 2**-125
LAST_BIN = FIRST_BIN + HIGHEST_EXPONENT - LOWEST_EXPONENT
NONFINITE_BIN = LAST_BIN + 1
ABOVE_BIN = LAST_BIN + 2  # finite, 2**128 or more (fp64 sources only)
HISTOGRAM_BINS = LAST_BIN + 3


def exponent_of(index: int) -> int:
    """The binary exponent that a bin of finite, non-zero values stands for."""
    return HIGHEST_EXPONENT + 1 if index == ABOVE_BIN else index - FIRST_BIN + LOWEST_EXPONENT


FINITE_BINS = (*range(BELOW_BIN, LAST_BIN + 1), ABOVE_BIN)  # non-zero, by rising exponent
