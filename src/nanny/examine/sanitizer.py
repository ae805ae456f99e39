"""Examines one training step: every operation beside its FP32 twin, and what its errors did to loss, gradients and weights.

    sanitizer = Sanitizer([(model, "")], step=7, scale=scaler.get_scale)
    sanitizer.open()
    ...one step, the optimizer inside if its updates are to be seen...
    examination = judged(sanitizer.close())        # from nanny.examine.hazards: suspects to hazards

The program, its random numbers and its results stay what they are. Whatever fails in here is kept (`facts["failed"]`) and
ends the examination, not the training. `Examination.facts` may hold:

    losses            each loss that was differentiated: {value, reference, dtype}, unscaled
    inputs            model inputs: name -> {absmax, nonfinite, whole (all whole numbers), dtype}
    nonfinite_given   what was not finite before the step touched it: role and name (`data:input`, a parameter, a buffer)
    poisoned          parameters and buffers that are not finite at the end of the step
    scale_overflow    the only infinities came from the loss scale: a GradScaler will find a smaller one
    loss_factor       a number of 16 or more that the loss was multiplied with before backward
    unscaled_by_torch a GradScaler divided the gradients again
    divided_by_hand   the loss scale, if the loop's own code divided the gradients by it that the optimizer met
    stepped_by_hand   {scale, ratio, where, source} of updates by the loop, longer than the weights by a scale nobody divided by
    shrunk_while_scaled  what a gradient was multiplied with, if that is below 1, before it was divided by hand
    scaled_penalty    {scale, where, source} of a penalty on gradients of a scaled loss, undivided
    left_scaled       {names, count, of, scale} of gradients that the optimizer stepped on while others had been divided by hand
    stored_infinity   an fp16 tensor from before the step holds -inf: a mask, or a number that was beyond the range when stored
    attention         site -> {entropy (normalised, 0 is one-hot), logit_max}
    dead_units        site of a ReLU -> share of units that are off for the whole batch, or for all that was called with few rows
    few_rows          site of a ReLU whose calls have few rows each -> all its rows of the step
    biases            site of P @ V whose rows of P tie at exactly 1 -> {bias: mean over spread of its own rounding, tied: share}
    targets_outside   {low, high, share, where, source} of targets of a binary cross entropy that are far below 0 or above 1
    softmax_twice     {classes, site, where, source} of a log_softmax whose rows all add up to 1 already
    ratios            site of an exp(a - b) that is 1 everywhere in FP32 -> median of |it - 1| as it ran
    growth            `site op phase` of an operation that ran 8 times or more, growing -> {site, phase, factor (per call), calls}
    saturated_outputs share of the model's outputs that are exactly 0 or 1 and are not in FP32; if no loss was seen
    seed_nonfinite    `NaN` or `infinite in fp16`: so were the gradients from which a backward pass that is made again began
    tiny_probabilities  the largest fp16 output between 0 and 1 that got an infinite gradient, if only such did: see again.py
    accumulated       parameter -> how often its gradient was added to in this step, if more than once
    not_reproducible  what gave other bits when it was run again: {op, site, where, device, rank, every_time, bad}: see again.py
    left_out          why twins or states were not kept (memory ran short), or from where on the step could not be examined
    failed            why the examination ended early
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter, process_time  # those of now: programs replace them to freeze time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..core.examination import Examination, Place, Trial
from ..core.formats import format_of
from ..core.limits import Limits
from ..core.ops import SCALINGS, bare_op
from ..watch.compiler import ModuleHooks
from ..watch.float_traps import Untrapped
from ..watch.memory import MemoryBudget
from ..watch.names import parts_of, unwrap
from ..watch.op_stream import is_programs_own
from ..watch.places import Places
from ..watch.ranks import many_processes
from ..watch.storages import StorageMap, key_of
from ..watch.tensors import (
    LOW,
    being_traced,
    float_leaves,
    gradient_of,
    has_storage,
    in_backward,
    is_plain,
    outside_program,
    short_dtype,
)
from ..watch.twins import Operation, Twins
from .by_hand import ScaledGradients
from .facts import StepFacts
from .follow import Follower
from .measure import GradientNumbers, extent, gradient_errors, gradient_numbers
from .nonfinite import check_given, first_bad, overflowed_by_scale, poisoned_buffer
from .records import Suspect, plain_suspects
from .remedies import Remedies
from .states import States
from .tags import Ledger, Preamble, Tag

_OF_THE_STEP = (
    "_shadows",
    "_follower",
    "_ledger",
    "_states",
    "_by_hand",
    "_overwritten",
    "_outputs",
    "_hooks",
    "_remedies",
)  # not kept after it
_MOST_OUTPUTS = 64  # of all that was called for one loss
_CHECK_OPS = 64  # for the time,
_CHECK_MEMORY_OPS = 256
_CHECK_SHARE = 8  # for memory, or when this part of the budget has been made since
_STATES_SHARE = 4  # of the budget goes to copies of what the step overwrites
_STASH_ELEMENTS = 1 << 24
_HAND_MADE_SCALE = 16.0
_SAME_NUMBER = 1e-3
_RUINED = 0.5  # a gradient this far from its twin moves nothing where it should
_NOISE = 1e-6  # gradients this much smaller per element than the largest are zero in theory (a bias before a norm)


class Sanitizer:
    """Open it before one step and close it after."""

    def __init__(
        self,
        models: Sequence[tuple[nn.Module, str]],
        step: int = 0,
        scale: Callable[[], float | None] | None = None,
        limits: Limits | None = None,
        twin_bytes: int | None = None,
        strict: bool = False,
        seconds: float = math.inf,
        try_remedies: bool = True,
        called: Sequence[nn.Module] = (),
        before: Preamble | None = None,
    ) -> None:
        self._models = [(unwrap(model), prefix) for model, prefix in models]
        self._step = step
        self._scale_of = scale
        self._limits = limits or Limits()
        self._twin_bytes = twin_bytes
        self.seconds = seconds
        self._strict = strict
        self._tries = try_remedies
        self._ends = {id(unwrap(module)) for module in (*called, *(model for model, _ in models))}  # what they give counts
        self._before = before  # what the loop made since the step before
        self._over_at: int | None = None
        self._made_since: StorageMap[bool] = StorageMap()  # not what is only written to: a scale, an average
        self.for_next: Preamble | None = None
        self._handles: list[Any] = []
        self._is_open = False
        self._failure = self._left_out = ""
        self._noted: dict[str, Any] = {}
        self._operations = 0
        self._opened = ExitStack()

    def open(self) -> Sanitizer:
        self._started, self._worked = perf_counter(), process_time()
        self._is_open = True
        try:
            self._open()
        except BaseException as error:
            if self._strict or is_programs_own(error):
                self._opened.close()
                raise
            self._end(error)
        return self

    def _open(self) -> None:
        with outside_program():
            parts = parts_of(self._models)
            self._owners = {name: parts.owners[key] for key, name in parts.parameters.items()}
            self._buffers = dict(parts.buffers)
            self._roles: StorageMap[tuple[str, str]] = StorageMap()  # parameter, buffer, input or gradient, and its name
            for name, owner in self._owners.items():
                parameter = owner()
                self._enter_role(parameter, "parameter", name)
                self._enter_role(None if parameter is None else gradient_of(parameter), "gradient", name)
            for name, buffer in parts.buffers.items():
                self._enter_role(buffer(), "buffer", name)
        self._shadows = Twins(
            on_op=self._on_op,
            before_write=self._before_write,
            on_trouble=None if self._strict else self._end,
            on_interrupt=self._stop,
            on_anew=lambda op: self._guard(self._follower.pass_on, op),
        )
        self._remedies = Remedies(self._shadows)
        self._ledger = Ledger(self._limits, self._shadows.twin, self._roles)
        self._follower = Follower(self._ledger)
        self._by_hand = ScaledGradients(self._ledger)
        if self._before is not None:
            self._shadows.begin_with(self._before.twins)
            self._ledger.begin_with(self._before)
            self._before = None
        devices = [p.device for model, _ in self._models for p in model.parameters()]
        self._budget = MemoryBudget(devices[0] if devices else torch.device("cpu"), self._twin_bytes)
        self._allowed = self._budget.allowance(0)
        self._made_at_check = 0
        self._states, self._facts = States(self._allowed // _STATES_SHARE), StepFacts()
        self._places = Places(self._models, on_trouble=self._end)
        self._overwritten: dict[int, Tensor] = {}
        self._dirty: set[str] = set()
        self._gradients: dict[str, GradientNumbers] = {}
        self._gradient_tags: dict[str, Tag | None] = {}
        self._accumulated: Counter[str] = Counter()
        self._losses: list[dict[str, Any]] = []
        self._outputs: list[Tag] = []
        self._unused: tuple[Tensor, Tag] | None = None
        self._saturation = 0.0
        self._inputs: dict[str, dict[str, Any]] = {}
        self._early_facts: dict[str, Any] = {}  # of a step that was examined in part
        self._scale: float | None = None
        self._loss_factor: float | None = None
        self._unscaled = False
        self._divided: StorageMap[float] = StorageMap()  # gradients that the loop's own code divided by the loss scale
        self._divided_by: float | None = None
        self._shrunk: StorageMap[float] = StorageMap()  # gradients that were not divided yet: what they were multiplied with
        self._shrunk_by: float | None = None
        self._undivided: set[str] = set()  # parameters whose gradient was not, when the optimizer began
        self._stepped: set[str] = set()  # parameters that the optimizer wrote
        self._updating = False
        self._ruined: set[str] = set()
        self._hook()
        self._opened.callback(self._places.close)
        self._places.open()
        self._opened.callback(self._shadows.__exit__, None, None, None)
        self._shadows.__enter__()
        self._opened.callback(self._remedies.close)
        self._mind_memory()

    def close(self) -> Examination:
        """Ends the examination; a second call changes nothing."""
        if self._is_open:
            try:
                self._opened.close()
            except BaseException as error:
                if self._strict or is_programs_own(error):
                    raise
                self._end(error)
            self._is_open = False
            self._guard(self._measure_gradients)
            self._guard(self._keep_for_next)
            self._examination = self._conclude()
            budget = self._budget
            for name in _OF_THE_STEP:
                vars(self).pop(name, None)
            self._guard(budget.give_back)
        return self._examination

    def step_is_over(self) -> None:
        """What is made from here on may be meant for the next step: a batch that the loop draws and casts."""
        if not self.has_ended:
            self._over_at, self._made_since = self._ledger.order, StorageMap()

    def _keep_for_next(self) -> None:
        if self._over_at is not None:
            self.for_next = self._ledger.preamble(self._over_at, self._made_since, self._shadows.of_storages)

    def _enter_role(self, tensor: Tensor | None, role: str, name: str) -> None:
        if tensor is not None and has_storage(tensor):
            self._roles.put(tensor, (role, name))

    def _hook(self) -> None:
        # global ones: nothing is stored on the user's modules, which may be copied or saved within the step
        self._roots = {id(model): prefix for model, prefix in self._models}
        self._hooks = ModuleHooks(
            lambda: register_module_forward_pre_hook(self._on_input), lambda: register_module_forward_hook(self._on_output)
        )
        self._opened.callback(self._unhook)
        self._opened.callback(self._hooks.close)
        self._hooks.open()
        for name, owner in self._owners.items():
            parameter = owner()
            if parameter is not None and parameter.requires_grad and parameter.is_leaf:
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name)))

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        for owner in self._owners.values():  # torch leaves an empty dictionary behind
            parameter = owner()
            if parameter is not None and not getattr(parameter, "_post_accumulate_grad_hooks", True):
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    # hooks: nothing that fails in here may reach the training

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        if self._failure or self._left_out:
            return
        try:
            with Untrapped():
                work(*args)
        except BaseException as error:
            if is_programs_own(error):
                raise
            self._end(error)
            if self._strict:
                raise

    def _end(self, error: BaseException) -> None:
        """Our own trouble. What was kept beside the program is given back at once: it may be memory that is missing."""
        if self._is_open and not self._failure:
            self._failure = f"{type(error).__name__}: {error}"
            if "_remedies" in vars(self):
                self._shadows.release()
                self._remedies.drop()
            self._overwritten = {}

    def _stop(self, why: str) -> None:
        """What comes cannot be seen, or would not be what it is if it were seen."""
        if self._is_open and not self._left_out:
            self._left_out = f"{why}; from there on the step was not examined"
            self._shadows.release()
            self._remedies.drop()
            self._overwritten = {}
            self._unhook()

    def _on_op(self, op: Operation) -> None:
        self._guard(self._look, op)

    def _before_write(self, tensor: Tensor) -> None:
        self._guard(self._stash, tensor)

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if self._is_open:
            self._dirty.add(name)
            self._accumulated[name] += 1
            self._guard(self._measure_before_others)

    def _measure_before_others(self) -> None:
        if many_processes():  # now: next, those of the others are added to it, and they have no twins here
            self._measure_gradients()

    def _on_input(self, module: nn.Module, args: Any) -> None:
        prefix = self._roots.get(id(module))
        # open: a hook removed while torch goes through them is still called once
        if self._is_open and prefix is not None:
            self._guard(self._note_inputs, prefix, args)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._ends:
            self._guard(self.note_result, output)

    def note_result(self, output: Any) -> None:
        """What is bad in it counts, as what models give does."""
        if self._is_open:
            self._guard(self._note_outputs, output)

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Of what lines of the loop were given: what is bad in them would have gone on into the model."""
        if self._is_open:
            self._guard(self._note_gradients, gradients)

    def _note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for gradient in gradients:
            tag = None if gradient is None or not has_storage(gradient) else self._ledger.tags.find(gradient)
            if tag is not None:
                self._note_arrival(tag.bad, tag.reference_bad, "output")

    def _note_outputs(self, output: Any) -> None:
        if in_backward() or being_traced():
            return
        with outside_program():
            leaves = [leaf for leaf in list(float_leaves(output))[:8] if has_storage(leaf)]
            tags = [self._ledger.tags.find(leaf) for leaf in leaves]
            self._saturation = max((self._saturated_share(leaf) for leaf in leaves), default=0.0)
            self._remedies.outputs(leaves)
        self._outputs = [*self._outputs, *(tag for tag in tags if tag is not None)][-_MOST_OUTPUTS:]

    def _note_inputs(self, prefix: str, args: Any) -> None:
        if being_traced():
            return
        with outside_program():
            for i, leaf in enumerate(filter(is_plain, float_leaves(args))):
                self._enter_role(leaf, "input", f"{prefix}input{i}" if i else f"{prefix}input")
                if i < 8 and len(self._inputs) < 32:
                    span = extent(leaf)
                    self._inputs[f"{prefix}{i}"] = {
                        "absmax": span.absmax if span.finite else math.inf,
                        "nonfinite": not span.finite,
                        "whole": span.finite and bool((leaf == leaf.round()).all()),
                        "dtype": short_dtype(leaf.dtype),
                    }

    # every operation

    def _look(self, op: Operation) -> None:
        self._operations += 1
        spot = self._places.spot()
        if self._dirty and not in_backward():
            self._measure_gradients()
        if spot.place.phase == "optimizer" and not self._updating:
            self._updating = True
            self._gradients_now()
            self._remedies.close()
        self._follower.see(op, spot, self._overwritten)
        if self._tries and self._ledger.has_broken:
            self._remedies.try_after_nonfinite(op, self._ledger.order, spot, self._overwritten, self._ledger.maker_of)
        self._facts.see(op, spot)
        self._by_hand.see(op, spot)
        if self._overwritten:
            self._states.note(op, spot, self._ledger.order, self._overwritten, self._ledger.towards, self._ledger.decayed)
            self._overwritten = {}
        if spot.place.phase == "loop" and not self._losses:
            self._note_unused(op)
        if op.name == "ones_like":
            self._note_loss(op)
        elif op.name == "_amp_foreach_non_finite_check_and_unscale_":
            self._unscaled = True
        elif spot.place.phase == "loop" and op.name in SCALINGS:
            self._note_division(op)
        if op.name == "mul" and isinstance(op.out, Tensor) and op.out.numel() == 1 and spot.place.phase == "loop":
            self._note_factor(op)
        if self._operations % _CHECK_OPS == 0 and self.is_spent:
            self.give_up()
        if not op.is_view:
            written = {*map(id, op.written)} if self._over_at is not None else {}
            for tensor in op.made:
                self._budget.note(tensor)
                if self._over_at is not None and id(tensor) not in written:
                    self._made_since.put(tensor, True)
        made = self._shadows.bytes_made - self._made_at_check
        if self._operations % _CHECK_MEMORY_OPS == 0 or made > self._allowed // _CHECK_SHARE:
            self._mind_memory()

    def _mind_memory(self) -> None:
        held = self._shadows.bytes_held + self._remedies.bytes_held
        self._allowed = self._budget.allowance(held)
        if held > self._allowed:
            self._remedies.drop()
            held = self._shadows.bytes_held
        if held > self._allowed:
            self._shadows.start_over()
        self._made_at_check = self._shadows.bytes_made
        if self._budget.shortage:
            self._stop(self._budget.shortage)

    def _memory_left_out(self) -> str:
        if self._shadows.restarts:
            return (
                f"FP32 twins may take {self._allowed >> 20} MiB beside this program and would take more: "
                f"the reference began anew {self._shadows.restarts} times, and errors count from there on"
            )
        return f"{self._states.left_out} states" if self._states.left_out else ""

    def _stash(self, tensor: Tensor) -> None:
        if self._dirty and not in_backward():
            self._measure_gradients()
        if not has_storage(tensor):
            return
        role, name = self._roles.find(tensor) or ("", "")
        if self._undivided and role == "parameter" and self._places.here().phase == "optimizer":
            self._stepped.add(name)
        if (role == "buffer" or (role == "gradient" and in_backward())) and self._ledger.tags.find(tensor) is None:
            check_given(self._ledger, tensor, role, name, self._places.spot())
        if tensor.dtype not in LOW or tensor.numel() > _STASH_ELEMENTS:
            return
        before = tensor.detach().clone()
        self._overwritten[key_of(tensor)] = before
        if self._ledger.tags.find(tensor) is None:
            place = self._places.here()
            if place.module == "Parameter":
                role, name = "gradient", place.site
            elif role == "parameter" and not self._is_learned(name):
                role = ""  # a copy that the loop keeps: no update by a gradient
            self._states.keep(tensor, before, role or ("optimizer" if place.phase == "optimizer" else ""), name)

    def _is_learned(self, name: str) -> bool:
        parameter = self._owners[name]()
        return parameter is None or parameter.requires_grad

    def _note_loss(self, op: Operation) -> None:
        """Autograd makes the gradient of a loss with `ones_like`."""
        loss = op.args[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None or in_backward():
            return
        if self._updating and self._places.in_closure_step:
            self.conclude("the optimizer calls its closure again, on weights that it has moved")
            return
        self._by_hand.begin_backward(loss)
        self._scale = self._scale_of() if self._scale_of is not None else None
        scale = self._scale or 1.0
        twin = self._shadows.twin(loss)
        tag = self._ledger.tags.find(loss)
        self._losses.append(
            {"value": float(loss.detach()) / scale, "reference": float(twin.detach()) / scale, "dtype": short_dtype(loss.dtype)}
        )
        self._remedies.loss(loss, scale)
        if tag is not None:
            self._note_arrival(tag.bad if not tag.quiet else None, tag.reference_bad, "loss")

    def _note_unused(self, op: Operation) -> None:
        """A single number with a gradient that the loop reads: its loss, if nobody ever passes backward from it."""
        for one in (a for a in op.args[:2] if isinstance(a, Tensor) and a.dim() == 0 and a.grad_fn is not None):
            tag = self._ledger.tags.find(one) if has_storage(one) and one.is_floating_point() else None
            self._unused = (one.detach(), tag) if tag is not None and tag.bad is not None and not tag.quiet else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While nothing that runs is the step's; operations are not seen either, if the modes are off."""
        self._is_open, since = False, perf_counter()
        try:
            yield
        finally:
            self._is_open = True
            self._started += perf_counter() - since

    def note(self, name: str, fact: Any) -> None:
        """A fact from outside."""
        self._noted[name] = fact

    def note_trial(self, trial: Trial) -> None:
        self._remedies.note(trial)

    def note_scale(self) -> None:
        """Backward begins from gradients that are given, not from a loss."""
        self._scale = self._scale_of() if self._scale_of is not None else None

    def _note_factor(self, op: Operation) -> None:
        numbers = [float(a) for a in op.args if not (isinstance(a, Tensor) and (a.requires_grad or a.numel() != 1))]
        factor = next((n for n in numbers if abs(n) >= _HAND_MADE_SCALE), None)
        if factor is not None:
            self._loss_factor = factor
            self._by_hand.note_factor(op.out, factor)

    def _note_division(self, op: Operation) -> None:
        first, by = op.args[:2] if len(op.args) > 1 else (None, None)
        by = by[0] if isinstance(by, (list, tuple)) and by else by
        if isinstance(by, Tensor) and by.numel() == 1 and by.is_floating_point():
            by = float(by.detach())
        if not isinstance(by, (int, float)) or not by:
            return
        divisor = by if bare_op(op.name) == "div" else 1 / by
        scale = self._scale or self._loss_factor or 0.0  # what micro-batches are averaged by is smaller, and no such number
        if scale < _HAND_MADE_SCALE:
            return
        divides = abs(divisor / scale - 1) <= _SAME_NUMBER
        given = first if isinstance(first, (list, tuple)) else [first]
        made = given if op.out is None else op.out if isinstance(op.out, (list, tuple)) else [op.out]
        for tensor, out in zip(given, made):
            if not isinstance(tensor, Tensor) or not has_storage(tensor) or (self._roles.find(tensor) or ("",))[0] != "gradient":
                continue
            if divides:
                self._divided.put(out, scale)
                self._shrunk_by = self._shrunk.find(tensor) or self._shrunk_by
            elif divisor > 1 and self._divided.find(tensor) is None:
                self._shrunk.put(out, 1 / divisor)

    def _note_arrival(self, bad: Suspect | None, reference_bad: Suspect | None, name: str) -> None:
        for suspect, in_reference in ((bad, False), (reference_bad, True)):
            if suspect is None or suspect is self._ledger.purpose or suspect is self._ledger.taken_over:
                continue
            suspect.reached.add(name)
            suspect.destroyed |= not in_reference
            suspect.destroyed_reference |= in_reference

    # after backward

    def _measure_gradients(self) -> None:
        names, self._dirty = self._dirty, set()
        scale = self._scale or 1.0
        with outside_program():
            for name in names:
                parameter = self._owners[name]()
                grad = None if parameter is None else gradient_of(parameter)
                if grad is None or not has_storage(grad) or not grad.is_floating_point():
                    continue
                self._enter_role(grad, "gradient", name)
                self._gradients[name] = gradient_numbers(grad, self._shadows.twin(grad), scale)
                self._gradient_tags[name] = self._ledger.tags.find(grad)
                self._remedies.gradient(name, grad, scale)

    def _gradients_now(self) -> None:
        """What the loop did to the gradients after backward, clipping above all, as the optimizer meets them."""
        for name, measured in self._gradients.items():
            parameter = self._owners[name]()
            grad = None if parameter is None else gradient_of(parameter)
            if grad is not None and has_storage(grad):
                scale = self._divided.find(grad)
                self._divided_by = scale or self._divided_by
                self._undivided |= {name} if scale is None and measured.reference_norm > 0 else set()
            tag = self._ledger.tags.find(grad) if grad is not None and has_storage(grad) else None
            if tag is None or tag is self._gradient_tags[name] or tag.origin is None or tag.level < _RUINED:
                continue
            self._ruined.add(name)
            tag.origin.error_energy += (min(tag.level, 1.0) * measured.reference_norm) ** 2
            tag.origin.reached.add(name)

    def _left_scaled(self) -> dict[str, Any] | None:
        left = sorted(self._undivided & self._stepped)
        if not left or self._divided_by is None or self._unscaled:
            return None
        return {"names": left[:8], "count": len(left), "of": len(self._gradients), "scale": self._divided_by}

    def _conclude(self) -> Examination:
        try:
            return self._assemble()
        except BaseException as error:
            if self._strict or is_programs_own(error):
                raise
            return Examination(self._step, self._operations, facts={"failed": f"{type(error).__name__}: {error}"})

    def _assemble(self) -> Examination:
        facts: dict[str, Any] = {**self._facts.facts(), **self._early_facts, **self._noted}
        size = math.sqrt(sum(g.reference_norm**2 for g in self._gradients.values() if math.isfinite(g.reference_norm)))
        self._guard(self._measure_consequences, facts)
        suspects = self._ledger.suspects
        low = self._ledger.low_dtype
        facts |= {
            key: value
            for key, value in {
                "losses": self._losses,
                "inputs": self._inputs,
                "accumulated": {name: n for name, n in self._accumulated.items() if n > 1},
                "loss_factor": self._loss_factor,
                "unscaled_by_torch": self._unscaled,
                "divided_by_hand": self._divided_by,
                "shrunk_while_scaled": self._shrunk_by if self._divided_by else None,
                "left_scaled": self._left_scaled(),
                "stepped_by_hand": self._by_hand.updates(self._limits.damage_update),
                "scaled_penalty": self._by_hand.penalty(),
                "stored_infinity": self._ledger.stored_infinity,
                "batch_nonfinite": next(
                    ("NaN" if s.nan else "infinite" for s in suspects if s.trouble == "given" and s.operands[0].role == "input"),
                    "",
                ),
                "left_out": self._left_out or self._memory_left_out(),
                "failed": self._failure,
                "scale_overflow": self._only_the_scale(suspects),
            }.items()
            if value
        }
        loss = next((x for x in self._losses if not math.isfinite(x["value"])), self._losses[-1] if self._losses else None)
        errors, total = gradient_errors(self._gradients)
        return Examination(
            step=self._step,
            operations=self._operations,
            amp_dtype=format_of(low).name if low is not None else "",
            scale=self._scale,
            loss=None if loss is None else loss["value"],
            loss_reference=None if loss is None else loss["reference"],
            gradient_error=total,
            gradients=errors,
            first_bad=first_bad(s for s in suspects if s.destroyed),
            first_bad_reference=first_bad(s for s in suspects if s.destroyed_reference),
            facts=facts,
            trials=self._remedies.trials(self._scale, total),
            reseeds={f"{op}: {why}": count for (op, why), count in self._shadows.reseeds.items()},
            seconds=perf_counter() - self._started,
            suspects=plain_suspects(suspects, size, sum(g.elements for g in self._gradients.values())),
        )

    def _measure_consequences(self, facts: dict[str, Any]) -> None:
        loudest = max((g.reference_rms for g in self._gradients.values() if not g.reference_nonfinite), default=0.0)
        for name, gradient in self._gradients.items():
            tag = self._gradient_tags[name]
            if tag is None:
                continue
            self._note_arrival(
                tag.bad if gradient.nonfinite else None, tag.reference_bad if gradient.reference_nonfinite else None, name
            )
            if not gradient.nonfinite and tag.origin is not None and math.isfinite(gradient.error_norm):
                tag.origin.error_energy += gradient.error_norm**2
                tag.origin.reached.add(name)
                if gradient.reference_rms > _NOISE * loudest:
                    tag.origin.silenced_elements += gradient.elements if gradient.zero_share == 1 else 0
                    ruined = gradient.error_norm > _RUINED * gradient.reference_norm
                    tag.origin.ruined_elements += gradient.elements if ruined else 0
        with outside_program():
            poisoned = []
            for name, owner in (*self._owners.items(), *self._buffers.items()):
                tensor = owner()
                if tensor is None or not tensor.is_floating_point() or not has_storage(tensor) or extent(tensor).finite:
                    continue
                poisoned.append(name)
                tag = self._ledger.tags.find(tensor)
                if tag is not None and not tag.quiet:
                    self._note_arrival(tag.bad, tag.reference_bad, name)
            if poisoned:
                facts["poisoned"] = poisoned
            self._ledger.suspects += [poisoned_buffer(n) for n in poisoned if self._was_poisoned(n)]
            if not self._losses and self._unused is not None:
                value, tag = self._unused
                self._losses.append({"value": float(value), "reference": math.nan, "dtype": short_dtype(value.dtype)})
                self._note_arrival(tag.bad, tag.reference_bad, "loss")
            elif not self._losses:
                if self._saturation:
                    facts["saturated_outputs"] = self._saturation
                for tag in self._outputs:
                    if not tag.quiet:
                        self._note_arrival(tag.bad, tag.reference_bad, "output")
            still = self._states.suspects(self._shadows.twin, self._limits.damage_kept, self._limits.unchanged_share_warn)
            lost = next((s for s in still if s.operands[0].role == "parameter"), None)
            if lost is not None and self._tries:
                before, moved = self._states.moved_shares(self._shadows.twin)
                place = Place(phase="optimizer")
                self._remedies.note(
                    Trial("master_weights", lost.op, place, lost.order, was_bad=False, moved=moved, moved_before=before)
                )
        self._ledger.suspects += [s for s in still if not self._had_no_update(s)]
        given = [s.operands[0] for s in self._ledger.suspects if s.trouble == "given"]
        if given:
            facts["nonfinite_given"] = [{"role": g.role, "name": g.name} for g in given]

    def _saturated_share(self, output: Tensor) -> float:
        """The share of an output that is exactly 0 or 1, and is not in FP32."""
        edge = (output == 0) | (output == 1)
        return float((edge & (self._shadows.twin(output) != output)).double().mean()) if output.numel() else 0.0

    def _had_no_update(self, still: Suspect) -> bool:
        """It stood still because the gradient was wrong before the optimizer met it."""
        state = still.operands[0]
        gradient = self._gradients.get(state.name) if state.role == "parameter" else None
        wrong = gradient is not None and gradient.error_norm > _RUINED * gradient.reference_norm
        return wrong or (bool(self._ruined) and state.role != "")

    def _was_poisoned(self, name: str) -> bool:
        """A statistic, that the step goes on writing: a mask is only read. What the step spoilt itself has its own suspect."""
        tensor = self._buffers[name]() if name in self._ledger.updated else None
        tag = None if tensor is None else self._ledger.tags.find(tensor)
        spoilt = any(s.destroyed for s in self._ledger.suspects) or (tag is not None and tag.bad is not None)
        return tensor is not None and not spoilt

    def _only_the_scale(self, suspects: list[Suspect]) -> bool:
        bad = [s for s in suspects if s.destroyed]
        return bool(bad) and all(overflowed_by_scale(s, self._scale) for s in bad)

    # time

    @property
    def is_spent(self) -> bool:
        """By the clock, or by the work where a busy machine makes everything slow: what is seen must not depend on others."""
        return min(perf_counter() - self._started, process_time() - self._worked) > self.seconds

    @property
    def has_ended(self) -> bool:
        """Before the step: what comes is not examined."""
        return bool(self._failure or self._left_out)

    def give_up(self) -> None:
        """Its time is over: what was seen stands, nothing more is looked at."""
        self.conclude(f"its {self.seconds:.1f} s were spent")

    def conclude(self, why: str) -> None:
        """Before its end: what the part that was seen has done is known now, and not later."""
        if not being_traced():
            if not in_backward():
                self._guard(self._measure_gradients)
            self._guard(self._measure_consequences, self._early_facts)
        self._stop(why)
