"""Which modules to keep in FP32: candidates by their own error, each set confirmed by running the model with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .diff_records import Advice, CallDiff, DiffReport, Failure
from .judge.diff_rules import graded
from .limits import Limits
from .observe.diff_settings import Settings
from .observe.paired_run import run_batch

MOST_CANDIDATES = 8


def find_advice(
    model: nn.Module, batch: Any, target: Any, settings: Settings, report: DiffReport, goal: float
) -> Advice:
    """Adds the module with the largest own error until the goal is met, then takes out what is not needed."""
    runs = 0

    def error_with(wide: Sequence[str]) -> float:
        nonlocal runs
        runs += 1
        lean = replace(settings, wide=tuple(wide), backward=False, own=False)
        outcome = run_batch(model, batch, target, lean)
        return math.inf if isinstance(outcome, Failure) else output_error(outcome.calls, report, settings.limits)

    before = output_error(report.calls, report, settings.limits)
    if before <= goal:
        return Advice(goal, before, before, (), 0.0, 0, "")
    wide, after = _grown(candidates(report, settings.limits), error_with, before, goal)
    if after <= goal:
        wide, after = _thinned(wide, error_with, after, goal)
    return Advice(
        goal=goal,
        before=before,
        after=after,
        wide=tuple(wide),
        parameter_share=_parameter_share(model, wide),
        runs=runs,
        code="\n".join(_region(site, report.device) for site in wide),
    )


def output_error(calls: Sequence[CallDiff], report: DiffReport, limits: Limits) -> float:
    outputs = [c.error for c in calls if not c.site]
    return max((math.inf if e.spoiled else graded(e, report, limits) for e in outputs), default=0.0)


def candidates(report: DiffReport, limits: Limits) -> list[str]:
    """Modules by their own error, those that make NaN or Inf first; the model itself is no candidate."""
    rated: dict[str, float] = {}
    for call in report.calls:
        if call.site and call.own is not None:
            own = math.inf if call.own.spoiled else graded(call.own, report, limits)
            rated[call.site] = max(rated.get(call.site, 0.0), own)
    return sorted(rated, key=lambda site: -rated[site])[:MOST_CANDIDATES]


def _grown(
    sites: Sequence[str], error_with: Callable[[Sequence[str]], float], before: float, goal: float
) -> tuple[list[str], float]:
    """The shortest prefix of the candidates that meets the goal; the best one if none does."""
    best: list[str] = []
    least = before
    for count in range(1, len(sites) + 1):
        error = error_with(sites[:count])
        if error < least:
            best, least = list(sites[:count]), error
        if error <= goal:
            break
    return best, least


def _thinned(
    wide: list[str], error_with: Callable[[Sequence[str]], float], after: float, goal: float
) -> tuple[list[str], float]:
    for site in wide[:-1]:
        fewer = [s for s in wide if s != site]
        error = error_with(fewer)
        if error <= goal:
            wide, after = fewer, error
    return wide, after


def _parameter_share(model: nn.Module, wide: Sequence[str]) -> float:
    kept = {id(p): p.numel() for site in wide for p in model.get_submodule(site).parameters()}
    total = sum(p.numel() for p in model.parameters())
    return sum(kept.values()) / total if total else 0.0


def _region(site: str, device: str) -> str:
    owner, _, name = site.rpartition(".")
    where = f"in the forward of {owner}" if owner else "in the model's forward"
    call = f"self[{name}]" if name.isdecimal() else f"self.{name}"
    return f"with torch.autocast({device!r}, enabled=False):  # {where}\n    y = {call}(x.float())"
