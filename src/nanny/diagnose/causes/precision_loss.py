"""Results that are finite and wrong: absorption, cancellation, rounding that decides. Seen beside the FP32 twin only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

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


def _tell_alone(*names: str, family: str = "precision_loss") -> None:
    """Causes of which hazards tell all that there is to tell."""
    for name in names:
        cause(name, family=family)(partial(_silent, name=name))


@cause("saturated_probability_loss", family="precision_loss")
def saturated_probability_loss(signs: Signs) -> Iterator[Diagnosis]:
    """A loss on probabilities that are exactly 0 or 1 in this format: its gradient is infinite, NaN or 0."""
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
    """Gradients of many micro-batches are added up in 16 bits; late ones fall below half a spacing."""
    for seen in _silent(signs, "low_precision_grad_accumulation"):
        yield replace(seen, culprit="loop:accumulation") if seen.is_bare_operation else seen


_tell_alone(
    "low_precision_scatter_add",
    "position_precision_loss",
    "integer_in_low_precision",
    "scale_imbalance_absorption",
    "catastrophic_cancellation",
    "logprob_rounding",
)


@cause("train_infer_mismatch", family="precision_loss")
def train_infer_mismatch(signs: Signs) -> Iterator[Diagnosis]:
    """Old and new log-probabilities come from different precision or kernels: the ratio is not 1 on unchanged weights."""
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


_tell_alone(
    "router_low_precision",
    "absorption_in_accumulator",
    "low_precision_output_head",
    "residual_absorption",
    "kernel_low_precision_accumulation",
    "target_in_low_precision",
)


@cause("flash_attention_bias", family="precision_loss")
def flash_attention_bias(signs: Signs) -> Iterator[Diagnosis]:
    """Attention weights of exactly 1 in bf16 round P V always to the same side; the error builds up in the weights."""
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


_tell_alone("fp8_scale_stale", family="overflow")
