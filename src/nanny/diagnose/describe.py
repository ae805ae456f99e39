"""How a cause tells what was seen: the same numbers in the same words, whichever cause they speak for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..core.examination import FirstBad, Trial
from ..core.formats import FP16
from ..core.numbers import counted
from .records import Diagnosis
from .registry import CERTAIN, LIKELY, POSSIBLE, less_sure
from .signs import Signs


def number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.3g}"


def by_first_bad(signs: Signs, at: FirstBad, confidence: float, *more: str, culprit: str = "") -> Diagnosis:
    """What the first bad number proves."""
    where = culprit or (at.hazard.culprit if at.hazard is not None and at.hazard.cause else at.culprit)
    return Diagnosis(
        culprit=where,
        confidence=confidence,
        evidence=(*_maker(at), *more, *_in_fp32(at), *_made_again(signs, at), *_harm(signs)),
        chain=chain_of(signs, at, where),
        step=at.step,
        where=at.place.where,
        source=at.place.source,
        precision_caused=None if at.in_reference is None else not at.in_reference,
    )


def _maker(at: FirstBad) -> Iterator[str]:
    what = "NaN" if at.nan else "infinity"
    maker = f"`{at.op}`" if at.op else "an operation"
    inside = f" in `{at.culprit}`" if at.place.site and not at.place.is_data else ""
    largest = at.inputs.get("absmax")
    came = f" from inputs up to {number(largest)}" if largest else ""
    yield f"step {at.step}: the first {what} comes out of {maker}{inside}" + (f" ({at.dtype})" if at.dtype else "") + came
    if at.expected is not None and math.isfinite(at.expected):
        over = f", beyond the {number(FP16.max)} of fp16" if at.expected > FP16.max else ""
        yield f"in FP32 the same result reaches {number(at.expected)}{over}"
    if at.hazard is not None and at.hazard.message:
        yield at.hazard.message


def _in_fp32(at: FirstBad) -> Iterator[str]:
    if at.in_reference is True:
        yield "the FP32 twin of the same step breaks there too: precision is not the reason"
    elif at.in_reference is False and at.source == "examination":
        yield "the FP32 twin of the same step stays finite there"


def _made_again(signs: Signs, at: FirstBad) -> Iterator[str]:
    if any(exam.step == at.step for exam, _ in signs.fact("other_bits")):
        yield "run again on the same inputs, the step gave other bits: the model keeps a state, or a kernel is not deterministic"


def _harm(signs: Signs) -> Iterator[str]:
    facts = signs.facts
    total, _, at_end = signs.skips
    if at_end and at_end == total and total > 1:
        yield f"{total} of {facts.steps} steps skipped, none after it succeeded"
    elif total:
        yield f"{total} of {facts.steps} steps skipped"
    elif facts.bad_steps:
        yield f"{facts.bad_steps} of {facts.steps} steps with a non-finite loss or gradient"


def chain_of(signs: Signs, at: FirstBad, culprit: str) -> tuple[str, ...]:
    links = [f"{culprit}: {'NaN' if at.nan else 'inf'}" + (f" out of {at.op}" if at.op else "")]
    incident = next((i for i in signs.facts.incidents if i.step >= at.step), None)
    if incident is not None:
        passed = [c.site for c in incident.bad_calls if c.site not in (culprit, signs.facts.latest.root_site)]
        links += [f"passed on by {passed[0]}"] if passed else []
        if incident.loss is not None and not math.isfinite(incident.loss):
            links.append(f"loss {incident.loss}")
        if incident.bad_grads:
            links.append(f"{len(incident.bad_grads)} gradients {'NaN' if incident.nan_grads else 'inf'}")
        links.append("optimizer step skipped" if incident.skipped else "weights spoilt" if incident.bad_grads else "")
    return tuple(link for link in links if link)


def by_hazard(signs: Signs, name: str, lowest: float = 0.0) -> Iterator[Diagnosis]:
    """The worst hazard that speaks for a cause by itself; earlier operations of the step before later ones."""
    found = [(e, h) for e, h in signs.hazards(name) if h.consequence > lowest]
    if not found:
        return
    worst = max(h.consequence for _, h in found)
    exam, hazard = next((e, h) for e, h in sorted(found, key=lambda p: (p[0].step, p[1].order)) if h.consequence >= 0.25 * worst)
    seen = len({e.step for e, _ in found})
    if worst < signs.limits.damage_consequence and seen < max(2.0, 0.5 * len(signs.evidence.examinations)):
        return  # little, and not always: what healthy runs show now and then
    if signs.learns and 2 * seen < len(signs.evidence.examinations) and all(h.kind == "amplification" for _, h in found):
        return  # a channel that is nearly constant in some batches: a norm makes noise of it, and the loss falls
    times = f"seen in {seen} of {len(signs.evidence.examinations)} examined steps"
    error = f"gradients {exam.gradient_error:.1%} off FP32 at this step" if _told(exam.gradient_error) else ""
    confidence = LIKELY if hazard.consequence >= 0.1 else POSSIBLE
    if name == signs.lead and worst >= 0.5:
        confidence = CERTAIN
    yield Diagnosis(
        culprit=hazard.culprit,
        confidence=less_sure(confidence) if hazard.in_reference else confidence,
        evidence=tuple(t for t in (f"step {exam.step}: {hazard.message}", error, times) if t),
        chain=(f"{hazard.culprit}: {hazard.kind} in {hazard.op}", *(("wrong gradients",) if error else ())),
        step=exam.step,
        where=hazard.place.where,
        source=hazard.place.source,
        precision_caused=not hazard.in_reference,
    )


def _told(error: float | None) -> bool:
    return error is not None and math.isfinite(error) and error > 0


# a remedy that was tried, in both languages: the change, what came of it, the verdict on it

_CHANGES = {
    "fp32": ("{op} in FP32{more}", "{op} 改用 FP32{more}"),
    "scaled_first": ("the first factor of {op} divided by {value} before the product", "在 {op} 之前先把第一个因子除以 {value}"),
    "larger_eps": ("an eps of {value} at {op}", "{op} 处的 eps 取 {value}"),
    "on_logits": ("the probabilities of {op} from their logits, in FP32", "{op} 的概率改由 logits 以 FP32 计算"),
    "master_weights": ("FP32 master weights", "改用 FP32 主权重"),
    "rows_left_out": ("{rows} of the batch left out", "去掉 batch 中的 {value} 行"),
    "smaller_scale": ("a loss scale {value} times smaller", "损失缩放缩小到原来的 1/{value}"),
}
_MORE = (", and at {places}", "，另有 {count} 处相同")
_HELPED = {
    True: ("tried on this step, it helps: with {change}, {outcome}", "已在这一步试过，有效：{change}，{outcome}"),
    False: ("tried on this step, it does not help: with {change}, {outcome}", "已在这一步试过，无效：{change}，{outcome}"),
    None: ("tried on this step: with {change}, {outcome}", "已在这一步试过：{change}，{outcome}"),
}
_OUTCOMES = {
    "loss": ("the loss is finite", "损失为有限值"),
    "no loss": ("the loss is still not finite", "损失仍非有限值"),
    "outputs": ("the model's outputs are finite", "模型输出为有限值"),
    "no outputs": ("the model's outputs are still not finite", "模型输出仍非有限值"),
    "no gradients": ("gradients are not finite", "梯度非有限值"),
    "scaled": ("gradients overflow under a loss scale of {0}", "在损失缩放 {0} 下梯度溢出"),
    "gradients": ("gradients {0} from FP32", "梯度与 FP32 相差 {0}"),
    "less": ("gradients {0} from FP32 instead of {1}", "梯度与 FP32 相差 {0}，原为 {1}"),
    "update": ("one update moves {0} of the weights instead of {1}", "一次更新改变 {0} 的权重，原为 {1}"),
    "off": ("outputs {0} from FP32", "输出与 FP32 相差 {0}"),
    "moved": ("outputs change by {0}", "输出改变 {0}"),
}


def trial_in_words(trial: Trial, language: str = "en") -> str:
    zh = int(language == "zh")
    more = _MORE[zh].format(count=trial.places - 1, places=counted(trial.places - 1, "more place")) if trial.places > 1 else ""
    value = "" if trial.value is None else number(trial.value)
    change = _CHANGES[trial.change][zh].format(
        op=f"`{trial.op}`", value=value, more=more, rows=counted(int(trial.value or 0), "row")
    )
    outcome = ("，" if zh else ", ").join(_OUTCOMES[key][zh].format(*numbers) for key, *numbers in _outcome(trial))
    return _HELPED[trial.helped][zh].format(change=change, outcome=outcome)


def _outcome(trial: Trial) -> Iterator[tuple[str, ...]]:
    if trial.was_bad and trial.loss is not None:
        yield ("loss" if math.isfinite(trial.loss) else "no loss",)
    elif trial.was_bad and trial.outputs_finite is not None:
        yield ("outputs" if trial.outputs_finite else "no outputs",)
    if trial.moved is not None and trial.moved_before is not None:
        yield "update", _share(trial.moved), _share(trial.moved_before)
    if trial.gradient_error is not None:
        before = () if trial.gradient_error_before is None else (_share(trial.gradient_error_before),)
        yield ("less" if before else "gradients", _share(trial.gradient_error), *before)
    elif trial.gradients_finite is False and trial.is_finite:
        yield "scaled", number(trial.scale or 1.0)
    elif trial.gradients_finite is False:
        yield ("no gradients",)
    if trial.output_error is not None and trial.output_change is None:
        yield "off", _share(trial.output_error)
    elif trial.output_change is not None:
        yield "moved", _share(trial.output_change)


def _share(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"
