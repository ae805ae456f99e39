"""What else one step tells that causes ask for: attention, dead units, biased products, growth along repeated operations, and
what a loss was given that it is not made for."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core.ops import ATTENTIONS, BINARY_LOSSES, MATMULS, RELUS, bare_op
from ..watch.places import Spot
from ..watch.tensors import LOW, in_backward
from ..watch.twins import Operation
from .measure import extent

_MOST_ROWS = 4096
_MOST_CALLS = 64
_MOST_SITES = 512
_EXACTLY_ONE = 1e-5
_NEAR_TOP = 0.05  # of the largest fp16 result of the step: who comes nearest to the end later is among those that are near now
_MOST_NEAR = 64
_TIED_ROWS = 0.2
_FEWEST_FOR_BIAS = 256
_MANY_ROWS = 32  # different inputs of one call; fewer do not tell by themselves: a dropout before it, one sample at a time
_MASKED = -1e4  # a score this low is a mask, not a score
_SUMS_TO_ONE = 0.02  # a row of probabilities as bf16 has it
_FAR_OUTSIDE = 0.5  # of 0 to 1: labels that were smoothed, or made noisy, go beyond by less


class StepFacts:
    """Collects; `facts()` tells."""

    def __init__(self) -> None:
        self.attention: dict[str, dict[str, float]] = {}
        self.dead: dict[str, float] = {}
        self._fired: dict[tuple[str, int], tuple[Tensor, int]] = {}  # units that a call of few rows turned on, and all its rows
        self.ratios: dict[str, float] = {}
        self.biases: dict[str, dict[str, float]] = {}
        self._reach: dict[str, float] = {}  # by place, in the order of execution
        self.outside: dict[str, Any] = {}
        self.twice: dict[str, Any] = {}
        self._growth: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        self._passes = 0  # micro-batches and closures come again: growth is told of the first pass alone
        self._in_backward = False

    def see(self, op: Operation, spot: Spot) -> None:
        if op.is_view or spot.place.phase == "optimizer":
            return
        name = bare_op(op.name)
        out = op.out[0] if isinstance(op.out, (tuple, list)) and op.out else op.out
        if not isinstance(out, Tensor) or not out.is_floating_point() or not out.numel() or out.layout is not torch.strided:
            return
        site = spot.place.site or f"op:{name}"
        if self._in_backward != in_backward():
            self._in_backward = not self._in_backward
            self._passes += not self._in_backward
        if name in MATMULS and not self._passes and len(self._growth) < _MOST_SITES:
            calls = self._growth[(site, name, spot.place.phase)]
            if len(calls) < _MOST_CALLS:
                calls.append(extent(out).absmax)
        if spot.place.phase == "backward":
            return
        if out.dtype == torch.float16 and math.isfinite(largest := extent(out).absmax):
            self._reach[site] = max(self._reach.get(site, 0.0), largest)
        if name == "bmm" and out.dtype in LOW:
            self._bias(site, op, out)
        elif name in RELUS:
            self._units(site, out)
        elif name == "softmax":
            self._softmax(site, op)
        elif name == "log_softmax":
            self._note_softmax_of_probabilities(op, spot)
        elif name in BINARY_LOSSES and len(op.args) > 1:
            self._note_targets(op, spot)
        elif name == "exp" and isinstance(op.twin_out, Tensor):
            self._ratio(f"op:{name}" if not spot.place.site else site, out, op.twin_out)
        elif name in ATTENTIONS and len(op.args) > 1:
            self._note_fused_scores(site, op)

    def _bias(self, site: str, op: Operation, out: Tensor) -> None:
        """The mean of a product's own rounding over its spread, where weights tie at exactly 1: then all may round one way."""
        tied = float(((op.args[0] == 1).sum(-1) > 1).double().mean())
        if tied < _TIED_ROWS or out.numel() < _FEWEST_FOR_BIAS:
            return
        error = out.double() - torch.bmm(op.args[0].double(), op.args[1].double())
        spread = float(error.std())
        if spread > 0:
            self.biases[site] = {"bias": float(error.mean()) / spread, "tied": tied}

    def _note_softmax_of_probabilities(self, op: Operation, spot: Spot) -> None:
        """Whether all rows are none below 0 and add up to 1 already."""
        given, dim = op.args[:2]
        if self.twice or given.dim() < 2 or given.shape[dim] < 2 or given.numel() < 2 * given.shape[dim]:
            return
        if not extent(given).low >= 0:
            return
        if float((given.float().sum(dim) - 1).abs().max()) > _SUMS_TO_ONE:
            return
        place, classes = spot.resolve(), int(given.shape[dim])
        self.twice = {"classes": classes, "site": place.site, "where": place.where, "source": place.source}

    def _note_targets(self, op: Operation, spot: Spot) -> None:
        target = op.args[1]
        if self.outside or not isinstance(target, Tensor) or not target.is_floating_point() or not target.numel():
            return
        span = extent(target)
        if span.finite and (span.low < -_FAR_OUTSIDE or span.high > 1 + _FAR_OUTSIDE):
            place, share = spot.resolve(), float(((target < 0) | (target > 1)).double().mean())
            self.outside = {**span._asdict(), "share": share, "where": place.where, "source": place.source}

    def _ratio(self, site: str, out: Tensor, twin: Tensor) -> None:
        """exp(a - b) that is 1 everywhere in FP32: the same quantity twice, as an importance ratio on unchanged weights is."""
        if out.numel() > 1 and float((twin - 1).abs().max()) < _EXACTLY_ONE:
            self.ratios[site] = float((out.float() - 1).abs().median())

    def _units(self, site: str, out: Tensor) -> None:
        if out.dim() < 2:
            return
        unit = 1 if out.dim() > 3 or (out.dim() == 3 and out.shape[1] < out.shape[0]) else out.dim() - 1
        others = [d for d in range(out.dim()) if d != unit]
        fires, rows = out.amax(others) > 0, out.numel() // out.shape[unit]
        if rows < _MANY_ROWS:
            before, seen = self._fired.get((site, len(fires)), (fires, 0))
            self._fired[site, len(fires)] = fires | before, rows + seen
        else:
            self.dead[site] = max(self.dead.get(site, 0.0), _share_off(fires))

    def _softmax(self, site: str, op: Operation) -> None:
        scores, dim = op.args[0], op.args[1]
        if scores.dim() < 3 or scores.shape[dim] < 2:
            return
        self._attend(site, scores.movedim(dim, -1).reshape(-1, scores.shape[dim])[:_MOST_ROWS].float())

    def _note_fused_scores(self, site: str, op: Operation) -> None:
        """The fused kernel keeps its scores to itself: those of the first head are made again."""
        query, key = op.args[0], op.args[1]
        if query.dim() != 4 or key.shape[-1] != query.shape[-1]:
            return
        scale = op.kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
        scores = query[0, 0, -512:].float() @ key[0, 0].float().T * scale
        causal = (len(op.args) > 4 and op.args[4] is True) or op.kwargs.get("is_causal")
        if causal:
            ones = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~ones.tril(key.shape[-2] - scores.shape[0]), -math.inf)
        self._attend(site, scores)

    def _attend(self, site: str, scores: Tensor) -> None:
        there = scores > _MASKED
        seen = there.sum(-1)
        rows = seen > 1
        if not bool(rows.any()):
            return
        scores, there, seen = scores[rows], there[rows], seen[rows]
        shares = scores.masked_fill(~there, -math.inf).softmax(-1)
        entropy = -(shares * shares.clamp_min(1e-30).log()).sum(-1) / seen.double().log()
        largest = float(scores[there].abs().max())
        known = self.attention.setdefault(site, {"entropy": math.inf, "logit_max": 0.0})
        known["entropy"] = min(known["entropy"], float(entropy.mean()))
        known["logit_max"] = max(known["logit_max"], largest)

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.attention:
            facts["attention"] = self.attention
        few = {site: (_share_off(fires), rows) for (site, _), (fires, rows) in self._fired.items() if site not in self.dead}
        if self.dead or few:
            facts["dead_units"] = {**self.dead, **{site: off for site, (off, _) in few.items()}}
        if few:
            facts["few_rows"] = {site: rows for site, (_, rows) in few.items()}
        if self.outside:
            facts["targets_outside"] = self.outside
        if self.twice:
            facts["softmax_twice"] = self.twice
        if self.biases:
            facts["biases"] = self.biases
        if self.ratios:
            facts["ratios"] = self.ratios
        top = max(self._reach.values(), default=0.0)
        if top:
            near = [(site, largest) for site, largest in self._reach.items() if largest >= _NEAR_TOP * top]
            facts["reach"] = {site: {"largest": largest} for site, largest in near[:_MOST_NEAR]}
        growth = {
            f"{site} {name} {phase}": {"site": site, "phase": phase, **grown}
            for (site, name, phase), calls in self._growth.items()
            if (grown := _growth(calls))
        }
        if growth:
            facts["growth"] = growth
        return facts


def _growth(calls: list[float]) -> dict[str, float] | None:
    """Factor per call of something that ran at least eight times, if it grew in nearly every one."""
    usable = [c for c in calls if 0 < c < math.inf]
    if len(usable) < 8:
        return None
    steps = [b / a for a, b in pairwise(usable)]
    factor = math.exp(sum(map(math.log, steps)) / len(steps))
    rising = sum(s > 1 for s in steps) / len(steps)
    return {"factor": factor, "calls": len(usable)} if rising > 0.8 else None


def _share_off(fires: Tensor) -> float:
    return float((~fires).double().mean())
