"""Why a diagnosis says what it says: every choice of a cause is made in this file, by rules with their reasons.

1. `HAZARD_RULES`: which cause a hazard of an examined step speaks for, by its kind and its traits. The first rule that fits.
2. `first_bad_cause`: which cause the first NaN or infinity of a run speaks for.
3. `diagnoses_of`: causes (`causes/`) tell for themselves whether they fit a run, and how sure they are. Where several fit:
   the surer one (certain, likely, possible); among equals the one that `PRECEDENCE` puts before the other; then the one that
   most examined steps put first; then the one that was there first.

4. `TRIED_FOR`: which remedies, tried on the step itself, speak for a cause, and against it if they were in vain.

The monitor asks the same functions while a run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cmp_to_key

from ..core.examination import FirstBad, Hazard
from ..core.formats import FP16
from ..core.ops import (
    ADDITIONS,
    ATTENTIONS,
    BATCHED_MATMULS,
    BOUNDED,
    CASTS,
    EXPONENTIALS,
    JOINS,
    LOGARITHMS,
    LOSS_OPS,
    MATMULS,
    NORMALISATIONS,
    OF_TOO_FEW,
    PARTIAL,
    PRODUCTS,
    RECURRENT,
    REDUCTIONS,
    ROOTS,
    SINGULAR_AT_ONE,
    SINGULAR_AT_ZERO,
    SOFTMAXES,
)
from .evidence import Evidence
from .knowledge import confirm_of, remedy_of
from .records import Diagnosis
from .registry import LIKELY, POSSIBLE, all_causes, less_sure
from .signs import Signs

# ---- 1. from a hazard to its cause ----


@dataclass(frozen=True)
class HazardRule:
    kind: str
    traits: frozenset[str]  # of the hazard; its phase (forward, backward, optimizer, loop) counts as one
    cause: str  # "": the operation alone does not tell
    reason: str


def _rule(kind: str, traits: str, cause: str, reason: str = "") -> HazardRule:
    return HazardRule(kind, frozenset(traits.split()), cause, reason)


HAZARD_RULES = (
    _rule("given_nonfinite", "parameter", "", "an earlier step destroyed the weights: that one has the cause"),
    _rule("given_nonfinite", "buffer", "bn_stats_poisoned", "only running statistics outlive a skipped step"),
    _rule("given_nonfinite", "gradient", "stale_inf_grads", "backward adds to what was there"),
    _rule("given_nonfinite", "constant", "constant_out_of_range", "one number from outside, and no batch"),
    _rule("given_nonfinite", "", "data_nan", "no operation has touched it yet"),
    _rule("coarse_target", "", "target_in_low_precision", "stored before the step, with less than it should say"),
    _rule("coarse_input", "angle", "position_precision_loss", "stored before the step, with less than its angles need"),
    _rule("coarse_input", "", "catastrophic_cancellation", "stored before the step, with less than what a shift leaves"),
    _rule("masked_rows", "", "mask_inf_full_row", "0 / 0 in every row without a key"),
    _rule("constant_lost", "optimizer", "adam_eps_underflow_fp16", "the eps of the optimizer"),
    _rule("constant_lost", "", "eps_underflow_fp16", "the eps is 0 in this format"),
    _rule("saturated_probability", "", "saturated_probability_loss", "a logarithm or loss meets exactly 0 or 1"),
    _rule("zero_divisor", "optimizer", "adam_eps_underflow_fp16", "the second moment has flushed"),
    _rule("zero_divisor", "flushed", "constant_out_of_range", "stored with less than the format can hold, before the step"),
    _rule("zero_divisor", "product", "product_underflow_fp16", "many factors below 1"),
    _rule("zero_divisor", "difference", "catastrophic_cancellation", "equal numbers were subtracted"),
    _rule("zero_divisor", "", "eps_underflow_fp16", "nothing protects from the zero"),
    _rule("integers", "angle", "position_precision_loss", "rounded before there was an angle"),
    _rule("integers", "", "integer_in_low_precision", "ids or counts"),
    _rule("decision", "target trained", "router_low_precision", "a choice inside a module that is itself trained routes"),
    _rule("decision", "target", "target_in_low_precision", "what the loss compares with was chosen"),
    _rule("decision", "", "router_low_precision", "the program goes another way"),
    _rule("exp_range", "in_reference", "float32_overflow", "FP32 overflows as well"),
    _rule("exp_range", "fp16", "exp_overflow_fp16", "exp ends at 11.09 in fp16"),
    _rule("overflow", "fp16 backward scaled_by_hand", "static_loss_scale_overflow", "a constant factor that nobody lowers"),
    _rule("overflow", "fp16 backward", "activation_overflow_fp16", "a gradient of activations leaves the range by itself"),
    _rule("overflow", "fp16 constant", "constant_out_of_range", "one number from outside is cast, and no batch"),
    _rule("overflow", "fp16 from_data", "input_out_of_range_fp16", "the cast of the data overflows"),
    _rule("overflow", "fp16 scores", "attention_logit_overflow_fp16", "two activations multiplied, and a softmax behind them"),
    _rule("overflow", "fp16 loss_operation", "loss_computed_in_fp16", "a library loss on fp16 tensors"),
    _rule("overflow", "fp16 of_gradients", "grad_norm_overflow_fp16", "the loop's own norm of its gradients"),
    _rule("overflow", "fp16 sum_times_constant", "reduction_overflow_fp16", "the sum stood at the end of the range already"),
    _rule("overflow", "fp16 small_terms outside", "reduction_overflow_fp16", "no term is large, their number is"),
    _rule("overflow", "fp16 small_terms norm", "norm_square_overflow_fp16", "a sum of squares whose root is taken"),
    _rule("overflow", "fp16 small_terms", "reduction_overflow_fp16", "no term is large, their number is"),
    _rule("overflow", "fp16 outside square", "loss_computed_in_fp16", "the criterion squares in the loop's own code"),
    _rule("overflow", "fp16 outside reduction", "loss_computed_in_fp16", "the criterion sums in the loop's own code"),
    _rule("overflow", "fp16 outside elementwise", "loss_computed_in_fp16", "the criterion compares in the loop's own code"),
    _rule("overflow", "fp16 norm", "norm_square_overflow_fp16", "a square whose root is taken"),
    _rule("overflow", "fp16 reduction", "reduction_overflow_fp16"),
    _rule("overflow", "fp16 product", "product_overflow_fp16"),
    _rule("overflow", "fp16", "activation_overflow_fp16", "what a layer puts out"),
    _rule("singular_backward", "opaque", "", "nobody knows what the operator would make of the same numbers again"),
    _rule("singular_backward", "backward", "singular_gradient", "forward was finite, its derivative is not"),
    _rule("singular_backward", "fell_together", "catastrophic_cancellation", "a table was rounded to what it is taken from"),
    _rule("singular_backward", "from_data", "data_nan", "made of the batch alone"),
    _rule("singular_backward", "only_gradients", "singular_gradient", "the loss is finite, the gradients are not"),
    _rule("singular_backward", "partial", "undefined_operation", "a function outside its domain"),
    _rule("singular_backward", "range", "float32_overflow", "finite numbers whose result no format holds"),
    _rule("undefined", "optimizer", "adam_eps_underflow_fp16", "the update divides by what flushed"),
    _rule("undefined", "after_difference", "catastrophic_cancellation", "rounding pushed a difference over the edge"),
    _rule("undefined", "singular", "eps_underflow_fp16", "nothing keeps the argument away from 0"),
    _rule("saturation", "", "fp8_scale_stale", "the scale did not know this maximum"),
    _rule("flush", "backward scaled", "loss_scale_too_low", "there is a scale, and it does not lift the gradients"),
    _rule("flush", "backward", "grad_underflow_no_scaling", "nothing lifts the gradients"),
    _rule("flush", "cast_weight", "", "weights below the range: whether that matters, their gradients tell"),
    _rule("flush", "", "product_underflow_fp16", "a forward result below the range"),
    _rule("accumulation", "fan_in", "low_precision_grad_accumulation", "autograd adds the uses of one parameter up"),
    _rule("accumulation", "scatter", "low_precision_scatter_add", "rows that are hit often"),
    _rule("accumulation", "", "kernel_low_precision_accumulation", "the kernel itself adds up in 16 bits"),
    _rule("phase", "", "position_precision_loss", "angles fall together"),
    _rule("biased_rounding", "", "ema_stagnation", "the same factor again and again"),
    *(
        rule
        for kind in ("cancellation", "absorption", "amplification")
        for rule in (
            _rule(kind, "target trained", "router_low_precision", "a target comes from outside, or from a frozen teacher"),
            _rule(kind, "target", "target_in_low_precision", "a loss compares with it"),
            _rule(kind, "choice", "router_low_precision", "a choice is made by it"),
            _rule(kind, "log_probabilities", "logprob_rounding", "it descends from a log_softmax"),
        )
    ),
    _rule("cancellation", "", "catastrophic_cancellation"),
    _rule("absorption", "small_branch", "residual_absorption", "the smaller addend was computed from the larger"),
    _rule("absorption", "running_sum", "absorption_in_accumulator", "the same line adds again and again"),
    _rule("absorption", "before_difference", "catastrophic_cancellation", "what was rounded is subtracted next"),
    _rule("absorption", "logits", "low_precision_output_head", "probabilities or a loss read it next"),
    _rule("absorption", "", "scale_imbalance_absorption"),
    _rule("amplification", "one_hot_attention", "attention_entropy_collapse", "a softmax that sees one key"),
    _rule("amplification", "running_sum", "absorption_in_accumulator", "the same line adds again and again"),
    _rule("amplification", "after_difference", "catastrophic_cancellation", "it descends from a difference"),
    _rule("amplification", "", "scale_imbalance_absorption"),
    _rule("residual", "", "residual_absorption"),
    _rule("average", "", "ema_stagnation"),
    _rule("accumulator", "of_gradients", "low_precision_grad_accumulation", "what is added are gradients"),
    _rule("accumulator", "", "absorption_in_accumulator"),
    _rule("update_lost", "", "update_lost"),
    _rule("decay_lost", "", "weight_decay_lost"),
    _rule("gradient_sum", "", "low_precision_grad_accumulation"),
    _rule("state_still", "average", "ema_stagnation", "state of the optimizer, or multiplied by a number below 1"),
    _rule("state_still", "", "absorption_in_accumulator"),
    # what auto_diff sees
    _rule("integers_rounded", "", "integer_in_low_precision"),
    _rule("decision_flips", "", "router_low_precision"),
    _rule("layer_error", "difference", "catastrophic_cancellation", "the layer subtracts"),
    _rule("layer_error", "", "scale_imbalance_absorption"),
)


def hazard_cause(hazard: Hazard) -> str:
    """The cause that a hazard speaks for by itself; "" if it does not tell."""
    known = {*hazard.traits, hazard.place.phase}
    return next((rule.cause for rule in HAZARD_RULES if rule.kind == hazard.kind and rule.traits <= known), "")


def with_cause(hazard: Hazard) -> Hazard:
    cause = hazard_cause(hazard)
    return replace(hazard, cause=cause, remedy=remedy_of(cause))


# ---- 2. from the first bad number of a run to its cause ----

_WEIGHTED_SUMS = MATMULS | ATTENTIONS | RECURRENT | NORMALISATIONS | ADDITIONS | JOINS | {"embedding_bag"}


def first_bad_cause(at: FirstBad, signs: Signs) -> str:
    """The name of the cause, or "" if the operation alone does not tell."""
    if at.hazard is not None and "opaque" in at.hazard.traits:
        return ""
    if at.source == "factor" and not at.from_data:
        return "undefined_operation" if at.in_reference else ""  # the loop's own line made it of finite numbers
    if at.from_data:
        return "data_nan" if at.dtype != "float16" or at.nan else "input_out_of_range_fp16"
    if at.hint and at.in_forward:
        return _in_its_module(at, signs)
    if at.place.phase == "backward":
        return ""
    if at.place.site == DATA:
        return "input_out_of_range_fp16"
    return _by_operation(at, signs)


DATA = "data:input"  # the place of a number that came with the batch


def _in_its_module(at: FirstBad, signs: Signs) -> str:
    """The examined operation names the cause; whose code it is decides between neighbours."""
    if at.hint == "norm_square_overflow_fp16" and at.place.is_outside:
        return "loss_computed_in_fp16"  # a distance in the criterion, no norm layer
    if at.hint == "loss_computed_in_fp16" and at.op == "mul":
        return "product_overflow_fp16"  # of two quantities; a criterion squares one
    if at.hint == "product_overflow_fp16" and at.op == "mul" and signs.layers_in(at.culprit) > 1:
        return "activation_overflow_fp16"  # a gate: two projections of the same layer multiplied
    if at.hint == "saturated_probability_loss" and at.in_reference and at.op in PARTIAL:
        return "undefined_operation"  # some of the probabilities are 0 in FP32 too
    return at.hint


def _by_operation(at: FirstBad, signs: Signs) -> str:
    in_module = bool(at.place.site)
    if at.op in LOGARITHMS | {"binary_cross_entropy"} and any(
        exam.step == at.step for exam, _ in signs.fact("saturated_outputs")
    ):
        return "saturated_probability_loss"
    if at.source == "graph" and at.nan and at.inputs.get("absmin1") == 0:
        return "undefined_operation"
    told = at.source == "examination" or not signs.amp_dtype  # else what went in may have been rounded to the edge before
    if told and at.dtype in ("float32", "float64", "bfloat16") and at.in_reference is not False:
        if at.op in PARTIAL | {"mul"} and (at.nan or at.op not in PRODUCTS | OF_TOO_FEW):
            return "undefined_operation"  # 0 times the -inf of a logarithm, too
        if not at.nan and at.op not in SOFTMAXES:
            return "float32_overflow"
    if at.op in SOFTMAXES:
        return "mask_inf_full_row" if at.nan else ""
    if at.op in EXPONENTIALS:
        return "exp_overflow_fp16"
    if at.op in CASTS:
        if at.dtype not in ("float16", ""):
            return ""  # the graph knows a copy to a wider format, which has made nothing
        return "activation_overflow_fp16" if in_module else "input_out_of_range_fp16"
    if at.op in LOSS_OPS:
        return "loss_computed_in_fp16" if at.dtype == "float16" else ""
    if at.op in REDUCTIONS:
        return "reduction_overflow_fp16" if not at.nan else ""
    if at.op == "pow" and at.place.is_outside and at.dtype == "float16" and not at.nan:
        return "loss_computed_in_fp16"  # the criterion squares
    if at.op in PRODUCTS and not at.nan:
        return "activation_overflow_fp16" if in_module and signs.layers_in(at.culprit) else "product_overflow_fp16"
    if at.op in BATCHED_MATMULS and signs.is_attention_product(at):
        return "attention_logit_overflow_fp16"
    if at.op in _WEIGHTED_SUMS:
        return "activation_overflow_fp16" if not at.nan or at.dtype == "float16" else ""
    if at.op in BOUNDED and at.nan and at.in_reference is False:
        return "catastrophic_cancellation"
    if at.op in SINGULAR_AT_ZERO | SINGULAR_AT_ONE | ROOTS and at.in_reference is False:
        return "eps_underflow_fp16" if "float16" in (at.dtype, signs.amp_dtype) else ""
    if not at.op and at.dtype == "float16" and not at.nan:
        return "activation_overflow_fp16" if at.inputs.get("absmax", 0.0) < FP16.overflow_at else "input_out_of_range_fp16"
    return ""


# ---- 3. from the causes that fit to the diagnosis ----


@dataclass(frozen=True)
class Precedence:
    winner: str  # a cause
    loser: str  # a cause, or a family of causes
    reason: str


PRECEDENCE = (
    Precedence("stale_inf_grads", "loss_scale_pinned", "old infinities keep every step skipped, whatever the scale does"),
    Precedence("stale_inf_grads", "overflow", "one overflow is forgiven; that it is kept is the fault"),
    Precedence("loss_scale_pinned", "overflow", "the gradients overflow because the scale cannot fall"),
    Precedence("clip_before_unscale", "overflow", "the order of calls is wrong at every step, an overflow only at some"),
    Precedence("step_on_scaled_gradients", "overflow", "the first update was too long by the loss scale, the overflow follows"),
    Precedence(
        "step_on_scaled_gradients", "static_loss_scale_overflow", "an update too long by the loss scale came before the overflow"
    ),
    Precedence("step_on_scaled_gradients", "not_precision", "what runs away was thrown by an update too long by the loss scale"),
    Precedence("data_nan", "mask_inf_full_row", "a bad batch breaks every softmax behind it"),
    Precedence("bn_stats_poisoned", "overflow", "training went on after the overflow; the buffer is what stays broken"),
    Precedence("adam_eps_underflow_fp16", "overflow", "the first update made the weights infinite, the rest follows"),
    Precedence("adam_eps_underflow_fp16", "underflow", "it is the optimizer's own eps that is 0"),
    Precedence("adam_eps_underflow_fp16", "not_precision", "the steps are too long because the second moments are 0"),
    Precedence("data_outlier", "overflow", "one batch threw the weights away, numbers left their range afterwards"),
    Precedence("data_outlier", "precision_loss", "nothing is exact on weights that were thrown away"),
    Precedence("data_outlier", "not_precision", "what broke afterwards was broken by that batch"),
    Precedence("data_outlier", "optimizer_v_lag", "the batch is the reason, whatever the second moment expected"),
    Precedence("exploding_recurrence", "overflow", "growth that is there before any training ends in an overflow"),
    Precedence("exploding_recurrence", "precision_loss", "numbers that grow without bound lose their digits in any format"),
    Precedence("lr_too_high", "overflow", "loss and gradients grew first, numbers left their range afterwards"),
    Precedence("norm_square_overflow_fp16", "residual_absorption", "a norm that puts out zeros silences more than its branch"),
    Precedence("lr_too_high", "precision_loss", "FP32 would run away as well"),
    Precedence("lr_too_high", "optimizer_v_lag", "a loss that grows on and on is divergence, not one long step"),
    Precedence("grad_norm_overflow_fp16", "underflow", "the gradients were there before the clip coefficient made them 0"),
    Precedence("grad_underflow_no_scaling", "precision_loss", "gradients that are exactly 0 were not rounded to that"),
    Precedence("weight_decay_lost", "ema_stagnation", "a decay that rounds away shows in every weight, a slow average in a few"),
    Precedence("update_lost", "ema_stagnation", "weights that do not move need no average to explain it"),
    Precedence("attention_entropy_collapse", "precision_loss", "a one-hot softmax passes no gradient in FP32 either"),
    Precedence("vanishing_architecture", "precision_loss", "the gradient is gone in FP32 too"),
    Precedence("vanishing_architecture", "dead_relu", "a fade through all layers leaves the first units off, too"),
    Precedence("adam_eps_dominates", "precision_loss", "steps that eps makes short are short in FP32 too"),
    Precedence("gradient_never_cleared", "not_precision", "sums of all gradients so far run away at any learning rate"),
    Precedence("gradient_never_cleared", "overflow", "the gradients grew first, numbers left their range afterwards"),
    Precedence("update_lost", "step_changes_nothing", "the format of the weights is why nothing moves"),
    Precedence("step_without_backward", "step_changes_nothing", "a step without a gradient has nothing to change"),
    Precedence("no_gradient_arrives", "step_changes_nothing", "a step without a gradient has nothing to change"),
    Precedence("static_loss_scale_overflow", "backward_without_step", "the program refuses gradients that are not finite"),
    Precedence("replicas_apart", "backward_without_step", "one rank alone does not step, and the others do"),
    Precedence("train_infer_mismatch", "logprob_rounding", "a ratio off 1 on unchanged weights is the proof itself"),
)


def wins(one: Diagnosis, other: Diagnosis) -> str:
    """The reason why one cause goes before another that fits as well; "" if none is known."""
    names = (other.cause, other.family)
    return next((p.reason for p in PRECEDENCE if p.winner == one.cause and p.loser in names), "")


def best_first(found: Sequence[Diagnosis], lead: str = "") -> list[Diagnosis]:
    """`lead`: the cause that most examined steps put first."""

    def compare(a: Diagnosis, b: Diagnosis) -> int:
        for one, other in ((a, b), (b, a)):
            sign = -1 if one is a else 1
            if (not one.early, one.confidence) > (not other.early, other.confidence) or (
                (one.early, one.confidence) == (other.early, other.confidence) and wins(one, other)
            ):
                return sign
        return -1 if _order(a, lead) < _order(b, lead) else int(_order(a, lead) > _order(b, lead))

    return sorted(found, key=cmp_to_key(compare))


def _order(one: Diagnosis, lead: str) -> tuple[bool, int]:
    return one.cause != lead, one.step if one.step is not None else 0


def all_that_fit(evidence: Evidence) -> list[Diagnosis]:
    """Everything that fits at all, best first."""
    signs = Signs(evidence)
    known = {name: one for name, one in all_causes().items() if not name.endswith("_fp16") or "fp16" in signs.formats}
    unknown = signs.first_bad is not None and signs.first_bad.stored
    found = [
        replace(
            seen,
            cause=one.name,
            format="fp16" if one.name.endswith("_fp16") else next(iter(signs.formats), ""),
            family=one.family,
            precision_caused=_precision_of(
                one.precision if seen.precision_caused is None and not unknown else seen.precision_caused, signs
            ),
            remedy=remedy_of(one.name),
            confirm=confirm_of(one.name),
        )
        for one in known.values()  # a name never contradicts the formats of the run
        for seen in one.function(signs)
    ]
    return best_first([_weighed_by_trials(one, signs) for one in _run_again(found)], signs.lead)


def _precision_of(caused: bool | None, signs: Signs) -> bool | None:
    """A run without a number in 16 bits has nothing to blame on them."""
    return caused if signs.formats else False if caused is not None else None


def _run_again(found: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Of a step that came out otherwise when it was run again, what an operation did in it proves nothing."""
    chance = next((one for one in found if one.cause == "not_reproducible" and one.confidence >= LIKELY), None)
    if chance is None:
        return list(found)
    return [replace(o, confidence=POSSIBLE) if o is not chance and o.step == chance.step else o for o in found]


# ---- 4. what was tried on the step itself ----

_FP32 = ("fp32",)
TRIED_FOR = {  # cause -> changes of a step (examine/remedies.py) that are its remedy; the other causes have none
    "activation_overflow_fp16": _FP32,
    "attention_logit_overflow_fp16": ("scaled_first", "fp32"),
    "exp_overflow_fp16": _FP32,
    "input_out_of_range_fp16": _FP32,
    "loss_computed_in_fp16": _FP32,
    "norm_square_overflow_fp16": _FP32,
    "product_overflow_fp16": _FP32,
    "reduction_overflow_fp16": _FP32,
    "eps_underflow_fp16": ("larger_eps",),
    "saturated_probability_loss": ("on_logits",),
    "update_lost": ("master_weights",),
    "weight_decay_lost": ("master_weights",),
    "data_nan": ("rows_left_out",),
    "static_loss_scale_overflow": ("smaller_scale",),
}


def _weighed_by_trials(one: Diagnosis, signs: Signs) -> Diagnosis:
    """A cause whose remedies were tried and all in vain is less sure, and they are not recommended."""
    changes = TRIED_FOR.get(one.cause, ())
    made = {  # of a fault that is there at every step, the last
        trial.change: replace(trial, step=exam.step)
        for exam in signs.evidence.examinations
        for trial in exam.trials
        if trial.tells and trial.change in changes and (exam.step == one.step or not trial.was_bad)
    }
    if not made:
        return one
    tried = replace(one, tried=tuple(sorted(made.values(), key=lambda t: (t.helped is not True, changes.index(t.change)))))
    return replace(tried, confidence=less_sure(one.confidence), remedy="") if tried.remedy_failed else tried


def diagnoses_of(evidence: Evidence) -> list[Diagnosis]:
    """The root cause: nothing on a healthy run. What fits less well, or follows from it, stands among its evidence."""
    found = all_that_fit(evidence)
    if not found:
        return []
    best = found[0]
    others = dict.fromkeys(f"{one.cause} at {one.culprit}" for one in found[1:] if not one.early and one.cause != best.cause)
    more = tuple(f"also fits, less well or as a consequence: {other}" for other in others)
    return [replace(best, evidence=(*best.evidence, *more[: max(MOST_EVIDENCE - len(best.evidence), 0)]))]


MOST_EVIDENCE = 8
