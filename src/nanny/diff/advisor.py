"""Which modules to keep in FP32: candidates by their own error, each set confirmed by running the model with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from ..core.limits import Limits
from .blame import largest_error, warn_limit
from .paired_run import run_batch
from .records import LOSS, Advice, CallDiff, DiffReport, Failure, WideTrial
from .settings import DiffSettings

MOST_CANDIDATES = 8


def run_trials(settings: DiffSettings, report: DiffReport, sites: Sequence[str]) -> tuple[WideTrial, ...]:
    """The model with one module after the other kept in FP32; a module that cannot be is left out."""
    out = []
    for site in sites:
        outcome = run_batch(replace(settings, wide=(site,), own=False))
        if not isinstance(outcome, Failure):
            gradient = outcome.total.rel_l2 if outcome.total else None
            if any(g.error.spoiled for g in outcome.gradients):
                gradient = math.inf
            out.append(WideTrial(site, _goal_error(outcome.calls, report, settings.limits), gradient))
    return tuple(out)


def find_advice(settings: DiffSettings, report: DiffReport, goal: float) -> Advice:
    """Adds the module with the largest own error until the goal is met, then takes out what is not needed."""
    runs = 0

    def error_with(wide: Sequence[str]) -> float:
        nonlocal runs
        runs += 1
        outcome = run_batch(replace(settings, wide=tuple(wide), backward=False, own=False))
        return math.inf if isinstance(outcome, Failure) else _goal_error(outcome.calls, report, settings.limits)

    before = _goal_error(report.calls, report, settings.limits)
    if before <= goal:
        return Advice(goal, before, before, (), 0.0, 0, "")
    wide, after = _grow(_candidates(report, settings.limits), error_with, before, goal)
    if after <= goal:
        wide, after = _thin(wide, error_with, after, goal)
    return Advice(
        goal=goal,
        before=before,
        after=after,
        wide=tuple(wide),
        parameter_share=_parameter_share(settings.model, wide),
        flop_share=_flop_share(report, wide),
        runs=runs,
        code="\n".join(_region(site, report) for site in wide),
    )


def _goal_error(calls: Sequence[CallDiff], report: DiffReport, limits: Limits) -> float:
    """What the goal is about: the error of the outputs, infinite if NaN or Inf come out."""
    outputs = [c.error for c in calls if not c.site]
    return max((math.inf if e.spoiled else largest_error(e, report, limits) for e in outputs), default=0.0)


def _candidates(report: DiffReport, limits: Limits) -> list[str]:
    """Modules by their own error, those that make NaN or Inf first; "" is the model's own code."""
    rated: dict[str, float] = {}
    for call in report.calls:
        if call.own is not None:
            own = math.inf if call.own.spoiled else largest_error(call.own, report, limits)
            rated[call.site] = max(rated.get(call.site, 0.0), own)
    for error in report.op_errors:  # code of a container whose result goes into a layer
        if error.site in rated or error.site == "":
            scaled = (error.centred or 0.0) * warn_limit(report, limits) / limits.diff_centred_warn
            rated[error.site] = max(rated.get(error.site, 0.0), error.rel_l2, scaled)
    for fault in report.faults:  # NaN or Inf inside, even if none comes out
        if fault.site != LOSS and not fault.backward:
            rated[fault.site] = math.inf
    return sorted(rated, key=lambda site: -rated[site])[:MOST_CANDIDATES]


def _grow(
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


def _thin(wide: list[str], error_with: Callable[[Sequence[str]], float], after: float, goal: float) -> tuple[list[str], float]:
    for site in wide[:-1]:
        fewer = [s for s in wide if s != site]
        error = error_with(fewer)
        if error <= goal:
            wide, after = fewer, error
    return wide, after


def _parameter_share(model: nn.Module, wide: Sequence[str]) -> float:
    kept = {id(p): p.numel() for site in wide for p in model.get_submodule(site).parameters(recurse=bool(site))}
    total = sum(p.numel() for p in model.parameters())
    return sum(kept.values()) / total if total else 0.0


def _flop_share(report: DiffReport, wide: Sequence[str]) -> float | None:
    total = sum(report.flops.values())
    kept = sum(n for site, n in report.flops.items() if any(_is_inside(site, w) for w in wide))
    return kept / total if total else None


def _is_inside(site: str, wide: str) -> bool:
    return site == wide or (wide != "" and site.startswith(f"{wide}."))


def _region(site: str, report: DiffReport) -> str:
    owner, _, name = site.rpartition(".")
    where = f"in the forward of {owner}" if owner else "in the model's forward"
    call = f"self[{name}]" if name.isdecimal() else f"self.{name}"
    if report.policy == "full":
        low = f"torch.{'bfloat16' if report.target == 'bf16' else 'float16'}"
        if not site:
            return f"x = x.float()  # {where}, after each layer; x.to({low}) before the next one"
        return f"model.{_path(site)}.float()  # after model.to({low})\ny = {call}(x.float()).to({low})  # {where}"
    if not site:
        return f"with torch.autocast({report.device!r}, enabled=False):  # {where}, between the layers\n    ...  # on x.float()"
    return f"with torch.autocast({report.device!r}, enabled=False):  # {where}\n    y = {call}(x.float())"


def _path(site: str) -> str:
    """`blocks.1.ffn` as code: `blocks[1].ffn`."""
    out = ""
    for part in site.split("."):
        out += f"[{part}]" if part.isdecimal() else f".{part}"
    return out.removeprefix(".")
