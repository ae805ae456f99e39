"""A remedy that was tried on the step itself, in words of both languages: the change, what came of it, whether it helped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..core.examination import Trial, as_typed
from ..core.numbers import amount, number


def trial_in_words(trial: Trial, language: str = "en") -> str:
    from ..show.translation import words_of

    words = words_of("trial", language)
    more = words["more"].format(count=trial.places - 1, places=amount(trial.places - 1, "more place")) if trial.places > 1 else ""
    value = "" if trial.value is None else number(trial.value)
    change = words[f"change.{trial.change}"].format(
        op=f"`{as_typed(trial.op)}`", value=value, more=more, rows=amount(int(trial.value or 0), "row")
    )
    outcomes = [words[f"outcome.{key}"].format(*numbers) for key, *numbers in _outcome(trial)]
    told = words[{True: "helps", False: "helps not", None: "tried"}[trial.helped]]
    return told.format(step=trial.step, change=change, outcome=("，" if language == "zh" else ", ").join(outcomes))


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
