"""Gathers what one training step shows, as it happens; the numbers stay on the device until they are asked for."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from time import perf_counter  # the one of now: programs replace it to freeze time
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..core.step import StepRecord
from ..measure import transfer
from ..measure.rows import HostLayout, JoinedRead, RowBuffer, count_nonfinite, pack_gradients
from ..measure.sketch import checksum, reduction_rows, sketch
from ..measure.transfer import PendingRead, copy_of, is_finite, number_of
from ..watch import events
from ..watch.calls import ModelCall, ModelCalls, inner_modules
from ..watch.compiler import compiled_calls
from ..watch.float_traps import Untrapped, traps_are_set
from ..watch.hooks import weakly
from ..watch.names import Held, called_part, parts_of, root_name, signature_of, unwrap
from ..watch.optimizers import lr_of, parameters_of
from ..watch.ranks import (
    LocalGradients,
    Replicas,
    SummedParts,
    compiles_backward,
    is_backward_compiled,
    many_processes,
    shards_of,
    summed_parts,
)
from ..watch.tensors import answers_itself, gradient_of, in_backward, is_readable, short_dtype, tensors_in
from . import loss_graph
from .capture import Bits, GradientRead, KnownGradients, Scale, SiteColumns, Sites, StepCapture
from .invariants import Invariants
from .trace import HISTOGRAM_SAMPLE, BadOutput, StepTrace
from .updates import UpdateProbe, optimizer_state

MOST_BACKWARDS = 1024  # per step, whose losses are averaged
MOST_CALLS_NOTED = 64  # per step
MOST_KNOWN = 64  # groups of gradients whose names and sizes are kept
MOST_UNSCALED = 4  # losses that no scaler has multiplied, while there is one, that are followed to their parameters
MOST_BELOW = 3  # levels of modules between a model and what the program calls of it
SCALE_SOUGHT = 128.0  # a loss scale from here on may overflow while it is searched for, and that is no fault

F = TypeVar("F", bound=Callable[..., Any])


def guard(method: F) -> F:
    """An event that belongs to this thread, or to autograd's threads at work for it, told to the recorder, which never raises."""

    @functools.wraps(method)
    def wrapper(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        return self.run(method, self, *args, **kwargs)

    return cast(F, wrapper)


class Recorder:
    """Listens to the training of some models. `begin` and `end` frame a step; optimizer events after `end` still belong to it."""

    def __init__(self, on_failure: Callable[[Exception], None], on_bad_output: Callable[[BadOutput], None]) -> None:
        self.off = False
        self.seconds = 0.0
        self.wants: Callable[[str], bool] = lambda name: True  # the outputs of a module, by its name
        self.thread = get_ident()  # whose steps these are
        self._busy = 0  # the thread that is at work in here
        self.models: list[tuple[nn.Module, str]] = []
        self.root_site = ""
        self.invariants = Invariants()
        self._signature: list[Any] | None = None  # of what the names were found in
        self._owners: Mapping[int, Held] = {}
        self._below = 0  # how deep in the models that lies which the program calls
        self.find_parts()
        self.capture: StepCapture | None = None
        self.optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._asked: set[int] = set()  # optimizers that have stepped
        self.suspects: frozenset[str] = frozenset()  # parameters whose gradient was not finite at the last step
        self._on_failure = on_failure
        self._on_bad_output = on_bad_output
        self._scaled: list[tuple[Any, Tensor | float]] = []  # since the last backward: grad_fn of what scale() gave, true loss
        self._is_scaled = False  # the loss that was told last
        self._followed = 0
        self._drawn: deque[list[weakref.ref[Tensor]]] = deque(maxlen=2)  # of loaders; frameworks draw one batch ahead
        self._probe: UpdateProbe | None = None
        self._updating = 0  # the optimizer whose closure has been called, until its step is over
        self._in_scaler_step: Optimizer | None = None
        self._scalers = WeakIdKeyDictionary()  # a class of the program may have no hash
        self._own_scalers = WeakIdKeyDictionary()  # that stepped an optimizer of these models
        self.hears_calls = False  # so that a step that goes wrong can be made again
        self._calls: ModelCalls | None = None
        self._compiled_calls = compiled_calls()
        self._hears_all = False
        self._stop_hearing: Callable[[], Any] = lambda: None
        self._local: LocalGradients | None = None
        self.replicas: Replicas | None = None
        self.shards: dict[str, int] = {}
        self._parts: SummedParts | None = None
        self._updates = 0  # optimizer steps so far
        self.when_backward: Callable[[bool, Tensor], None] | None = None  # with whether the loss is bad, and the loss
        self.when_read: Callable[[], None] | None = None  # gradients are complete, and weights as they were
        self.when_bad_gradients: Callable[[Any], None] | None = None  # of a finite loss, with the node where backward began
        self.when_updated: Callable[[], None] | None = None  # weights are no longer as they were

    def run(self, work: Callable[..., Any], *args: Any, apart: bool = True, **kwargs: Any) -> Any:
        """The one broad catch: whatever goes wrong inside must not reach the training. Also keeps the account of time spent.

        `apart`: operations in here are not the program's, and no mode sees them; what opens and ends examinations is not apart.
        """
        if self.off:
            return None
        if apart and torch._C._len_torch_dispatch_stack():
            work = functools.partial(_without_modes, work)
        if traps_are_set() > 0:
            work = functools.partial(_without_traps, work)
        here = get_ident()
        if self._busy == here:
            return work(*args, **kwargs)  # a failure is met where it came in
        self._busy = here
        started = perf_counter()
        try:
            # tensors of a class that counts or refuses calls are not asked by us
            with torch._C.DisableTorchFunction():
                return work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self.failed(error)
            return None
        finally:
            if self.invariants.given.must_end:
                self.invariants.given.end_look()
            self._busy = 0
            self.seconds += perf_counter() - started

    def failed(self, error: Exception) -> None:
        if self.off:
            return
        self.off = True
        with contextlib.suppress(Exception):  # it is failing already
            self.close()
        self.capture, self._scaled = None, []  # they hold the graph of a step that nobody ends any more
        self._on_failure(error)

    def run_hook(self, work: Callable[..., Any], *args: Any) -> None:
        """What a hook tells: of this thread, or from within backward."""
        try:
            is_mine = get_ident() == self.thread or in_backward()
        except Exception as error:  # noqa: BLE001
            self.failed(error)
            return
        if is_mine and self._busy != get_ident():
            self.run(work, *args)

    @property
    def is_busy(self) -> bool:
        """This thread is in here already: a signal handler, or a finalizer, runs the model where ours was interrupted."""
        return self._busy == get_ident()

    def add_model(self, model: nn.Module, prefix: str = "") -> None:
        self.models.append((model, prefix))
        self.root_site = self.root_site or root_name(model, prefix)
        self.find_parts()

    def find_parts(self) -> None:
        """Names everything anew: modules may be replaced or added while training goes on."""
        reads = [_is_read_freely(unwrap(model)) for model, _ in self.models]
        signature = [*reads, *signature_of(self.models)]
        if signature == self._signature and all(held() is not None for held in self._owners.values()):
            return
        self._signature = signature
        parts = parts_of(self.models)
        self._called = [called_part(model) for (model, _), read in zip(self.models, reads) if parts.compiled or read]
        for _ in range(self._below):
            self._called = inner_modules(self._called)
        self.modules, self.parameters, self.buffers = parts.modules, parts.parameters, parts.buffers
        self._owners, self.compiled = parts.owners, parts.compiled
        self.invariants.know(self.models, self.parameters, self._owners)
        self._known: dict[int, KnownGradients] = {}  # by their first parameter

    def open(self) -> None:
        if self.thread != get_ident() or not events.is_heard(self):
            self.thread = get_ident()
            events.listen(self, self.thread)

    def close(self) -> None:
        events.leave(self)
        self._stop_hearing()
        self._calls = None
        self.invariants.close()
        if self._local is not None:
            self._local.close()
            self._local = None
        if self._parts is not None:
            self._parts.close()
            self._parts = None
        if self.capture is not None and self.capture.trace is not None:
            self.capture.trace.close()

    def forget(self) -> None:
        """After the last step: nothing of the models is kept."""
        self.models.clear()
        self.find_parts()

    # a step

    def begin(self, step: int, traced: bool, examined: bool = False) -> None:
        self.capture = StepCapture(StepRecord(step, traced=traced, examined=examined), started=perf_counter())
        self._scaled, self._probe = [], None
        quiet = self._hear_calls()
        if traced:
            self.find_parts()
        self.invariants.begin(self.capture.record, quiet)
        if traced:
            self._find_replicas()
        self.capture.receives = self.replicas is not None and self.replicas.receives
        if self._parts is not None:
            self._parts.forget()
        self._hear_gradients()
        if traced:
            self._measure_weights(self.capture)
            self.capture.trace = StepTrace(self.modules, self._on_bad_output, self.compiled)
            self.capture.trace.left_out = frozenset(at for at, name in self.modules.items() if not self.wants(name))
            self.capture.trace.roots = frozenset(id(unwrap(model)) for model, _ in self.models)
            self.capture.trace.model_calls = () if self._calls is None else self._calls.made
            self.capture.trace.open(self.run_hook)

    def _hear_calls(self) -> int:
        """Gives how often the models were called in train mode without gradients since the last step began."""
        models = self._called if self.hears_calls else []
        self._hears_all = self._calls is not None and self._calls.are_of(models)  # a step may begin within the first call
        if self._calls is None or not self._hears_all:
            self._stop_hearing()
            self._calls = ModelCalls(models).open()
            self._stop_hearing = weakref.finalize(self, self._calls.close)
        self._calls.catches = True
        self._calls.begin()
        quiet, self._calls.in_train_mode = self._calls.in_train_mode, 0
        return 0 if self._below else quiet

    def _forget_hooks(self) -> None:
        """Ours would be compiled with the backward pass that begins."""
        if self._local is not None:
            self._local.close()
            self._local = None
        for call in () if self._calls is None else self._calls.made:
            call.let_gradients_pass()

    def _hear_gradients(self) -> None:
        """Of this process alone: at the optimizer they are those of all."""
        if self._local is not None and not self._local.are_of(self.parameters):
            self._local.close()
            self._local = None
        if self._local is None and many_processes() and not compiles_backward():
            self._local = LocalGradients(self.parameters, self._owners, self.run_hook, sketch, weakly(self._look_behind_loss))
        if self._local is not None:
            traced = self.capture is not None and self.capture.record.traced
            self._local.begin(traced, [model for model, _ in self.models] if self.shards else ())

    def _find_replicas(self) -> None:
        if self.replicas is not None and self.replicas.are_of(self.parameters):
            return
        self.replicas = Replicas(self.parameters) if many_processes() else None
        self.shards = shards_of(self.parameters, self._owners) if many_processes() else {}
        self.shards |= {} if self.replicas is None else self.replicas.stages
        if self._parts is not None:
            self._parts.close()
        self._parts = summed_parts(self.parameters, self._owners) if self.shards else None

    def _bits(self, held: Mapping[str, Tensor]) -> Bits:
        """For whoever compares the files of all ranks."""
        assert self.replicas is not None
        own = self.shards.keys() - self.replicas.stages.keys()  # a sum of parts is a plain tensor
        groups = [-1 if name in own else self.replicas.group_of(name, tensor) for name, tensor in held.items()]
        return Bits(PendingRead([torch.stack([checksum(tensor) for tensor in held.values()])]), groups)

    def calls_since_backward(self) -> tuple[ModelCall, ...]:
        """Of the models; asked again, they are forgotten."""
        made = () if self._calls is None else tuple(self._calls.made)
        if self._calls is not None:
            self._calls.made.clear()
        return made

    def end(self) -> None:
        """The user's block is over. Gradients are read at the optimizer; here, for now, if none is known to come."""
        capture = self.capture
        if capture is None or self.off:
            return
        capture.ended = True
        if capture.record.stepped:
            capture.graph = None  # it holds the parameters
            self._scaled = []
        if capture.trace is not None:
            self.run(capture.trace.close)
        if not capture.reads and not (self.optimizers and self._updates):  # a compiled optimizer tells nobody
            self.run(self._read_for_now, capture)

    def _read_for_now(self, capture: StepCapture) -> None:
        mine = [p for r in self._owners.values() if (p := r()) is not None]
        scaled = capture.backward_scaled and not capture.unscaled
        self._read_gradients(mine, capture.scale if scaled else None, last=True)
        capture.provisional = True
        for read in capture.reads:
            read.bits = None  # nobody knows whether they are complete

    def take_capture(self, last: bool = False) -> StepCapture | None:
        """All that was seen of the step, its numbers on their way to the host; of the last one, what it left behind as well."""
        capture, self.capture = self.capture, None
        self._scaled = []
        if capture is None:
            return None
        if capture.trace is not None:
            capture.trace.close()
        record = capture.record
        if record.traced or record.skipped or last:
            self._measure_buffers(capture)
        if last and capture.weights is None:
            self._measure_weights(capture)
        if record.traced or record.examined:
            record.optimizers = tuple(
                optimizer_state(o) for r in self.optimizers.values() if (o := r()) is not None and id(o) in capture.stepped_by
            )
        self.invariants.finish(record, capture.trace, capture.backward_scaled, last)
        record.root_site, capture.graph = self.root_site, None
        if self._local is not None:
            capture.local = self._local.take()
            self.seconds += self._local.seconds
        record.seconds = perf_counter() - capture.started
        capture.start_reading()
        return capture

    # what is measured

    def _measure_weights(self, capture: StepCapture) -> None:
        rows = RowBuffer(HISTOGRAM_SAMPLE)
        owned = {name: self._owners[key]() for key, name in self.parameters.items()}
        held = {name: p for name, p in owned.items() if p is not None and is_readable(p)}
        rows.add_all(list(held.values()))
        sites = [(name, short_dtype(p.dtype), tuple(p.shape)) for name, p in held.items()]
        capture.weights = (sites, rows)
        if self.replicas is not None and len({p.device for p in held.values()}) == 1 and capture.record.traced:
            capture.weight_bits = self._bits(held)
            capture.record.updates_before = self._updates

    def _measure_buffers(self, capture: StepCapture) -> None:
        rows = RowBuffer()
        sites = []
        for name, reference in self.buffers.items():
            buffer = reference()
            if buffer is not None and is_readable(buffer):
                rows.add(buffer)
                sites.append((name, short_dtype(buffer.dtype), tuple(buffer.shape)))
        capture.buffers = (sites, rows)

    def nonfinite_buffers(self) -> frozenset[str]:
        """Buffers that hold NaN or infinities now, before training: masks."""
        held = {n: b for n, r in self.buffers.items() if (b := r()) is not None and is_readable(b)}
        return frozenset(n for n, b in held.items() if not bool(b.isfinite().all()))

    def _read_gradients(self, parameters: Sequence[Tensor], scale: Scale, last: bool = False) -> None:
        """Once per parameter and step, at the first moment they are complete: before clipping, after unscaling if possible.

        `last`: the optimizer has stepped; a part of a sum that nobody has made is read as it is.
        """
        capture = self.capture
        if capture is None:
            return
        if capture.provisional:  # an optimizer came after all: its moment is the right one
            capture.provisional = False
            capture.reads.clear()
            capture.read = frozenset()
        if self.when_read is not None and not last:
            self.when_read()
        if not capture.record.traced and not capture.read and self._read_as_before(capture, parameters, scale):
            return
        groups: dict[torch.device, tuple[Sites, list[Tensor]]] = {}
        read = set(capture.read)
        for p in parameters:
            name = self.parameters.get(id(p))
            grad = None if name is None or name in read or not p.requires_grad else gradient_of(p)  # frozen: an old one
            if name is None or grad is None:
                continue
            whole = grad if self._parts is None else self._parts.whole(grad)
            if whole is None and not last:
                continue
            grad = grad if whole is None else whole
            if grad.layout is torch.sparse_coo:
                grad = grad.coalesce().values()
            if not is_readable(grad):
                continue
            read.add(name)
            sites, grads = groups.get(grad.device) or groups.setdefault(grad.device, ([], []))
            sites.append((name, short_dtype(grad.dtype), tuple(grad.shape)))
            grads.append(grad)
        capture.read = frozenset(read)
        for device, (sites, grads) in groups.items():
            names, dtypes, shapes = zip(*sites)
            if capture.record.traced:
                rows = RowBuffer(HISTOGRAM_SAMPLE)
                rows.add_all(grads)
                one = GradientRead((names, dtypes, shapes), rows=rows, scale=scale)
                if self.replicas is not None and capture.synced:
                    one.bits = self._bits(dict(zip(names, grads)))
                    if self._local is not None and self._local.sent:
                        got = dict(zip(names, grads))
                        one.reduction = PendingRead([reduction_rows(self._local.sent, got, dist.get_world_size())])
                self._add_read(capture, one, grads, rows.bad_rows())
                continue
            layout = HostLayout(grads) if transfer.reads_freely(device) else None
            absent = [gradient_of(p) is None for p in parameters]
            if layout is not None and layout.are_plain and len(absent) - sum(absent) == len(grads):
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                ids = list(map(id, parameters))
                self._known[ids[0]] = KnownGradients(ids, absent, (names, dtypes, shapes), frozenset(names), layout)
            self._read_untraced(capture, (names, dtypes, shapes), grads, scale, layout)

    def _read_as_before(self, capture: StepCapture, parameters: Sequence[Tensor], scale: Scale) -> bool:
        """The gradients of these parameters, if they are like those of the last time."""
        known = self._known.get(id(parameters[0])) if parameters else None
        grads = None if known is None else known.gradients_of(parameters)
        if known is None or grads is None:
            return False
        capture.read = known.names
        self._read_untraced(capture, known.sites, grads, scale, known.layout)
        return True

    def _read_untraced(
        self, capture: StepCapture, sites: SiteColumns, grads: list[Tensor], scale: Scale, layout: HostLayout | None
    ) -> None:
        counts, read = pack_gradients(grads, layout)
        bad: list[int] = []
        if layout is not None and not (isinstance(read, JoinedRead) and math.isfinite(read.squares)):
            packed = read.arrays()[0]
            if not math.isfinite(np.vdot(packed, packed)):  # one call that never warns; a number that overflows is looked at
                bad = np.flatnonzero(~np.isfinite(packed).all(axis=0)).tolist()
        column = np.array(counts, dtype=np.float64) if layout is None else layout.column
        self._add_read(capture, GradientRead(sites, counts=column, read=read, scale=scale), grads, bad)

    def _add_read(self, capture: StepCapture, one: GradientRead, grads: list[Tensor], bad: list[int]) -> None:
        one.bad = {i: count_nonfinite(grads[i]) for i in bad}
        capture.reads.append(one)
        graph = capture.graph
        if bad and graph is not None and capture.record.autopsy is None:
            capture.record.singular = loss_graph.singular_operation(graph, self.parameters)
            capture.graph = None
        if bad and self.when_bad_gradients is not None and not self._scale_is_sought():
            self.when_bad_gradients(graph)

    def _scale_is_sought(self) -> bool:
        capture = self.capture
        scaled = capture is not None and capture.backward_scaled and capture.scale is not None
        return scaled and float(capture.scale) >= SCALE_SOUGHT  # type: ignore[union-attr, arg-type]

    # events

    def _own_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        return self.invariants.watched.own_parameters(optimizer)

    @guard
    def saved_tensors_packed(self) -> None:
        if self.capture is not None:
            self.capture.packed = True

    def before_backward(self, roots: tuple[Tensor, ...]) -> None:
        if self.invariants.given.is_looking:
            self.run(self.invariants.given.looked, self._model_calls, apart=False)
        self._before_backward(roots)

    def _look_below(self) -> None:
        """Backward, and no model was called: the program calls their parts. They are heard from the next step on."""
        if self._calls is None or self._calls.heard or not (self.hears_calls and self._hears_all and self._called):
            return
        if self._below >= MOST_BELOW or self.compiled or self._compiled_calls != compiled_calls():
            return  # what a compiled function calls cannot be heard, and its classes are not to change
        self._below += 1
        self._called = inner_modules(self._called)

    @property
    def _model_calls(self) -> Sequence[ModelCall]:
        """Calls of the models themselves: their inputs are the batch. What goes into a part of one may be anything."""
        return () if self._calls is None or self._below else self._calls.made

    @guard
    def _before_backward(self, roots: tuple[Tensor, ...]) -> None:
        self._look_below()
        capture = self.capture
        if capture is not None and roots:
            self.invariants.before_backward(roots[0], self._model_calls)
        if capture is None or not roots or (capture.ended and capture.backwards) or capture.backwards >= MOST_BACKWARDS:
            return
        root = roots[0]
        if is_backward_compiled():
            self._forget_hooks()
        capture.synced = self.replicas is None or self.replicas.are_synced
        capture.was_synced |= capture.synced
        self._note("backward")
        if capture.trace is not None and not capture.backwards:
            capture.trace.first_pass = len(capture.trace.calls)
        loss_is_bad = self._note_loss(capture, root)
        # for gradients that are bad though the loss is not; a graph keeps parameters at the size that they have
        capture.graph = None if loss_is_bad else root.grad_fn
        if self.when_backward is not None and (loss_is_bad is not None or self.compiled):
            self.when_backward(bool(loss_is_bad), root)
        suspects = {key: name for key, name in self.parameters.items() if name in self.suspects} if self.suspects else {}
        capture.begin_backward(self._owners, suspects)
        if self._scalers and root.grad_fn is not None and root.numel() == 1 and not self._is_scaled:
            self._follow_unscaled(capture, root)

    def _follow_unscaled(self, capture: StepCapture, root: Tensor) -> None:
        """A loss beside the one that the scaler has multiplied; a few times in a run."""
        by_hand = (capture.record.loss_factor or 1.0) >= SCALE_SOUGHT
        if not by_hand and self._followed < MOST_UNSCALED:
            self._followed += 1
            capture.never_scaled |= loss_graph.reached_by(root.grad_fn, self.parameters) - capture.unscaled

    @guard
    def before_derivative(self, root: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """The last of a loss by the weights, in a program whose optimizer is not torch's."""
        capture = self.capture
        if capture is None or capture.ended or capture.backwards or len(capture.losses) >= MOST_BACKWARDS:
            return
        if not self.optimizers and any(id(t) in self.parameters for t in inputs):
            loss_is_bad = self._note_loss(capture, root)
            if self.when_backward is not None and loss_is_bad:
                self.when_backward(True, root)

    def _note_loss(self, capture: StepCapture, root: Tensor) -> bool | None:
        """Whether it is bad; None if that cannot be told without waiting for the device, or asking a class of the program's."""
        self._is_scaled = True  # unless it is asked, and is not
        if answers_itself(root):
            return None
        loss: Tensor | float | None = None
        if root.numel() == 1 and root.is_floating_point():
            loss = self._true_loss(capture, root)
            capture.losses.append(loss)
            capture.record.loss_terms = max(capture.record.loss_terms or 0, loss_graph.terms_of(root.grad_fn)) or None
        looks = isinstance(loss, float) or transfer.reads_freely(root.device)
        seen = root if loss is None or capture.backward_scaled else loss  # its scale alone may make it infinite
        if looks and capture.record.autopsy is None and not is_finite(seen):
            given = [t for call in self._model_calls for t in call.inputs]
            drawn = [t for batch in self._drawn for held in batch if (t := held()) is not None]
            capture.record.autopsy = loss_graph.autopsy_of_loss(
                root, self.parameters, self._owners, given, drawn, capture.packed, capture.receives, bool(self.compiled)
            )
        return bool(capture.losses) and not is_finite(capture.losses[-1]) if looks else None

    def _true_loss(self, capture: StepCapture, root: Tensor) -> Tensor | float:
        """What was scaled before backward, or what became of it: divided, added to others, stacked."""
        scaled = self._scaled and loss_graph.among_nearest(root.grad_fn, [one for one in self._scaled if one[0] is not None])
        self._is_scaled = bool(scaled)
        if not scaled:
            capture.record.loss_factor = loss_graph.factor_of(root)
            return root.item() if transfer.reads_freely(root.device) else copy_of(root)
        capture.backward_scaled, capture.record.loss_factor = True, None
        waiting = [one for one in self._scaled if all(one is not hit for hit in scaled)]
        self._scaled = [*waiting, scaled[-1]]  # backward may run there once more
        if scaled[0][0] is root.grad_fn or capture.scale is None:
            return scaled[0][1]
        return number_of(copy_of(root) / capture.scale)

    def _look_behind_loss(self) -> None:
        """A gradient of this process is bad: what broke it may be a number of the forward pass that the loss did not show."""
        capture = self.capture
        if capture is not None and capture.graph is not None and capture.record.autopsy is None and not capture.packed:
            capture.record.autopsy = loss_graph.hidden_nonfinite(capture.graph, self.parameters)

    @guard
    def loss_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None:
        capture = self.capture
        if capture is None or (capture.ended and capture.backwards):
            return
        self._scaled.append((scaled.grad_fn, number_of(loss)))
        self._note("scale")
        self._note_scaler(scaler)

    @guard
    def after_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        mine = self._own_parameters(optimizer)
        if self.capture is not None and mine:
            self._note("unscale")
            if self.capture.never_scaled:
                held = self.capture.never_scaled - self.capture.unscaled
                self.capture.record.never_scaled += tuple(self.parameters[id(p)] for p in mine if id(p) in held)[:MOST_UNSCALED]
            self.capture.unscale(mine)
            self._read_gradients(mine, None)

    @guard
    def before_clip(self, parameters: Any, max_norm: Any) -> None:
        capture = self.capture
        mine = [p for p in events.tensors_of(parameters) if id(p) in self.parameters]
        if capture is None or not mine or not math.isfinite(max_norm):
            return
        scaled = capture.backward_scaled and any(id(p) not in capture.unscaled and gradient_of(p) is not None for p in mine)
        self._note("clip")
        capture.record.clipped = float(max_norm)
        capture.record.clipped_scaled |= scaled
        self._read_gradients(mine, capture.scale if scaled else None)

    @guard
    def before_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._in_scaler_step = None
        capture = self.capture
        mine = self._own_parameters(optimizer)
        if capture is None or not mine:
            return
        self._in_scaler_step = optimizer
        capture.updated = True
        self.invariants.before_scaler_step()
        self._note("scaler.step")
        self._note_scaler(scaler)
        self._note_optimizer(optimizer)
        self._own_scalers[scaler] = True
        capture.record.growth_interval = scaler.get_growth_interval()
        capture.ran = False
        if getattr(optimizer, "_step_supports_amp_scaling", False) and id(mine[0]) not in capture.unscaled:
            self._read_gradients(mine, capture.scale)  # a fused optimizer unscales inside its kernel

    @guard
    def after_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        capture = self.capture
        if capture is None or self._in_scaler_step is not optimizer:
            return
        self._in_scaler_step = None
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            capture.found_inf.extend(t.detach().clone() for t in cast(Mapping[Any, Tensor], found).values())
        elif not capture.ran:
            capture.record.skipped = True

    @guard
    def after_scaler_update(self, scaler: GradScaler, given: bool) -> None:
        if self._own_scalers and scaler not in self._own_scalers:
            return
        self._note("update")
        if self.capture is not None and scaler._scale is not None:
            self.capture.scale_after = number_of(scaler._scale)
            self.capture.record.scale_given |= given

    @guard
    def before_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._updating = 0
        if id(optimizer) not in self._asked:
            self._asked.add(id(optimizer))
            self.find_parts()  # its parameters may be of modules that came since
        mine = self._own_parameters(optimizer)
        if self.capture is not None:
            self.invariants.before_step(optimizer, mine, has_closure)
        if not has_closure:
            self._begin_update(optimizer, mine)

    @guard
    def after_closure(self, optimizer: Optimizer) -> None:
        """The gradients are complete now; a training step may even have begun in there. Called again by a line search."""
        if self._updating != id(optimizer):
            self._updating = id(optimizer)
            self._begin_update(optimizer, self._own_parameters(optimizer))

    def _begin_update(self, optimizer: Optimizer, mine: list[Tensor]) -> None:
        capture = self.capture
        if capture is not None:
            capture.updated = True
            self.invariants.before_update(optimizer, mine)
        if capture is None or not mine:
            return
        if self._in_scaler_step is not optimizer:
            self._note("step")
            capture.record.stepped_scaled |= capture.backward_scaled and id(mine[0]) not in capture.unscaled
        capture.note_stale(mine)
        self._note_optimizer(optimizer)
        self._updates += 1
        if self.replicas is not None and capture.backwards and not capture.was_synced:
            self.replicas.drift_on_purpose = True  # an update of this rank alone
        capture.ran = True
        self._read_gradients(mine, None)
        if capture.record.traced or capture.record.examined or self.invariants.wants_probe:
            self._probe = UpdateProbe(optimizer, self.parameters)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        self.before_optimizer_step(optimizer, False)
        self._probe = None  # it would find that nothing moved
        if self.capture is not None:
            self.capture.record.skipped = False
        self.after_optimizer_step(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self._after_optimizer_step(optimizer)
        if self.invariants.given.wants_look:
            self.run(self.invariants.given.look, apart=False)

    @guard
    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        capture = self.capture
        if capture is None or id(optimizer) not in self.optimizers:
            return
        if self._probe is not None:
            self._probe.after()
            if capture.record.traced or capture.record.examined:
                capture.probes.append(self._probe)
            if self.invariants.wants_probe:
                self.invariants.step.probes.append(self._probe)
            self._probe = None
        if self._parts is not None:
            self._read_gradients(self._own_parameters(optimizer), None, last=True)
            self._parts.forget()
        self.invariants.after_step()
        self._updating = 0
        capture.record.stepped_scaled |= capture.begin_window(self._own_parameters(optimizer) if capture.has_waiting else ())
        if self.when_updated is not None:
            self.when_updated()
        if capture.ended:
            capture.graph = None

    @guard
    def gradients_cleared(self, optimizer: Optimizer) -> None:
        if any(id(p) in self.parameters for p in parameters_of(optimizer)):
            self.invariants.cleared(optimizer)
            if self.capture is not None:
                self.capture.begin_window(self._own_parameters(optimizer) if self.capture.has_waiting else ())
        self._note("zero_grad")

    @guard
    def before_model_cleared(self, model: nn.Module) -> None:
        self.invariants.cleared_by_model(model)
        if self.capture is not None:
            self.capture.forget_gradients(model.parameters())

    def autocast_entered(self) -> None:
        if self.capture is not None and not self.is_busy:
            self.run(self.invariants.autocast_entered, self.capture.ended)

    @guard
    def batch_drawn(self, iterator: Any, batch: Any) -> None:
        self.invariants.batch_drawn(iterator, batch)
        self._drawn.append([weakref.ref(tensor) for tensor in tensors_in(batch)])

    def forked(self) -> None:
        self.off = True

    def _note(self, call: str) -> None:
        if self.capture is not None and len(self.capture.record.calls) < MOST_CALLS_NOTED:
            self.capture.record.calls += (call,)

    def _note_scaler(self, scaler: GradScaler) -> None:
        if self.capture is None:
            return
        self.capture.record.new_scaler |= scaler not in self._scalers
        self._scalers[scaler] = True
        self.capture.record.scale_static = scaler.get_backoff_factor() >= 1.0
        if scaler._scale is not None:
            self.capture.scale = number_of(scaler._scale)

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        assert self.capture is not None
        self.optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        self.capture.record.stepped = True
        self.capture.stepped_by.add(id(optimizer))
        rates = [self.capture.record.lr, *map(lr_of, optimizer.param_groups)]
        self.capture.record.lr = max((rate for rate in rates if rate is not None and not math.isnan(rate)), default=None)


def _without_modes(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return work(*args, **kwargs)


def _without_traps(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Untrapped():
        return work(*args, **kwargs)


def _is_read_freely(model: nn.Module) -> bool:
    """Else nobody asks in time whether a loss is bad, and what a model was called with would be held for nothing."""
    first = next(model.parameters(), None)
    return first is None or transfer.reads_freely(first.device)
