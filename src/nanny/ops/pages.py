"""What the findings of the operation tools mean, why they matter and what to do: the pages of `nanny rule`."""

from __future__ import annotations

from ..core.finding import Severity

PAGES: dict[str, tuple[Severity, str]] = {
    "OP_MISMATCH": (
        Severity.ERROR,
        """An operation's result is not what FP32 or FP64 on the CPU makes of the same inputs.

        Why: the kernel is wrong, adds up in too narrow a type, or its result does not fit into the type. Rounding is allowed for:
        by dtype, and by how far a roundoff in every input moves the result.

        Fix: save the call with `nanny trace --compare --dump` and run it alone with `nanny replay`; compute that operation in
        FP32 until the kernel is repaired. If it is expected, name it in `white_list`.
        """,
    ),
    "OP_NONFINITE": (
        Severity.WARNING,
        """An operation made NaN or Inf out of finite numbers, or was given them from outside.

        Why: it is the first of its chain; what only passed the damage on is counted under it. Infinities that were written on
        purpose (masks) do not count until something makes NaN of them. A step that a GradScaler skips shows here, too.

        Fix: look at the smallest and largest input in the log: a product beyond 65504 in fp16, a root or logarithm of a negative
        number, a division by 0. Compute that line in FP32, or clamp its input. For broken data or weights, look before the step.
        """,
    ),
}
