"""Trends that foresee trouble while nothing is lost yet; the causes they lead to tell them as early warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...core.formats import FP16
from ..describe import number
from ..records import Diagnosis
from ..registry import POSSIBLE
from ..signs import Signs


def crossing(points: Sequence[tuple[int, float]], limit: float, fewest: int, fit: float) -> int | None:
    """The step at which values that grow by a factor per step pass `limit`, if the trend is clear and that is soon."""
    known = [(s, v) for s, v in points if v > 0 and math.isfinite(v)]
    if len(known) < fewest:
        return None
    steps = np.array([s for s, _ in known], dtype=np.float64)
    logs = np.log([v for _, v in known])
    slope, start = np.polyfit(steps, logs, 1)
    spread = float(np.square(logs - logs.mean()).sum())
    if slope <= 0 or not spread:
        return None
    explained = 1 - float(np.square(logs - (start + slope * steps)).sum()) / spread
    if explained < fit or math.exp(logs[-1] - logs[0]) < 2:
        return None
    step = (math.log(limit) - start) / slope
    seen = steps[-1] - steps[0]
    return math.ceil(step) if steps[-1] < step <= steps[-1] + seen else None


def headroom_falls(signs: Signs) -> Iterator[Diagnosis]:
    """A layer's fp16 output grows steadily towards 65,504."""
    reach = signs.facts.reach
    if not reach or signs.harmed or signs.amp_dtype != "float16":
        return
    site = reach[-1].site
    points = [(r.step, r.largest) for r in reach if r.site == site]
    limits = signs.limits
    if points[-1][1] < FP16.max / 2**limits.headroom_info_bits:
        return
    step = crossing(points, FP16.max, int(limits.trend_points), limits.trend_fit)
    if step is None:
        return
    yield Diagnosis(
        culprit=site,
        confidence=POSSIBLE,
        evidence=(
            f"its largest value rose from {number(points[0][1])} at step {points[0][0]} to {number(points[-1][1])} at step "
            f"{points[-1][0]}, fp16 ends at {number(FP16.max)}",
            f"at this pace it overflows around step {step}",
        ),
        step=points[-1][0],
        precision_caused=True,
        early=True,
        expected_step=step,
    )


def attention_logits_grow(signs: Signs) -> Iterator[Diagnosis]:
    """Attention logits grow steadily towards the end of fp16."""
    if signs.harmed or signs.amp_dtype != "float16":
        return
    points: dict[str, list[tuple[int, float]]] = {}
    for exam, attention in signs.fact("attention"):
        for site, numbers in attention.items():
            points.setdefault(site, []).append((exam.step, float(numbers["logit_max"])))
    for site, known in points.items():
        if known[-1][1] < FP16.max / 2**signs.limits.headroom_info_bits:
            continue
        step = crossing(known, FP16.max, int(signs.limits.trend_points), signs.limits.trend_fit)
        if step is not None:
            yield Diagnosis(
                culprit=site,
                confidence=POSSIBLE,
                evidence=(
                    f"its largest logit rose from {number(known[0][1])} to {number(known[-1][1])}",
                    f"at this pace it passes {number(FP16.max)} around step {step}",
                ),
                step=known[-1][0],
                precision_caused=True,
                early=True,
                expected_step=step,
            )
