"""Which cause the first bad number of a step speaks for, by the operation that made it."""

from __future__ import annotations

from ..core.formats import FP16
from ..core.ops import (
    ADDITIONS,
    ATTENTIONS,
    BOUNDED,
    CASTS,
    EXPONENTIALS,
    JOINS,
    LOSS_OPS,
    MATMULS,
    NORMALISATIONS,
    PRODUCTS,
    RECURRENT,
    REDUCTIONS,
    SINGULAR_AT_ZERO,
    SOFTMAXES,
)
from .breaks import Break
from .signs import Signs

_WEIGHTED_SUMS = MATMULS | ATTENTIONS | RECURRENT | NORMALISATIONS | ADDITIONS | JOINS | {"embedding_bag"}


def cause_of(at: Break, signs: Signs) -> str:
    """The name of the cause, or "" if the operation alone does not tell."""
    if at.from_data:
        return "data_nan" if at.dtype != "float16" or at.nan else "input_out_of_range_fp16"
    if at.hint and at.in_forward:
        return _in_context(at, signs)
    if at.phase == "backward":
        return ""
    if at.culprit.startswith("data"):
        return "input_out_of_range_fp16"
    return _forward(at, signs)


def _in_context(at: Break, signs: Signs) -> str:
    """The examined operation names the cause; whose code it is decides between neighbours."""
    in_loop = at.phase == "loop" and at.culprit.startswith("op:")
    if at.hint == "norm_square_overflow_fp16" and in_loop:
        return "loss_computed_in_fp16"  # a distance in the criterion, no norm layer
    if at.hint == "loss_computed_in_fp16" and at.op == "mul":
        return "product_overflow_fp16"  # of two quantities; a criterion squares one
    if at.hint == "product_overflow_fp16" and at.op == "mul" and _layers_in(at, signs) > 1:
        return "activation_overflow_fp16"  # a gate: two projections of the same layer multiplied
    return at.hint


def _forward(at: Break, signs: Signs) -> str:
    if at.op in SOFTMAXES:
        return "mask_inf_full_row" if at.nan else ""
    if at.op in EXPONENTIALS:
        return "exp_overflow_fp16"
    if at.op in CASTS:
        return "activation_overflow_fp16" if not at.culprit.startswith("op:") else "input_out_of_range_fp16"
    if at.op in LOSS_OPS:
        return "loss_computed_in_fp16" if at.dtype == "float16" else ""
    if at.op in REDUCTIONS:
        return "reduction_overflow_fp16" if not at.nan else ""
    if at.op in PRODUCTS and not at.nan:
        inside_a_layer = not at.culprit.startswith("op:")
        return "activation_overflow_fp16" if inside_a_layer and _layers_in(at, signs) else "product_overflow_fp16"
    if at.op in ("bmm", "baddbmm") and signs.attends(at):
        return "attention_logit_overflow_fp16"
    if at.op in _WEIGHTED_SUMS:
        return "activation_overflow_fp16" if not at.nan or at.dtype == "float16" else ""
    if at.op in BOUNDED and at.nan and at.in_reference is False:
        return "catastrophic_cancellation"
    if at.op in SINGULAR_AT_ZERO | {"sqrt", "atanh"} and at.in_reference is False:
        return "eps_underflow_fp16" if "float16" in (at.dtype, signs.facts.amp_dtype) else ""
    if not at.op and at.dtype == "float16" and not at.nan:
        return "activation_overflow_fp16" if (at.input_absmax or 0.0) < FP16.overflow_at else "input_out_of_range_fp16"
    return ""


def _layers_in(at: Break, signs: Signs) -> int:
    """How many layers with weights the module holds in which it broke."""
    inside = f"{at.culprit}."
    return len({name[len(inside) :].partition(".")[0] for name in signs.facts.parameters if name.startswith(inside)})
