"""Trouble that FP32 would have had as well."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...core.examination import FirstBad
from ...core.numbers import number, share, short
from ...core.ops import LOSS_OPS
from ..choose import first_bad_cause
from ..describe import by_first_bad, by_hazard
from ..records import Diagnosis
from ..registry import CERTAIN, LIKELY, POSSIBLE, cause
from ..signs import Signs
from .early import entropy_falls


@cause("lr_too_high", family="not_precision", precision=False)
def lr_too_high(signs: Signs) -> Iterator[Diagnosis]:
    """Loss and gradients grow from step to step: the steps are too long, in any precision."""
    away = signs.steps_too_long
    if away is None:
        yield from _weights_thrown(signs)
        return
    at_steps, rates = signs.evidence.curve("lr")
    rates = rates[(at_steps >= away.start) & (at_steps <= away.step)]  # not what a schedule has made of it since
    ratio = float(np.nanmax(signs.evidence.curve("update_ratio")[1], initial=0.0))
    at = signs.first_bad
    twin = signs.twin_agrees(away.step)
    yield Diagnosis(
        culprit="optimizer.lr",
        confidence=LIKELY,
        evidence=tuple(
            t for t in (
                f"{away.name} grows from {number(away.low)} at step {away.start} to {number(away.high)} at step {away.step}",
                f"learning rate {rates.max():g}" if len(rates) else "",
                _update_told(ratio) if ratio > 0.05 else "",
                "at the examined steps before, loss and gradients agree with FP32" if twin else "",
                f"numbers leave their range only later, at step {at.step}" if at is not None and at.step > away.start else "",
            ) if t
        ),
        chain=("steps too long", f"{away.name} grows {number(away.factor)} times", *(("overflow",) if at is not None else ())),
        step=away.start,
        precision_caused=False,
    )  # fmt: skip


def _update_told(ratio: float) -> str:
    if ratio < 10:
        return f"one update is up to {share(ratio)} of the weights"
    return f"one update is up to {number(ratio)} times the weights"


def _weights_thrown(signs: Signs) -> Iterator[Diagnosis]:
    """No runaway, since norms or clipping hold it; but the first updates replaced the weights, and nothing is learned."""
    thrown, (_, rates) = signs.weights_overwritten, signs.evidence.curve("lr")
    height = signs.thrown_height
    learned = signs.below_its_start and signs.died is None and height is None
    if thrown is None or learned or signs.harmed or not len(rates):
        return
    before, after, ratio = thrown
    died = [] if signs.died is None else [signs.died]
    yield Diagnosis(
        culprit="optimizer.lr",
        confidence=POSSIBLE if signs.wrong_before(signs.facts.steps) else LIKELY,
        evidence=(
            f"the norm of all weights grows from {number(before)} to {number(after)}",
            *(() if signs.below_its_start else ("the loss is not below its start",)),
            *(() if height is None else (f"the first updates threw the loss to {number(height)} times its start",)),
            *(f"all units of `{site}` are off from step {step} on, and were not before" for site, step in died),
            _update_told(ratio),
            f"learning rate up to {float(np.max(rates)):g}",
        ),
        chain=("steps too long", "the first updates replace the weights", "nothing is learned"),
        step=0,
        precision_caused=False,
    )


@cause("lr_spent_early", family="not_precision", precision=False)
def lr_spent_early(signs: Signs) -> Iterator[Diagnosis]:
    """A schedule has taken the learning rate to next to nothing after a few steps, and the loss stays where it began."""
    spent = signs.rate_spent
    if spent is None or signs.learns or signs.harmed:
        return
    step, highest, since = spent
    yield Diagnosis(
        culprit="optimizer.lr",
        confidence=LIKELY,
        evidence=(
            f"the learning rate falls from {highest:g} to {since:g} by step {step} of {signs.facts.steps}, and stays there",
            "the loss does not fall",
        ),
        chain=(f"the schedule ends at step {step}", "updates too short to learn by", "the loss stays where it began"),
        step=step,
        precision_caused=False,
    )


@cause("data_outlier", family="not_precision", precision=False)
def data_outlier(signs: Signs) -> Iterator[Diagnosis]:
    """One batch holds a number far outside the others; its gradient throws the weights away, or stops Adam, in any precision."""
    one, at = signs.outlier, signs.first_bad
    if one is None or (at is not None and at.step <= one.step and at.in_reference is False):
        return  # FP32 would have borne that very step
    harm, end = "behind it the weights are thrown away", "weights thrown away"
    if one.shrinks is not None:
        end = "updates too short to learn by"
        share = number(100 * one.shrinks)
        harm = f"the second moment keeps that gradient: updates are {share} % as long for about {one.lasts:.0f} steps"
    yield Diagnosis(
        culprit="data",
        confidence=LIKELY,
        evidence=(
            f"the loss is {number(one.loss)} at step {one.step}, at most {number(one.usual)} in the steps before",
            f"the update before was usual (gradient norm {number(one.norm)}, median {number(one.usual_norm)}): the batch did it",
            harm,
        ),
        chain=(f"a number out of proportion in the batch of step {one.step}", "a huge gradient", end),
        step=one.step,
        precision_caused=False,
    )


@cause("exploding_recurrence", family="not_precision", precision=False)
def exploding_recurrence(signs: Signs) -> Iterator[Diagnosis]:
    """Activations or gradients grow by a factor in every layer or time step, before any training."""
    growth = signs.growth
    if growth is None or signs.growth_is_borne or not (signs.harmed or signs.exploded_at_once or signs.runaway is not None):
        return
    at, step = signs.first_bad, signs.facts.first_steps.get("growths")
    yield Diagnosis(
        culprit=growth.site,
        confidence=CERTAIN,
        evidence=(
            f"step {step}: {growth.direction} over {growth.calls} {growth.unit} from `{growth.site}` on the "
            f"norm grows {number(growth.factor)} times, {growth.each:.2f} each",
            *((f"it passes the range at `{at.culprit}`",) if at is not None else ()),
        ),
        chain=(f"gain above 1 in `{growth.site}`", "geometric growth", "overflow or an exploding gradient"),
        step=step,
        precision_caused=False,
    )


@cause("dead_relu", family="not_precision", precision=False)
def dead_relu(signs: Signs) -> Iterator[Diagnosis]:
    """Units that are never active: their gradients are exactly zero, in FP32 too."""
    yield from by_hazard(signs, "dead_relu")
    off = signs.dead_units
    if off is None or signs.harmed:
        return
    site, part, exams = off
    if part < signs.limits.dead_units_error and (part < signs.limits.dead_units_warn or signs.learns):
        return
    yield Diagnosis(
        culprit=site,
        confidence=CERTAIN if part >= signs.limits.dead_units_error else LIKELY,
        evidence=(
            f"{share(part)} of the units of `{site}` are off for the whole batch, in all of {exams} examined steps",
            *_no_gradient(signs),
        ),
        chain=("pre-activations below 0 for every sample", "derivative 0", "no gradient for these units and what feeds them"),
        step=signs.evidence.examinations[0].step,
        precision_caused=False,
    )


def _no_gradient(signs: Signs) -> Iterator[str]:
    names = [g.name for g in signs.facts.levels if g.steps >= 3 and g.zeros == g.steps]
    if names:
        yield f"{len(names)} gradients have been exactly 0 at every step, first `{names[0]}`; FP32 gives the same"


@cause("data_nan", family="not_precision", precision=False)
def data_nan(signs: Signs) -> Iterator[Diagnosis]:
    """The batch itself holds NaN or infinities."""
    at = signs.first_bad
    if at is None:
        return
    if at.from_data and at.source == "factor":
        text = "what the loss is computed with has no gradient and is not finite: the batch, or what the loop computed of it"
        yield by_first_bad(signs, at, POSSIBLE, text)
    elif at.from_data and at.source == "batch":
        what = "NaN" if at.nan else "infinity"
        text = f"step {at.step}: the batch holds {what}; forward and loss hide it (tanh of infinity is 1), gradients do not"
        yield by_first_bad(signs, at, LIKELY if at.hazard is None else CERTAIN, text)
    elif at.from_data and (at.nan or at.dtype != "float16"):
        yield by_first_bad(signs, at, CERTAIN, culprit=_which_data(signs, at))
    elif first_bad_cause(at, signs) == "data_nan":
        yield by_first_bad(signs, at, CERTAIN)


def _which_data(signs: Signs, at: FirstBad) -> str:
    """The target, if every module put out finite numbers and only the loss is bad."""
    if at.place.is_data and at.hazard is not None:
        return at.place.site
    incident = next((i for i in signs.facts.incidents if i.step == at.step), None)
    if incident is None or incident.bad_calls:
        return "data:input"
    seen = incident.autopsy
    beside = seen is not None and seen.takes_in and not seen.inside  # what meets a weight goes into the model
    return "data:target" if beside or (seen is not None and seen.op in LOSS_OPS) else "data:input"


@cause("undefined_operation", family="not_precision", precision=False)
def undefined_operation(signs: Signs) -> Iterator[Diagnosis]:
    """A logarithm, root, division, power or angle outside its domain: no precision has a finite result."""
    at = signs.first_bad
    if at is not None and first_bad_cause(at, signs) == "undefined_operation" and not signs.ran_away_before(at):
        yield by_first_bad(signs, at, CERTAIN if at.source == "examination" and not at.stored else LIKELY)


@cause("float32_overflow", family="not_precision", precision=False)
def float32_overflow(signs: Signs) -> Iterator[Diagnosis]:
    """A result beyond 3.4e38, the end of float32 and bfloat16: a wider format of the same kind does not help."""
    at = signs.first_bad
    if at is not None and first_bad_cause(at, signs) == "float32_overflow" and not signs.ran_away_before(at):
        # the graph of a loss does not show what went in: an infinite constant looks the same
        yield by_first_bad(signs, at, CERTAIN if at.source == "examination" else POSSIBLE)


@cause("loss_without_floor", family="not_precision", precision=False)
def loss_without_floor(signs: Signs) -> Iterator[Diagnosis]:
    """The loss falls below 0 and on without end: a term has the wrong sign, or nothing bounds it."""
    away = signs.bottomless
    if away is None or signs.outlier is not None:
        return
    yield Diagnosis(
        culprit="loop:loss",
        confidence=LIKELY,
        evidence=(
            f"the loss falls from {number(away.low)} to {number(away.high)} at step {away.step}, and stays there or goes on",
            f"it is below 0 from step {away.start} on, and gradients grow with it: the lower the loss, the faster it falls",
        ),
        chain=("a term with the wrong sign, or without a bound", "a loss without a lowest value", "outputs grow for ever"),
        step=away.start,
        precision_caused=False,
    )


@cause("targets_outside_range", family="not_precision", precision=False)
def targets_outside_range(signs: Signs) -> Iterator[Diagnosis]:
    """A binary cross entropy is given targets below 0 or above 1: it has no lowest value then.

    Confirm: print target.min() and target.max(): they are not within 0 and 1.
    """
    seen = list(signs.fact("targets_outside"))
    if not seen:
        return
    _, losses = signs.evidence.curve("loss")
    below = losses[losses < 0]
    exam, told = seen[0]
    yield Diagnosis(
        culprit="data:target",
        confidence=CERTAIN if len(below) else LIKELY,
        evidence=(
            f"step {exam.step}: targets of the binary cross entropy go from {number(told['low'])} to {number(told['high'])}; "
            f"{share(told['share'])} of them are not within 0 and 1",
            *(
                (f"the loss falls to {number(float(below.min()))}: with targets from 0 to 1 it is never below 0",)
                if len(below)
                else ()
            ),
        ),
        chain=("targets outside 0 to 1", "a loss without a lowest value", "outputs grow for ever"),
        step=exam.step,
        where=told["where"],
        source=told["source"],
        precision_caused=False,
    )


@cause("softmax_twice", family="not_precision", precision=False)
def softmax_twice(signs: Signs) -> Iterator[Diagnosis]:
    """A loss that takes logits is given probabilities: a softmax is taken of a softmax.

    Confirm: print output.sum(-1) of what the loss is given: it is 1 in every row.
    """
    seen = list(signs.fact("softmax_twice"))
    if not seen or 2 * len(seen) < len(signs.evidence.examinations):
        return
    exam, told = seen[0]
    lowest = math.log1p((told["classes"] - 1) / math.e)
    yield Diagnosis(
        culprit=told["site"] or "op:log_softmax",
        confidence=LIKELY if signs.learns else CERTAIN,
        evidence=(
            f"step {exam.step}: every row that log_softmax is given adds up to 1 already, with none below 0",
            f"of such rows of {told['classes']} a cross entropy is never below {lowest:.3g}",
            f"seen in {len(seen)} of {len(signs.evidence.examinations)} examined steps",
        ),
        chain=(
            "probabilities where logits belong",
            "what the softmax is given lies within 1",
            "small gradients, a loss with a floor",
        ),
        step=exam.step,
        where=told["where"],
        source=told["source"],
        precision_caused=False,
    )


@cause("singular_gradient", family="not_precision", precision=False)
def singular_gradient(signs: Signs) -> Iterator[Diagnosis]:
    """A derivative is taken where it does not exist: sqrt or norm at 0, a power, an angle at 1."""
    at = signs.first_bad
    if at is None or signs.ran_away_before(at) or (at.place.phase != "backward" and at.hint != "singular_gradient"):
        return  # forward may hold the infinity that only its derivative meets, behind a torch.where
    if at.in_reference is True:
        yield by_first_bad(signs, at, CERTAIN, culprit=_forward_name(signs, at))
        return
    scales = signs.evidence.curve("scale")[1]
    at_any_scale = len(scales) and float(np.min(scales)) <= 1 and signs.skips[2] > 0
    if at.source != "examination" and at.nan and (at_any_scale or not len(scales)):
        scaled = "gradients are NaN at any loss scale while forward and loss are finite"
        text = scaled if len(scales) else "gradients are NaN while forward and loss are finite"
        yield by_first_bad(signs, at, POSSIBLE, text)


def _forward_name(signs: Signs, at: FirstBad) -> str:
    """`sqrt`, not the division that its derivative is: as the user has written it."""
    incident = next((i for i in signs.facts.incidents if i.step == at.step and i.singular is not None), None)
    if at.place.site or incident is None or incident.singular is None:
        return ""
    return f"op:{incident.singular.op}"


@cause("vanishing_architecture", family="not_precision", precision=False)
def vanishing_architecture(signs: Signs) -> Iterator[Diagnosis]:
    """Gradients fade layer by layer on the way back, in FP32 too."""
    fade = signs.gradient_fade
    if fade is None:
        yield from _biases_alone(signs)
        yield from _fades_in_time(signs)
        return
    name, ratio, norm, top, reference = fade
    yield Diagnosis(
        culprit=name.rpartition(".")[0] or name,
        confidence=LIKELY if not signs.learns else POSSIBLE,
        evidence=(
            f"the gradient of `{name}` has an rms of {short(norm)}, that of the last layer {short(top)}: {short(ratio)} of it",
            "FP32 gives the same" if reference else "not compared with FP32",
        ),
        chain=("derivatives below 1 in every layer", "the product vanishes", "early layers learn nothing"),
        step=signs.evidence.examinations[-1].step if signs.evidence.examinations else None,
        precision_caused=False,
    )


def _biases_alone(signs: Signs) -> Iterator[Diagnosis]:
    """Forward and backward fade alike, or all weights begin at 0: every matrix gets as little, and only biases learn."""
    alone = signs.biases_alone
    if alone is None or signs.learns or signs.harmed:
        return
    name, ratio, exams = alone
    if not ratio and signs.evidence.finding("NO_GRADIENT_ARRIVES") is not None:
        return  # what fades is small, and these are exactly 0, biases among them
    yield Diagnosis(
        culprit=name.rpartition(".")[0] or name,
        confidence=LIKELY,
        evidence=(
            f"the gradients of most weight matrices are at most {short(ratio)} of those of the biases, "
            f"in {exams} examined steps; FP32 gives the same",
            "the loss does not fall",
        ),
        chain=("weights begin at 0, or so small that the signal dies", "no matrix gets a gradient", "only biases learn"),
        step=signs.evidence.examinations[0].step,
        precision_caused=False,
    )


def _fades_in_time(signs: Signs) -> Iterator[Diagnosis]:
    fading = signs.fading_in_time
    if fading is None or signs.learns or signs.harmed:
        return
    step = signs.facts.first_steps.get("growths")
    yield Diagnosis(
        culprit=fading.site,
        confidence=LIKELY,
        evidence=(
            f"step {step}: over {fading.calls} calls of `{fading.site}` the gradient shrinks to "
            f"{short(fading.factor)} of itself on the way back, {fading.each:.2f} each",
            "the loss does not fall",
        ),
        chain=("derivatives below 1 at every call", "the product vanishes", "what came early is never learned"),
        step=step,
        precision_caused=False,
    )


@cause("attention_entropy_collapse", family="not_precision", precision=False)
def attention_entropy_collapse(signs: Signs) -> Iterator[Diagnosis]:
    """Attention logits are so large that every query sees one key only; no gradient flows through the softmax."""
    collapsed = signs.one_hot_attention
    if collapsed is None or signs.harmed:
        yield from entropy_falls(signs)
        return
    site, entropy, largest, exams = collapsed
    yield Diagnosis(
        culprit=site,
        confidence=CERTAIN if not signs.learns else LIKELY,
        evidence=(
            f"the attention of `{site}` has an entropy of {entropy:.2g} (1 uniform, 0 one-hot), in {exams} examined steps",
            f"its logits reach {number(largest)}; from about 50 on the softmax is one-hot",
            *(("the loss does not fall",) if not signs.learns else ()),
        ),
        chain=("logits far apart", "softmax puts all weight on one key", "its gradient is 0", "the scores never change"),
        step=signs.evidence.examinations[0].step,
        precision_caused=False,
    )
