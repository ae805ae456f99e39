"""A remedy that was tried on the step itself, in words of both languages: the change, what came of it, whether it helped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..core.examination import Trial
from ..core.numbers import counted, number

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
