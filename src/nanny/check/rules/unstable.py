"""Formulas that are fine in float32 and break in half: exponentials, logarithms, sums, variances."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ...core.ops import (
    BOUNDING_FUNCTIONS,
    DIFFERENCES,
    FFT_FUNCTIONS,
    LOG_FUNCTIONS,
    MATMULS,
    MAX_FUNCTIONS,
    NEEDS_FLOAT,
    PLAIN_SUMS,
    RUNNING_SUMS,
    SAME_VALUES,
    SCALINGS,
    SQUARES,
    SUM_FUNCTIONS,
    autocast_list,
)
from ..chains import half_links, link, unknown_link
from ..interpreter.trace import Event, FileView
from ..interpreter.values import HALF, Value, ancestors
from ..registry import Hit, rule
from .training import MAKES_GRADIENTS, goes_backward

_PASS = SAME_VALUES | {"cast", "clamp", "clamp_min", "add", "part", "clone"}


def _is_promoted(event: Event) -> bool:
    """Whether autocast, or an explicit dtype, runs this operation in float32; an unknown device counts as promoting."""
    asked = event.kwargs.get("dtype")
    if asked is not None and not asked.is_none:
        return asked.const not in HALF
    region = event.at.region
    return region is not None and autocast_list(event.op, region.device) in ("float32", "unknown")


def _is_guess_in_evaluation(event: Event, view: FileView) -> bool:
    """A model's output is half under autocast by convention only; without gradients a few lost digits are no damage."""
    return not event.arg(0).sure and (not event.at.has_grad or _is_beside_the_loss(event, view))


def _is_beside_the_loss(event: Event, view: FileView) -> bool:
    """Whether the code goes backward, and not through this: a metric of what the loss was made of."""
    trace = view.trace_of(event)
    losses = trace.of(*MAKES_GRADIENTS) if trace is not None else []
    return bool(losses) and not goes_backward(event.out, losses)


def _unstable(event: Event, value: Value, text: str, hint: str) -> Hit:
    chain = (*half_links(value, event.file), link(event, event.op))
    return Hit(event.node, text, hint, chain=chain, unknown=unknown_link(value, event.file))


def _made_by(value: Value, ops: frozenset[str] | tuple[str, ...]) -> Value | None:
    """The value made by one of `ops` that `value` is, but for reshaping, clamping or an added eps."""
    current = value
    for _ in range(8):
        if current.op in ops:
            return current
        if current.op not in _PASS or not current.inputs:
            return None
        current = next((v for v in current.inputs if v.kind == "tensor"), current.inputs[0])
    return None


@rule("NUM_SOFTMAX_HALF", Severity.WARNING, "softmax", "log_softmax", "logsumexp")
def softmax_half(event: Event, view: FileView) -> Iterator[Hit]:
    """softmax, log_softmax or logsumexp runs on a half tensor that nothing promotes.

    Why: outside CUDA autocast (a half model, CPU autocast, an island) the result is rounded to half: probabilities below
    6e-8 are 0 in fp16, and bf16 keeps 2 digits.

    Example:
        weights = torch.softmax(scores, dim=-1)  # scores are half

    Use instead:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)

    When not: under CUDA autocast, which promotes softmax to float32.
    """
    value = event.arg(0)
    if not value.is_half or _is_promoted(event) or event.at.island or _is_guess_in_evaluation(event, view):
        return
    if event.op == "softmax" and id(event.out) in _results_logged(view, "softmax"):
        return
    text = f"{event.op} in {value.dtype}: {value.why}"
    yield _unstable(event, value, text, "pass dtype=torch.float32, or cast the input with .float()")


@rule("NUM_LOG_OF_SOFTMAX", Severity.WARNING, *LOG_FUNCTIONS)
def log_of_softmax(event: Event, view: FileView) -> Iterator[Hit]:
    """log(softmax(x)) is computed in two steps in half.

    Why: a probability that rounds to 0 gives log(0) = -inf, and the gradient is NaN. log_softmax never forms the
    probability.

    Example:
        logp = torch.log(torch.softmax(logits, dim=-1))

    Use instead:
        logp = torch.log_softmax(logits, dim=-1, dtype=torch.float32)

    When not: both run in float32 and the probabilities are not tiny.
    """
    made = _made_by(event.arg(0), ("softmax",))
    if made is None:
        return
    if not (made.is_half or (made.inputs and made.inputs[0].is_half and event.arg(0).is_half)):
        return
    yield _unstable(event, made, f"log of a softmax that is {made.dtype or 'half'}: {made.why}", "use log_softmax")


@rule("NUM_LOG_OF_SIGMOID", Severity.WARNING, *LOG_FUNCTIONS, "log1p")
def log_of_sigmoid(event: Event, view: FileView) -> Iterator[Hit]:
    """log(sigmoid(x)) or log(1 - sigmoid(x)) is computed in two steps in half.

    Why: in fp16 sigmoid is exactly 1 from 8.4 on and 0 below -17, so the logarithm gives -inf; autocast does not promote
    sigmoid.

    Example:
        loss = -torch.log(torch.sigmoid(x)).mean()

    Use instead:
        loss = -F.logsigmoid(x.float()).mean()

    When not: x is float32.
    """
    value = event.arg(0)
    if value.op in DIFFERENCES and len(value.inputs) == 2 and value.inputs[0].is_number:
        value = value.inputs[1]
    elif event.op == "log1p" and value.op == "neg" and value.inputs:
        value = value.inputs[0]
    made = _made_by(value, ("sigmoid",))
    if made is None and value.op in _PASS:
        inner = next((v for v in ancestors(value, 6) if v.op == "sub" and v.inputs and v.inputs[0].is_number), None)
        made = _made_by(inner.inputs[1], ("sigmoid",)) if inner else None
    if made is None or not made.is_half:
        return
    text = f"log of a sigmoid that is {made.dtype}: {made.why}"
    yield _unstable(event, made, text, "use logsigmoid, or binary_cross_entropy_with_logits")


@rule("NUM_LOGSUMEXP", Severity.WARNING, *LOG_FUNCTIONS)
def log_of_sum_of_exp(event: Event, view: FileView) -> Iterator[Hit]:
    """log(sum(exp(x))) is written out in half.

    Why: exp overflows fp16 from 11.1 on; logsumexp subtracts the maximum first.

    Example:
        energy = torch.log(torch.exp(logits).sum(-1))

    Use instead:
        energy = torch.logsumexp(logits.float(), -1)

    When not: the maximum is subtracted before exp.
    """
    total = _made_by(event.arg(0), PLAIN_SUMS)
    made = _made_by(total.inputs[0], ("exp",)) if total is not None and total.inputs else None
    if made is None or not made.inputs or _is_shifted(made.inputs[0]):
        return
    if not (made.is_half or event.arg(0).is_half):
        return
    yield Hit(
        event.node,
        f"log of a sum of exp in {made.dtype or event.arg(0).dtype}: {made.why or event.arg(0).why}",
        "use torch.logsumexp",
    )


def _is_shifted(value: Value) -> bool:
    """Whether exp's argument cannot be large: a maximum was subtracted, it was clamped, it is negated, or it is a cosine."""
    if _is_cosine(value):
        return True
    current = value
    for _ in range(8):
        if current.op in BOUNDING_FUNCTIONS or current.op == "neg":
            return True
        if current.op == "sub" and len(current.inputs) == 2 and _made_by(current.inputs[1], MAX_FUNCTIONS) is not None:
            return True
        if current.op in SCALINGS and any((v.is_number and v.const < 0) or v.op == "neg" for v in current.inputs):
            return True
        if current.op not in _PASS | {"mul", "div", "neg"} or not current.inputs:
            return False
        current = next((v for v in current.inputs if v.kind == "tensor"), current.inputs[0])
    return False


_NORMS = ("norm", "linalg.norm", "linalg.vector_norm")


def _is_cosine(value: Value) -> bool:
    """Whether a value is a product of vectors of length one: nothing between divides it by a temperature."""
    product = _made_by(value, MATMULS)
    factors = [v for v in product.inputs if v.kind == "tensor"] if product is not None else []
    return len(factors) > 1 and all(_has_length_one(v) for v in factors)


def _has_length_one(value: Value) -> bool:
    made = _made_by(value, ("normalize", "div"))
    if made is None or made.op == "normalize":
        return made is not None
    return len(made.inputs) == 2 and _made_by(made.inputs[1], _NORMS) is not None


@rule("NUM_EXP_HALF", Severity.WARNING, "exp", "expm1", "exp_")
def exp_half(event: Event, view: FileView) -> Iterator[Hit]:
    """exp of an fp16 value that nothing promotes or bounds.

    Why: exp(11.1) is beyond 65504, so fp16 gives inf.

    Example:
        std = torch.exp(0.5 * logvar)  # logvar is fp16

    Use instead:
        std = torch.exp(0.5 * logvar.float())

    When not: the argument is bounded (a maximum was subtracted, or it was clamped), in bf16, or under CUDA autocast.
    """
    value = event.arg(0)
    if value.dtype != "fp16" or _is_promoted(event) or _is_shifted(value) or _is_guess_in_evaluation(event, view):
        return
    if id(event.out) in view.once("log of sum of exp", lambda: {id(_summed_exp(e.arg(0))) for e in view.of(*LOG_FUNCTIONS)}):
        return
    text = f"exp overflows fp16 from 11.1 on: {value.why}"
    yield _unstable(event, value, text, "cast the argument with .float(), or bound it")


def _summed_exp(value: Value) -> Value | None:
    """The exp that a logarithm takes the sum of."""
    total = _made_by(value, PLAIN_SUMS)
    return _made_by(total.inputs[0], ("exp",)) if total is not None and total.inputs else None


def _results_logged(view: FileView, *ops: str) -> set[int]:
    """The results of these operations that a logarithm is taken of."""
    return view.once(f"log of {ops}", lambda: {id(_made_by(e.arg(0), ops)) for e in view.of(*LOG_FUNCTIONS)} - {id(None)})


@rule("NUM_REDUCE_HALF", Severity.WARNING, *SUM_FUNCTIONS)
def reduce_half(event: Event, view: FileView) -> Iterator[Hit]:
    """A sum, running sum or mean of squares is taken of half values.

    Why: the result must fit the format: fp16 ends at 65504 and a square reaches that at 256; running sums lose addends
    below 1/2048 (fp16) or 1/256 (bf16) of the total.

    Example:
        ms = (x * x).mean(-1)

    Use instead:
        ms = x.float().pow(2).mean(-1)

    When not: under CUDA autocast for sum, cumsum, norm and prod, which it promotes; or when the values are known to be
    small.
    """
    value = event.arg(0)
    if not value.is_half or _is_promoted(event) or event.at.island or _is_bounded(value) or _is_guess_in_evaluation(event, view):
        return
    if not value.sure and _made_by(value, ("sigmoid",)) is None:  # a guess, and nothing says that the values add up
        return
    if _is_row_of_shares(event):
        return
    is_square = _is_square(value)
    if event.op in ("mean", "nanmean") and not is_square:
        return
    if event.op not in RUNNING_SUMS and value.dtype != "fp16":
        return
    if event.op == "sum" and not is_square and _made_by(value, ("randn", "randn_like", "normal")) is not None:
        return  # the root of their number
    if _is_part_of_larger(event, view) or _is_only_differentiated(event, view):
        return
    what = "squares" if is_square else "values"
    text = f"{event.op} of {value.dtype} {what}: {value.why}"
    yield _unstable(event, value, text, "cast with .float() first, or pass dtype=torch.float32")


def _is_row_of_shares(event: Event) -> bool:
    """Whether values between 0 and 1 are summed along one dimension: classes, not pixels of a batch."""
    dim = event.arg(1, "dim")
    return event.op == "sum" and isinstance(dim.const, int) and _made_by(event.arg(0), ("sigmoid",)) is not None


def _is_bounded(value: Value) -> bool:
    """Whether the values are so small or so few that their sum is harmless: probabilities and masks over one row."""
    made = _made_by(value, ("softmax", "compare", "one_hot", "exp"))
    return made is not None or value.dtype == "bool"


def _is_square(value: Value) -> bool:
    made = _made_by(value, SQUARES | {"mul"}) if value.op in _PASS | SQUARES | {"mul"} else None
    if made is None:
        return False
    if made.op == "square":
        return True
    if made.op == "pow":
        return len(made.inputs) > 1 and made.inputs[1].const == 2
    return len(made.inputs) == 2 and made.inputs[0] is made.inputs[1]


def _is_part_of_larger(event: Event, view: FileView) -> bool:
    """Whether a more specific finding (a variance, a log of a sum of exp) covers this reduction."""
    parts = view.once("variance", lambda: {id(v) for e in view.of("sub") if _variance(e) for v in ancestors(e.out, 20)})
    return id(event.out) in parts or id(event.out) in _results_logged(view, "sum", "mean")


def _is_only_differentiated(event: Event, view: FileView) -> bool:
    """Whether a sum is itself what the gradient is taken of: that is the same whatever the sum is rounded to."""
    taken = view.once("differentiated", lambda: {id(_without_scale(e.arg(0))) for e in view.of("autograd.grad", "backward")})
    return event.op in ("sum", "nansum") and id(event.out) in taken


def _without_scale(loss: Value) -> Value:
    return loss.inputs[0] if loss.op == "scale" and loss.inputs else loss


@rule("NUM_VARIANCE", Severity.WARNING, "sub")
def variance_in_one_pass(event: Event, view: FileView) -> Iterator[Hit]:
    """A variance is computed as mean(x*x) - mean(x)**2 in half.

    Why: the two terms are almost equal and each has 3 digits (fp16) or 2 (bf16); the difference is noise and often
    negative.

    Example:
        var = (x * x).mean(-1) - x.mean(-1) ** 2

    Use instead:
        var = x.float().var(-1, unbiased=False)

    When not: x is float32 and its mean is not large against its spread.
    """
    found = _variance(event)
    if found is None:
        return
    yield Hit(event.node, f"mean of squares minus square of mean in {found.dtype}: {found.why}", "use x.float().var(...)")


def _variance(event: Event) -> Value | None:
    """The half operand of E[x^2] - E[x]^2, if the subtraction is that."""
    left, right = event.arg(0), event.arg(1)
    if left.op not in ("mean", "sum", "div") or not _is_square_of_mean(right):
        return None
    squares = left.inputs[0] if left.inputs else left
    if left.op == "div" and squares.op in ("sum", "mean") and squares.inputs:
        squares = squares.inputs[0]
    if not _is_square(squares):
        return None
    for value in (right, left, *right.inputs, squares, *squares.inputs):
        if value.is_half:
            return value
    return None


def _is_square_of_mean(value: Value) -> bool:
    if value.op in SQUARES:
        inner = value.inputs[0] if value.inputs else value
        return inner.op in ("mean", "div") and (value.op == "square" or value.inputs[1].const == 2)
    return (
        value.op == "mul"
        and len(value.inputs) == 2
        and value.inputs[0] is value.inputs[1]
        and value.inputs[0].op in ("mean", "div")
    )


@rule("NUM_UNSUPPORTED_OP", Severity.ERROR, *sorted(NEEDS_FLOAT | FFT_FUNCTIONS))
def unsupported_op(event: Event, view: FileView) -> Iterator[Hit]:
    """An operation that has no half version gets a half tensor.

    Why: matrix decompositions and inverses, quantiles and (in bf16) Fourier transforms raise on half tensors; CUDA autocast
    does not promote them.

    Example:
        u, s, v = torch.linalg.svd(h)  # h comes from a linear layer under autocast

    Use instead:
        u, s, v = torch.linalg.svd(h.float())

    When not: under CPU autocast, which promotes most of them.
    """
    value = event.arg(0)
    if not value.is_half or _is_promoted(event):
        return
    if event.op in FFT_FUNCTIONS and (value.dtype != "bf16" or (event.at.region is not None and event.at.region.device == "cpu")):
        return
    yield Hit(
        event.node,
        f"{event.op} does not take {value.dtype} and raises: {value.why}",
        "cast the input with .float()",
        chain=(*half_links(value, event.file), link(event, event.op)),
        unknown=unknown_link(value, event.file),
        is_proven=True,
    )
