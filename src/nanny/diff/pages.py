"""What the findings of `nanny diff` mean, why they matter and what to do: the pages of `nanny rule`."""

from __future__ import annotations

from ..core.finding import Severity

PAGES: dict[str, tuple[Severity, str]] = {
    "TARGET_RAISES": (
        Severity.ERROR,
        """The model runs in FP32 but raises in the target precision.

        Why: an operation has no kernel for the type, or two types meet in one operation. The site is the innermost module that
        raised.

        Fix: cast the inputs of that operation with .float(), or keep the module out of autocast.
        """,
    ),
    "REFERENCE_NONFINITE": (
        Severity.WARNING,
        """The FP32 reference has NaN or Inf at the same place: precision is not the cause.

        Why: a logarithm or root of 0, a division by 0, broken data or broken weights look the same in every format.

        Fix: look at the inputs and the code of the named module; changing the format will not help.
        """,
    ),
    "DIFF_NONFINITE": (
        Severity.ERROR,
        """A module makes NaN or Inf where the reference stays finite.

        Why: a result left the range of the format, or a small number became 0 and was divided by. The named module made it; the
        ones that only passed it on are listed behind it.

        Fix: keep that part in FP32, normalise or rescale before it, or use an eps that the format can hold (2**-24 in fp16).
        """,
    ),
    "LOSS_NONFINITE": (
        Severity.ERROR,
        """The outputs are finite, but the loss is not, while the reference loss is.

        Why: squares, sums or exponentials in the loss function left the range of the format. The operation that made the first
        NaN or Inf is named (`op:pow`).

        Fix: compute the loss in FP32: loss_fn(output.float(), target), with the target in FP32 too.
        """,
    ),
    "LAYER_ERROR": (
        Severity.WARNING,
        """A module's own operations lose far more than rounding explains.

        Why: on exact inputs, in the target precision, its result is off by more than 25 roundoffs, or by more than a quarter of
        what varies over the batch. Typical: a difference of close numbers, a large offset, a sum kept in half. Where several
        stand out, runs with one of them kept in FP32 tell which is behind it. Code of the model's own forward or of the loss is
        named by its operation (`op:sub`). Information as long as neither outputs nor gradients suffer, an error when they are
        destroyed.

        Fix: keep the module in FP32 (`nanny diff --advise` finds the smallest set), or rewrite the formula.
        """,
    ),
    "ERROR_ADDS_UP": (
        Severity.WARNING,
        """The output is far off although no single module is to blame.

        Why: small errors of many layers add up, or the model amplifies any change. In the second case it is information: rounding
        each layer's output once, in FP32, does as much.

        Fix: keep the residual stream or the recurrent state in FP32, or normalise between layers.
        """,
    ),
    "GRADIENT_NONFINITE": (
        Severity.ERROR,
        """The forward pass is finite, but gradients have NaN or Inf that the reference gradients do not have.

        Why: a singular backward (root, division or norm at 0), or a product beyond the range at every loss scale that was tried.

        Fix: compute that part in FP32, with an eps that the format can hold.
        """,
    ),
    "GRADIENT_LOST": (
        Severity.ERROR,
        """Parameters without any gradient that have one in the reference.

        Why: every element became 0 on the way back. Information if these parameters hold less than 1 % of the gradient's energy.

        Fix: train fp16 with a GradScaler; rescale that part of the loss, or use bf16.
        """,
    ),
    "GRADIENT_ERROR": (
        Severity.WARNING,
        """The whole gradient is far from the reference gradient.

        Why: it is off by more than 5 %, and by more than twice what a change of one rounding in inputs and weights does to this
        model (ReLU signs and max-pool ties flip in health, and near an optimum the terms of a gradient cancel).

        Fix: see the layer that is blamed; if there is none, keep the named part in FP32.
        """,
    ),
    "DECISION_FLIPS": (
        Severity.WARNING,
        """A choice (argmax, top-k, sorting, sampling) falls otherwise than in the reference.

        Why: rounding ties or swaps close scores; a router then sends tokens to other experts. Comparisons are information.

        Fix: compute what is compared in FP32.
        """,
    ),
    "REL_ERROR": (
        Severity.WARNING,
        """A module's relative error is above the limit that was asked for with --rel-warn or --rel-error.

        Why: the limit is the user's. Plain limits such as 1 % fire on healthy models too, so there is none by default.

        Fix: see the columns `own` and `inherited`: only the first is the module's doing.
        """,
    ),
}
