"""The one clock of training steps, for a program that does not say where they begin: `nanny run`, `watch_model`, `nanny trace`.

A model is found when a part of it, or all, is first called for training from outside any known part: it is the outermost module
that holds what was called (the module of a framework is never called itself, its training step calls parts).

A step begins with the first training call of a known model, and with the one that follows when every known optimizer has stepped
(a step that a GradScaler skips is a step), or one of them twice. A model that takes part and whose parameters no optimizer has
stepped yet has one to come: a GAN's two updates are one step from the first on. Where no optimizer of torch has the parameters,
a step is over when the loop itself has moved them. All of it happens in one thread, that of the first training call; when it has
ended, in the next.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook
from torch.optim import Optimizer

from . import events
from .hooks import add_module_hook
from .names import unwrap
from .optimizers import modules_and_optimizers, optimizers_alive, parameters_of, states_of
from .tensors import being_traced, is_readable

MOST_MODELS = 8
PATIENCE = 64  # backward passes without an optimizer step or a weight that was moved, until each of them counts as a step
_MOST_WEIGHTS = 64  # that are looked at to see whether the loop itself moves them


class StepClock(events.PartListener):
    """Calls `begin(model)` when a step begins, `over()` when its last optimizer has stepped; `step` counts them from 0.

    `models=None`: they are found, and `found(model, prefix)` is told. With models given, optimizers of others do not count.
    `first`: the number of the first step; None: where the optimizer of the model that is found stands, in a resumed training.
    """

    def __init__(
        self,
        begin: Callable[[nn.Module], None],
        models: Sequence[nn.Module] | None = None,
        found: Callable[[nn.Module, str], None] | None = None,
        guard: Callable[[Callable[..., None]], Callable[..., None]] = lambda hook: hook,
        over: Callable[[], None] | None = None,
        first: int | None = 0,
    ) -> None:
        self._begin, self._found, self._guard, self._over = begin, found, guard, over
        self._finds_models, self._first = models is None, first
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._parts: dict[int, weakref.ref[nn.Module]] = {}
        self._whole: dict[int, weakref.ref[nn.Module]] = {}  # what `found` was told
        self._prefixes: set[str] = set()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of these all that ever stepped
        self._in_evaluation: dict[int, weakref.ref[nn.Module]] = {}  # called with gradients, not in train mode
        self._updated: set[int] = set()  # roots for which no further optimizer is waited
        self._called: set[int] = set()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_stepped = self._stepped_twice = False
        self._closure: str | None = None  # of the optimizer that steps: `first`, its first call begins a step, or `later`
        self._backwards = 0
        self._without_optimizer = False
        self._moves_by_hand: bool | None = None  # None: no weight has moved yet that no optimizer had stepped
        self._versions: list[tuple[weakref.ref[Tensor], int]] = []  # of weights, as the step began
        self._scaler_steps: Optimizer | None = None
        self._unhook: Callable[[], Any] | None = None
        self._thread: int | None = None
        self.step = (first or 0) - 1
        self._begun = 0  # steps
        for model in models or ():
            self._add(model)

    def open(self) -> StepClock:
        events.listen(self)
        self._unhook = add_module_hook(register_module_forward_pre_hook, self._before_forward)
        return self

    def close(self) -> None:
        events.leave(self)
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    __enter__ = open

    def __exit__(self, *_: object) -> None:
        self.close()

    # models

    def _add(self, model: nn.Module) -> None:
        inner = unwrap(model)
        self._roots |= {id(m): weakref.ref(m) for m in (model, inner)}
        self._parts |= {id(m): weakref.ref(m) for m in model.modules()}

    def _is_new(self, module: nn.Module) -> bool:
        if not self._finds_models or _knows(self._parts, module) or len(self._roots) >= MOST_MODELS:
            return False
        return module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())

    # steps

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if being_traced():  # a call that is recorded is no training
            return
        if _knows(self._roots, module) or (self._finds_models and not _knows(self._parts, module)):
            self._guard(self._called_for_training)(module, args)

    def _is_elsewhere(self) -> bool:
        here = get_ident()
        if self._thread == here:
            return False
        if self._thread is not None and any(thread.ident == self._thread for thread in threading.enumerate()):
            return True
        self._thread = here
        events.listen(self, here)
        return False

    def _called_for_training(self, module: nn.Module, args: Any) -> None:
        known = _knows(self._roots, module)
        if not known and not self._is_new(module):
            self._note_evaluation(module)
            return
        if self._is_elsewhere():
            return
        is_another = not known and self._begun > 1 and self._is_over()  # steps were whole without it: another training begins
        if not known:
            self._find(module)
        if not torch.is_grad_enabled():
            return
        if module.training:
            self._called.add(id(module))
        if is_another:
            self._optimizers.clear()  # those of the training before count again when they step again
        if is_another or (self._is_over() if self._closure is None else self._closure == "first"):
            self._called = {id(module)}
            self._stepped.clear()
            self._closure = self._closure and "later"
            self._has_stepped, self._stepped_twice, self._backwards = False, False, 0
            self._begun += 1
            self.step += 1
            self._versions = [] if self._optimizers else _versions_of(module)
            hooks = set(_global_forward_pre_hooks)
            self._begin(module)
            for key, hook in list(_global_forward_pre_hooks.items()):
                if key not in hooks:  # registered just now: torch made its list of this call's hooks before
                    hook(module, args)

    def _find(self, module: nn.Module) -> None:
        wholes = (whole for known in self._whole.values() if (whole := known()) is not None)
        if any(part is module for whole in wholes for part in whole.modules()):  # the loop calls its parts
            self._add(module)
            return
        alive = modules_and_optimizers()
        whole = _outermost(module, alive)
        if self._first is None and not self._begun:
            self.step = max([_steps_taken(o) for o in alive if isinstance(o, Optimizer) and _has_any_of(o, whole)], default=0) - 1
        if self._found is not None and not _knows(self._whole, whole):
            self._found(whole, self._new_prefix(whole) if self._whole else "")
            self._whole[id(whole)] = weakref.ref(whole)
        self._add(module)

    def _new_prefix(self, model: nn.Module) -> str:
        name = type(unwrap(model)).__name__
        free = (name, *(f"{name}{i}" for i in range(2, 2 + MOST_MODELS)))
        prefix = next(f"{n}." for n in free if f"{n}." not in self._prefixes)
        self._prefixes.add(prefix)
        return prefix

    def _note_evaluation(self, module: nn.Module) -> None:
        """Whoever forgot `model.train()` trains all the same: an optimizer that steps its parameters tells."""
        if not self._finds_models or module.training or not torch.is_grad_enabled() or len(self._in_evaluation) >= MOST_MODELS:
            return
        known = [one for r in self._in_evaluation.values() if (one := r()) is not None]
        if not any(module is part for one in known for part in one.modules()) and any(
            p.requires_grad for p in module.parameters()
        ):
            self._in_evaluation[id(module)] = weakref.ref(module)

    def _find_trained(self, optimizer: Optimizer) -> None:
        """Models in evaluation mode that this optimizer steps."""
        owned = {id(p) for p in parameters_of(optimizer)}
        for key, reference in list(self._in_evaluation.items()):
            model = reference()
            if model is None or not owned.isdisjoint(id(p) for p in model.parameters()):
                del self._in_evaluation[key]
                if model is not None and not _knows(self._parts, model) and len(self._roots) < MOST_MODELS:
                    self._find(model)

    def _is_over(self) -> bool:
        if not self._begun:
            return True
        known = list(self._optimizers)
        if not known and self._has_stepped:
            return True  # one that was made for this step alone
        if not known and self._moved_by_hand():
            return True
        if not known and self._moves_by_hand:
            return False
        if not known:  # gradients may be accumulated first; after many backward passes there is none of torch's to come
            self._without_optimizer = self._without_optimizer or self._backwards >= PATIENCE
            return self._without_optimizer and self._backwards > 0
        if self._stepped_twice:
            self._updated |= self._called  # what has not been updated by now never is
            return True
        return all(o in self._stepped for o in known) and self._all_updated(known)

    def _moved_by_hand(self) -> bool:
        moved = any((weight := known()) is not None and weight._version != before for known, before in self._versions)
        if moved and self._moves_by_hand is None:  # once: weights that an optimizer is to step have been filled, or loaded
            optimizers = optimizers_alive()
            weights = {id(known()) for known, _ in self._versions}
            self._moves_by_hand = not any(id(p) in weights for o in optimizers for p in parameters_of(o))
        return moved and bool(self._moves_by_hand)

    def _all_updated(self, known: list[Optimizer]) -> bool:
        waiting = [model for key in self._called - self._updated if (model := self._roots[key]()) is not None]
        if not waiting:
            return True
        owned = {id(p) for optimizer in known for p in parameters_of(optimizer)}
        have = {id(m) for m in waiting if not owned.isdisjoint(id(p) for p in m.parameters())}
        if not have and not self._updated:
            return True  # optimizers of copies (FP32 masters): whose they are cannot be told
        self._updated |= have
        return len(have) == len(waiting)

    def before_backward(self, roots: tuple[Tensor, ...]) -> None:
        self._backwards += 1

    def before_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._scaler_steps = optimizer

    def after_scaler_step(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._scaler_steps = None
        self.after_optimizer_step(optimizer)

    def before_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if has_closure:  # all of its calls are one step
            self._closure = "first" if self._is_over() else "later"

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self._closure = None
        if optimizer is not self._scaler_steps:
            self._guard(self._note_update)(optimizer)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        if optimizer not in self._stepped:  # a scaler may have told
            self.after_optimizer_step(optimizer)

    def _note_update(self, optimizer: Optimizer) -> None:
        if not self._counts(optimizer):
            return
        if self._in_evaluation:
            self._find_trained(optimizer)
        if optimizer not in self._met and self._begun > 1 and not self._has_stepped:
            self._optimizers.clear()  # steps were whole without it, and those of before do not step with it: a second phase
        self._met.add(optimizer)
        self._optimizers[optimizer] = None
        self._stepped_twice = self._stepped_twice or optimizer in self._stepped
        self._stepped.add(optimizer)
        self._has_stepped = True
        if self._over is not None and self._is_over():
            self._over()

    def _counts(self, optimizer: Optimizer) -> bool:
        if self._finds_models or optimizer in self._optimizers:
            return True
        models = [model for root in self._roots.values() if (model := root()) is not None]
        mine = {id(p) for model in models for p in model.parameters()}
        return any(id(p) in mine for p in parameters_of(optimizer))


def _knows(modules: dict[int, weakref.ref[nn.Module]], module: nn.Module) -> bool:
    known = modules.get(id(module))
    return known is not None and known() is module


def _outermost(module: nn.Module, alive: list[Any]) -> nn.Module:
    """Upwards as long as exactly one other module holds it."""
    parents: dict[int, list[nn.Module]] = {}
    for one in alive:
        if isinstance(one, nn.Module):
            for child in one.__dict__.get("_modules", {}).values():
                parents.setdefault(id(child), []).append(one)
    met = {id(module)}
    while len(above := parents.get(id(module), [])) == 1 and id(above[0]) not in met:
        module = above[0]
        met.add(id(module))
    return module


def _versions_of(model: nn.Module) -> list[tuple[weakref.ref[Tensor], int]]:
    """Of some of the weights that are to be trained; what is written into one counts up."""
    weights = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    return [(weakref.ref(p), p._version) for p in weights[:: len(weights) // _MOST_WEIGHTS + 1]]


def _steps_taken(optimizer: Optimizer) -> int:
    """By its own count, if it keeps one (Adam does, SGD does not)."""
    counts = [state.get("step", 0) for state in states_of(optimizer).values() if isinstance(state, dict)]
    known = [c for c in counts if isinstance(c, (int, float)) or (isinstance(c, Tensor) and is_readable(c) and c.numel() == 1)]
    return int(max(known, default=0))


def _has_any_of(optimizer: Optimizer, model: nn.Module) -> bool:
    return not {id(p) for p in parameters_of(optimizer)}.isdisjoint(id(p) for p in model.parameters())
