"""The full packed row (minimum, maximum, sum of squares, mean, exponent histogram) against `_foreach_norm` and `aminmax`.

run: python -m benchmarks measure
"""

from __future__ import annotations

import torch

from benchmarks.timing import note, ratio
from nanny.measure.rows import RowBuffer

TENSORS, ELEMENTS, BAR = 100, 1_000_000, 1.6


def main() -> int:
    tensors = [torch.randn(ELEMENTS) for _ in range(TENSORS)]

    def rows(histogram: bool) -> object:
        buffer = RowBuffer()
        for t in tensors:
            buffer.add(t, histogram=histogram)
        return buffer.start_read().table()

    def nanny() -> object:
        return rows(histogram=True)

    def floor() -> object:
        return torch._foreach_norm(tensors, 2), [torch.aminmax(t) for t in tensors]

    def without_histogram() -> object:
        return rows(histogram=False)

    full = ratio(nanny, floor, repeats=25)
    print(f"{TENSORS} tensors of {ELEMENTS:,} elements, fp32, {torch.get_num_threads()} threads")
    print(f"full packed row against foreach_norm + aminmax: {full}")
    print(f"the same without the histogram:                 {ratio(without_histogram, floor)}")
    note("full packed row against foreach_norm + aminmax", full.median, bar=BAR, control=full.control)
    print(full.verdict(BAR))
    return 0 if full.meets(BAR) else 1


if __name__ == "__main__":
    raise SystemExit(main())
