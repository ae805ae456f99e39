"""The signs of a run: what its evidence means, before any cause is named.

Where the first bad number arose and whether FP32 would have had it too, whether bad steps pass by themselves, whether loss and
gradients run away, how far the gradients are from those of FP32. Causes ask here, so that each question is answered once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core.examination import Examination, FirstBad, Hazard, Place, operation
from ..core.finding import NannyError
from ..core.formats import FP16, format_of
from ..core.limits import Limits
from ..core.numbers import median
from ..core.ops import LOGARITHMS, WEIGHTINGS
from ..core.step import Autopsy, Growth, StepRecord
from .evidence import Evidence, RunFacts
from .first_nonfinite import first_bad_of, of_seed
from .knowledge import current_name

_SETTLED = 8  # steps before which nothing is usual
_FEWEST_ROWS = 8  # different inputs, of all examined steps together, that tell of a unit that is off
PROVED = ("overflow", "exp_range", "constant_lost", "integers")  # by the number itself, whatever it led to


@dataclass(frozen=True)
class Runaway:
    """Loss or gradients that grew by orders of magnitude while all was still finite."""

    start: int  # last step at the old level
    step: int  # the worst one
    name: str  # loss or gradient norm
    low: float
    high: float

    @property
    def factor(self) -> float:
        return self.high / self.low if self.low else math.inf


@dataclass(frozen=True)
class Outlier:
    """A batch whose loss was out of proportion though nothing before it was, and after which nothing was as before: weights
    are thrown away, or an optimizer that divides by the size of its gradients (Adam) steps too short to learn."""

    step: int
    loss: float
    usual: float  # the largest loss lately
    norm: float  # of the gradients of the step before, beside ...
    usual_norm: float
    shrinks: float | None = None  # updates behind it beside those before; None: the weights are thrown away
    lasts: float = 0.0  # steps


@dataclass(frozen=True)
class Signs:
    evidence: Evidence

    @property
    def facts(self) -> RunFacts:
        return self.evidence.facts

    @property
    def limits(self) -> Limits:
        return self.evidence.limits

    # non-finite numbers

    @cached_property
    def losing_steps(self) -> Sequence[StepRecord]:
        """Bad steps that the loss scale's search does not explain: the forward pass was bad, or nobody skipped the update."""
        own = [i for i in self.facts.incidents if not i.from_others]
        return [i for i in own if not (i.skipped and math.isfinite(i.loss or 0.0) and not i.bad_calls)]

    @cached_property
    def skips(self) -> tuple[int, int, int]:
        """Skipped steps, the longest run of them after the first that passed, and how many were skipped at the very end."""
        _, values = self.evidence.curve("skipped")
        total = int(values.sum())
        longest = now = 0
        passed = False
        for skipped in values:
            now = now + 1 if skipped else 0
            passed = passed or not skipped
            if passed:
                longest = max(longest, now)
        return total, longest, now

    @cached_property
    def scale_search_failed(self) -> bool:
        """Skips that go on: at the end of the run after a step had passed, or longer than any search for a scale."""
        total, longest, at_end = self.skips
        if not total:
            return False
        _, scales = self.evidence.curve("scale")
        low = bool(len(scales)) and float(scales[-1]) < self.limits.scale_floor
        return longest >= self.limits.scale_skips_error or (at_end == total and (low or at_end > 16)) or low

    @cached_property
    def harmed(self) -> bool:
        """Non-finite numbers have done harm: weights or loss went bad, or steps are skipped for good."""
        return bool(self.losing_steps) or self.scale_search_failed or self.refused

    @cached_property
    def refused(self) -> bool:
        """The program itself makes no step on gradients that are not finite, and so none at all."""
        never = self.evidence.finding("BACKWARD_WITHOUT_STEP") is not None and not self.facts.count("stepped")
        return never and any(g.nonfinite for e in self.evidence.examinations for g in e.gradients)

    @cached_property
    def broken_exams(self) -> Sequence[Examination]:
        """Examined steps with a first bad number of their own: not those that only inherited bad weights."""
        first_loss = next((i.step for i in self.facts.incidents if not i.skipped and (i.bad_grads or not i.stepped)), None)
        return [e for e in self.evidence.examinations if e.first_bad is not None and (first_loss is None or e.step <= first_loss)]

    @cached_property
    def first_bad(self) -> FirstBad | None:
        """The first bad number that did harm."""
        at = self._first_bad_seen
        return at if at is None else self._made_before_the_step(at) or at

    @cached_property
    def _first_bad_seen(self) -> FirstBad | None:
        first = self.first_bad_step
        in_forward = [e for e in self.broken_exams if _reaches_loss(e)]
        if in_forward and (first is None or in_forward[0].step <= first + 64):
            best = in_forward[0]
            told = self._by_incident()
            if told is not None and told.from_data and told.step < best.step:
                return told  # one bad batch; what broke later is another matter
            return first_bad_of(best)
        told = self._by_incident()
        if told is not None and told.place.phase != "backward":
            return told
        if not self.harmed:
            return None
        backward = [e for e in self.broken_exams if any(g.nonfinite for g in e.gradients) or _is_of_lines(e)]
        if backward:  # the last: a loss scale that was still being searched broke the earlier ones
            tiny = backward[-1].facts.get("tiny_probabilities")
            if tiny is not None and told is not None and told.op in LOGARITHMS:
                return replace(told, dtype="float16", in_reference=False)  # the criterion's derivative, not the model's
            return first_bad_of(backward[-1])
        return told

    @property
    def first_bad_step(self) -> int | None:
        return self.losing_steps[0].step if self.losing_steps else self.evidence.first_bad_step

    def _made_before_the_step(self, at: FirstBad) -> FirstBad | None:
        """What made the bad batches: a later look that began with the batch saw the loop, or a network that is not trained,
        spoil one."""
        if not (at.from_data or (at.hazard is not None and current_name(at.hazard.cause) == "data_nan")):
            return None
        later = (first_bad_of(e) for e in self.evidence.examinations if e.step > at.step and e.first_bad is not None)
        made = (a for a in later if a.place.phase == "loop" or a.order < 0)
        return next((a for a in made if a.hazard is not None and a.in_reference is False), None)

    def _by_incident(self) -> FirstBad | None:
        """From the loss's graph or the traced modules, for a step that was not examined."""
        for incident in self.losing_steps:
            autopsy = incident.autopsy
            site = {"input": "data:input", "loss": ""}.get(incident.culprit_site, incident.culprit_site)
            if incident.culprit_code == "WEIGHT_NONFINITE":
                continue
            given = self._given_bad(incident)
            if given is not None:
                return given
            if autopsy is not None and autopsy.is_factor:
                return _of_factor(autopsy, incident.step)
            if autopsy is not None and not autopsy.weight:
                op = autopsy.op.lstrip("_")
                if site in (self.facts.latest.root_site, operation(autopsy.op)):
                    site = ""
                same = None if autopsy.from_data or autopsy.nan else self._overflows_later(op, site)
                place = Place("data:input" if autopsy.from_data else site, phase="forward" if site else self._phase_of(incident))
                place = same.place if same is not None else place
                decided = self._reference_by_size(autopsy.dtype, autopsy.size)
                inputs = {"absmin1": 0.0} if autopsy.by_zero else {}
                return FirstBad(
                    op, place, 0, autopsy.nan, inputs, expected=autopsy.size, step=incident.step, dtype=autopsy.dtype,
                    in_reference=decided, from_data=autopsy.from_data, source="graph", hazard=same,
                )  # fmt: skip
            if incident.bad_calls and site:
                call = next((c for c in incident.bad_calls if c.inputs_clean is not False), incident.bad_calls[0])
                clean = any(c.inputs_clean is not False for c in incident.bad_calls)
                return FirstBad(
                    "", Place(site if clean else "data:input", call.module), 0, bool(call.nan), {"absmax": call.input_absmax},
                    step=incident.step, dtype=call.dtype, from_data=not clean, source="trace",
                )  # fmt: skip
            if math.isfinite(incident.loss or 0.0) and incident.bad_grads:
                batch = self._bad_batch(incident)
                again = (e for e in self.evidence.examinations if e.step == incident.step)
                seeded = next((found for e in again if (found := of_seed(e)) is not None), None)
                if batch is not None or seeded is not None:
                    return batch or seeded
                op = incident.singular.op if incident.singular is not None and incident.nan_grads else ""
                place = Place("" if op else incident.bad_grads[-1], phase="backward")
                return FirstBad(op, place, 0, incident.nan_grads, step=incident.step, source="gradients")
        return None

    def _given_bad(self, incident: StepRecord) -> FirstBad | None:
        """The step was examined as it ran, and the loss is bad by what was so before it: the graph shows that less surely."""
        exam = next((e for e in self.evidence.examinations if e.step == incident.step and e.first_bad is None), None)
        if exam is None or exam.facts.get("again") or math.isfinite(incident.loss or 0.0):
            return None
        hazard = next((h for h in exam.hazards if h.is_of_data and math.isinf(h.consequence)), None)
        if hazard is None:
            return None
        nan = math.isnan(incident.loss or 0.0)
        return FirstBad(
            hazard.op, hazard.place, hazard.order, nan, step=exam.step, dtype=hazard.dtype, in_reference=True, from_data=True,
            hazard=hazard,
        )  # fmt: skip

    def _bad_batch(self, incident: StepRecord) -> FirstBad | None:
        """Forward and loss hide it (tanh of infinity is 1), the weights' gradients do not: 0 times infinity."""
        exam = next((e for e in self.evidence.examinations if e.step == incident.step and e.first_bad is None), None)
        if exam is None:
            return None
        hazard = next((h for h in exam.hazards if h.kind == "given_nonfinite" and "input" in h.traits), None)
        if hazard is None and (exam.gradients or not exam.facts.get("batch_nonfinite")):
            return None  # its backward pass was examined, and is not bad by the batch
        nan = exam.facts.get("batch_nonfinite") == "NaN"
        return FirstBad(
            "",
            Place("data:input"),
            0,
            nan,
            step=incident.step,
            in_reference=None if hazard is None else True,
            from_data=True,
            source="batch",
            hazard=hazard,
        )

    def _overflows_later(self, op: str, site: str) -> Hazard | None:
        """The same operation at the same place, in a step that was examined: it tells more than the graph of the loss."""
        known = (h for e in self.evidence.examinations for h in e.hazards if not h.in_reference and math.isinf(h.consequence))
        return next((h for h in known if h.op.lstrip("_") == op and h.place.site == site and h.place.phase != "backward"), None)

    def _phase_of(self, incident: StepRecord) -> str:
        """`loop`, if the calls of the model were made again and are finite: the criterion did it."""
        again = [e for e in self.evidence.examinations if e.step == incident.step and e.facts.get("again")]
        return "loop" if again and all(e.first_bad is None for e in again) and not incident.bad_calls else "forward"

    def _reference_by_size(self, dtype: str, size: float | None) -> bool | None:
        return False if dtype == "float16" and size is not None and math.isfinite(size) and size >= FP16.max else None

    def layers_in(self, module: str) -> int:
        """How many layers with weights a module holds."""
        inside = f"{module}."
        return len({name[len(inside) :].partition(".")[0] for name in self.facts.parameters if name.startswith(inside)})

    def is_attention_product(self, at: FirstBad) -> bool:
        """A product of two activations whose result a softmax turns into weights."""
        for exam in self.evidence.examinations:
            if exam.step == at.step:
                later = [h for h in exam.hazards if h.order > at.order and h.op in WEIGHTINGS]
                return bool(later) or at.order < 0
        return False

    # runaway growth

    @cached_property
    def runaway(self) -> Runaway | None:
        """The loss and the gradients both grew out of proportion: one of them by orders of magnitude, the other with it."""
        loss, norm = (self._find_growth(name) for name in ("loss", "grad_norm"))
        if loss is None or norm is None:
            return None
        for one, other, limit in ((loss, norm, self.limits.runaway_loss), (norm, loss, self.limits.runaway_grad)):
            if one.factor >= limit and other.factor >= self.limits.loss_ratio:
                return one
        return None

    def _find_growth(self, name: str) -> Runaway | None:
        steps, values = self.evidence.curve(name)
        at, norms = self.evidence.curve("grad_norm")
        alive = np.flatnonzero(norms)
        if len(alive) and len(norms) - alive[-1] > _SETTLED:  # thrown so far that nothing moves any more: the loss is a constant
            values = values[steps <= at[alive[-1]]]
        found = _growth(values, self.limits.loss_ratio)
        if found is None:
            return None
        start, worst = found
        return Runaway(int(steps[start]), int(steps[worst]), name, float(values[start]), float(values[worst]))

    @cached_property
    def outlier(self) -> Outlier | None:
        """The loss jumps by orders behind an update like all others: the batch did it. And the weights are thrown away."""
        steps, losses = self.evidence.curve("loss")
        at, norms = self.evidence.curve("grad_norm")
        if len(losses) <= _SETTLED:
            return None
        sizes = np.concatenate([np.zeros(20), np.abs(losses)])
        peaks = np.lib.stride_tricks.sliding_window_view(sizes, 20)[: len(losses)].max(axis=1)  # of the 20 losses before each
        with np.errstate(invalid="ignore"):
            calm = np.isfinite(losses) & np.isfinite(peaks) & (losses < self.limits.outlier_jump * peaks)
        jumps = _SETTLED + np.flatnonzero(~calm[_SETTLED:])
        if not len(jumps) or not math.isfinite(losses[jumps[0]]) or not math.isfinite(peaks[jumps[0]]):
            return None
        i, known = int(jumps[0]), dict(zip(at.tolist(), norms.tolist()))
        earlier = [known[s] for s in steps[max(0, i - 20) : i].tolist() if s in known]
        if len(earlier) < _SETTLED or not earlier[-1] < self.limits.grad_ratio * median(earlier):
            return None
        step, usual = int(steps[i]), median(earlier)
        if self._rate_rose(step):
            return None
        found = Outlier(step, float(losses[i]), float(peaks[i]), earlier[-1], usual)
        if self.weights_ran_away(step, self.limits.runaway_loss, sure=True):
            return found
        rates = [o.beta2 for o in self.facts.latest.optimizers if o.beta2 is not None and o.beta2 < 1]
        if len(rates) < len(self.facts.latest.optimizers) or not rates or self.facts.count("clipped"):
            return None
        shrinks, lasts = usual / (known.get(step, 0.0) * math.sqrt(1 - max(rates)) or math.inf), 1 / (1 - max(rates))
        # not 0: an infinite gradient is skipped, or breaks the weights
        return replace(found, shrinks=shrinks, lasts=lasts) if 0 < shrinks < self.limits.outlier_slows else None

    def _rate_rose(self, step: int) -> bool:
        """The learning rate of the update before this step was above what it had been."""
        steps, rates = self.evidence.curve("lr")
        before = rates[steps < step]
        return len(before) > 1 and float(before[-1]) > 2 * median(before[-_SETTLED:])

    def weights_ran_away(self, step: int, times: float = 0.0, sure: bool = False) -> bool:
        """The weights became far larger than they were at this step, or are not finite. `sure`: not if nobody measured them."""
        steps, norms = self.evidence.curve("weight_norm")
        before, after = norms[steps <= step], norms[steps > step]
        if not len(before) or not len(after):
            return not sure
        return not np.isfinite(after).all() or float(after.max()) > (times or self.limits.runaway_weights) * float(before[-1])

    @cached_property
    def steps_too_long(self) -> Runaway | None:
        """A runaway that the updates have made: there was a learning rate, a loss to lower, and the weights went along."""
        away = self.runaway
        if away is None or self.exploded_at_once or self.outlier is not None or self.wrong_before(away.start + 1):
            return None
        steps, rates = self.evidence.curve("lr")
        meanwhile = rates[(steps >= away.start) & (steps <= away.step)]
        if len(meanwhile) and not float(np.max(meanwhile)) > 0:
            return None
        at = self.first_bad
        if at is not None and at.in_reference is False and at.step <= away.start:
            return None  # precision had broken something before anything grew
        maximised = any(o.maximizes for o in self.facts.latest.optimizers)
        return None if maximised or not self.weights_ran_away(away.start) else away

    @cached_property
    def bottomless(self) -> Runaway | None:
        """The loss falls from where it began to far below 0, and on, by gradients that grow with it."""
        steps, losses = self.evidence.curve("loss")
        _, norms = self.evidence.curve("grad_norm")
        known = losses[np.isfinite(losses)]
        if len(known) < 2 * _SETTLED or not len(norms):
            return None
        began, low, end = float(np.abs(known[:_SETTLED]).max()), float(known.min()), median(known[-_SETTLED:])
        norms = norms[np.isfinite(norms)]
        grown = float(norms.max(initial=0.0)) >= self.limits.runaway_grad * median(norms[:_SETTLED])
        if not grown or low > -self.limits.runaway_grad * began or end > low / self.limits.loss_ratio:
            return None
        start = int(np.argmax(losses < -began))
        return Runaway(int(steps[start]), int(steps[np.nanargmin(losses)]), "loss", float(known[0]), low)

    @cached_property
    def learns(self) -> bool:
        """The loss has come down from where it began."""
        _, values = self.evidence.curve("loss")
        values = values[np.isfinite(values)]
        if len(values) < 4:
            return False
        quarter = max(1, len(values) // 4)
        (first, of_first), (last, of_last) = (_middle(part) for part in (values[:quarter], values[-quarter:]))
        return last < 0.95 * first and first - last > 3 * math.hypot(of_first, of_last) / math.sqrt(quarter)

    @cached_property
    def rate_spent(self) -> tuple[int, float, float] | None:
        """(step, highest rate, highest since) where a schedule took the rate to next to nothing as the run had hardly begun."""
        steps, rates = self.evidence.curve("lr")
        if len(rates) < 2 or not np.isfinite(rates).all() or self.facts.steps < self.limits.spent_steps:
            return None
        used = np.flatnonzero(rates > self.limits.spent_rate * rates.max())
        if not len(used) or used[-1] + 1 >= len(rates):
            return None
        since = int(used[-1]) + 1
        early = steps[since] <= self.limits.spent_share * self.facts.steps
        return (int(steps[since]), float(rates.max()), float(rates[since:].max())) if early else None

    @cached_property
    def below_its_start(self) -> bool:
        """The loss has come below what it was before any update: not from a height to which the first updates threw it."""
        _, values = self.evidence.curve("loss")
        values = values[np.isfinite(values)]
        if len(values) < 4:
            return False
        first, last = float(values[0]), median(values[-max(1, len(values) // 4) :])
        return last < 0.5 * first or (self.learns and last < 0.95 * first)  # half of it is more than batches make by chance

    @cached_property
    def thrown_height(self) -> float | None:
        """Times its start, the height to which the first updates threw a loss that never came far below that start."""
        _, values = self.evidence.curve("loss")
        values = values[np.isfinite(values)]
        if len(values) < 2 * _SETTLED or not values[0] > 0:
            return None
        height = float(values[1:_SETTLED].max() / values[0])
        came_down = median(values[-(len(values) // 4) :]) < 0.5 * values[0]
        return height if height > self.limits.thrown_loss and not came_down else None

    @cached_property
    def growth(self) -> Growth | None:
        """Geometric growth within one step, before any training can have made it."""
        known = [*self.facts.first.growths] if self._untrained(self.facts.first_steps.get("growths")) else []
        for exam, growths in self.fact("growth"):
            if self._untrained(exam.step):
                known += [_growth_of(numbers) for numbers in growths.values()]
        limits = self.limits
        growing = [g for g in known if g.factor > limits.growth_whole and g.each > limits.growth_each]
        # backward mirrors forward, also where it only passes: forward tells who does it
        return max(growing, key=lambda g: (g.direction == "forward", g.factor), default=None)

    @cached_property
    def growth_is_borne(self) -> bool:
        """FP32 has a finite loss and usual gradients at the very step whose numbers outgrew a narrower format."""
        at = self.first_bad
        if at is None or at.in_reference is not False:
            return False
        exam = next((e for e in self.evidence.examinations if e.step == at.step and e.gradients), None)
        if exam is None or exam.loss_reference is None or not math.isfinite(exam.loss_reference):
            return False
        squares = sum(math.inf if g.reference_nonfinite else g.reference_norm**2 for g in exam.gradients)
        return math.sqrt(squares) < self.limits.grad_rail_high

    def _untrained(self, step: int | None) -> bool:
        """No optimizer step has succeeded before this one, or one at most."""
        if step is None:
            return False
        steps, skipped = self.evidence.curve("skipped")
        before = skipped[steps < step]
        return step <= 1 or (len(before) > 0 and bool(before.all()))

    @cached_property
    def fading_in_time(self) -> Growth | None:
        """A gradient that fades over the calls of one module."""
        fading = [g for g in self.facts.first.growths if g.factor < 1 and g.direction == "backward"]
        return min(fading, key=lambda g: g.factor, default=None)

    @cached_property
    def exploded_at_once(self) -> bool:
        """Gradients beyond any usual size, or bad numbers, at the first step: before the learning rate could matter."""
        steps, norms = self.evidence.curve("grad_norm")
        first = self.first_bad_step
        began_bad = first is not None and len(steps) > 0 and first <= int(steps[0])
        return began_bad or (len(norms) > 0 and float(norms[0]) > self.limits.grad_rail_high)

    def ran_away_before(self, at: FirstBad) -> bool:
        """Loss or gradients had grown by orders before the number went bad: it is a consequence."""
        thrown, aways = self.outlier, [away for away in (self.steps_too_long, self.bottomless) if away is not None]
        return any(away.start < at.step and away.step <= at.step for away in aways) or (
            thrown is not None and thrown.step < at.step
        )

    def wrong_before(self, step: int) -> bool:
        """An examined step before this one had gradients that FP32 would not have given: mostly noise, or by a known hazard."""
        limits = self.limits
        return any(
            (e.gradient_error or 0.0) > (limits.diff_grad_warn if e.hazards else limits.diff_grad_error) and e.step < step
            for e in self.clean_exams
        )

    def twin_agrees(self, step: int) -> bool:
        seen = [e.gradient_error or 0.0 for e in self.clean_exams if e.step < step]
        return bool(seen) and max(seen) <= self.limits.diff_grad_warn

    @cached_property
    def weights_lost(self) -> bool:
        """Bad numbers were written into the weights: after a bad step that nobody skipped, all later ones are bad."""
        _, losses = self.evidence.curve("loss")
        written = any(not i.skipped and i.bad_grads for i in self.facts.incidents)
        return written and len(losses) > 0 and not math.isfinite(float(losses[-1]))

    @cached_property
    def converged(self) -> bool:
        _, losses = self.evidence.curve("loss")
        known = losses[np.isfinite(losses)]
        return len(known) > 1 and abs(float(known[-1])) <= self.limits.converged * abs(float(np.max(known)))

    @cached_property
    def gradient_fade(self) -> tuple[str, float, float, float, bool] | None:
        """(parameter, ratio, its rms, the last layer's rms, FP32 agrees) of gradients that fade on the way back to the first."""
        exam = next((e for e in reversed(self.evidence.examinations) if e.gradients and e.first_bad is None), None)
        sizes = self.facts.sizes
        if exam is not None:
            norms = {g.name: (g.reference_norm, g.norm) for g in exam.gradients if g.name not in self.facts.vectors}
        else:
            norms = {g.name: (g.norm, g.norm) for g in self.facts.levels if g.name not in self.facts.vectors}
        known = [(n, *norms[n]) for n in self.facts.parameters if n in norms and sizes.get(n, 0) > 1]  # in the model's order
        rms = [(n, r / math.sqrt(sizes[n]), v) for n, r, v in known if 0 < r < math.inf]
        if len(rms) < self.limits.fade_layers:
            return None
        third = len(rms) // 3
        head = median([r for _, r, _ in rms[:third]])
        tail = median([r for _, r, _ in rms[-third:]])
        middle = median([r for _, r, _ in rms[third:-third]])
        if not head < middle < tail or head > self.limits.fade_ratio * tail:
            return None
        if self.weights_overwritten is not None:
            return None  # weights that were written over fade, too
        name, least, _ = min(rms[:third], key=lambda item: item[1])
        return name, least / tail, least, tail, exam is not None

    @cached_property
    def biases_alone(self) -> tuple[str, float, int] | None:
        """(first matrix, gradient of the median matrix beside that of all vectors, examined steps) where only vectors learn.

        The last matrices get gradients from what biases alone have made.
        """
        vectors = self.facts.vectors
        seen: list[float] = []
        for exam in self.clean_exams:
            sizes = {g.name: g.reference_norm**2 for g in exam.gradients if math.isfinite(g.reference_norm)}
            matrices = [size for name, size in sizes.items() if name not in vectors]
            others = sum(size for name, size in sizes.items() if name in vectors)
            if len(matrices) >= self.limits.fade_layers and others > 0:
                seen.append(math.sqrt(median(matrices) / others))
        names = [name for name in self.facts.parameters if name not in vectors]
        if len(seen) < 2 or max(seen) > self.limits.biases_alone or not names or self.weights_overwritten is not None:
            return None
        return names[0], max(seen), len(seen)

    @cached_property
    def weights_overwritten(self) -> tuple[float, float, float] | None:
        """(weights before, weights after, largest update beside them), if the first updates wrote the weights over."""
        _, norms = self.evidence.curve("weight_norm")
        at, ratios = self.evidence.curve("update_ratio")
        if len(norms) < 2 or not len(ratios) or not np.isfinite(norms).all():
            return None
        grown = float(norms[1:].max()) / float(norms[0]) if norms[0] else 0.0
        early = float(np.max(ratios[at >= 2], initial=0.0)) >= 1  # of a whole tensor, and not its first or second update
        late = float(np.max(ratios[at >= 2 * _SETTLED], initial=0.0)) >= self.limits.thrown_update
        if grown < self.limits.thrown_weights or not (early or late or self._rose_early or self.died is not None):
            return None
        return float(norms[0]), float(norms[1:].max()), float(np.nanmax(ratios))

    @cached_property
    def weights_left(self) -> bool:
        """An update was longer than the weights by far, and they are not what they were, whatever is learnt from there."""
        (_, norms), (_, ratios) = self.evidence.curve("weight_norm"), self.evidence.curve("update_ratio")
        far = float(np.nanmax(ratios, initial=0.0)) >= self.limits.damage_update
        return far and len(norms) > 1 and float(norms[1:].max()) > self.limits.thrown_weights * float(norms[0])

    @cached_property
    def _rose_early(self) -> bool:
        """Loss and gradients rose out of proportion in the first half of the run, whatever they came down to."""
        (_, losses), (_, norms) = self.evidence.curve("loss"), self.evidence.curve("grad_norm")
        if len(losses) < 2 * _SETTLED or len(norms) != len(losses) or not (np.isfinite(losses) & (losses > 0)).all():
            return False
        half = len(losses) // 2
        return bool(
            losses[:half].max() > self.limits.thrown_loss * losses[0] and norms[:half].max() > self.limits.grad_ratio * norms[0]
        )

    @cached_property
    def died(self) -> tuple[str, int] | None:
        """(activation, step) of a layer whose units were on when the run began, and are off in every later examined step."""
        seen = [(e.step, e.facts["dead_units"]) for e in self.evidence.examinations if "dead_units" in e.facts]
        for site, share in seen[0][1].items() if len(seen) > 2 else ():
            off = [step for step, shares in seen if shares.get(site, 0.0) >= self.limits.dead_units_error]
            if share < self.limits.dead_units_warn and len(off) > 1 and off == [step for step, _ in seen[-len(off) :]]:
                return site, off[0]
        return None

    @cached_property
    def dead_units(self) -> tuple[str, float, int] | None:
        """(activation, share of its units that are off, examined steps) that is worst off at its best step."""
        least: dict[str, float] = {}
        rows: dict[str, float] = defaultdict(float)
        seen = [e for e in self.evidence.examinations if "dead_units" in e.facts and e.first_bad is None]
        for exam in seen:
            for site, share in exam.facts["dead_units"].items():
                least[site] = min(least.get(site, 1.0), share)
                rows[site] += exam.facts.get("few_rows", {}).get(site, math.inf)
        least = {site: share for site, share in least.items() if rows[site] >= _FEWEST_ROWS}
        if not least:
            return None
        site = max(least, key=lambda name: least[name])
        return site, least[site], len(seen)

    @cached_property
    def one_hot_attention(self) -> tuple[str, float, float, int] | None:
        """(site, entropy, largest logit, examined steps) of an attention that sees one key only, at every examined step."""
        entropy: dict[str, list[float]] = {}
        logits: dict[str, float] = {}
        for exam in self.evidence.examinations:
            for site, numbers in exam.facts.get("attention", {}).items():
                entropy.setdefault(site, []).append(float(numbers["entropy"]))
                logits[site] = max(logits.get(site, 0.0), float(numbers["logit_max"]))
        limits = self.limits
        found = [
            s for s, e in entropy.items()
            if max(e) < limits.attention_entropy and limits.attention_logit < logits[s] < math.inf
        ]  # fmt: skip
        if not found:
            return None
        site = min(found, key=lambda s: max(entropy[s]))
        return site, max(entropy[site]), logits[site], len(entropy[site])

    @cached_property
    def zeroed_in_the_loop(self) -> tuple[Examination, float] | None:
        """(examined step, norm of its gradients) if backward gives gradients and the optimizer always finds zeros."""
        read = [g for g in self.facts.levels if g.steps]
        if not read or any(g.zeros < g.steps for g in read) or not any(g.dtype == "float16" for g in read):
            return None
        for exam in self.clean_exams:
            norm = math.sqrt(sum(g.norm**2 for g in exam.gradients if not g.nonfinite))
            if norm > 0:
                return exam, norm
        return None

    # silent errors

    @cached_property
    def clean_exams(self) -> Sequence[Examination]:
        return [e for e in self.evidence.examinations if e.first_bad is None and e.gradient_error is not None]

    @cached_property
    def gradient_error(self) -> float:
        """Median over the examined steps whose loss and gradients are finite."""
        errors = [e.gradient_error for e in self.clean_exams if e.gradient_error is not None and math.isfinite(e.gradient_error)]
        return median(errors) if errors else 0.0

    def hazards(self, cause: str) -> Iterator[tuple[Examination, Hazard]]:
        began = self.outlier.step if self.outlier is not None else self.steps_too_long.start if self.steps_too_long else math.inf
        found = [
            (e, h) for e in self.evidence.examinations for h in e.hazards if current_name(h.cause) == cause and self._lasts(h)
        ]
        if any(e.step <= began for e, _ in found):
            yield from found  # what only a runaway has shown, the runaway has made

    def _lasts(self, hazard: Hazard) -> bool:
        """A branch that begins at nothing is lost in its stream at first, and grows out of it by itself."""
        last = self.clean_exams[-1] if self.clean_exams else None
        return hazard.kind != "residual" or last is None or any(h.kind == "residual" for h in last.hazards)

    @cached_property
    def lead(self) -> str:
        """The cause that most examined steps put first: the earliest operation among those that do most of the harm."""
        votes: dict[str, float] = {}
        for exam in self.evidence.examinations:
            known = [h for h in exam.hazards if h.cause and (exam.first_bad is None or not math.isinf(h.consequence))]
            worst = max((min(h.consequence, 1.0) for h in known), default=0.0)
            if any(h.kind == "overflow" and h.consequence >= 0.25 * worst for h in known):
                known = [h for h in known if h.kind != "residual"]  # counted by what it loses, not by what it does to gradients
            first = min((h for h in known if h.consequence >= 0.25 * worst), key=lambda h: h.order, default=None)
            if first is not None:
                proof = 2.0 if first.kind in PROVED else 1.0
                votes[first.cause] = votes.get(first.cause, 0.0) + proof * (0.5 + 0.5 * worst)
        return max(votes, key=lambda name: votes[name], default="")

    def fact(self, name: str) -> Iterator[tuple[Examination, Any]]:
        for exam in self.evidence.examinations:
            if name in exam.facts:
                yield exam, exam.facts[name]

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The 16-bit (or narrower) formats that the run has shown, the one of autocast first."""
        facts, told = self.facts, [self.amp_dtype]
        for exam in self.evidence.examinations:
            told += [exam.amp_dtype, *(h.dtype for h in exam.hazards)]
        for incident in facts.incidents:
            told += [call.dtype for call in incident.bad_calls]
            told += [incident.autopsy.dtype] if incident.autopsy is not None else []
        told += [u.dtype for u in facts.updates] + [g.dtype for g in (*facts.early_levels, *facts.levels)]
        told += [dtype for o in facts.latest.optimizers for dtype in (o.param_dtype, o.state_dtype)]
        told += ["fp16"] if facts.reach or facts.count("scale") else []
        return tuple(dict.fromkeys(filter(None, map(_low_format, told))))

    @property
    def amp_dtype(self) -> str:
        return self.facts.latest.amp_dtype or next((e.amp_dtype for e in self.evidence.examinations if e.amp_dtype), "")


def _middle(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The median, and how far a usual value is from it; a few that were far off at the start change neither."""
    middle = median(values)
    return middle, 1.48 * median(np.abs(values - middle))


def _of_factor(autopsy: Autopsy, step: int) -> FirstBad:
    """What the loop multiplied its loss with: by the line that made it, or from somewhere outside the graph."""
    place = Place(f"loop:{autopsy.variable}", phase="loop", file=autopsy.file, line=autopsy.line, source=autopsy.source)
    made = bool(autopsy.variable)
    wide = _low_format(autopsy.dtype) == ""
    return FirstBad(
        "" if made else autopsy.op, place if made else Place("data:input", phase="loop"), 0, autopsy.nan, step=step,
        dtype=autopsy.dtype, in_reference=True if made and wide else None, from_data=not made, source="factor",
    )  # fmt: skip


def _low_format(dtype: str) -> str:
    """`fp16` of `float16`; "" for wide ones, whole numbers and others."""
    try:
        found = format_of(dtype)
    except NannyError:
        return ""
    return found.name if found.bits <= 16 else ""


def _reaches_loss(exam: Examination) -> bool:
    first = exam.first_bad
    if first is None or first.place.phase in ("backward", "optimizer"):
        return False
    if exam.facts.get("again"):
        return True  # a bad loss was the reason to make it
    return not math.isfinite(exam.loss if exam.loss is not None else 0.0) or any(g.nonfinite for g in exam.gradients)


def _is_of_lines(exam: Examination) -> bool:
    """The backward pass of what the loop made of its model's outputs, and not that of the model."""
    return bool(exam.facts.get("again")) and not exam.gradients


def _growth_of(numbers: Mapping[str, Any]) -> Growth:
    """From what the sanitizer saw of an operation that ran again and again."""
    calls, direction = int(numbers["calls"]), "backward" if numbers["phase"] == "backward" else "forward"
    return Growth(direction, numbers["site"], "calls", calls, float(numbers["factor"]) ** (calls - 1))


def _growth(values: np.ndarray, factor: float) -> tuple[int, int] | None:
    """(last index at the low level, index of the peak), if values rose by `factor` above their beginning and stayed there."""
    at = np.flatnonzero(np.isfinite(values) & (values > 0))
    known = values[at]
    if len(at) < 2 or (len(at) < 3 and len(values) == len(at)):
        return None
    base = min(median(known[: max(3, len(known) // 8)]), float(known[0]))  # it may have grown before the third step
    peak = int(np.argmax(known))
    if known[peak] < factor * base:
        return None
    below = [i for i in range(peak) if known[i] <= 2 * base]
    start = below[-1] if below else 0
    broke = not np.isfinite(values[at[peak] + 1 :]).all()
    rise = next((i for i in range(start + 1, peak) if known[i] >= 0.5 * known[peak]), peak)
    settled = start >= 4 and rise - start <= 1
    if settled and not broke and median(known[-max(3, len(known) // 4) :]) < 0.7 * known[peak]:
        return None  # one jump from a settled level that is being learnt away: another task, a strange batch
    stays = peak >= len(known) - 2 or broke or median(known[peak:]) > factor**0.5 * base
    return (int(at[start]), int(at[peak])) if stays else None
