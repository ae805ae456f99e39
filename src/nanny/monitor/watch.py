"""Watches a training run: `MixedPrecisionNanny`.

    nanny = MixedPrecisionNanny(model, optimizer, scaler)
    for step, (x, y) in enumerate(loader):
        with nanny.step(step):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
        optimizer.step()
    nanny.close()

A step is judged when the next one begins (or at `close`): the optimizer usually runs after the block.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import sys
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import getpid
from pathlib import Path
from threading import get_ident
from time import perf_counter  # the one of now: programs replace it to freeze time
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..core.command_line import examine_command
from ..core.cost import cost_text
from ..core.examination import Examination
from ..core.finding import Finding, NannyError, Severity, warn
from ..core.limits import Limits
from ..core.numbers import short, size
from ..core.step import StepRecord
from ..core.terminal import tell
from ..diagnose.causes.early import near_end_at
from ..diagnose.choose import diagnoses_of
from ..diagnose.evidence import Evidence
from ..diagnose.history import RunHistory
from ..diagnose.records import Diagnosis
from ..diagnose.signs import Signs
from ..diagnose.verdict import NO_VERDICT, Verdict, is_from_others, verdict_of
from ..examine.hazards import judge
from ..store.writer import status_at_exit, status_of
from ..watch.ranks import many_processes
from ..watch.steps import StepClock
from ..watch.tensors import is_recorded
from .capture import StepCapture, quiet_steps
from .cost import CostClock
from .dump import save_bad_output
from .examiner import Examiner
from .live_causes import LiveCauses
from .live_log import LiveLog, closing_lines
from .recorder import Recorder
from .recording import RunRecording, run_info
from .registry import all_rules, is_of_loop, judge_quiet, judge_step
from .trace import BadOutput, layer_filter
from .trackers import Trackers

DENSE_STEPS = 5  # traced in a row after an ERROR
MOST_DENSE_BURSTS = 20
MOST_DUMPS = 4
LARGEST_STEP = 1 << 53  # of one that is larger its position stands
FIRST_AT_ONCE = 100  # steps; after that, steps in which nothing happens
MOST_WAITING, LONGEST_WAIT = 40, 0.25  # are judged so many, or those of so many seconds, at a time
EARLY_STEPS, FACTS_EVERY, FACTS_SECONDS = 5, 50, 0.5  # when the facts of the run are written down, beside traced and bad steps


def should_trace(step: int, every: int, dense_until: int, early: bool = False) -> bool:
    """`early`: ten times as often at first; replicas that part do so in their first steps, and only traces are compared."""
    return step < dense_until or step % (max(every // 10, 1) if early and step < every else every) == 0


def looks_wrong(found: Sequence[Finding]) -> bool:
    """Is the next step worth an examination? What GradScaler does by itself while it looks for its scale is not, nor what came
    from another process."""
    found = [f for f in found if not is_from_others(f) and not is_of_loop(f.code)]
    return any(f.severity > Severity.INFO or f.code in ("GRAD_EXPLOSION", "LOSS_SPIKE") for f in found)


def disabled() -> bool:
    return os.environ.get("NANNY_DISABLE", "") not in ("", "0")


class MixedPrecisionNanny:
    """Watches the training of `model` and says what goes wrong numerically, first culprit first.

    `optimizer` and `scaler` need not be given: they are seen when they are used. `output_dir=None` writes no files.
    `examine="off"` forbids to watch single steps operation by operation beside FP32, which `diagnose` otherwise draws on;
    `try_remedies=False` forbids to try there what would help a step that went wrong.
    `include="decoder"`, `exclude=["*.dropout", "head"]`: modules (and all inside them) whose outputs are traced, or not; loss,
    gradients, weights and the explanation of a bad step are those of the whole model all the same.
    `on_finding` is called with each finding; what it raises is told once, but KeyboardInterrupt and SystemExit end the run.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
        trace_interval: int = 100,
        output_dir: str | os.PathLike[str] | None = "nanny_logs",
        *,
        on_finding: Callable[[Finding], None] | None = None,
        dump_on_error: bool = False,
        limits: Limits | None = None,
        examine: str = "auto",
        live: bool = True,
        strict: bool = False,
        try_remedies: bool = True,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise NannyError(f"MixedPrecisionNanny needs the model (a torch.nn.Module), got {type(model).__name__}")
        if trace_interval < 1:
            raise NannyError(f"trace_interval is {trace_interval}; it counts steps, so use 1 or more")
        if examine not in ("auto", "every", "off"):
            raise NannyError(f'examine is {examine!r}; use "auto" (within one percent of the time), "every" or "off"')
        self.findings: list[Finding] = []
        self._failure: str | None = None
        self._warn = _Warnings()
        self._strict = strict
        self.enabled = not self._attempt(disabled)
        self._closed, self._recorded = not self.enabled, False  # `_recorded`: a step began where its code was only written down
        if not self.enabled:
            return
        self._interval = trace_interval
        self._on_finding = on_finding
        self._callback_failed = self._told_failure = False
        self._dump_on_error = dump_on_error
        self._waiting: deque[StepCapture] = deque()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last_seen: dict[tuple[str, str], int] = {}
        self._worst: dict[tuple[str, str], Severity] = {}
        self._step: int | None = None
        self._offset = 0
        self._steps = self._traced = 0
        self._dense_until = self._dense_bursts = 0
        self._dumps: list[Path] = []
        self._facts_written = 0.0
        self._facts: dict[str, Any] = {}  # of the last step
        self._shows_models = False
        self._usual: tuple[float, float, float] | None = None  # None: no step waits
        self._rng: torch.Tensor | None = None
        self._clock: StepClock | None = None
        self._folder = None if output_dir is None else Path(output_dir)
        wanted = self._attempt(layer_filter, *((p,) if isinstance(p, str) else tuple(p) for p in (include, exclude)))
        if self._failure is None:
            self._attempt(self._open, model, optimizer, limits, examine, live, try_remedies, wanted)
        if self._failure is not None:  # the run goes on without a nanny
            self.enabled, self._closed = False, True

    def _open(
        self,
        model: nn.Module | None,
        optimizer: Any,
        limits: Limits | None,
        examine: str,
        live: bool,
        try_remedies: bool,
        wanted: Callable[[str], bool],
    ) -> None:
        self._pid = getpid()
        self._rules = all_rules()
        self._history = RunHistory(limits)
        self._recorder = Recorder(self._failed, self._suspect)
        self._recorder.wants = wanted
        self._examiner = None
        if examine != "off":
            self._examiner = Examiner(self._recorder, self._on_examined, always=examine == "every", try_remedies=try_remedies)
        self._cost = CostClock(lambda: self._recorder.seconds, lambda: self.examined_seconds)
        info = run_info(self._interval)
        self._rank, self._world_size = info.rank if info.world_size > 1 else None, info.world_size
        self._live = LiveLog(lowest=Severity.ERROR if self._rank else Severity.WARNING) if live else None
        self._causes = LiveCauses(self._live, self._rank, self.verdict, self._call_back)
        self._recording: RunRecording | None = None
        self._trackers = Trackers(self._warn, lambda: atexit.register(_close_at_exit))  # theirs end later than ours
        if model is not None:
            self.add_model(model)
        for one in optimizer if isinstance(optimizer, Iterable) else [optimizer]:
            if isinstance(one, Optimizer):  # others are not heard: they tell torch nothing
                self._recorder.optimizers[id(one)] = weakref.ref(one)
        if self._failure is None and self._folder is not None:
            self._recording = RunRecording(self._folder, info, self._warn)
        _open_nannies.add(self)

    def add_model(self, model: nn.Module, prefix: str = "") -> None:
        """One more model in the same run (a discriminator, a critic), its sites named with `prefix`."""
        if not self.enabled:
            return
        if prefix and not prefix.endswith("."):
            prefix += "."
        self._recorder.run(self._add_model, model, prefix)

    def _add_model(self, model: nn.Module, prefix: str) -> None:
        self._recorder.add_model(model, prefix)
        self._history.bad_buffers |= self._recorder.nonfinite_buffers()
        if self._recorder.compiled and self._live is not None and not prefix:
            self._live.say("nanny: part of the model is compiled: its inner outputs are not traced, gradients are as usual")

    # steps

    def step(self, step: int) -> Framed:
        """Frames one training step: forward and backward inside, the optimizer inside or right after."""
        return Framed(self, step)

    def begin_step(self, step: int) -> None:
        if self._attempt(is_recorded):  # the compiler takes this for a constant, and leaves the rest alone
            self._recorded = True
            return
        if self._closed or getpid() != self._pid:
            return
        self._attempt(self._next_step, step)

    def _next_step(self, step: int) -> None:
        step = int(step) if abs(int(step)) < LARGEST_STEP else self._steps
        self._close_examination()
        self._recorder.run(self._change_step, step)
        if self._examiner is not None and self._recorder.capture is not None and self._recorder.capture.record.examined:
            self._recorder.run(self._examiner.open, self._step, apart=False)

    def _change_step(self, step: int) -> None:
        self._finish()
        self._begin(step)

    def _begin(self, step: int) -> None:
        if self._step is not None and step + self._offset <= self._step:
            self._offset = self._step + 1 - step  # counting began anew (a second epoch)
        step += self._offset
        early = step < self._interval and many_processes()
        traced = self._steps == 0 or should_trace(step, self._interval, self._dense_until, early)
        if traced and self._dump_on_error:
            self._rng = torch.get_rng_state()
        self._cost.begin_step(self._steps, step)
        examined = self._examiner is not None and self._examiner.begin(self._steps)
        self._step = step
        self._steps += 1
        self._traced += traced
        self._recorder.open()
        self._recorder.begin(step, traced, examined)

    def end_step(self, goes_on: bool = False) -> None:
        """`goes_on`: its optimizers have stepped, and nobody knows what the loop does next: averages of the weights follow."""
        if not (self._attempt(is_recorded) or self._closed):
            self._attempt(self._end, goes_on)
            self._attempt(self._cost.end_step)

    def _end(self, goes_on: bool) -> None:
        self._recorder.end()
        if goes_on and self._examiner is not None and not self._recorder.off:
            self._examiner.step_is_over()
        elif self._recorder.off or (self._recorder.capture is not None and self._recorder.capture.record.stepped):
            self._close_examination()

    def _close_examination(self, at_any_price: bool = False) -> None:
        if self._examiner is None or not self._examiner.is_open:
            return
        if self._recorder.off:  # after a failure nobody asks for the result
            self._attempt(self._examiner.close, at_any_price)
        else:
            self._recorder.run(self._examiner.finish, at_any_price, apart=False)

    def _attempt(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What must be tried even after a failure, which is told only once."""
        try:
            return work(*args, **kwargs)
        except Exception as error:
            if self._strict:
                raise
            if self._failure is None:
                self._failed(error)
            return None

    def _on_examined(self, examination: Examination, from_before: Examination | None = None) -> None:
        """`from_before`: of the same step, made again together with the lines of the loop before it."""
        assert self._examiner is not None
        try:
            examination = judge(examination)
            if from_before is not None:
                examination = _better(examination, judge(from_before))
        except Exception as error:
            if self._strict:
                raise
            self._examiner.off_because = f"{type(error).__name__}: {error}"
            self._examination_failed(examination.step, self._examiner.off_because)
            return
        if examination.facts.get("failed"):
            self._examination_failed(examination.step, examination.facts["failed"])
        self._history.add_examination(examination)
        if any(h.is_of_data and math.isinf(h.consequence) for h in examination.hazards):
            self._examiner.look_before_next()
        near = near_end_at(Signs(self.evidence()))
        if near is not None:
            self._examiner.plan.look_at(self._steps + max(near - examination.step, 1) - 1)
        if self._recording is not None:
            self._recording.writer.add_examination(examination)

    def _examination_failed(self, step: int, why: str) -> None:
        if not self._told_failure:
            self._told_failure = True
            self._warn(f"the examination of step {step} beside FP32 ended early, the run is not affected: {why}")

    def leave_step(self, error: BaseException) -> None:
        """The step was left by an exception: judge what was seen of it and take every hook away."""
        if self._attempt(is_recorded) or self._closed:
            return
        self.end_step()
        self._attempt(self._close_examination)
        self._attempt(self._recorder.run, self._finish, at_once=True)
        self._attempt(self._recorder.close)
        if self._recording is not None:
            self._attempt(self._note_exception, self._recording, error)

    def _note_exception(self, recording: RunRecording, error: BaseException) -> None:
        recording.failed_with = f"{type(error).__name__}: {error}"[:500]
        recording.writer.flush()

    def _finish(self, wait: bool = False, at_once: bool = False) -> None:
        """Judges the steps whose numbers have arrived, in order. Short steps in which nothing happens wait for each other: one
        after the other they take a fifth of the time."""
        capture = self._recorder.take_capture(last=wait)
        if capture is not None:
            self._waiting.append(capture)
            few = len(self._waiting) < MOST_WAITING and capture.started - self._waiting[0].started < LONGEST_WAIT
            capture.is_quiet = self._is_quiet(capture) and not capture.record.examined  # what a look has shown is told at once
            if capture.is_quiet and few and not wait and not at_once:
                self._recorder.suspects = frozenset()
                return
        self._catch_up(wait)

    def _is_quiet(self, capture: StepCapture) -> bool:
        """Nothing is different from the step before, and loss and gradients are not far from what they have been lately."""
        facts, before = capture.facts(), self._facts
        self._facts = facts
        numbers = capture.quiet_numbers() if self._usual is not None and facts == before else None
        if numbers is None or self._usual is None:
            return False
        most, lowest, highest = self._usual
        return numbers[0] <= most and lowest <= numbers[1] <= highest

    def _find_usual(self) -> tuple[float, float, float] | None:
        """The largest loss, the smallest and the largest norm with which a step may wait for others."""
        losses, norms, limits = self._history.losses.ranked, self._history.norms.ranked, self._history.limits
        if self._trackers.any_open or self._steps < FIRST_AT_ONCE or not losses or not norms:
            return None
        loss, norm = losses[len(losses) // 2], norms[len(norms) // 2]
        return loss + (limits.loss_ratio - 1) / 2 * abs(loss), 2 * norm / limits.grad_ratio, norm * limits.grad_ratio / 2

    def _catch_up(self, wait: bool = False) -> None:
        quiet = list(itertools.takewhile(lambda capture: capture.is_quiet, self._waiting))
        if len(quiet) > 1 and not self._trackers.any_open and self._add_quiet(quiet):
            for _ in quiet:
                self._waiting.popleft()
        while self._waiting and (wait or self._waiting[0].ready()):
            self._judge(self._waiting.popleft().finish())
        self._usual = self._find_usual()

    def _add_quiet(self, captures: Sequence[StepCapture]) -> bool:
        """Steps about which nothing is to be said, at once; whether there is nothing."""
        quiet = quiet_steps(captures)
        columns = None if quiet is None else judge_quiet(quiet, self._history, self._rules)
        if quiet is None or columns is None:
            return False
        if self._recording is not None:
            self._recording.add_quiet(quiet, columns)
            if any(map(self._are_facts_due, quiet.steps)):
                self._write_facts(self._recording)
        if self._examiner is not None:
            for seconds in quiet.seconds.tolist():
                self._examiner.plain_step(seconds)
        self._recorder.suspects = frozenset()
        return True

    def _write_facts(self, recording: RunRecording) -> None:
        recording.writer.set_fact("facts", self._history.facts)
        self._facts_written = perf_counter()

    def _judge(self, step: StepRecord) -> None:
        found = judge_step(step, self._history, self._rules)
        if self._shows_models:
            self._show_models(step)
        wrong = any(f.severity is Severity.ERROR for f in found)
        if self._recording is not None:
            self._recording.add_step(step, self._history.scalars, urgent=wrong)
            if wrong or step.traced or step.examined or step.step < EARLY_STEPS or self._are_facts_due(step.step):
                self._write_facts(self._recording)
            if step.traced and self._recorder.replicas is not None:
                self._recording.set_replicas(self._recorder.replicas.groups, self._recorder.shards)
        if self._examiner is not None:
            if not step.examined and not step.traced and step.seconds is not None:
                self._examiner.plain_step(step.seconds)
            if looks_wrong(found):
                self._examiner.plan.suspect()
            self._examiner.weights_are_lost = self._history.weights_bad and not math.isfinite(step.loss or 0.0)
        fresh = [new for finding in found if (new := self._add_finding(finding)) is not None]
        is_asked = self._causes.show_findings(fresh, wrong)
        tried = step.stepped or "update" in step.calls  # else gradients may be kept on purpose: accumulation
        overflowed = (f.evidence.get("overflowed", ()) or f.evidence.get("parameters", ()) for f in found if tried)
        self._recorder.suspects = frozenset(n for names in overflowed for n in names)
        self._trackers.tell_step(step.step, self._history.scalars)
        if self._trackers.verdict_is_due and self._trackers.any_open:
            self._trackers.tell_verdict(self.verdict())
        if not is_asked:
            examined = self._history.examinations[-1:] if step.examined else ()
            self._causes.look_again(step, self._steps, any(one.hazards for one in examined), self.findings)

    def _are_facts_due(self, step: int) -> bool:
        return step % FACTS_EVERY == 0 and perf_counter() - self._facts_written > FACTS_SECONDS

    def verdict(self, status: str = "running") -> Verdict:
        """What `nanny summary` would say of the run as it is now."""
        steps = None if not self.enabled or self._step is None else (self._step - self._steps + 1, self._step)
        return verdict_of(self.evidence(), steps=steps, status=status, failure=self._failure or "")

    def _repr_html_(self) -> str:
        """In a notebook: the verdict as it is now, with its cause."""
        from ..diagnose.text import diagnosis_block
        from ..show.notebook import cell
        from ..show.tables import lines_text

        verdict = self.verdict("finished" if self._closed else "running")
        return cell(lines_text(diagnosis_block(verdict, verdict.diagnosis), 100, colour=True))

    def evidence(self) -> Evidence:
        """What was gathered so far, as `diagnose` reads it."""
        if self.enabled and get_ident() == self._recorder.thread and not self._recorder.is_busy:
            self._recorder.run(self._catch_up)
        return self._history.evidence(self.findings) if self.enabled else RunHistory().evidence(())

    def diagnoses(self) -> list[Diagnosis]:
        """The root causes of what was seen so far, best first; nothing on a healthy run."""
        return diagnoses_of(self.evidence())

    def _add_finding(self, finding: Finding) -> Finding | None:
        """Each code and site once, and again only if it got worse: else nothing, but the repeat is counted."""
        finding = finding if self._rank is None else replace(finding, rank=self._rank)
        key = (finding.code, finding.site)
        self._counts[key] += 1
        if finding.step is not None:
            self._last_seen[key] = finding.step
        if self._worst.get(key, 0) >= finding.severity:
            return None
        self._worst[key] = finding.severity
        self.findings.append(finding)
        if self._recording is not None:
            self._recording.writer.add_finding(finding)
        self._trackers.tell_finding(finding)
        if finding.severity is Severity.ERROR and self._dense_bursts < MOST_DENSE_BURSTS and self._step is not None:
            self._dense_bursts += 1
            self._dense_until = self._step + 1 + DENSE_STEPS
        self._call_back(finding)
        return finding

    def _call_back(self, finding: Finding) -> None:
        if self._on_finding is not None:
            try:
                self._on_finding(finding)
            except Exception as error:  # noqa: BLE001 - the user's own; the run and its watch go on
                if not self._callback_failed:
                    self._warn(f"on_finding raised {type(error).__name__}: {error}; the nanny goes on, and calls it again")
                self._callback_failed = True

    def _suspect(self, suspect: BadOutput) -> None:
        if self._dump_on_error and self._folder is not None and len(self._dumps) < MOST_DUMPS and self._step is not None:
            saved = save_bad_output(self._folder / "dumps", self._step, suspect, self._rng)
            if saved is not None:
                self._dumps.append(saved[0])
                if self._recording is not None:
                    self._recording.writer.add_dump(self._step, suspect.bad.site, str(saved[0]), saved[1])

    def steps_by_themselves(self, *, find_models: bool, first: int | None = 0) -> None:
        """Lets steps begin when a model is called for training; with `find_models`, models are found in the same way.

        `first`: the number of the first step; None: the one at which the optimizer of a found model stands.
        """
        if not self.enabled:
            return
        clock = self._clock = StepClock(
            lambda _: self.begin_step(clock.step),
            None if find_models else [model for model, _ in self._recorder.models],
            self.add_model,
            guard=lambda hook: functools.partial(self._run_hook, hook),
            over=functools.partial(self.end_step, goes_on=True),
            first=first,
        )
        clock.open()
        self._shows_models = find_models and self._live is not None and not self._rank

    def set_language(self, lang: str) -> None:
        """The language of the lines on stderr: en or zh."""
        if self._live is not None:
            self._live.set_language(lang)

    def _show_models(self, step: StepRecord) -> None:
        """What was found in a program that did not say what to watch."""
        self._shows_models = False
        assert self._live is not None
        models = [model for model, _ in self._recorder.models]
        names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
        parameters = {id(p): p.numel() for model in models for p in model.parameters()}
        precision = step.amp_dtype or "no autocast"
        scale = "" if step.scale is None else f" with GradScaler {short(step.scale)}"
        kept = "" if self._recording is None else f", recording to {self._folder}, live: nanny ui --db {self._folder}"
        self._live.say(f"nanny: watching {names}, {size(sum(parameters.values()))} parameters, {precision}{scale}{kept}")

    def _run_hook(self, hook: Callable[..., None], *about: Any) -> None:
        if not self._recorder.is_busy:
            self._recorder.run(hook, *about, apart=False)

    # the end

    def _failed(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        if self._strict:
            raise error
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]  # extract_tb would read the files of the program
        where = f"{Path(frame.f_code.co_filename).name}:{line}"
        self._warn(f"the nanny failed and has left the run, which is not affected: {self._failure} ({where})")

    @property
    def cost_percent(self) -> float:
        """Time spent watching, in percent of the training without it. Examinations are counted apart, in `examined_seconds`."""
        return self._cost.percent if self.enabled else 0.0

    @property
    def examined_seconds(self) -> float:
        return self._examiner.plan.spent if self.enabled and self._examiner is not None else 0.0

    def close(self, status: str = "finished") -> None:
        """Judges the last step, writes everything, removes every hook. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if getpid() != self._pid:
            return
        _open_nannies.discard(self)
        if self._recorded:
            self._warn(
                "steps that begin inside torch.compile or torch.jit.trace were not watched: frame the call of the function"
            )
        if self._clock is not None:
            self._attempt(self._clock.close)
        self._attempt(self._close_examination, at_any_price=True)
        if self._examiner is not None:
            self._attempt(self._examiner.abandon)
        cost = self._attempt(self._cost.totals) or {}
        self._attempt(self._recorder.run, self._finish, wait=True)
        self._attempt(self._recorder.close)
        if self._steps and self._trackers.any_open:
            self._attempt(lambda: self._trackers.tell_verdict(self.verdict(status)))
        if self._recording is not None:
            self._attempt(self._recording.writer.set_fact, "facts", self._history.facts)
            self._attempt(self._recording.close, status, **self._attempt(self._totals, cost) or {})
        if self._live is not None and self._steps and not self._rank:
            self._attempt(self._show_end, cost, status)
        self._attempt(self._recorder.forget)

    @property
    def saw_nothing(self) -> bool:
        return self.enabled and self._failure is None and not self._steps and getpid() == self._pid

    @property
    def recorded_at(self) -> tuple[Path, int] | None:
        """The store and the number of the run in it, of a run that has steps on record."""
        if not self.enabled or self._recording is None or not self._recording.writer.run or not self._steps:
            return None
        return self._recording.writer.path, self._recording.writer.run

    def _totals(self, cost: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **cost,
            "traced_steps": self._traced,
            "steps": self._steps,
            "failure": self._failure or "",
            "not_again": self._examiner.not_again if self._examiner is not None else "",
            "repeats": [[c, s, n, self._last_seen.get((c, s))] for (c, s), n in self._counts.items() if n > 1],
        }

    def _show_end(self, cost: Mapping[str, Any], status: str) -> None:
        assert self._live is not None
        dropped = self._recording.writer.dropped if self._recording is not None else 0
        where = self._recording.writer.path if self._recording is not None and self._recording.writer.path.exists() else None
        if where is not None and self._rank is not None:
            where = where.parent  # all ranks write there
        count = len(self._history.examinations)
        examined = f"; {count} steps examined beside FP32 in {self._cost.examinations_text()}" if count else ""
        found: list[Verdict] = []
        self._recorder.run(lambda: found.append(self.verdict(status)))  # a fault of ours must not reach the script
        verdict = found[0] if found else NO_VERDICT
        self._causes.show_what_became(verdict)
        is_located = verdict.diagnosis is not None and bool(verdict.diagnosis.where)
        if not is_located and self._examiner is not None and self._examiner.not_again:
            step = verdict.first.step if verdict.first is not None else None
            self._live.say(
                f"nanny: the bad step was not run again beside FP32: {self._examiner.not_again}; "
                f"to see it: {examine_command(sys.argv, step)}"
            )
        for text in closing_lines(
            verdict,
            self.findings,
            f"{cost_text(cost)}, {self._traced} of {self._steps} steps traced{examined}",
            f"{dropped} samples" + (f", {self._live.held_back} lines held back" if self._live.held_back else ""),
            f"nanny summary --db {where}" if where is not None else "`nanny run`, or MixedPrecisionNanny, to keep a record",
            "" if self._rank is None else f"rank {self._rank} of {self._world_size} by itself",
            self._live.lang,
        ):
            self._live.say(text)
        for path in self._dumps:
            self._live.say(f"nanny: inputs and weights of a culprit are kept; run it again with: nanny replay {path}")

    def __enter__(self) -> MixedPrecisionNanny:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(status_of(kind))


class Framed:
    """One step of a nanny, in a `with`."""

    __slots__ = ("_nanny", "_step")

    def __init__(self, nanny: MixedPrecisionNanny, step: int) -> None:
        self._nanny, self._step = nanny, step

    def __enter__(self) -> None:
        self._nanny.begin_step(self._step)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._nanny.end_step()
        else:
            self._nanny.leave_step(error)


class _Warnings:
    """The first trouble of a run is a warning, what follows a line on stderr."""

    _is_first = True

    def __call__(self, message: str) -> None:
        if self._is_first:
            self._is_first = False
            warn(message, stacklevel=4)
        else:
            tell(f"nanny: {message}")


_open_nannies: weakref.WeakSet[MixedPrecisionNanny] = weakref.WeakSet()


@atexit.register  # once: Python keeps a place for each function that is registered, also when it is taken back
def _close_at_exit() -> None:
    for nanny in list(_open_nannies):
        nanny.close(status_at_exit())


def examine(
    model: nn.Module, step_fn: Callable[[int], Any], steps: int = 3, optimizer: Any = None, scaler: Any = None
) -> MixedPrecisionNanny:
    """Runs `step_fn(i)` (one whole training step) a few times, each examined beside FP32; give the result to `diagnose`."""
    if steps < 1:
        raise NannyError(f"examine(steps={steps}): at least one step must run")
    nanny = MixedPrecisionNanny(model, optimizer, scaler, trace_interval=1, output_dir=None, live=False, examine="every")
    with nanny:
        for i in range(steps):
            with nanny.step(i):
                step_fn(i)
    return nanny


def _better(live: Examination, from_before: Examination) -> Examination:
    """The lines before the step count where it begins with what they broke, and where they alone show what FP32 does not have."""
    given = any(h.is_of_before or h.is_of_data for h in live.hazards)
    is_news = all(h.in_reference for h in live.hazards) and not all(h.in_reference for h in from_before.hazards)
    return from_before if given or is_news else live
