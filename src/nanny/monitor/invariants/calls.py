"""The order of backward passes, clearing and optimizer steps: gradients that are used twice, never, or not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.step import Breach, StepRecord
from ...measure import transfer
from ...watch.calls import ModelCall
from ...watch.hooks import add_hook
from ...watch.optimizers import parameters_of
from ...watch.places import users_line
from ...watch.tensors import gradient_of, is_readable, with_gradient
from ..trace import fingerprints
from ..updates import UpdateProbe
from .watched import (
    FEW,
    Stepping,
    Watched,
    any_gradient,
    any_nonzero,
    are_unwritten,
    few_of,
    gradient_sample,
    leaves_of,
    sample_of,
    versions_of,
)

ALIKE = 0.9999  # cosine of two gradients that are one, whatever it was clipped or unscaled by


@dataclass
class ThisStep:
    backwards: int = 0
    stepped: bool = False
    fresh: bool = False  # an optimizer stepped on gradients that a backward pass had left
    again: bool = False  # on those of its last step
    empty: bool = False  # on none
    closure: bool = False
    other_optimizers: int = 0  # steps of optimizers of other parameters
    autocast: str = ""  # entered, with which format
    evaluates: bool = False  # the models that are stepped are in evaluation mode
    thrown_away: int = 0  # times that gradients were cleared on which nobody had stepped
    probes: list[UpdateProbe] = field(default_factory=list)


@dataclass
class Idle:
    """An optimizer that clears gradients and has not stepped, while another one steps."""

    optimizer: weakref.ref[Optimizer]
    holds: bool = False  # gradients, when the other one stepped
    lost: int = 0  # times that it cleared them


class Calls:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._pending = False  # a backward pass of an earlier step waits for its optimizer
        self._lost = self._passes = self._again = self._empty = self._cleared = self._looked = 0
        self._unconnected = 0
        self._never = 0  # backward passes so far, if no optimizer has stepped
        self._asks_scaler = False  # it may refuse every step, and says so itself
        self._has_optimizer: bool | None = None  # that could have; it may be gone when the run ends
        self._first: list[tuple[Tensor, Tensor]] = []  # parameters and what they were
        self._wasted = Wasted(watched)
        self._idle: dict[int, Idle] = {}  # optimizers that clear and have not stepped

    def before_backward(self, step: ThisStep, root: Tensor, made: Sequence[ModelCall]) -> None:
        watched = self._watched
        for one in (one for one in watched.known.values() if not one.in_closure):
            one.backwards += 1
            if one.held:
                one.held = watched.is_early and _holds_gradients(watched.of_optimizer(one))
        if self._pending and not step.backwards:
            self._pending = False
            if watched.is_early and not any_gradient(few_of(watched.trainable())):
                self._lost += 1
        step.backwards += 1
        if not watched.known and not self._first:
            self._first = [(p, sample_of(p)) for p in few_of(watched.trainable(), FEW) if is_readable(p)]
        if self._unconnected and watched.is_early:
            self._look_at_graph(root)
        if watched.is_early and len(watched.known) == 1:
            self._wasted.before_backward(made)

    def _look_at_graph(self, root: Tensor) -> None:
        """Steps on no gradient, although the loss reaches what was stepped: it was cleared in between."""
        owned = {id(p) for one in self._watched.known.values() if one.is_empty for p in self._watched.of_optimizer(one)}
        reached = leaves_of(root, self._watched.parameters)
        if reached & owned:
            self._cleared += self._unconnected
        if reached:  # else the loss does not depend on the models at all
            self._unconnected = 0

    def cleared(self, step: ThisStep, optimizer: Optimizer) -> None:
        """By an optimizer of these models."""
        if id(optimizer) not in self._watched.known and self._watched.is_early:
            idle = self._idle.setdefault(id(optimizer), Idle(weakref.ref(optimizer)))
            idle.lost += idle.holds
            idle.holds = False
        self._take_away(step)

    def cleared_by_model(self, step: ThisStep, model: nn.Module) -> None:
        """By one that holds all that has a gradient; a part (a discriminator) clears what others have left in it."""
        held = {id(p) for p in with_gradient(self._watched.trainable())}
        if held and held <= {id(p) for p in model.parameters()}:
            self._take_away(step)

    def _take_away(self, step: ThisStep) -> None:
        if step.backwards and not step.stepped:
            step.thrown_away += 1
            self._wasted.cleared()
        elif self._pending and not step.backwards:
            self._pending = False
            self._lost += 1

    def before_step(self, step: ThisStep, one: Stepping, mine: list[Tensor], has_closure: bool) -> None:
        one.steps += 1
        step.stepped, step.closure, self._pending, step.thrown_away = True, step.closure or has_closure, False, 0
        self._first = []
        for key, idle in list(self._idle.items()) if self._watched.is_early else ():
            owner = idle.optimizer()
            if owner is None or key in self._watched.known or _shares(owner, mine):
                del self._idle[key]  # its parameters are stepped, be it by an optimizer inside it
            else:
                idle.holds = idle.holds or any_gradient(few_of(parameters_of(owner), FEW))
        one.in_closure = has_closure
        if has_closure and not one.backwards:  # a framework passes one that does nothing where the loop has made the gradients
            one.held, one.uncleared, one.gradients = False, 0, None
            return
        if self._watched.is_early:
            self._look_at_gradients(step, one, mine)
            self._wasted.before_step(one, alone=len(self._watched.known) == 1)
        else:
            one.uncleared, one.gradients = 0, None
            self._wasted.close()
        one.backwards, one.held = 0, True

    def after_step(self) -> None:
        for one in self._watched.known.values():
            one.in_closure = False

    def before_scaler_step(self, step: ThisStep) -> None:
        """The scaler may refuse the step; the gradients were not for nothing."""
        step.stepped, self._pending, step.thrown_away = True, False, 0
        self._asks_scaler = True

    def _look_at_gradients(self, step: ThisStep, one: Stepping, mine: list[Tensor]) -> None:
        present = with_gradient(mine)
        holding = _readable(few_of(present, FEW)) or _readable(present)
        sparse = bool(present) and not holding
        now = gradient_sample(few_of(holding, FEW)) if holding else None
        one.is_empty = bool(one.backwards) and not holding and not sparse
        gradients = [g for p in holding if (g := gradient_of(p)) is not None]
        kept = not one.backwards or are_unwritten(gradients, one.written)  # whatever others passed backward
        is_old = kept and _is_same(now, one.gradients)
        if one.backwards and not is_old:
            step.fresh |= bool(holding) or sparse
            step.empty |= one.is_empty
        elif now is not None and one.gradients is not None:
            step.again |= is_old
            step.fresh |= not is_old
        else:
            step.empty |= not holding and not sparse and one.steps > 1
            step.fresh |= bool(holding) or sparse
        one.uncleared = one.uncleared + 1 if one.steps > 1 and one.backwards and one.held and not is_old else 0
        one.where = one.where or (users_line() if one.uncleared else "")
        one.gradients, one.written = now, versions_of(gradients)

    def count(self, step: ThisStep, record: StepRecord) -> None:
        is_early, known = self._watched.is_early, self._watched.known
        self._never = 0 if known or self._asks_scaler else self._never + step.backwards
        if not known and self._has_optimizer is None and (self._never > FEW or self._lost):
            self._watched.search()
            self._has_optimizer = not self._watched.owned_ids().isdisjoint(self._watched.parameters)
        if is_early:
            # a loop that never steps may be one step to whoever finds steps by their optimizers
            self._passes += bool(step.backwards) if known else step.backwards
            self._looked += step.stepped
        if step.backwards and not step.stepped and not step.other_optimizers:
            if is_early:
                self._lost += min(step.thrown_away, 1) if known else step.thrown_away
            self._pending = not step.thrown_away
        if step.stepped and not step.closure and not record.skipped and is_early:
            self._again += step.again
            if step.empty and not step.fresh and not step.again:
                if step.backwards:
                    self._unconnected += 1
                else:
                    self._empty += 1

    def close(self) -> None:
        self._wasted.close()
        self._first = []

    def breaches(self, last: bool) -> Iterator[Breach]:
        watched = self._watched
        if self._unconnected:
            yield watched.breach("no_gradient", [], self._unconnected, self._looked, ("unconnected",))
        for one in watched.known.values():
            optimizer = one.optimizer()
            if one.uncleared and optimizer is not None:
                names = [watched.parameters[id(p)] for p in parameters_of(optimizer) if id(p) in watched.parameters]
                yield watched.breach("uncleared", names, one.uncleared, one.steps, where=one.where)
        for times, trait in ((self._again, "again"), (self._empty, "empty"), (self._cleared, "cleared")):
            if times:
                yield watched.breach("no_backward", [], times, self._looked, (trait,))
        if self._lost and (watched.known or (self._has_optimizer and self._stands_still)):
            yield watched.breach("no_step", [], self._lost, self._passes, () if watched.known else ("never",))
        for idle in self._idle.values():
            owner = idle.optimizer()
            if owner is not None and idle.lost:
                names = [watched.parameters[id(p)] for p in parameters_of(owner) if id(p) in watched.parameters]
                yield watched.breach("no_step", names, idle.lost, idle.lost, ("idle",))
        if self._wasted.steps > 2:
            yield watched.breach("no_step", [], self._wasted.lost, self._wasted.passes)
        yield from self.of_never(last)

    def of_never(self, last: bool) -> Iterator[Breach]:
        """Backward passes that add up for nobody; how long that may be accumulation, and how long not, the rule knows."""
        if self._never and not self._lost and self._has_optimizer and self._stands_still:
            yield self._watched.breach("no_step", [], self._never, self._never, ("ended" if last else "kept",))

    @property
    def _stands_still(self) -> bool:
        """Nobody else moves the weights: the program itself, or another rank that sends its own."""
        return bool(self._first) and all(torch.equal(before, sample_of(p)) for p, before in self._first)

    @property
    def is_never(self) -> bool:
        """No optimizer has stepped, and none of the program's own moves the weights."""
        return self._never > 0


class Wasted:
    """Batches whose gradients are cleared before the one optimizer steps, again and again: it takes the last batch alone.

    That may be meant: a second pass on the same batch (SAM), a pass for the gradient of an input, gradients that are gathered by
    hand. So inputs must be others, without a gradient of their own; and what is stepped on must be what the last pass has left,
    for which two parameters are listened to, once there is a suspicion.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.steps = self.lost = self.passes = 0
        self._inputs: list[int] = []  # of the passes since the last step
        self._thrown: set[int] = set()
        self._is_meant = False
        self._heard: list[Tensor] = []
        self._left: dict[int, Tensor] = {}  # behind the last pass
        self._unhook: list[Callable[[], Any]] = []

    def before_backward(self, made: Sequence[ModelCall]) -> None:
        if self._is_meant:
            return
        given = [t for call in made for t in call.inputs]
        self._is_meant = any(t.requires_grad for t in given)
        self._inputs = [] if self._is_meant else fingerprints(given)
        self._left = {}

    def cleared(self) -> None:
        if not self._is_meant and self._inputs and (self._left or not self._unhook):
            self._thrown.add(hash(tuple(self._inputs)))
        self._left = {}

    def before_step(self, one: Stepping, alone: bool) -> None:
        thrown, self._thrown = self._thrown - {hash(tuple(self._inputs))}, set()
        if not alone or self._is_meant or not thrown:
            return
        if not self._unhook:
            self._listen(self._watched.of_optimizer(one))
        elif all(_is_one(self._left.get(id(p)), gradient_of(p)) for p in self._heard):
            self.steps, self.lost, self.passes = self.steps + 1, self.lost + len(thrown), self.passes + len(thrown) + 1
        else:
            self._is_meant = True
            self.close()

    def _listen(self, mine: list[Tensor]) -> None:
        held = [p for p in mine if (g := gradient_of(p)) is not None and is_readable(g) and transfer.reads_freely(g.device)]
        self._heard = list(few_of([p for p in held if p.is_leaf], 2))[:2]
        self._unhook = [add_hook(p.register_post_accumulate_grad_hook, self._accumulated) for p in self._heard]
        self._is_meant = not self._heard

    def _accumulated(self, parameter: Tensor) -> None:
        grad = gradient_of(parameter)
        if grad is not None and is_readable(grad):
            self._left[id(parameter)] = sample_of(grad)

    def close(self) -> None:
        while self._unhook:
            self._unhook.pop()()
        for p in self._heard:  # torch leaves an empty dictionary behind
            if not getattr(p, "_post_accumulate_grad_hooks", True):
                p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._heard, self._left = [], {}


def _is_one(left: Tensor | None, now: Tensor | None) -> bool:
    if left is None or now is None:
        return False
    a, b = left.double(), sample_of(now).double()
    return a.shape == b.shape and bool(torch.dot(a, b) >= ALIKE * a.norm() * b.norm())


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    return now is not None and before is not None and now.shape == before.shape and torch.equal(now, before) and bool(now.any())


def _shares(optimizer: Optimizer, mine: Sequence[Tensor]) -> bool:
    return not {id(p) for p in mine}.isdisjoint(map(id, parameters_of(optimizer)))


def _readable(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those whose gradient can be read."""
    return [p for p in parameters if (g := gradient_of(p)) is not None and is_readable(g)]


def _holds_gradients(mine: list[Tensor]) -> bool:
    found = [g for p in few_of(mine) if (g := gradient_of(p)) is not None and is_readable(g)]
    return any_nonzero(g for g in found if transfer.reads_freely(g.device))  # what cannot be read may be 0
