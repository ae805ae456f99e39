"""Examines a step that has already been: it is made once more beside FP32, and everything is put back.

The step that went wrong is at hand until the optimizer changes the weights. Before anything is blamed it is run again as it was:
an operation that gives other bits of the same inputs is itself the diagnosis. Backward is run again too, into gradients that
nobody else sees, from the gradients that the outputs got, or from a loss that the model itself computes. What cannot be made
again without a trace (calls of other processes, hooks of the user, inputs written over) is left alone, and why is said. Compiled
parts run as they were written: what is compared with FP32 is then not the very kernels of the run.
"""

from __future__ import annotations

import contextvars
import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

from ..core.examination import Examination, Trial
from ..watch.bad_lines import MakingLine, assignment_of
from ..watch.calls import LineCall, ModelCall, answered, same_bits
from ..watch.compiler import can_uncompile, foreign_module_hooks, uncompiled
from ..watch.digests import Digests, first_difference
from ..watch.effects import Effect, can_be_guarded, no_effects
from ..watch.memory import shortage
from ..watch.names import is_compiled
from ..watch.op_facts import is_collective, is_pure, is_view_op
from ..watch.op_stream import Op, Stopped, watching
from ..watch.places import Places, derivative_of
from ..watch.ranks import has_group, many_processes
from ..watch.snapshot import KeptState, kept_state
from ..watch.storages import key_of
from ..watch.tensors import answers_itself, has_storage, kept_by, map_leaves, outside_program, tensors_in
from .sanitizer import Sanitizer
from .tags import Preamble

NamedModels = Sequence[tuple[nn.Module, str]]
_SCALINGS = ("MulBackward0", "DivBackward0", "ToCopyBackward0")  # between the loss of a model and what is differentiated
_MOST_SCALINGS = 4
_MOST_NODES = 10_000
_MADE_UNSEEN = 16 << 20  # bytes, until the memory that is left is looked at
_TIMES_MADE = 4  # of what an operation gave has to be left for the next, and what is computed beside it
_SMALLER = 1024.0  # a loss scale that is tried


class NotAgain(Exception):
    """Why a step cannot be made again, for people."""


def examine_again(
    calls: Sequence[ModelCall],
    models: NamedModels,
    step: int,
    scale: Callable[[], float | None] | None = None,
    try_remedies: bool = True,
    root: Tensor | None = None,
    compare: bool = True,
    before: Preamble | None = None,
) -> Examination:
    """The examination of these calls. Raises `NotAgain`; whatever happens, model, inputs and random numbers are as they were.

    `root`: what backward was called on, if it has not run yet. `compare`: is it the same when it is run once more? `before`:
    what the loop has made of the batch, if that was looked at.
    """
    calls = tuple(calls)  # those who listen hear the second run as well
    second = Again(calls, root, scale)
    sanitizer = Sanitizer(models, step, scale, try_remedies=try_remedies, called=[call.module for call in calls], before=before)
    second.run(sanitizer)
    examination = sanitizer.close()
    facts = {**examination.facts, "again": True}
    if second.compiled:
        facts["uncompiled"] = True
    elif any(
        call.gave_same_bits(result) is False for call, result in zip(calls, second.results) if not isinstance(call, LineCall)
    ):
        facts["other_bits"] = True
    if root is None and (bad := _bad_seed(calls)):
        facts["seed_nonfinite"] = bad
    if lost := _tiny_probabilities(calls, second.results):
        facts["tiny_probabilities"] = lost
    unlike = _irreproducible(calls, models, second) if compare else {}
    if unlike:
        facts["not_reproducible"] = unlike
    return replace(examination, facts=facts)


def _bad_seed(calls: Sequence[ModelCall]) -> str:
    """Of the gradients that the outputs got: bad ones were made between the model and the loss, which is not made again."""
    bad = [g for call in calls for g in call.gradients.values() if not bool(g.isfinite().all())]
    if not bad:
        return ""
    return "NaN" if any(g.dtype != torch.float16 or bool(g.isnan().any()) for g in bad) else "infinite in fp16"


def _tiny_probabilities(calls: Sequence[ModelCall], results: Sequence[Any]) -> float | None:
    """The largest of the fp16 probabilities that got an infinite gradient, if only such did: 1 / p is finite in FP32."""
    largest: list[float] = []
    for call, result in zip(calls, results):
        for i, output in enumerate(tensors_in(result)):
            gradient = call.gradients.get(i)
            if gradient is None or bool((good := gradient.isfinite()).all()):
                continue
            bad = output.detach()[~good]
            if output.dtype != torch.float16 or not bool(((output >= 0) & (output <= 1)).all()) or not bool((bad > 0).all()):
                return None
            largest.append(float(bad.max()))
    return max(largest, default=None)


def find_irreproducible(calls: Sequence[ModelCall], models: NamedModels, root: Tensor) -> dict[str, Any]:
    """What proves that these calls cannot be reproduced: the fact `not_reproducible` of an examination; empty if nothing does."""
    calls = tuple(calls)
    second = Again(calls, root)
    second.run()
    return _irreproducible(calls, models, second)


def without_bad_rows(calls: Sequence[ModelCall], root: Tensor) -> Trial | None:
    """The calls again without the rows of the batch that are not finite; None if there are none, or no others."""
    calls = tuple(calls)
    rows = [bad for call in calls if (bad := _bad_rows(call)) is not None]
    count = sum(int(bad.sum()) for bad in rows)
    if not count or any(bool(bad.all()) for bad in rows):
        return None
    try:
        again = Again(calls, root)
        again.leave_out = dict(zip((id(call) for call in calls if _bad_rows(call) is not None), rows))
        again.run()
    except NotAgain:
        return None
    still = _is_bad(again.results)
    return None if still is None else Trial("rows_left_out", value=float(count), outputs_finite=not still)


def _bad_rows(call: ModelCall) -> Tensor | None:
    """Which rows of its inputs hold NaN or infinities, of those that are as long as the first that does."""
    spoilt = [t for t in call.inputs if t.is_floating_point() and t.dim() and not bool(t.isfinite().all())]
    if not spoilt:
        return None
    of_length = [t for t in spoilt if len(t) == len(spoilt[0])]
    return torch.stack([~t.detach().isfinite().reshape(len(t), -1).all(-1) for t in of_length]).any(0)


def smaller_scale(calls: Sequence[ModelCall], models: NamedModels, step: int) -> Trial | None:
    """Backward again from gradients that are smaller, as behind a smaller loss scale."""
    calls = tuple(calls)
    if _is_bad([call.gradients for call in calls]) is not False:
        return None  # they were spoilt before they came to the model
    sanitizer = Sanitizer(models, step, try_remedies=False, called=[call.module for call in calls])
    try:
        again = Again(calls)
        again.shrink = 1 / _SMALLER
        again.run(sanitizer)
    except NotAgain:
        return None
    seen = sanitizer.close()
    if not seen.gradients:
        return None
    bad = any(g.nonfinite for g in seen.gradients)
    return Trial("smaller_scale", value=_SMALLER, gradients_finite=not bad, gradient_error=None if bad else seen.gradient_error)


def _irreproducible(calls: Sequence[ModelCall], models: NamedModels, second: Again) -> dict[str, Any]:
    with closing(Places(models).open()) as places:
        third = Again(calls, second.root, second.scale, places)
        third.run()
    same, found = first_difference(second.digests, third.digests)
    told: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0") or 0),
        "bad": [_is_bad([call.results() for call in calls]), _is_bad(second.results), _is_bad(third.results)],
        "every_time": found is not None,
    }
    if found is not None:
        place = found.place
        return {**told, "op": found.op, "site": place.site, "where": place.where, "device": found.device}
    if second.compiled:
        return {}  # kernels of another kind give other bits
    was_same = [call.gave_same_bits(result) for call, result in zip(calls, second.results)]
    if not same or False not in was_same or not second.untouched or second.digests.trouble:
        return {}  # the program itself went another way, or keeps a state
    call, result = next((c, r) for c, r, s in zip(calls, second.results, was_same) if s is False)
    made = tensors_in(result)
    ends = [(b, a.grad_fn) for nr, a in zip(call.nodes, made) if (b := _node_at(second.root, nr)) is not None]
    op = next((op for b, a in ends if (op := _where_they_part(b, a))), "")
    return {**told, "op": op, "site": "", "where": "", "device": str(made[0].device)}


def line_call(line: MakingLine) -> LineCall:
    with torch.set_grad_enabled(line.has_graph):
        call = LineCall(line.as_module(), (), line.inputs)
    call.note_results(line.result)
    return call


def calls_to_loss(made: Sequence[ModelCall], root: Any) -> tuple[list[ModelCall], Any] | None:
    """The calls, behind them the lines of the loop that made a loss of what they gave, and that loss. `root`: the node in which
    backward began."""
    found = assignment_of(lambda t: t.numel() == 1 and t.grad_fn is not None and _is_scaled(root, t.grad_fn._sequence_nr()))
    if found is None:
        return None
    between = (
        one for one in found.sources if not goes_into(one.result, made) and not any(came_from(call, one.result) for call in made)
    )
    return [*made, *map(line_call, (*between, found))], found.result


def came_from(call: ModelCall, result: Any) -> bool:
    return any(call.position_of(tensor) is not None for tensor in tensors_in(result))


def goes_into(result: Any, calls: Sequence[ModelCall]) -> bool:
    """It goes into one of the calls, whole or a part of it."""
    made = {key_of(tensor) for tensor in tensors_in(result) if has_storage(tensor)}
    return any(has_storage(given) and key_of(given) in made for call in calls for given in call.passed)


def _is_bad(results: Any) -> bool | None:
    """Is a number among them not finite? None: they are gone."""
    known = [t for t in tensors_in(results) if t.is_floating_point() and not answers_itself(t)]
    return any(not bool(t.isfinite().all()) for t in known) if known else None


class Again:
    """One more run of some calls, watched; nothing of it stays."""

    def __init__(
        self,
        calls: Sequence[ModelCall],
        root: Tensor | None = None,
        scale: Callable[[], float | None] | None = None,
        places: Places | None = None,
    ) -> None:
        obstacle = _obstacle(calls)
        if obstacle:
            raise NotAgain(obstacle)
        self._calls, self.root, self.scale = calls, root, scale
        self.compiled = any(call.of_compiled for call in calls)
        self.digests = Digests(places)
        self.results: list[Any] = []
        self.leave_out: dict[int, Tensor] = {}  # rows, by the identity of the call
        self.shrink = 1.0  # gradients from which backward begins
        self._begins: list[Tensor] = []  # where the backward pass of a line ends
        self.untouched = True  # it left no trace in the model, even before all was put back

    def run(self, sanitizer: Sanitizer | None = None) -> None:
        contextvars.copy_context().run(self._run, sanitizer)  # what it sets of the program's context ends with it

    def _run(self, sanitizer: Sanitizer | None) -> None:
        given = [tensor for call in self._calls for tensor in call.inputs]
        states: list[KeptState] = []
        with ExitStack() as kept:
            for module in {id(call.module): call.module for call in self._calls}.values():
                versions = kept.enter_context(ExitStack())  # last of all
                states.append(kept.enter_context(kept_state(module, [(c.args, c.kwargs) for c in self._calls])))
                if states[-1].reached.obstacle:
                    raise NotAgain(states[-1].reached.obstacle)
                states[-1].reached.hide_caches()
                # backward checks that nobody has written into what it saved: what is put back counts as never written
                within_reach = (*module.parameters(), *module.buffers(), *given, *states[-1].reached.tensors)
                written = [t for t in within_reach if not t.is_inference()]
                versions.enter_context(_unsafe_preserve_version_counter(tuple(written)))
                kept.enter_context(watching(states[-1]))
            known = {code for state in states for code in state.reached.code}
            stopped: list[str] = []
            if many_processes():
                kept.enter_context(watching(_NoCollectives(stopped)))
            kept.enter_context(watching(_OnlyPure(stopped)))
            kept.enter_context(watching(_EnoughMemory(stopped, _device_of(self._calls))))
            kept.enter_context(watching(self.digests))
            if sanitizer is not None:
                kept.callback(sanitizer.close)
                sanitizer.open()
            try:
                drawn = _random_states()
                with (
                    self._as_written(),
                    torch._C._EnableTorchFunction(),
                    no_effects(known),
                ):  # of its classes
                    for call in self._calls:
                        with self._answered() if isinstance(call, LineCall) else nullcontext():
                            self.results.append(call.make_again(*self._inputs(call)))
                        if sanitizer is not None and isinstance(call, LineCall):
                            sanitizer.note_result(self.results[-1])
                self.untouched = all(state.is_untouched() for state in states) and _random_states() == drawn
                with no_effects(known):
                    self._backward(sanitizer)
            except (Stopped, Effect) as error:
                stopped.append(str(error))
            except Exception as error:  # noqa: BLE001 - the program's own, and no business of the run
                stopped.append(f"the second run raised {type(error).__name__}: {error}")
            if stopped:  # the program's code may have caught the first, and logged it, or gone on
                raise NotAgain(stopped[0])

    def _as_written(self) -> AbstractContextManager[None]:
        return uncompiled() if self.compiled else nullcontext()

    def _inputs(self, call: ModelCall) -> tuple[Any, ...]:
        """What another call gave is what it gives now; and backward ends where the call began."""
        rows = self.leave_out.get(id(call))
        if rows is None and all(t.grad_fn is None and self._as_now(t) is t for t in call.inputs):
            return ()

        def as_now(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            now = self._as_now(value)
            if value.grad_fn is not None and not value.is_inference():
                value = now.detach().requires_grad_()
                if isinstance(call, LineCall):
                    self._begins.append(value)
            elif now is not value:
                value = now.detach()
            if rows is None or not value.dim() or len(value) != len(rows):
                return value
            return value[~rows]

        return tuple(map_leaves((call.args, call.kwargs), as_now))

    def _answered(self) -> AbstractContextManager[None]:
        """A model that was called once gives in a line what that call has given now: what went in may be drawn there."""
        known: dict[int, list[tuple[ModelCall, Any]]] = {}
        for call, result in zip(self._calls, self.results):
            if not isinstance(call, LineCall):
                known.setdefault(id(call.module), []).append((call, result))
        return answered([pairs[0] for pairs in known.values() if len(pairs) == 1])

    def _as_now(self, before: Tensor) -> Tensor:
        with outside_program():
            for call, result in zip(self._calls, self.results):
                position = call.position_of(before)
                if position is not None and (not isinstance(call, LineCall) or call.gave_same_bits(result)):
                    return tensors_in(result)[position]
        return before

    def _backward(self, sanitizer: Sanitizer | None) -> None:
        if has_group():
            return  # gradients meet those of others when they are accumulated; DDP of one process counts them, too
        parts = {id(part): part for call in self._calls for part in call.module.modules()}.values()
        parameters = tuple(
            {id(p): p for part in parts for p in part._parameters.values() if p is not None and p.requires_grad}.values()
        )
        if not (parameters or self._begins) or _has_backward_hooks(parts, parameters):
            return
        pairs = list(self._seeds())
        if not pairs:
            return
        if sanitizer is not None:
            sanitizer.note_scale()
        roots, seeds = zip(*pairs)
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # torch.autograd.backward is told to listeners
        ends = (*parameters, *self._begins)
        run(roots, seeds, False, False, ends, allow_unreachable=True, accumulate_grad=True)
        if sanitizer is not None:
            sanitizer.note_gradients([begin.grad for begin in self._begins])

    def _seeds(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is differentiated, and from which gradient."""
        for call, result in zip(self._calls, self.results):
            for i, output in enumerate(tensors_in(result)):
                if not output.requires_grad:
                    continue
                node = call.nodes[i] if i < len(call.nodes) else -1
                if self.root is not None and output.numel() == 1 and _is_scaled(self.root.grad_fn, node):
                    with torch.enable_grad():  # it may be asked for while gradients are clipped
                        loss = output * ((self.scale() if self.scale is not None else None) or 1.0)
                    yield loss, torch.ones_like(loss)
                elif self.root is None and i in call.gradients:
                    yield output, call.gradients[i] * self.shrink


def _random_states() -> tuple[Any, bytes]:
    """Where the random numbers of Python and numpy stand: to read them before every call of a model would cost too much."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


class _OnlyPure:
    """An operator of the program's own may count, draw or communicate."""

    on_trouble: Callable[[Any], None] | None = None

    def __init__(self, stopped: list[str]) -> None:
        self._stopped = stopped
        self._own: set[int] = set()  # tensors that this run has made, by the address of what they are in C++

    def before(self, op: Op) -> Any:
        if not is_pure(op.func) and not is_view_op(op.func):
            self.stop(f"the model calls {op.name}, which may do more than compute")
        if torch.Tag.inplace_view in op.func.tags and tensors_in(op.args)[0]._cdata not in self._own:
            self.stop(f"the model calls {op.name}, and the shape that it gives a tensor is not put back")
        return True

    def after(self, op: Op, state: Any) -> None:
        self._own.update(tensor._cdata for tensor in tensors_in(op.out))

    def passed_by(self, op: Op) -> None: ...

    def stop(self, why: str) -> None:
        self._stopped.append(why)
        raise Stopped(why)


class _EnoughMemory(_OnlyPure):
    """A second run makes once more what the program has made for its step, and holds already: it ends where room does."""

    def __init__(self, stopped: list[str], device: torch.device) -> None:
        super().__init__(stopped)
        self._device, self._unseen = device, 0

    def before(self, op: Op) -> Any:
        return True

    def after(self, op: Op, state: Any) -> None:
        made = sum(tensor.untyped_storage().nbytes() for tensor in op.made)
        self._unseen += made
        if self._unseen > _MADE_UNSEEN:
            self._unseen = 0
            if short := shortage(self._device, _TIMES_MADE * made):
                self.stop(short)


class _NoCollectives(_OnlyPure):
    """A second run of one process alone must not wait for the others, who do not know of it."""

    def before(self, op: Op) -> Any:
        if is_collective(op.func) or op.func.namespace == "fsdp":
            self.stop(f"the model calls {op.name} in its forward pass, which one process cannot do alone")

    def passed_by(self, op: Op) -> None:
        self.stop("the model computes with tensors that several processes hold together")


def _is_scaled(node: Any, loss: int) -> bool:
    """What is differentiated is the loss that a model computed itself, known by its number in the graph; or that, scaled."""
    for _ in range(_MOST_SCALINGS):
        if node is None or node._sequence_nr() == loss:
            return node is not None
        following = [n for n, _ in node.next_functions if n is not None]
        if type(node).__name__ not in _SCALINGS or len(following) != 1:
            return False
        node = following[0]
    return False


def _has_backward_hooks(parts: Any, parameters: Sequence[Tensor]) -> bool:
    """They would run a second time; those of an examination know it."""
    if any(part._backward_hooks or part._backward_pre_hooks for part in parts):
        return True
    after = [hook for p in parameters for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return any(p._backward_hooks for p in parameters) or not all(
        isinstance(getattr(getattr(hook, "func", None), "__self__", None), Sanitizer) for hook in after
    )


def _node_at(root: Tensor | None, number: int) -> Any:
    """The node with this number in the graph behind a loss."""
    stack: list[Any] = [None if root is None else root.grad_fn]
    seen: set[Any] = set()
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node._sequence_nr() == number:
            return node
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return None


def _where_they_part(before: Any, after: Any) -> str:
    """The earliest operation that autograd kept other numbers of, in two graphs of the same program; "" if it kept none."""
    stack: list[tuple[Any, Any]] = [(before, after)]
    seen: set[Any] = set()
    parted = []
    while stack and len(seen) < _MOST_NODES:
        one, other = stack.pop()
        if one is None or other is None or one in seen or type(one) is not type(other):
            continue
        seen.add(one)
        if any(not same_bits(a, b) for a, b in zip(_saved_tensors(one), _saved_tensors(other))):
            parted.append((one._sequence_nr(), derivative_of(one)))
        stack += [(a, b) for (a, _), (b, _) in zip(one.next_functions, other.next_functions)]
    return min(parted)[1] if parted else ""


def _saved_tensors(node: Any) -> list[Tensor]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    return [t for name in names if isinstance(t := kept_by(node, name), Tensor)]


def _device_of(calls: Sequence[ModelCall]) -> torch.device:
    devices = (t.device for call in calls for t in (*call.module.parameters(), *call.inputs))
    return next(devices, torch.device("cpu"))


def _obstacle(calls: Sequence[ModelCall]) -> str:
    if not calls:
        return "no call of the model was seen"
    if not all(call.is_intact for call in calls):
        return "its inputs have been written over or let go since"
    if any(call.has_modes for call in calls) or torch._C._len_torch_dispatch_stack():
        return "a mode of the program's own was on"
    if not can_be_guarded():
        return "a profiler or a debugger is on, which would see it"
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in torch 2.6
    if top_hooks is None:
        return "this version of torch does not tell whether hooks handle what is saved for backward"
    if top_hooks(True) is not None:
        return "hooks of the program's own handle what is saved for backward"
    if foreign_module_hooks():
        return "the program has hooks on all modules, which would run a second time"
    if short := shortage(_device_of(calls)):
        return short
    for module in (part for call in calls for part in call.module.modules()):
        if is_compiled(module) and not can_uncompile():
            return "part of the model is compiled"
        if module._forward_hooks or module._forward_pre_hooks:
            return "the model has hooks, which would run a second time"
    return ""
