"""Numbers that leave the range of fp16 in the forward pass, the loss, or a norm of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...core.formats import FP16
from ...core.numbers import number
from ..choose import first_bad_cause
from ..describe import by_first_bad, by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, cause
from ..signs import Signs
from .early import attention_logits_grow, headroom_falls


def _of_first_bad(signs: Signs, name: str) -> Iterator[Diagnosis]:
    """If the first bad number speaks for this cause; else an overflow that no NaN betrays (x / inf is 0)."""
    at = signs.first_bad
    if at is not None:
        if first_bad_cause(at, signs) == name and not signs.ran_away_before(at):
            yield by_first_bad(signs, at, CERTAIN if at.source == "examination" else LIKELY)
        elif at.place.phase == "backward" and at.hint == name and at.in_reference is False and signs.scale_search_failed:
            yield by_first_bad(signs, at, LIKELY, "the gradients themselves leave fp16: no loss scale is small enough")
    else:
        yield from by_hazard(signs, name)


@cause("activation_overflow_fp16", family="overflow")
def activation_overflow(signs: Signs) -> Iterator[Diagnosis]:
    """A layer's output leaves the range of fp16 (65,504) and is stored as infinity."""
    yield from _of_first_bad(signs, "activation_overflow_fp16")
    yield from headroom_falls(signs)


@cause("attention_logit_overflow_fp16", family="overflow")
def attention_logit_overflow(signs: Signs) -> Iterator[Diagnosis]:
    """Attention scores pass 65,504 before the softmax, which makes NaN of inf - inf."""
    yield from _of_first_bad(signs, "attention_logit_overflow_fp16")
    yield from attention_logits_grow(signs)


for _name in (
    "loss_computed_in_fp16",
    "reduction_overflow_fp16",
    "exp_overflow_fp16",
    "product_overflow_fp16",
    "norm_square_overflow_fp16",
):
    cause(_name, family="overflow")(partial(_of_first_bad, name=_name))


@cause("input_out_of_range_fp16", family="overflow")
def input_out_of_range(signs: Signs) -> Iterator[Diagnosis]:
    """A feature of the input is beyond the range of fp16: a timestamp, an id, an amount of money."""
    at = signs.first_bad
    if at is not None and first_bad_cause(at, signs) == "input_out_of_range_fp16" and not signs.ran_away_before(at):
        largest = at.inputs.get("absmax")
        reaches = (f"the input reaches {number(largest)}, fp16 ends at {number(FP16.max)}",) if largest else ()
        yield by_first_bad(signs, at, LIKELY if at.source == "graph" else CERTAIN, *reaches, culprit="data:input")
    elif at is None:
        yield from by_hazard(signs, "input_out_of_range_fp16")


@cause("constant_out_of_range", family="overflow")
def constant_out_of_range(signs: Signs) -> Iterator[Diagnosis]:
    """A constant (a large distance, a penalty, a table) is infinite or 0 in fp16: what is computed with it is NaN."""
    at = signs.first_bad
    if at is not None and first_bad_cause(at, signs) == "constant_out_of_range":
        yield by_first_bad(signs, at, CERTAIN if at.source == "examination" else LIKELY)
    else:
        yield from by_hazard(signs, "constant_out_of_range")


@cause("bn_stats_poisoned", family="overflow")
def bn_stats_poisoned(signs: Signs) -> Iterator[Diagnosis]:
    """A step that was skipped has still written NaN or infinity into BatchNorm's running statistics."""
    facts = signs.facts
    if not facts.bad_buffers:  # broken before the run was watched: nobody saw by what
        yield from by_hazard(signs, "bn_stats_poisoned")
    if not facts.bad_buffers or signs.weights_lost:
        return
    total, _, at_end = signs.skips
    passing = facts.steps > facts.bad_steps + 1 and at_end == 0  # training itself went on
    if not passing:
        return
    name = facts.bad_buffers[0]
    at = signs.first_bad
    yield Diagnosis(
        culprit=name.rpartition(".")[0] or name,
        confidence=CERTAIN,
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


@cause("grad_norm_overflow_fp16", family="overflow")
def grad_norm_overflow(signs: Signs) -> Iterator[Diagnosis]:
    """A gradient norm computed in fp16 is infinite, so the clip coefficient is 0 and nothing moves."""
    zeroed = signs.zeroed_in_the_loop
    if zeroed is None or zeroed[1] ** 2 < FP16.overflow_at:
        yield from by_hazard(signs, "grad_norm_overflow_fp16")
        return
    exam, norm = zeroed
    yield Diagnosis(
        culprit="loop:clip",
        confidence=CERTAIN,
        evidence=(
            f"step {exam.step}: backward leaves fp16 gradients of norm {number(norm)}, the optimizer finds nothing but zeros",
            f"their sum of squares is {number(norm**2)}, fp16 ends at {number(FP16.max)}: the norm is inf, max_norm / inf is 0",
        ),
        chain=("norm of the gradients in fp16: inf", "clip coefficient 0", "every gradient 0", "weights stand still"),
        step=exam.step,
        precision_caused=True,
    )
