"""The formats once more, in exact rational arithmetic and from literals, to check the nanny's numbers against."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

# smallest normal exponent, significant bits, largest finite, first magnitude out of range (inclusive?)
GRID = {
    "fp16": (-14, 11, 65504, 65520, True),
    "bf16": (-126, 8, (2**8 - 1) * 2**120, (2**9 - 1) * 2**119, True),
    "fp8_e4m3": (-6, 4, 448, 464, False),
    "fp8_e5m2": (-14, 3, 57344, 61440, True),
}
HOSTILE = [
    0.0, -0.0, 1.0, -1.0, 65504.0, 65519.0, 65520.0, 65536.0, -65520.0, 2.0**-24, 2.0**-25, -(2.0**-25), 2.0**-25 * (1 +
    2.0**-23), 2.0**-14, 2.0**-14 * (1 - 2.0**-24), 1.5 * 2.0**-24, 2049.0, 2051.0, 257.0, 259.0, 1 + 2.0**-11, 1 + 3 *
    2.0**-11, 1 + 2.0**-8, 448.0, 464.0, 465.0, 479.0, 57344.0, 61439.0, 61440.0, 2.0**-10, 2.0**-9, 2.0**-17, 2.0**-16,
    3.3895e38, 3.4e38, 1e-45, 1e-40, 2.0**-126, 2.0**-133, 2.0**-134, 1e-30, 1e30, 0.1, 1 / 3, 1000.0, -1000.0, 1e-9,
]  # fmt: skip


def out_of_range(value: float, name: str) -> bool:
    edge, inclusive = GRID[name][3:]
    if math.isinf(value):
        return True
    return abs(Fraction(value)) >= edge if inclusive else abs(Fraction(value)) > edge


@cache
def ulp(value: float, name: str) -> Fraction:
    lowest, bits, top, *_ = GRID[name]
    exponent = max(_exponent(abs(Fraction(value))), lowest) if value else lowest
    return Fraction(2) ** (min(exponent, _exponent(Fraction(top))) - bits + 1)


def _exponent(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


@cache
def rounded(value: float, name: str) -> float:
    """To nearest, ties to even; infinity or, where there is none, the largest value beyond the range."""
    if out_of_range(value, name):
        return math.copysign(math.inf if GRID[name][4] else GRID[name][2], value)
    step = ulp(value, name)
    return float(round(Fraction(value) / step) * step)


def flushed(value: float, name: str) -> bool:
    return value != 0 and rounded(value, name) == 0


def subnormal(value: float, name: str) -> bool:
    return value != 0 and not flushed(value, name) and abs(Fraction(value)) < Fraction(2) ** GRID[name][0]


def energy(values: list[float]) -> float:
    return float(sum((Fraction(v) ** 2 for v in values), Fraction(0)))


def accumulated(terms: list[float], name: str) -> tuple[float, float]:
    """`acc += term` in the format, and the share of sum|term| that left the accumulator unchanged."""
    acc, lost, total = 0.0, Fraction(0), Fraction(0)
    for term in terms:
        before = acc
        acc = rounded(before + term, name)  # exact in float64 for 16-bit operands of similar size, which the tests use
        total += abs(Fraction(term))
        if acc == before:
            lost += abs(Fraction(term))
    return acc, float(lost / total) if total else 0.0
