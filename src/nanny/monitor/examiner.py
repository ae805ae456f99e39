"""Decides which steps of a run are examined operation by operation, and sees to it that it stays cheap.

An examined step costs several plain ones, of a model of many small parts a hundred. The first step is always worth a second, or
several where the work itself takes long; after that examinations come at growing distance, or when something looks wrong, and
together take a tenth of the time more until they have had their first seconds, then a percent of the time at most. A step that
turns out to be longer (many micro-batches, a closure that runs often) is examined until its time is spent, and goes on alone;
the next one waits until there is time for a whole one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from time import perf_counter, process_time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..core.examination import Examination, Trial
from ..examine.again import (
    NotAgain,
    calls_to_loss,
    came_from,
    examine_again,
    find_irreproducible,
    goes_into,
    line_call,
    smaller_scale,
    without_bad_rows,
)
from ..examine.sanitizer import Sanitizer
from ..examine.tags import Preamble
from ..watch.bad_lines import assignments_behind_backward
from ..watch.calls import MOST_CALLS, ModelCall
from ..watch.hooks import add_module_hook, weakly
from ..watch.op_stream import is_set_aside
from ..watch.ranks import compiles_backward, many_processes
from ..watch.tensors import being_traced, in_backward
from .recorder import Recorder

FIRST_SECONDS, FIRST_CALLS = 1.0, 500  # which examinations may take at once, or as long as so many calls of modules take,
EARLY_SHARE = 0.1  # and of the time of a run in addition,
STARTUP_SECONDS = 5.0  # until they have taken this much
SECOND_SECONDS = 3.0  # if the first took less, the second step is examined too, whatever the time
SHARE = 0.01  # of the time of a run, afterwards
MOST_SUSPICIONS = 3
HAND_MADE_SCALE = 16.0  # a factor of the loss that is no average
MOST_AGAIN = 2  # bad losses, and bad gradients of finite ones, whose step is made again: neither takes from the other,
MOST_LINES = 3  # and lines of the loop, for each
TIMES_A_STEP = 8.0  # what an examined step costs, until one has told
MOST_LOOKS_BEFORE = 2  # steps that are looked at from the moment their batch is drawn, because one had come in bad
MOST_OWED = 2  # examinations that are made up for: the loss scale hid from them what rounding did to the gradients


@dataclass
class ExaminationPlan:
    """Which steps to examine; knows of time only what it is told."""

    spent: float = 0.0
    at_once: float = FIRST_SECONDS
    count: int = 0
    suspicions: int = 0
    _next: int = 0
    _worst: float = 0.0
    _was_cut: bool = False  # the last one ran out of time, so nobody knows what a whole one costs
    _suspected: bool = False
    _paced: float = 0.0  # `at_once` after a whole examination
    _owed: int = 0
    _owed_at: float = math.inf

    @property
    def is_suspected(self) -> bool:
        return self._suspected

    def is_due(self, position: int) -> bool:
        """Whether it would want this step if it had the time."""
        return self._suspected or position >= min(self._next, self._owed_at)

    def wants(self, position: int, elapsed: float, step_seconds: float | None) -> bool:
        """`position`: how many steps there were before; `elapsed`: seconds since the first; `step_seconds`: of a plain one."""
        wanted, suspected, self._suspected = self.would_want(position, elapsed, step_seconds), self._suspected, False
        self.suspicions += wanted and suspected and position < self._owed_at
        return wanted

    def would_want(self, position: int, elapsed: float, step_seconds: float | None) -> bool:
        if not self.count and position == 0:
            return True
        if not self.is_due(position):
            return False
        if position >= self._owed_at:  # whatever the time: what the run is told must not depend on it
            return True
        price = self._worst
        if self._was_cut or not price:
            price = max(2 * price, TIMES_A_STEP * (step_seconds or 0.0))
        return price <= self.seconds_left(elapsed)

    def seconds_left(self, elapsed: float) -> float:
        """Seconds that may still be spent, `elapsed` seconds after the first step."""
        return max(min(self.at_once + EARLY_SHARE * elapsed, STARTUP_SECONDS), SHARE * elapsed) - self.spent

    def allowance(self, position: int, elapsed: float) -> float:
        """Seconds for the examination of this step."""
        return max(self.seconds_left(elapsed), 2 * self._worst if position >= self._owed_at else 0.0)

    def pace(self, calls: int, seconds: float) -> None:
        """So many modules were called in an examined step so far. Where each takes long, it is work, and steps are long too."""
        self.at_once = max(FIRST_SECONDS, self._paced, FIRST_CALLS * seconds / calls)

    def suspect(self) -> None:
        """Something looks wrong: the next step is worth a look, a few times in a run."""
        self._suspected = self.suspicions < MOST_SUSPICIONS

    def look_at(self, position: int) -> None:
        """Something is expected to be near then: if there is time for it, a look that comes before the usual one."""
        self._next = min(self._next, position)

    def owe_next(self, position: int) -> None:
        """A bad step is not explained: the next one is examined as it runs, whatever the time."""
        self._owed_at = min(self._owed_at, position + 1)

    def count_done(self, position: int, seconds: float, was_cut: bool = False, was_hidden: bool = False) -> None:
        """`was_hidden`: gradients overflowed by the loss scale alone; a few steps later it has been lowered."""
        self.count += 1
        self.spent += seconds
        self._worst = max(self._worst, seconds)
        self._was_cut = was_cut
        self._next = max(position + 1, 2 * position + self.count % 2)  # powers of two alone never meet every third step
        if not was_cut:
            self._paced = self.at_once
        if position == 0 and seconds <= SECOND_SECONDS:
            self._owed_at = 1.0  # the first step knows no momentum and no average, and may have been cut
        elif position >= self._owed_at or not (was_hidden or was_cut):
            self._owed_at = math.inf
        if was_hidden and self._owed_at in (1.0, math.inf) and self._owed < MOST_OWED:
            self._owed += 1
            self._owed_at = 4.0 * (position + 1)


def _now() -> tuple[float, float]:
    return perf_counter(), process_time()


def _since(began: tuple[float, float]) -> float:
    """By the clock, or by the work where a busy machine makes everything slow."""
    return min(now - then for now, then in zip(_now(), began))


def modes_may_change() -> bool:
    """Inference mode, backward and transforms put the dispatcher back as they found it: what is opened or closed within them
    would be half undone."""
    return not torch.is_inference_mode_enabled() and not in_backward() and not being_traced()


def _are_spoilt(calls: Sequence[ModelCall]) -> bool:
    """Something that went into them from outside is not finite."""
    given = [t for call in calls for t in call.inputs if t.is_floating_point() and t.grad_fn is None]
    return any(not bool(t.isfinite().all()) for t in given)


def _release(opened: list[Sanitizer]) -> None:
    """Whatever became of the examination: nothing of it stays switched on."""
    try:
        for sanitizer in opened:
            with contextlib.suppress(Exception):
                sanitizer.close()
    finally:
        Examiner.turn.release()


class Examiner:
    """Opens the sanitizer around the steps that the plan wants. What one thread has opened, that thread closes."""

    turn: ClassVar[threading.Lock] = threading.Lock()  # one step of a process is examined at a time

    def __init__(
        self,
        recorder: Recorder,
        on_examination: Callable[..., None],
        always: bool = False,
        try_remedies: bool = True,
    ) -> None:
        self.plan = ExaminationPlan()
        self.off_because = ""
        self.weights_are_lost = False  # not finite, and so is every loss: no operation of such a step is to blame
        self._always = always
        self._tries = try_remedies
        self._recorder = recorder
        self._deliver = on_examination
        self._sanitizer: Sanitizer | None = None
        self._release: Callable[[], Any] = lambda: None
        self.not_again = ""  # why a bad step could not be made again
        self._unhook: Callable[[], Any] = lambda: None
        self._thread = 0
        self._position = self._calls = 0
        self._elapsed, self._opened = 0.0, (0.0, 0.0)
        self._began: tuple[float, float] | None = None
        self._took: float | None = None  # seconds, of the step that is over while what follows is still looked at
        self._plain: deque[float] = deque(maxlen=31)
        self._again = {True: 0, False: 0}  # of bad losses, and of bad gradients, which a loss scale has now and then
        self._twice = 0
        self._preamble: Preamble | None = None  # of the step that begins, if the one before was examined
        self._is_ahead = False  # what is open looks at what the loop makes for a step that has not begun
        self._from_before: Examination | None = None  # of lines of a bad step, those before it included
        self._is_replaced = False  # what is open came to an end before the step, which was made again
        self._looks_before = False  # the next step is to be looked at from where its batch is made,
        self._looked_before = 0  # as so many were
        self._is_through = False  # what is open goes on through networks that are not trained
        self._afterwards = False  # this step is examined when its backward pass is over
        self._explained: int | None = None  # the last step of which an examination has told the first bad number
        self._made: list[ModelCall] = []  # in this step
        self._made_at = -1
        recorder.hears_calls = True
        recorder.when_backward = self.backward_begins
        recorder.when_read = self.gradients_read
        recorder.when_bad_gradients = self.gradients_are_bad
        recorder.when_updated = self.weights_changed

    def begin(self, position: int) -> bool:
        """Whether the step that begins now is examined."""
        examined = self._wants(position)
        if not (examined or self._afterwards):
            self._preamble = None
        return examined

    def _wants(self, position: int) -> bool:
        self._position, self._afterwards = position, False
        if self._began is None:
            self._began = _now()
        if not self._always and not (self.plan.is_due(position) if self._leads() else self.plan.is_suspected):
            return False
        if not self._may_open():
            return False
        self._elapsed = _since(self._began) - self.plan.spent
        wanted = self.plan.wants(position, self._elapsed, self._typical()) or self._always
        self._afterwards = wanted and bool(self._recorder.compiled)  # its own operations are not seen one by one
        return wanted and not self._afterwards

    def _may_open(self) -> bool:
        tells_nothing = self.weights_are_lost and not (self._always or self._looks_before or self._preamble is not None)
        if self.off_because or tells_nothing:
            return False
        return bool(self._recorder.models) and not self.turn.locked() and modes_may_change()

    def backward_begins(self, loss_is_bad: bool, root: torch.Tensor) -> None:
        """What was called for a bad loss is examined now, outside the budget, unless it has been; a few times in a run."""
        made, capture = self._recorder.calls_since_backward(), self._recorder.capture
        if capture is None:
            return
        if self._made_at != capture.record.step:
            self._made, self._made_at = [], capture.record.step
        self._made = [*self._made, *made][:MOST_CALLS]
        if loss_is_bad:
            self._made, self._afterwards = [], False
            self._make_again(made, root)
        elif self._afterwards and compiles_backward():  # of that nothing can be seen
            self._afterwards = False
            self._make_again(made, planned=True)

    def gradients_read(self) -> None:
        """Backward is over and the weights are as they were: what was called of a compiled model is made again, as it was
        written, when the plan wants it."""
        made, planned, self._afterwards = self._made, self._afterwards, False
        if planned and made:
            self._make_again(made, planned=True)

    def gradients_are_bad(self, graph: Any) -> None:
        """The loss was finite: all that was called for it in this step is made again, backward too."""
        made, self._made = self._made, []
        if made:
            self._make_again(made, graph=graph)

    def weights_changed(self) -> None:
        """No call can be made again as it was: what was passed in belongs to the program alone from here on."""
        self._made = []
        self._recorder.calls_since_backward()

    def _make_again(
        self, made: Sequence[ModelCall], root: torch.Tensor | None = None, planned: bool = False, graph: Any = None
    ) -> None:
        capture = self._recorder.capture
        if capture is None or self.off_because or self.weights_are_lost or not modes_may_change():
            return
        if self._explained == capture.record.step:
            return  # it was examined as it ran, criterion included; the calls alone tell less
        live = self._sanitizer
        if live is not None and not live.has_ended:
            self._look_twice(made, root, live)
            return
        loss_is_bad = root is not None
        if (self._again[loss_is_bad] >= MOST_AGAIN and not planned) or (live is None and not self.turn.acquire(blocking=False)):
            return
        if not planned:
            self._again[loss_is_bad] += 1
            self._recorder.hears_calls = min(self._again.values()) < MOST_AGAIN or bool(self._recorder.compiled)
        started = _now()
        step = capture.record.step
        try:
            with contextlib.nullcontext() if live is None else live.paused():
                is_explained = self._make_calls_again(made, root, planned, step, graph)
                if not is_explained and root is not None:
                    seen = self._make_lines_again(made, step)
                    is_explained = seen is not None
                    if seen is not None:
                        self._deliver(seen)
        finally:
            if live is None:
                self.turn.release()
            self._recorder.calls_since_backward()  # the second run was heard as well
            seconds = _since(started)
            if planned:
                self.plan.count_done(self._position, seconds)
            else:
                self.plan.spent += seconds
            self._recorder.seconds -= seconds  # examinations have an account of their own
        if is_explained and not planned:
            self._explained = step  # what a later loss of this step meets (a GAN) was spoilt by it
        if not is_explained:
            self.plan.owe_next(self._position)

    def _make_calls_again(
        self, made: Sequence[ModelCall], root: torch.Tensor | None, planned: bool, step: int, graph: Any
    ) -> bool:
        tries = self._tries and not planned
        try:
            before, self._preamble = self._preamble if planned else None, None
            seen = examine_again(made, self._recorder.models, step, weakly(self._scale), tries, root, not planned, before)
            if seen.facts.get("seed_nonfinite"):
                seen = self._make_loss_again(made, graph, step) or seen
            from_before = self._make_lines_again(made, step) if root is not None and _are_spoilt(made) else None
            trials = (*seen.trials, *(self._try_remedies(made, root) if tries else ()))
            self._deliver(replace(seen, trials=trials), from_before)
        except NotAgain as error:
            self.not_again = str(error)
            return planned
        self._is_replaced = self._sanitizer is not None
        return planned or seen.first_bad is not None

    def _make_loss_again(self, made: Sequence[ModelCall], graph: Any, step: int) -> Examination | None:
        """The gradients came bad to the model: the lines that made a loss of what it gave are made again, and their backward."""
        with contextlib.suppress(NotAgain, SyntaxError):
            found = calls_to_loss(made, graph)
            if found is not None:
                calls, loss = found
                seen = examine_again(calls, self._recorder.models, step, weakly(self._scale), False, loss, compare=False)
                return seen if seen.first_bad is not None else None
        return None

    def _make_lines_again(self, made: Sequence[ModelCall], step: int) -> Examination | None:
        """The calls of the model were all right: what the loop made of them, or of its data, is computed once more."""
        for line in itertools.islice(assignments_behind_backward(), MOST_LINES):
            first = [one for one in line.sources if goes_into(one.result, made)]
            behind = () if goes_into(line.result, made) else made
            before = [one for one in line.sources if one not in first and not any(came_from(call, one.result) for call in behind)]
            # behind the calls and the lines before it, so that what they gave has its twins
            ways = ((first, behind, before), ((), behind, before), ((), behind, ()), ((), (), ()))
            for feeding, calls, lines in itertools.compress(ways, (first, before, True, behind)):
                with contextlib.suppress(NotAgain, SyntaxError):  # the latter where it waits for others (`await`)
                    again = [*map(line_call, feeding), *calls, *map(line_call, (*lines, line))]
                    seen = examine_again(again, self._recorder.models, step, try_remedies=self._tries, compare=False)
                    if seen.first_bad is not None:
                        return seen
                    break
        return None

    def _look_twice(self, made: Sequence[ModelCall], root: torch.Tensor | None, sanitizer: Sanitizer) -> None:
        """A bad step that is being examined as it runs: is it bad again, and would other inputs help?"""
        if self._twice >= MOST_AGAIN or get_ident() != self._thread:
            return
        self._twice += 1
        with self._beside_examination(sanitizer):
            if root is not None and self._recorder.capture is not None:
                self._from_before = self._make_lines_again(made, self._recorder.capture.record.step)
            with contextlib.suppress(NotAgain):
                found = {} if root is None else find_irreproducible(made, self._recorder.models, root)
                if found:
                    sanitizer.note("not_reproducible", found)
                for trial in self._try_remedies(made, root):
                    sanitizer.note_trial(trial)

    @contextlib.contextmanager
    def _beside_examination(self, sanitizer: Sanitizer) -> Iterator[None]:
        """What is run again in here is neither seen by the examination nor reckoned with by the plan."""
        started = _now()
        with sanitizer.paused():
            yield
        self._recorder.calls_since_backward()  # the second run was heard as well
        seconds = _since(started)
        self.plan.spent += seconds
        self._recorder.seconds -= seconds
        wall, work = (now - then for now, then in zip(_now(), started))
        self._opened = (self._opened[0] + wall, self._opened[1] + work)  # nothing that the plan has to reckon with

    def _try_remedies(self, made: Sequence[ModelCall], root: torch.Tensor | None) -> list[Trial]:
        """What other inputs, or a smaller loss scale, would have made of these calls."""
        capture = self._recorder.capture
        if not self._tries or capture is None:
            return []
        if root is not None:
            trial = without_bad_rows(made, root)
        else:
            by_hand = (capture.record.loss_factor or 1.0) >= HAND_MADE_SCALE or capture.record.scale_static
            trial = smaller_scale(made, self._recorder.models, capture.record.step) if by_hand else None
        return [] if trial is None else [trial]

    def open(self, step: int, ahead: bool = False) -> None:
        """Last thing before the user's code: from here on every operation is watched. `ahead`: the step has not begun."""
        if not self.turn.acquire(blocking=False):
            return
        opened: list[Sanitizer] = []
        self._release = weakref.finalize(self, _release, opened)
        self._thread = get_ident()
        self._opened, self._calls, self._is_replaced, self._is_ahead = _now(), 0, False, ahead
        self._took = 0.0 if ahead else None
        self._is_through = ahead and self._looks_before
        if self._is_through:
            self._looks_before, self._looked_before = False, self._looked_before + 1
        try:
            opened.append(
                Sanitizer(
                    self._recorder.models,
                    step,
                    weakly(self._scale),
                    seconds=self._seconds_left(),
                    try_remedies=self._tries,
                    before=self._preamble,
                )
            )
            self._preamble = None
            opened[0].open()
        except BaseException:
            self._release()
            raise
        self._sanitizer = opened[0]
        self._unhook = add_module_hook(register_module_forward_pre_hook, self._on_call)

    def close(self, at_any_price: bool = False) -> Examination | None:
        """Idempotent. Gives what the examination told. Where it may not end now, it ends at the next occasion: in backward,
        where modes are not to be changed, and in a thread that did not open it (unless nobody is going to come back)."""
        if self._sanitizer is None or not modes_may_change() or is_set_aside():
            return None
        if get_ident() != self._thread and not at_any_price:
            return None
        sanitizer, self._sanitizer = self._sanitizer, None
        was_cut = sanitizer.is_spent
        self._unhook()
        try:
            examination = sanitizer.close()
        finally:
            self._release()
        self._preamble = sanitizer.for_next
        if self._is_ahead:
            self.plan.spent += _since(self._opened)
            return None
        took = _since(self._opened) if self._took is None else self._took
        seconds = max(took - (self._typical() or 0.0), 0.0)
        self.plan.count_done(self._position, seconds, was_cut, bool(examination.facts.get("scale_overflow")))
        return examination

    def step_is_over(self) -> None:
        """What follows is still looked at until a module is called: the loop's own averages move behind the optimizer, and the
        next batch is drawn and cast. Before a step that will be examined, too."""
        if self._sanitizer is None and self._leads() and self.plan.is_due(self._position + 1) and self._may_open():
            self._open_ahead()
        elif self._sanitizer is not None:
            self._took = self._took if self._is_ahead else _since(self._opened)
            self._sanitizer.step_is_over()

    def look_before_next(self) -> None:
        """What came into the model was bad already: the next step is looked at from where the loop makes its batch."""
        if not self._looks_before and self._looked_before < MOST_LOOKS_BEFORE:
            self._looks_before = True
            self.plan.owe_next(self._position)

    def _open_ahead(self) -> None:
        self._elapsed = _since(self._began) - self.plan.spent if self._began is not None else 0.0
        if self._always or self.plan.would_want(self._position + 1, self._elapsed, self._typical()):
            self.open(self._position + 1, ahead=True)
        if self._sanitizer is not None:
            self._sanitizer.step_is_over()

    def abandon(self) -> None:
        """After `close`, which may have failed. Idempotent."""
        self._sanitizer = None
        self._unhook()
        self._release()

    def finish(self, at_any_price: bool = False) -> None:
        examination = self.close(at_any_price)
        if examination is not None and not self._is_replaced:
            self._explained = examination.step if examination.first_bad is not None else None
            self._deliver(examination, self._from_before)
        self._from_before = None

    @property
    def is_open(self) -> bool:
        return self._sanitizer is not None

    def _finish_and_look_on(self) -> None:
        self.finish()
        if self._looks_before and self._sanitizer is None and self._leads() and self._may_open():
            self._open_ahead()

    def plain_step(self, seconds: float) -> None:
        """What a step that was not examined took."""
        self._plain.append(seconds)

    def _seconds_left(self) -> float:
        """For the examination of this step."""
        return math.inf if self._always else self.plan.allowance(self._position + self._is_ahead, self._elapsed)

    def _typical(self) -> float | None:
        return sorted(self._plain)[len(self._plain) // 2] if self._plain else None

    def _on_call(self, module: nn.Module, _: Any) -> None:
        if get_ident() == self._thread and not self._recorder.is_busy:
            self._recorder.run(self._close_if_over, module, apart=False)

    def _close_if_over(self, module: nn.Module) -> None:
        """Its time is spent, or this is a forward pass after the step: an evaluation, or the block is over and nobody said so."""
        if self._sanitizer is not None:
            self._calls += 1
            self.plan.pace(self._calls, _since(self._opened))
            self._sanitizer.seconds = self._seconds_left()
            if self._sanitizer.is_spent:
                self._sanitizer.give_up()
                self.finish()
                return
        capture = self._recorder.capture
        over = capture is None or capture.ended or (capture.record.stepped and not torch.is_grad_enabled())
        is_ours = id(module) in self._recorder.modules
        if over and (is_ours or (self._took is not None and not self._is_through)):
            if self._sanitizer is not None and self._took is not None and not modes_may_change():
                self._sanitizer.conclude("the step was over")  # an evaluation begins, where nothing may be closed
            if is_ours:
                self.finish()
            else:
                self._finish_and_look_on()

    def _leads(self) -> bool:
        """Of many processes one is slow while it is examined, and the others wait for it. So that they do not wait for each in
        turn, the first has the plan, and another is examined only when something was wrong in itself. No process needs to know
        what the others do: the operations between them run once, as the program has them."""
        return not many_processes() or dist.get_rank() == 0

    def _scale(self) -> float | None:
        capture = self._recorder.capture
        scale = None if capture is None else capture.scale
        return None if scale is None else float(scale)
