"""Numbers that leave the range of fp16 in the forward pass, the loss, or a norm of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.formats import FP16
from ..accounts import by_break, by_hazard, number
from ..producers import cause_of
from ..registry import CERTAIN, LIKELY, Suspicion, cause
from ..signs import Signs


def _named(signs: Signs, name: str) -> Iterator[Suspicion]:
    """If the first bad number speaks for this cause; else an overflow that no NaN betrays (x / inf is 0)."""
    at = signs.break_
    if at is not None:
        if cause_of(at, signs) == name and not signs.ran_away_before(at):
            yield by_break(signs, at, CERTAIN if at.source == "examination" else LIKELY)
        elif at.phase == "backward" and at.hint == name and at.in_reference is False and signs.scale_search_failed:
            yield by_break(signs, at, LIKELY, "the gradients themselves leave fp16: no loss scale is small enough")
    else:
        yield from by_hazard(signs, name)


@cause("activation_overflow_fp16", "overflow")
def activation_overflow(signs: Signs) -> Iterator[Suspicion]:
    """A layer's output leaves the range of fp16 (65,504) and is stored as infinity.

    Fix: compute this layer and the sum behind it in FP32 or BF16 (`with torch.autocast(device, enabled=False)` and `.float()`),
    or normalise what goes in.

    Confirm: run this step with the layer in FP32: the infinity is gone and its output peaks above 65,504.
    """
    yield from _named(signs, "activation_overflow_fp16")


@cause("attention_logit_overflow_fp16", "overflow")
def attention_logit_overflow(signs: Signs) -> Iterator[Suspicion]:
    """Attention scores pass 65,504 before the softmax, which makes NaN of inf - inf.

    Fix: divide q by sqrt(d) before the product, normalise q and k, or compute the scores in FP32.

    Confirm: print (q.float() @ k.float().transpose(-2, -1)).abs().max() at this step: it is above 65,504.
    """
    yield from _named(signs, "attention_logit_overflow_fp16")


@cause("loss_computed_in_fp16", "overflow")
def loss_in_fp16(signs: Signs) -> Iterator[Suspicion]:
    """The criterion works on fp16 tensors, outside autocast's care; its squares or sums pass 65,504.

    Fix: call the criterion on `prediction.float()`, or inside the autocast block, which computes library losses in FP32.

    Confirm: evaluate the same criterion on prediction.float() and target.float(): it is finite.
    """
    yield from _named(signs, "loss_computed_in_fp16")


@cause("reduction_overflow_fp16", "overflow")
def reduction_overflow(signs: Signs) -> Iterator[Suspicion]:
    """The sum of many small fp16 numbers passes 65,504.

    Fix: reduce in FP32: `x.sum(dtype=torch.float32)`, or take the mean.

    Confirm: compare x.sum() with x.sum(dtype=torch.float32) at this step.
    """
    yield from _named(signs, "reduction_overflow_fp16")


@cause("exp_overflow_fp16", "overflow")
def exp_overflow(signs: Signs) -> Iterator[Suspicion]:
    """exp() of more than 11.09 is infinite in fp16.

    Fix: stay in log space (logsumexp, log_softmax, subtract the maximum first), clamp the input, or compute in FP32.

    Confirm: print the largest input of this exp: it is above 11.09.
    """
    yield from _named(signs, "exp_overflow_fp16")


@cause("product_overflow_fp16", "overflow")
def product_overflow(signs: Signs) -> Iterator[Suspicion]:
    """The product of two moderate numbers passes 65,504: areas, squared coordinates.

    Fix: bring the factors to unit size first (coordinates as shares of the image), or multiply in FP32.

    Confirm: multiply the same factors after .float(): the result is finite and above 65,504.
    """
    yield from _named(signs, "product_overflow_fp16")


@cause("norm_square_overflow_fp16", "overflow")
def norm_square_overflow(signs: Signs) -> Iterator[Suspicion]:
    """A hand-written norm squares values above 256 in fp16; rsqrt(inf) is 0, so the layer puts out zeros.

    Fix: `x.float()` inside the norm, or the library's rms_norm / layer_norm kernel, which computes in FP32.

    Confirm: the norm's output is exactly zero where its input is above 256.
    """
    yield from _named(signs, "norm_square_overflow_fp16")


@cause("input_out_of_range_fp16", "overflow")
def input_out_of_range(signs: Signs) -> Iterator[Suspicion]:
    """A feature of the input is beyond the range of fp16: a timestamp, an id, an amount of money.

    Fix: standardise the features in FP32 before the model; keep ids as integers.

    Confirm: print the largest magnitude of each input feature: one is above 65,504.
    """
    at = signs.break_
    if at is not None and cause_of(at, signs) == "input_out_of_range_fp16" and not signs.ran_away_before(at):
        largest = f"the input reaches {number(at.input_absmax)}, fp16 ends at {number(FP16.max)}" if at.input_absmax else ""
        yield by_break(signs, at, CERTAIN, *filter(None, [largest]), culprit="data:input")
    elif at is None:
        yield from by_hazard(signs, "input_out_of_range_fp16")


@cause("bn_stats_poisoned", "overflow")
def bn_stats_poisoned(signs: Signs) -> Iterator[Suspicion]:
    """A step that was skipped has still written NaN or infinity into BatchNorm's running statistics.

    Fix: keep the layer in front of the norm in range (FP32 or clamp), put the buffers back after a skipped step, and call
    `reset_running_stats()` now.

    Confirm: model.eval() gives NaN although every parameter is finite.
    """
    facts = signs.facts
    if not facts.bad_buffers or signs.weights_lost:
        return
    total, _, at_end = signs.skips
    passing = facts.steps > facts.bad_steps + 1 and at_end == 0  # training itself went on
    if not passing:
        return
    name = facts.bad_buffers[0]
    at = signs.break_
    yield Suspicion(
        culprit=name.rpartition(".")[0] or name,
        score=CERTAIN + 0.02,
        evidence=(
            f"step {facts.bad_buffers_step}: buffer `{name}` turned non-finite"
            + (f", and {len(facts.bad_buffers) - 1} more" if len(facts.bad_buffers) > 1 else ""),
            f"{total} of {facts.steps} steps were skipped, the others trained on with finite loss and weights",
            *((f"the overflow itself: `{at.op}` in `{at.culprit}`",) if at is not None and at.op else ()),
        ),
        chain=("overflow in one batch", "step skipped, weights kept", f"{name} keeps NaN/inf", "evaluation gives NaN"),
        step=facts.bad_buffers_step,
        precision_caused=None if at is None or at.in_reference is None else not at.in_reference,
    )


@cause("grad_norm_overflow_fp16", "overflow")
def grad_norm_overflow(signs: Signs) -> Iterator[Suspicion]:
    """A gradient norm computed in fp16 is infinite, so the clip coefficient is 0 and nothing moves.

    Fix: compute the norm in FP32: `torch.linalg.vector_norm(g, dtype=torch.float32)`, or use `clip_grad_norm_` on FP32 gradients.

    Confirm: after clipping every gradient is exactly 0 although none was before.
    """
    yield from by_hazard(signs, "grad_norm_overflow_fp16")
    zeroed = signs.zeroed_in_the_loop
    if zeroed is None:
        return
    exam, norm = zeroed
    if norm**2 < FP16.overflow_at:
        return
    yield Suspicion(
        culprit="loop:clip",
        score=CERTAIN + 0.01,
        evidence=(
            f"step {exam.step}: backward leaves fp16 gradients of norm {number(norm)}, the optimizer finds nothing but zeros",
            f"their sum of squares is {number(norm**2)}, fp16 ends at {number(FP16.max)}: the norm is inf, max_norm / inf is 0",
        ),
        chain=("norm of the gradients in fp16: inf", "clip coefficient 0", "every gradient 0", "weights stand still"),
        step=exam.step,
        precision_caused=True,
    )
