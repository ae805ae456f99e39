"""Results that are finite and wrong: absorption, cancellation, rounding that decides. Seen beside the FP32 twin only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..accounts import as_named, by_break, by_hazard
from ..producers import cause_of
from ..registry import CERTAIN, Suspicion, cause
from ..signs import Signs


def _silent(signs: Signs, name: str) -> Iterator[Suspicion]:
    """A hazard that the examined steps name, unless louder trouble hides it; or the first bad number, if it speaks for this."""
    at = signs.break_
    if at is not None and name in (at.hint, cause_of(at, signs)) and at.in_reference is not True:
        yield by_break(signs, at, CERTAIN)
    elif at is None or not signs.harmed:
        yield from by_hazard(signs, name)


@cause("saturated_probability_loss", "precision_loss")
def saturated_probability_loss(signs: Signs) -> Iterator[Suspicion]:
    """A loss on probabilities that are exactly 0 or 1 in this format: its gradient is infinite, NaN or 0.

    Fix: use the loss on logits (`binary_cross_entropy_with_logits`, `cross_entropy`), or take the sigmoid or softmax in FP32.

    Confirm: count the probabilities that are exactly 0 or 1 and have the opposite label.
    """
    yield from _silent(signs, "saturated_probability_loss")


@cause("low_precision_grad_accumulation", "precision_loss")
def low_precision_grad_accumulation(signs: Signs) -> Iterator[Suspicion]:
    """Gradients of many micro-batches are added up in 16 bits; late ones fall below half a spacing.

    Fix: accumulate in FP32: FP32 parameters under autocast, or FP32 buffers beside the 16-bit gradients.

    Confirm: compare p.grad with the FP32 sum of the same micro-batch gradients: it is too small.
    """
    for seen in _silent(signs, "low_precision_grad_accumulation"):
        yield replace(seen, culprit="loop:accumulation") if seen.culprit.startswith("op:") else seen


@cause("low_precision_scatter_add", "precision_loss")
def low_precision_scatter_add(signs: Signs) -> Iterator[Suspicion]:
    """A scatter, index or embedding gradient is added up in 16 bits: rows that are hit often come out far too small.

    Fix: keep the table (and what is scattered) in FP32.

    Confirm: compare the gradient of the most frequent row with the FP32 one: it is too small.
    """
    yield from _silent(signs, "low_precision_scatter_add")


@cause("position_precision_loss", "precision_loss")
def position_precision_loss(signs: Signs) -> Iterator[Suspicion]:
    """Angles of positions are computed in 16 bits: distinct positions get the same phase.

    Fix: compute positions, frequencies, sin and cos in FP32 (`with torch.autocast(device, enabled=False)`), cast the result.

    Confirm: count the distinct angles: fewer than positions.
    """
    yield from _silent(signs, "position_precision_loss")


@cause("integer_in_low_precision", "precision_loss")
def integer_in_low_precision(signs: Signs) -> Iterator[Suspicion]:
    """Whole numbers (ids, timesteps, counts) are kept in bf16 or fp16 beyond 256 or 2048, where they collide.

    Fix: keep them as integers or in FP32 until they are embedded.

    Confirm: x.to(dtype) != x for some of them; count the distinct values before and after.
    """
    yield from _silent(signs, "integer_in_low_precision")


@cause("scale_imbalance_absorption", "precision_loss")
def scale_imbalance_absorption(signs: Signs) -> Iterator[Suspicion]:
    """Terms of very different size are added up in one reduction; the small ones, which matter, are below the spacing.

    Fix: standardise each feature in FP32 first, or keep this layer in FP32.

    Confirm: compare the size of each channel's contribution: the largest is more than 1/u times the typical one.
    """
    yield from _silent(signs, "scale_imbalance_absorption")


@cause("catastrophic_cancellation", "precision_loss")
def catastrophic_cancellation(signs: Signs) -> Iterator[Suspicion]:
    """Two nearly equal rounded numbers are subtracted: what remains is rounding error.

    Fix: reformulate (two-pass variance, torch.cdist, log1p, expm1), or compute this part in FP32.

    Confirm: compute the difference in float64 from the same inputs: it differs in the first digit.
    """
    yield from _silent(signs, "catastrophic_cancellation")


@cause("logprob_rounding", "precision_loss")
def logprob_rounding(signs: Signs) -> Iterator[Suspicion]:
    """Sums of log-probabilities are kept in 16 bits; their differences are below the spacing.

    Fix: log_softmax and the sum over tokens in FP32: `logits.float().log_softmax(-1)`.

    Confirm: compare the margins with torch.finfo(dtype).eps * |logp|: they are smaller.
    """
    yield from _silent(signs, "logprob_rounding")


@cause("train_infer_mismatch", "precision_loss")
def train_infer_mismatch(signs: Signs) -> Iterator[Suspicion]:
    """Old and new log-probabilities come from different precision or kernels: the ratio is not 1 on unchanged weights.

    Fix: compute both with the same precision and code path.

    Confirm: nanny.check_policy_mismatch(train_logprobs, rollout_logprobs) on unchanged weights.
    """
    yield from _silent(signs, "train_infer_mismatch")
    found = [(e, site, gap) for e, ratios in signs.fact("ratios") for site, gap in ratios.items() if gap > signs.limits.ratio_gap]
    if found:
        exam, site, gap = max(found, key=lambda item: item[2])
        yield Suspicion(
            culprit=as_named(site),
            score=CERTAIN,
            evidence=(
                f"step {exam.step}: exp(new - old) is 1 everywhere in FP32, on unchanged weights, but {gap:.2g} off as it ran",
                f"seen in {len({e.step for e, _, _ in found})} of {len(signs.evidence.examinations)} examined steps",
            ),
            chain=("log-probabilities by different precision", "ratio is not 1", "clipping and weights act on rounding"),
            step=exam.step,
            precision_caused=True,
        )


@cause("router_low_precision", "precision_loss")
def router_low_precision(signs: Signs) -> Iterator[Suspicion]:
    """A discrete decision (top-k, argmax, nearest code) falls differently because its scores were rounded.

    Fix: compute the router's logits in FP32.

    Confirm: compare the chosen indices with those of FP32 scores: more than 1 % differ.
    """
    yield from _silent(signs, "router_low_precision")


@cause("absorption_in_accumulator", "precision_loss")
def absorption_in_accumulator(signs: Signs) -> Iterator[Suspicion]:
    """A running sum in 16 bits no longer moves: what is added is below half its spacing.

    Fix: keep the accumulator in FP32 (or in integers, for counts).

    Confirm: accumulator + increment == accumulator, with an increment that is not 0.
    """
    yield from _silent(signs, "absorption_in_accumulator")


@cause("low_precision_output_head", "precision_loss")
def low_precision_output_head(signs: Signs) -> Iterator[Suspicion]:
    """Outputs share a large offset; the spacing at that size is larger than the differences that matter.

    Fix: compute the last layer in FP32, remove the offset (normalise targets, z-loss).

    Confirm: compare the spacing at the outputs' size with their standard deviation.
    """
    yield from _silent(signs, "low_precision_output_head")


@cause("residual_absorption", "precision_loss")
def residual_absorption(signs: Signs) -> Iterator[Suspicion]:
    """What a branch adds is below half a spacing of the residual stream, and has no effect.

    Fix: keep the residual stream in FP32, or normalise it.

    Confirm: x + f(x) == x for most elements although f(x) is not 0.
    """
    yield from _silent(signs, "residual_absorption")


@cause("kernel_low_precision_accumulation", "precision_loss")
def kernel_low_precision_accumulation(signs: Signs) -> Iterator[Suspicion]:
    """A library kernel adds up in the storage format: the affine gradients of LayerNorm on the CPU do.

    Fix: give this layer an FP32 input (`norm(x.float())`), or keep it out of autocast.

    Confirm: compare its weight gradient with the FP32 one; the error grows with the number of rows.
    """
    yield from _silent(signs, "kernel_low_precision_accumulation")


@cause("target_in_low_precision", "precision_loss")
def target_in_low_precision(signs: Signs) -> Iterator[Suspicion]:
    """Labels or a teacher's outputs are computed in low precision; arg-maxima or thresholds fall differently.

    Fix: compute targets in FP32, outside autocast.

    Confirm: compute the targets once more in FP32: they differ.
    """
    yield from _silent(signs, "target_in_low_precision")


@cause("flash_attention_bias", "precision_loss")
def flash_attention_bias(signs: Signs) -> Iterator[Suspicion]:
    """Attention weights of exactly 1 in bf16 round P V always to the same side; the error builds up in the weights.

    Fix: compute P V in FP32, or shift the maximum so that no weight is exactly 1.

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
            yield Suspicion(
                culprit=as_named(site),
                score=CERTAIN,
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


@cause("reduce_dtype_low_precision", "precision_loss")
def reduce_dtype_low_precision(signs: Signs) -> Iterator[Suspicion]:
    """Gradients are summed over processes in 16 bits.

    Fix: reduce in FP32 (`MixedPrecisionPolicy(reduce_dtype=torch.float32)`).

    Confirm: compare the reduced gradient with an FP32 all-reduce of the same local ones.
    """
    yield from _silent(signs, "reduce_dtype_low_precision")


@cause("fp8_scale_stale", "overflow")
def fp8_scale_stale(signs: Signs) -> Iterator[Suspicion]:
    """The scale of an fp8 tensor comes from older steps and does not know this step's outlier.

    Fix: scale by the present maximum, keep a shorter history, or leave a margin of a few bits.

    Confirm: compare this step's absolute maximum with the one the scale was made from.
    """
    yield from _silent(signs, "fp8_scale_stale")
