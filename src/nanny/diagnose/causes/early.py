"""Trends that foresee trouble while nothing is lost yet; the causes they lead to tell them as early warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...core.formats import FP16
from ...core.numbers import number, share
from ..records import Diagnosis
from ..registry import POSSIBLE
from ..signs import Signs

Points = Sequence[tuple[int, float]]  # step and value
_NARROW = 0.3  # of an entropy: a fall from wide to less wide is how attention learns


def crossing(points: Points, limit: float, fewest: int, fit: float) -> int | None:
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


def _foreseen(culprit: str, seen_at: int, expected: int, *evidence: str, precision: bool = True) -> Diagnosis:
    return Diagnosis(
        culprit=culprit,
        confidence=POSSIBLE,
        evidence=evidence,
        step=seen_at,
        precision_caused=precision,
        early=True,
        expected_step=expected,
    )


def _points_of(signs: Signs, fact: str, quantity: str) -> dict[str, Points]:
    """By site, over the examined steps."""
    points: dict[str, list[tuple[int, float]]] = {}
    for exam, of_sites in signs.fact(fact):
        for site, told in of_sites.items():
            points.setdefault(site, []).append((exam.step, float(told[quantity])))
    return dict(points)


def _nearest(signs: Signs) -> Iterator[tuple[str, Points]]:
    """The place whose fp16 results are the largest now, and how they grew: at traced steps what modules gave, at examined ones
    what operations gave. Of those that are as large the first: later ones mostly hand it on."""
    traced = signs.facts.reach
    if traced:
        yield traced[-1].site, [(r.step, r.largest) for r in traced if r.site == traced[-1].site]
    *_, last = [{}, *(of_sites for _, of_sites in signs.fact("reach"))]
    top = max((told["largest"] for told in last.values()), default=0.0)
    site = next((site for site, told in last.items() if told["largest"] >= 0.9 * top), None)
    if site is not None:
        yield site, _points_of(signs, "reach", "largest")[site]


def near_end_at(signs: Signs) -> int | None:
    """The step at which what grows steadily in fp16 will be so near to its end that it is told: worth a look then."""
    limits = signs.limits
    if signs.harmed or signs.amp_dtype != "float16":
        return None
    told_from = FP16.max / 2**limits.headroom_info_bits
    for _, points in _nearest(signs):
        ends = [crossing(points, end, int(limits.trend_points), limits.trend_fit) for end in (told_from, FP16.max)]
        if None not in ends and points[-1][1] < told_from:
            return ends[0]
    return None


def headroom_falls(signs: Signs) -> Iterator[Diagnosis]:
    """A layer's fp16 output grows steadily towards 65,504."""
    limits = signs.limits
    if signs.harmed or signs.amp_dtype != "float16":
        return
    for site, points in _nearest(signs):
        step = crossing(points, FP16.max, int(limits.trend_points), limits.trend_fit)
        if step is None or points[-1][1] < FP16.max / 2**limits.headroom_info_bits:
            continue
        yield _foreseen(
            site,
            points[-1][0],
            step,
            f"its largest value rose from {number(points[0][1])} at step {points[0][0]} to {number(points[-1][1])} at step "
            f"{points[-1][0]}, fp16 ends at {number(FP16.max)}",
            f"at this pace it overflows around step {step}",
        )
        return


def attention_logits_grow(signs: Signs) -> Iterator[Diagnosis]:
    """Attention logits grow steadily towards the end of fp16."""
    if signs.harmed or signs.amp_dtype != "float16":
        return
    for site, points in _points_of(signs, "attention", "logit_max").items():
        if points[-1][1] < FP16.max / 2**signs.limits.headroom_info_bits:
            continue
        step = crossing(points, FP16.max, int(signs.limits.trend_points), signs.limits.trend_fit)
        if step is not None:
            yield _foreseen(
                site,
                points[-1][0],
                step,
                f"its largest logit rose from {number(points[0][1])} to {number(points[-1][1])}",
                f"at this pace it passes {number(FP16.max)} around step {step}",
            )


def scale_sinks(signs: Signs) -> Iterator[Diagnosis]:
    """The loss scale falls again and again after steps had passed: the gradients grow towards what fp16 holds."""
    steps, scales = signs.evidence.curve("scale")
    _, skipped = signs.evidence.curve("skipped")
    if signs.harmed or len(scales) < 2 or len(skipped) != len(scales) or bool(skipped.all()):
        return
    first = int(np.argmin(skipped))  # a step that passed: the search is over
    changes = [i for i in range(first, len(scales)) if i == first or scales[i] != scales[i - 1]]
    points = [(int(steps[i]), 1 / float(scales[i])) for i in changes if scales[i] > 0]
    floor = signs.limits.scale_floor
    step = crossing(points, 1 / floor, int(signs.limits.trend_points), signs.limits.trend_fit)
    if step is None or points[-1][1] / points[0][1] < 1 / (2 * signs.limits.scale_sunk) ** 0.5:
        return
    yield _foreseen(
        "scaler.scale",
        points[-1][0],
        step,
        f"the loss scale sank from {number(1 / points[0][1])} at step {points[0][0]} to {number(1 / points[-1][1])} at step "
        f"{points[-1][0]}, in {len(points) - 1} changes",
        f"at this pace it is {floor:g} around step {step}, {step - int(steps[-1])} steps from now",
    )


def entropy_falls(signs: Signs) -> Iterator[Diagnosis]:
    """An attention becomes narrower from look to look, and nothing is learnt by it."""
    if signs.harmed or signs.learns:
        return
    limits = signs.limits
    for site, known in _points_of(signs, "attention", "entropy").items():
        points = [(step, 1 / entropy) for step, entropy in known if entropy > 0]
        if not points or known[-1][1] > _NARROW or known[-1][1] <= limits.attention_entropy:
            continue
        step = crossing(points, 1 / limits.attention_entropy, int(limits.trend_points), limits.trend_fit)
        if step is not None:
            yield _foreseen(
                site,
                known[-1][0],
                step,
                f"the entropy of its attention fell from {number(known[0][1])} at step {known[0][0]} to "
                f"{number(known[-1][1])} at step {known[-1][0]} (1 uniform, 0 one-hot)",
                f"at this pace it sees one key only around step {step}",
                precision=False,
            )
            return


def updates_shrink(signs: Signs) -> Iterator[Diagnosis]:
    """The share of 16-bit weights that a step leaves as they were grows towards most of them."""
    narrow = [u for u in signs.facts.updates if u.may_be_lost]
    steps, shares = signs.evidence.curve("unchanged_share")
    limits = signs.limits
    if signs.harmed or not narrow or not len(shares) or float(shares[-1]) > limits.unchanged_share_warn:
        return
    points = [(int(s), float(part)) for s, part in zip(steps, shares)]
    step = crossing(points, limits.unchanged_share_warn, int(limits.trend_points), limits.trend_fit)
    if step is None or points[-1][1] < limits.unchanged_share_warn / 2:
        return
    yield _foreseen(
        max(narrow, key=lambda u: u.unchanged).name,
        points[-1][0],
        step,
        f"{share(points[0][1])} of the 16-bit weights were left as they were at step {points[0][0]}, {share(points[-1][1])} "
        f"at step {points[-1][0]}: updates fall below half a spacing",
        f"at this pace it is most of them around step {step}",
    )
