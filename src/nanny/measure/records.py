"""What a comparison beside a reference tells: frozen records of plain numbers, without torch. Errors are fractions of 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorStats:
    """A low-precision tensor beside its reference. Errors are over the elements that are finite in both."""

    count: int
    rel_l2: float  # |x - y| / |y| as vectors
    centred: float | None  # against the part of y that varies over the batch; None if (nearly) nothing varies
    varying: float | None  # that part's share of y
    max_abs: float
    cosine: float | None
    ulp_p50: float  # error in spacings of the target format
    ulp_p99: float
    bias: float | None  # mean over standard deviation of the error
    reference_absmax: float
    reference_norm: float
    norm: float
    nan: int = 0
    inf: int = 0
    reference_nan: int = 0
    reference_inf: int = 0
    spoiled: int = 0  # not finite, but finite in the reference
    all_zero: bool = False  # although the reference is not

    @property
    def worst(self) -> float:
        """The larger of the plain and the centred error."""
        return max(self.rel_l2, self.centred or 0.0)


@dataclass(frozen=True)
class DimensionError:
    """Where along one dimension the error sits, everything else pooled."""

    dim: int
    size: int
    index: int  # holds most of the error
    error_share: float  # of the error's energy at that index
    loudest: int  # index with the largest reference rms
    rms_ratio: float | None  # that rms over the median of the non-zero ones
    rms_max: float
    rms_min: float
