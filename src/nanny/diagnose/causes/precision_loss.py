"""Results that are finite and wrong: absorption, cancellation, rounding that decides. Seen beside the FP32 twin only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...core.numbers import share, short
from ...core.ops import LOGARITHMS
from ..choose import first_bad_cause
from ..describe import by_first_bad, by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, cause
from ..signs import Signs


def _silent(signs: Signs, name: str) -> Iterator[Diagnosis]:
    """A hazard that the examined steps name, unless louder trouble hides it; or the first bad number, if it speaks for this."""
    at = signs.first_bad
    if at is not None and name in (at.hint, first_bad_cause(at, signs)) and at.in_reference is not True:
        yield by_first_bad(signs, at, CERTAIN)
    elif at is None or not signs.harmed:
        yield from by_hazard(signs, name)


@cause("saturated_probability_loss", family="precision_loss")
def saturated_probability_loss(signs: Signs) -> Iterator[Diagnosis]:
    """A loss on probabilities that are exactly 0 or 1 in this format: its gradient is infinite, NaN or 0.

    Confirm: count the probabilities that are exactly 0 or 1 and have the opposite label.
    """
    at = signs.first_bad
    if at is not None and at.source != "examination" and first_bad_cause(at, signs) == "saturated_probability_loss":
        part = max(part for exam, part in signs.fact("saturated_outputs") if exam.step == at.step)
        saturated = f"{share(part)} of the model's outputs are exactly 0 or 1 in this step, and are not in FP32"
        yield replace(by_first_bad(signs, at, LIKELY, saturated), precision_caused=True)
        return
    tiny = [p for exam, p in signs.fact("tiny_probabilities") if at is not None and exam.step == at.step]
    if at is not None and tiny and at.op in LOGARITHMS and at.place.phase == "backward":
        text = f"gradients are infinite only at probabilities of up to {short(tiny[0])}: 1 / p leaves fp16, and is finite in FP32"
        yield by_first_bad(signs, at, LIKELY, text)
        return
    yield from _silent(signs, "saturated_probability_loss")


@cause("low_precision_grad_accumulation", family="precision_loss")
def low_precision_grad_accumulation(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients of many micro-batches are added up in 16 bits; late ones fall below half a spacing.

    Confirm: compare p.grad with the FP32 sum of the same micro-batch gradients: it is too small.
    """
    for seen in _silent(signs, "low_precision_grad_accumulation"):
        yield replace(seen, culprit="loop:accumulation") if seen.is_bare_operation else seen


@cause("low_precision_scatter_add", family="precision_loss")
def low_precision_scatter_add(signs: Signs) -> Iterator[Diagnosis]:
    """A scatter, index or embedding gradient is added up in 16 bits: rows that are hit often come out far too small.

    Confirm: compare the gradient of the most frequent row with the FP32 one: it is too small.
    """
    yield from _silent(signs, "low_precision_scatter_add")


@cause("position_precision_loss", family="precision_loss")
def position_precision_loss(signs: Signs) -> Iterator[Diagnosis]:
    """Angles of positions are computed in 16 bits: distinct positions get the same phase.

    Confirm: count the distinct angles: fewer than positions.
    """
    yield from _silent(signs, "position_precision_loss")


@cause("integer_in_low_precision", family="precision_loss")
def integer_in_low_precision(signs: Signs) -> Iterator[Diagnosis]:
    """Whole numbers (ids, timesteps, counts) are kept in bf16 or fp16 beyond 256 or 2048, where they collide.

    Confirm: x.to(dtype) != x for some of them; count the distinct values before and after.
    """
    yield from _silent(signs, "integer_in_low_precision")


@cause("scale_imbalance_absorption", family="precision_loss")
def scale_imbalance_absorption(signs: Signs) -> Iterator[Diagnosis]:
    """Terms of very different size are added up in one reduction; the small ones, which matter, are below the spacing.

    Confirm: compare the size of each channel's contribution: the largest is more than 1/u times the typical one.
    """
    yield from _silent(signs, "scale_imbalance_absorption")


@cause("catastrophic_cancellation", family="precision_loss")
def catastrophic_cancellation(signs: Signs) -> Iterator[Diagnosis]:
    """Two nearly equal rounded numbers are subtracted: what remains is rounding error.

    Confirm: compute the difference in float64 from the same inputs: it differs in the first digit.
    """
    yield from _silent(signs, "catastrophic_cancellation")


@cause("logprob_rounding", family="precision_loss")
def logprob_rounding(signs: Signs) -> Iterator[Diagnosis]:
    """Sums of log-probabilities are kept in 16 bits; their differences are below the spacing.

    Confirm: compare the margins with torch.finfo(dtype).eps * |logp|: they are smaller.
    """
    yield from _silent(signs, "logprob_rounding")


@cause("train_infer_mismatch", family="precision_loss")
def train_infer_mismatch(signs: Signs) -> Iterator[Diagnosis]:
    """Old and new log-probabilities come from different precision or kernels: the ratio is not 1 on unchanged weights.

    Confirm: nanny.check_policy_mismatch(train_logprobs, rollout_logprobs) on unchanged weights.
    """
    yield from _silent(signs, "train_infer_mismatch")
    found = [(e, site, gap) for e, ratios in signs.fact("ratios") for site, gap in ratios.items() if gap > signs.limits.ratio_gap]
    if found:
        exam, site, gap = max(found, key=lambda item: item[2])
        yield Diagnosis(
            culprit=site,
            confidence=CERTAIN,
            evidence=(
                f"step {exam.step}: exp(new - old) is 1 everywhere in FP32, on unchanged weights, but {gap:.2g} off as it ran",
                f"seen in {len({e.step for e, _, _ in found})} of {len(signs.evidence.examinations)} examined steps",
            ),
            chain=("log-probabilities by different precision", "ratio is not 1", "clipping and weights act on rounding"),
            step=exam.step,
            precision_caused=True,
        )


@cause("router_low_precision", family="precision_loss")
def router_low_precision(signs: Signs) -> Iterator[Diagnosis]:
    """A discrete decision (top-k, argmax, nearest code) falls differently because its scores were rounded.

    Confirm: compare the chosen indices with those of FP32 scores: more than 1 % differ.
    """
    yield from _silent(signs, "router_low_precision")


@cause("absorption_in_accumulator", family="precision_loss")
def absorption_in_accumulator(signs: Signs) -> Iterator[Diagnosis]:
    """A running sum in 16 bits no longer moves: what is added is below half its spacing.

    Confirm: accumulator + increment == accumulator, with an increment that is not 0.
    """
    yield from _silent(signs, "absorption_in_accumulator")


@cause("low_precision_output_head", family="precision_loss")
def low_precision_output_head(signs: Signs) -> Iterator[Diagnosis]:
    """Outputs share a large offset; the spacing at that size is larger than the differences that matter.

    Confirm: compare the spacing at the outputs' size with their standard deviation.
    """
    yield from _silent(signs, "low_precision_output_head")


@cause("residual_absorption", family="precision_loss")
def residual_absorption(signs: Signs) -> Iterator[Diagnosis]:
    """What a branch adds is below half a spacing of the residual stream, and has no effect.

    Confirm: x + f(x) == x for most elements although f(x) is not 0.
    """
    yield from _silent(signs, "residual_absorption")


@cause("kernel_low_precision_accumulation", family="precision_loss")
def kernel_low_precision_accumulation(signs: Signs) -> Iterator[Diagnosis]:
    """A library kernel adds up in the storage format: the affine gradients of LayerNorm on the CPU do.

    Confirm: compare its weight gradient with the FP32 one; the error grows with the number of rows.
    """
    yield from _silent(signs, "kernel_low_precision_accumulation")


@cause("target_in_low_precision", family="precision_loss")
def target_in_low_precision(signs: Signs) -> Iterator[Diagnosis]:
    """Labels or a teacher's outputs are computed or stored in low precision; arg-maxima or thresholds fall differently.

    Confirm: compute the targets once more in FP32: they differ.
    """
    yield from _silent(signs, "target_in_low_precision")


@cause("flash_attention_bias", family="precision_loss")
def flash_attention_bias(signs: Signs) -> Iterator[Diagnosis]:
    """Attention weights of exactly 1 in bf16 round P V always to the same side; the error builds up in the weights.

    Confirm: mean over standard deviation of (O_low - O_fp32): persistently above 0.5.
    """
    yield from _silent(signs, "flash_attention_bias")
    seen: dict[str, list[float]] = {}
    for _, biases in signs.fact("biases"):
        for site, numbers in biases.items():
            seen.setdefault(site, []).append(float(numbers["bias"]))
    for site, values in seen.items():
        least = min(values, key=abs)
        if abs(least) > signs.limits.rounding_bias and len({v > 0 for v in values}) == 1 and len(values) > 1:
            yield Diagnosis(
                culprit=site,
                confidence=CERTAIN,
                evidence=(
                    f"the rounding of P V in `{site}` has a mean of {least:.2f} of its spread, always to the same side, in "
                    f"{len(values)} examined steps; unbiased rounding has 0",
                    "two or more weights of a row are exactly 1: equal maxima",
                ),
                chain=("equal maxima, weights of exactly 1", "sums of one sign round one way", "the error adds up over steps"),
                step=signs.evidence.examinations[0].step,
                precision_caused=True,
            )
            return


@cause("fp8_scale_stale", family="overflow")
def fp8_scale_stale(signs: Signs) -> Iterator[Diagnosis]:
    """The scale of an fp8 tensor comes from older steps and does not know this step's outlier.

    Confirm: compare this step's absolute maximum with the one the scale was made from.
    """
    yield from _silent(signs, "fp8_scale_stale")
