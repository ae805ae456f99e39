"""What holds in every sound loop, looked at while a run goes on: who owns, moves and clears what, in which mode and precision.

Nothing is judged here: a `Breach` says what did not hold and how often, and `rules/` say from when on that cannot be meant. The
first steps are looked at one by one, then ever more rarely, and at every traced step; what is proved right is not asked again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from ..core.step import Breach, Setup, StepRecord, Update
from ..measure import transfer
from ..measure.flatten import as_line, thin
from ..measure.transfer import PendingRead
from ..watch.names import Held, unwrapped
from ..watch.places import users_line
from ..watch.tensors import gradient_of, is_readable, short_dtype
from .trace import StepTrace, fingerprints
from .updates import UpdateProbe

EARLY = 64  # steps that are looked at one by one
MOST_NAMES = 8  # of what is affected
MOST_FROZEN = 32
SAMPLE = 64  # elements of a tensor
FEW = 4  # parameters that stand for all of an optimizer
MOST_SEARCHES = 3  # through everything that Python holds
LARGEST_GRAPH = 20_000
SAID_FROZEN = ("require_grad", "require_grads", "requires_grads", "trainable")  # what does nothing on a parameter


def looks_closely(position: int, traced: bool) -> bool:
    return traced or position < 4 or (position + 1) & position == 0


@dataclass
class Stepping:
    """One optimizer of these models, and what came between its steps."""

    optimizer: weakref.ref[Optimizer]
    steps: int = 0
    backwards: int = 0  # since its last step
    held: bool = False  # its gradients were there before each of these
    uncleared: int = 0  # steps in a row whose gradients held those of the step before
    gradients: Tensor | None = None  # a sample of those of its last step
    where: str = ""


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


class Invariants:
    """Told by the recorder what happens; `finish` says what it makes of a step."""

    def __init__(self) -> None:
        self.position = -1
        self.is_early = self.is_close = False
        self.step = ThisStep()
        self._models: Sequence[tuple[nn.Module, str]] = ()
        self._parameters: Mapping[int, str] = {}
        self._owners: Mapping[int, Held] = {}
        self._homes: dict[int, weakref.ref[nn.Module]] = {}  # of parameters
        self._known: dict[int, Stepping] = {}
        self._others: dict[int, weakref.ref[Optimizer]] = {}  # that hold none of our parameters, or have not stepped yet
        self._searches = 0
        self._total = 0  # steps of optimizers, ours or not
        self._where = ""
        # gradients
        self._arrived: set[str] = set()
        self._missing: dict[str, int] = {}  # looks at which there was none, or only zeros
        self._zero: set[str] = set()  # of them those that had one, of zeros
        self._ran: set[str] = set()
        self._ran_without_grad: set[str] = set()
        self._experts: tuple[str, ...] = ()
        self._products: dict[str, tuple[str, int]] = {}
        self._meant = ""
        self._unconnected = self._closely = 0
        # movement
        self.has_moved = False
        self._probed: list[tuple[UpdateProbe, PendingRead]] = []  # on their way to the host
        self._still = 0  # looks at steps that moved nothing
        self._still_without_rate = 0
        self._rates: list[float] = []
        self._narrow_only = False
        self._unowned: dict[str, tuple[Tensor, int]] = {}
        self._owns_nothing = False  # no optimizer has any parameter of ours
        self._moves: set[str] = set()  # although no optimizer has it
        self._frozen: list[tuple[str, Tensor, Tensor]] = []
        self._frozen_moves: dict[str, int] = {}
        self._norms: dict[str, tuple[Tensor, Tensor, int]] = {}
        # the order of calls
        self._pending = False  # a backward pass of an earlier step waits for its optimizer
        self._lost = self._passes = self._again = self._empty = self._cleared = self._looked = 0
        self._evaluates = 0
        self._quiet_steps = self._quiet_calls = 0
        self._is_quiet = False
        # data
        self._draws: dict[int, Draws] = {}
        self._trained_on = 0

    # a step

    def know(self, models: Sequence[tuple[nn.Module, str]], parameters: Mapping[int, str], owners: Mapping[int, Held]) -> None:
        """Everything that has a name, whenever it was found anew."""
        self._models, self._parameters, self._owners = models, parameters, owners
        inner = [unwrapped(model) for model, _ in models]
        self._homes = {id(p): weakref.ref(m) for model in inner for m in model.modules() for p in m._parameters.values()}

    def begin(self, record: StepRecord, quiet_calls: int) -> None:
        self.position += 1
        self.is_early = self.position < EARLY or record.traced
        self.is_close = looks_closely(self.position, record.traced)
        self.step = ThisStep()
        self._frozen = []
        self._is_quiet = quiet_calls > 0 and self.position > 1
        if self._is_quiet:
            self._quiet_steps += 1
            self._quiet_calls += quiet_calls

    def before_backward(self, root: Tensor) -> None:
        step = self.step
        for one in self._known.values():
            one.backwards += 1
            if one.held:
                one.held = self.is_early and self._holds_gradients(one)
        if self._pending and not step.backwards:
            self._pending = False
            if self.is_early and not self._any_gradient(self._sample_of(self._trainable())):
                self._lost += 1
        step.backwards += 1
        step.evaluates = all(not model.training for model, _ in self._models) if self._models else False
        if self._unconnected and self.is_early and self._reaches(root):
            self._cleared, self._unconnected = self._cleared + self._unconnected, 0

    def cleared(self) -> None:
        """By an optimizer of these models."""
        if self.step.backwards and not self.step.stepped:
            self.step.thrown_away += 1
        elif self._pending and not self.step.backwards:
            self._pending = False
            self._lost += 1

    def before_step(self, optimizer: Optimizer, mine: list[Tensor], has_closure: bool) -> None:
        self._total += 1
        step = self.step
        if self.is_close and not self._where:
            self._where = users_line()
        if not mine:
            step.other_optimizers += 1
            self._others[id(optimizer)] = weakref.ref(optimizer)
            if self.is_close:
                self._look_for_unowned()
            return
        one = self._stepping(optimizer)
        one.steps += 1
        step.stepped, step.closure, self._pending, step.thrown_away = True, step.closure or has_closure, False, 0
        if has_closure:
            one.backwards, one.held, one.uncleared, one.gradients = 0, False, 0, None
            return
        if self.is_early:
            self._look_at_gradients(one, mine)
        else:
            one.uncleared, one.gradients = 0, None
        if self.is_close:
            self._look_for_unowned()
            self._look_at_arrivals(mine)
            self._look_at_norms()
        one.backwards, one.held = 0, True

    def before_scaler_step(self) -> None:
        """The scaler may refuse the step; the gradients were not for nothing."""
        self.step.stepped, self._pending, self.step.thrown_away = True, False, 0

    @property
    def wants_probe(self) -> bool:
        return self.is_close and not self.has_moved

    def after_step(self) -> None:
        for name, p, before in self._frozen:
            if not torch.equal(before, sample_of(p)):
                self._frozen_moves[name] = self._frozen_moves.get(name, 0) + 1
        self._frozen = []

    def autocast_entered(self) -> None:
        if self.is_early and not self.step.autocast and torch.is_grad_enabled():
            kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            self.step.autocast = short_dtype(torch.get_autocast_dtype(kinds[0])) if kinds else ""

    def batch_drawn(self, iterator: Any, batch: Any) -> None:
        if self.is_early or self.position < 0:
            draws = self._draws.setdefault(id(iterator._dataset), Draws())
            draws.add(iterator, batch)

    def finish(self, record: StepRecord, trace: StepTrace | None, scaled: bool) -> None:
        """Fills in what was seen of the step."""
        step = self.step
        self._count(step, record)
        if trace is not None:
            self._ran |= trace.called
            self._ran_without_grad |= trace.called_without_grad
            record.experts = self._experts = tuple(experts_of(self._models, trace))
            self._note_data(trace)
            self._products = trace.products
            step.autocast = step.autocast or (trace.amp[1] if trace.amp is not None else "")  # entered before the step began
            self._meant = step.autocast or ("float16" if scaled else "")
        if self.is_early:
            record.breaches = tuple(self._breaches(record, trace))
        elif self._evaluates or self._is_quiet:
            record.breaches = tuple(self._of_mode())
        if self.is_close and self._models and (step.stepped or step.backwards):
            record.setup = self._setup()
        step.probes, self._frozen = [], []  # they hold parameters

    def _count(self, step: ThisStep, record: StepRecord) -> None:
        if self.is_early:
            # a loop that never steps may be one step to whoever finds steps by their optimizers
            self._passes += bool(step.backwards) if self._known else step.backwards
            self._looked += step.stepped
        if step.backwards and not step.stepped and not step.other_optimizers:
            if self.is_early:
                self._lost += min(step.thrown_away, 1) if self._known else step.thrown_away
            self._pending = not step.thrown_away
        if step.stepped and not step.closure and not record.skipped and self.is_early:
            self._again += step.again
            if step.empty and not step.fresh and not step.again:
                if step.backwards:
                    self._unconnected += 1
                else:
                    self._empty += 1
        self._evaluates = self._evaluates + 1 if step.evaluates and step.stepped else 0
        if step.probes and not record.skipped:
            self._probed = [(probe, probe.pending()) for probe in step.probes]
        if self._probed and all(read.ready() for _, read in self._probed):
            self._look_at_updates([u for probe, read in self._probed for u in probe.updates(read) if u.count])
            self._probed = []

    # looks

    def _stepping(self, optimizer: Optimizer) -> Stepping:
        one = self._known.get(id(optimizer))
        if one is None or one.optimizer() is not optimizer:
            one = self._known[id(optimizer)] = Stepping(weakref.ref(optimizer))
        return one

    def _trainable(self) -> list[Tensor]:
        return [p for held in self._owners.values() if (p := held()) is not None and p.requires_grad]

    def _sample_of(self, parameters: list[Tensor]) -> list[Tensor]:
        return parameters[:: max(1, len(parameters) // (2 * FEW))]

    def _any_gradient(self, parameters: Iterable[Tensor]) -> bool:
        found = [g for p in parameters if (g := gradient_of(p)) is not None]
        if any(not is_readable(g) or hasattr(g, "to_local") or not transfer.reads_freely(g.device) for g in found):
            return True  # sparse or sharded: it may be kept elsewhere
        return any_nonzero(found) if found else any(hasattr(p, "to_local") for p in parameters)

    def _holds_gradients(self, one: Stepping) -> bool:
        optimizer = one.optimizer()
        if optimizer is None:
            return False
        mine = [p for p in parameters_of(optimizer) if id(p) in self._parameters and p.requires_grad]
        found = [g for p in self._sample_of(mine) if (g := gradient_of(p)) is not None and is_readable(g)]
        return any_nonzero(g for g in found if transfer.reads_freely(g.device))  # what cannot be read may be 0

    def _look_at_gradients(self, one: Stepping, mine: list[Tensor]) -> None:
        holding = [p for p in mine if (g := gradient_of(p)) is not None and is_readable(g)]
        sparse = any(gradient_of(p) is not None for p in mine) and not holding
        now = gradient_sample(holding[:: max(1, len(holding) // FEW)]) if holding else None
        if one.backwards:
            self.step.fresh |= bool(holding) or sparse
            self.step.empty |= not holding and not sparse
        elif now is not None and one.gradients is not None:
            self.step.again |= now.shape == one.gradients.shape and torch.equal(now, one.gradients) and bool(now.any())
            self.step.fresh |= not self.step.again
        else:
            self.step.empty |= not holding and not sparse and one.steps > 1
            self.step.fresh |= bool(holding) or sparse
        one.uncleared = one.uncleared + 1 if one.steps > 1 and one.backwards and one.held else 0
        one.where = one.where or (users_line() if one.uncleared else "")
        one.gradients = now
        if any(p.requires_grad for p in mine):
            frozen = [p for p in mine if not p.requires_grad and is_readable(p)]
            frozen.sort(key=lambda p: gradient_of(p) is None)
            if frozen and (self.is_close or gradient_of(frozen[0]) is not None):
                self._frozen = [(self._parameters[id(p)], p, sample_of(p)) for p in frozen[:MOST_FROZEN]]

    def _look_at_arrivals(self, mine: list[Tensor]) -> None:
        self._closely += 1
        asked = [(self._parameters[id(p)], p) for p in mine if p.requires_grad and self._parameters[id(p)] not in self._arrived]
        zero: list[tuple[str, Tensor]] = []
        for name, p in asked:
            grad = gradient_of(p)
            if grad is None:
                self._missing[name] = self._missing.get(name, 0) + 1
            elif is_readable(grad) and transfer.reads_freely(grad.device):
                zero.append((name, grad))
            else:
                self._arrived.add(name)
        for (name, _), arrived in zip(zero, are_nonzero([grad for _, grad in zero])):
            if arrived:
                self._arrived.add(name)
                self._missing.pop(name, None)
            else:
                self._missing[name] = self._missing.get(name, 0) + 1
                self._zero.add(name)

    def _look_at_updates(self, updates: Sequence[Update]) -> None:
        if not updates:
            return
        moved = sum(u.count - u.unchanged for u in updates)
        if moved > 0.01 * sum(u.count for u in updates):
            self.has_moved = True
            return
        self._still += 1
        self._still_without_rate += all(u.lr == 0 for u in updates)
        self._rates.append(max(u.lr for u in updates))
        self._narrow_only = all(u.dtype in ("bfloat16", "float16") and u.lr for u in updates)

    def _look_for_unowned(self) -> None:
        """Trainable, with a gradient, in no optimizer: those that also do not move from look to look."""
        owned = self._owned()
        found: dict[str, Tensor] = {}
        for key, name in self._parameters.items():
            p = self._owners[key]() if key not in owned and name not in self._moves else None
            grad = None if p is None or not p.requires_grad else gradient_of(p)
            if p is None or grad is None or not is_readable(p):
                continue
            home = self._homes.get(key, lambda: None)()
            if home is not None and home.training and not is_sharded_whole(self._models):
                found[name] = p
        looked: dict[str, tuple[Tensor, int]] = {}
        for name, p in found.items():
            now, before = sample_of(p), self._unowned.get(name)
            if before is not None and not torch.equal(before[0], now):
                self._moves.add(name)
            else:
                looked[name] = (now, 1 if before is None else before[1] + 1)
        self._unowned = looked
        if any(times == 2 for _, times in looked.values()) and self._searches < MOST_SEARCHES:
            self._searches += 1
            for one in optimizers_alive():
                self._others.setdefault(id(one), weakref.ref(one))
            owned = self._owned()
            keys = {name: key for key, name in self._parameters.items()}
            self._unowned = {name: seen for name, seen in looked.items() if keys[name] not in owned}
        self._owns_nothing = owned.isdisjoint(self._parameters)

    def _owned(self) -> set[int]:
        references = [*(one.optimizer for one in self._known.values()), *self._others.values()]
        return {id(p) for reference in references if (o := reference()) is not None for p in parameters_of(o)}

    def _look_at_norms(self) -> None:
        """Running statistics that move in a stage that is frozen and stands still."""
        looked: dict[str, tuple[Tensor, Tensor, int]] = {}
        for model, prefix in self._models:
            for name, norm, weight in frozen_norms(unwrapped(model)):
                statistics, still = sample_of(norm.running_mean), sample_of(weight)
                before = self._norms.get(prefix + name)
                times = 0
                if before is not None and before[1].shape == still.shape and torch.equal(before[1], still):
                    times = before[2] + (not torch.equal(before[0], statistics))
                looked[prefix + name] = (statistics, still, times)
        self._norms = looked

    def _reaches(self, root: Tensor) -> bool:
        """Does the graph of this loss end in a parameter of ours?"""
        stack: list[Any] = [root.grad_fn]
        met: set[Any] = set()
        while stack and len(met) < LARGEST_GRAPH:
            node = stack.pop()
            if node is None or node in met:
                continue
            met.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and id(variable) in self._parameters:
                return True
            stack.extend(following for following, _ in node.next_functions)
        return False

    def _note_data(self, trace: StepTrace) -> None:
        """Which data set the model is trained on: the one whose last batch came in, or the only one."""
        for key, draws in self._draws.items():
            if draws.leaves & trace.root_inputs:
                self._trained_on = key

    # what did not hold

    def _breaches(self, record: StepRecord, trace: StepTrace | None) -> Iterator[Breach]:
        yield from self._of_movement(record)
        yield from self._of_gradients()
        yield from self._of_calls()
        yield from self._of_mode()
        yield from self._of_data()
        if trace is not None and self._meant:
            yield from self._of_precision(trace, self._meant, "autocast" if self.step.autocast else "scaler")

    def _of_movement(self, record: StepRecord) -> Iterator[Breach]:
        looks = max((times for _, times in self._unowned.values()), default=0)
        names = [name for name, (_, times) in self._unowned.items() if times > 1]
        if names and self._searches:
            nothing = self._owns_nothing
            yield self._breach("still" if nothing else "unowned", names, looks, self._total, ("others",) if nothing else ())
        rises = len(self._rates) > 1 and self._rates[-1] > self._rates[0]  # a warm-up is on its way
        if self._still and not self.has_moved and not self._narrow_only and not rises:
            traits = ("no_rate",) if self._still_without_rate == self._still else ()
            yield self._breach("still", [], self._still, self._total, traits)
        if self._frozen_moves:
            names = list(self._frozen_moves)
            yield self._breach("frozen_moves", names, max(self._frozen_moves.values()), self._looked)
        moving = [name for name, (_, _, times) in self._norms.items() if times]
        if moving:
            yield self._breach(
                "frozen_statistics", moving, max(self._norms[name][2] for name in moving), self._closely, of_parameters=False
            )
        if self.is_close and self.has_moved:
            said = list(said_frozen(self._models))
            if said:
                yield self._breach("said_frozen", said, self._total, self._total, of_parameters=False)

    def _of_gradients(self) -> Iterator[Breach]:
        unused_is_meant = any(getattr(model, "find_unused_parameters", False) for model, _ in self._models)
        if self._unconnected:
            yield self._breach("no_gradient", [], self._unconnected, self._looked, ("unconnected",))
        if unused_is_meant or not self._arrived:
            return
        kinds: dict[str, list[str]] = {}
        prefixes = tuple(prefix for _, prefix in self._models if prefix)
        own = {name for name in self._arrived if not name.startswith(prefixes)}  # of the model without a prefix
        for name, looks in self._missing.items():
            inside = name.rpartition(".")[0]
            site = inside or self._root_site
            kind = "ran" if site in self._ran else "without_grad" if site in self._ran_without_grad else "idle"
            chosen = any(name.startswith(f"{expert}.") for expert in self._experts)
            # else it is a bias that cancels out, or a parameter that is left over
            alone = not any(other.startswith(f"{inside}.") if inside else other in own for other in self._arrived)
            if looks >= self._closely and alone and not chosen:
                kinds.setdefault(kind, []).append(name)
        for kind, names in kinds.items():
            traits = (kind, "zero") if self._zero.intersection(names) else (kind,)
            yield self._breach("no_gradient", names, self._total, self._total, traits)

    @property
    def _root_site(self) -> str:
        return type(unwrapped(self._models[0][0])).__name__ if self._models else ""

    def _of_calls(self) -> Iterator[Breach]:
        for one in self._known.values():
            optimizer = one.optimizer()
            if one.uncleared and optimizer is not None:
                names = [self._parameters[id(p)] for p in parameters_of(optimizer) if id(p) in self._parameters]
                yield self._breach("uncleared", names, one.uncleared, one.steps, where=one.where)
        for times, trait in ((self._again, "again"), (self._empty, "empty"), (self._cleared, "cleared")):
            if times:
                yield self._breach("no_backward", [], times, self._looked, (trait,))
        if self._lost:
            never = not self._known
            if not never or self._has_optimizer():
                yield self._breach("no_step", [], self._lost, self._passes, ("never",) if never else ())

    def _has_optimizer(self) -> bool:
        """Is there one of these models that could have stepped?"""
        if not self._others and self._searches < MOST_SEARCHES:
            self._searches += 1
            self._others = {id(one): weakref.ref(one) for one in optimizers_alive()}
        return not self._owned().isdisjoint(self._parameters)

    def _of_mode(self) -> Iterator[Breach]:
        if not self._evaluates and not self._quiet_calls:
            return
        names = [prefix + n for model, prefix in self._models for n in changed_by_mode(unwrapped(model))]
        if not names:
            return
        trains_all = all(p.requires_grad for model, _ in self._models for p in model.parameters())
        homes = {home for key in self._parameters if (home := self._homes.get(key, lambda: None)()) is not None}
        if self._evaluates and trains_all and not any(home.training for home in homes):
            yield self._breach("evaluation_mode", names, self._evaluates, self._total, of_parameters=False)
        if self._quiet_calls:
            yield self._breach(
                "training_mode", names, self._quiet_calls, self.position, (f"{self._quiet_steps}",), of_parameters=False
            )

    def _of_data(self) -> Iterator[Breach]:
        key = self._trained_on or (next(iter(self._draws)) if len(self._draws) == 1 else 0)
        draws = self._draws.get(key)
        if draws is not None and draws.repeats and draws.batches != 1:
            yield Breach("same_batch", (), draws.batches, draws.repeats, draws.drawn, traits=(f"{draws.workers}",))

    def _of_precision(self, trace: StepTrace, meant: str, by: str) -> Iterator[Breach]:
        full = [name for name, (dtype, _) in trace.products.items() if dtype in ("float32", "float64")]
        low = len(trace.products) - len(full)
        if not full or (trace.low_elsewhere and not low):
            return
        weights = {name: elements for name, (_, elements) in trace.products.items()}
        share = sum(weights[name] for name in full) / max(sum(weights.values()), 1)
        if 2 * low < len(trace.products) and share > 0.5:
            traits = (by, meant, trace.products[full[0]][0])
            yield Breach("full_precision", tuple(full[:MOST_NAMES]), len(full), 1, len(trace.products), traits=traits)

    def _breach(
        self,
        kind: str,
        names: Sequence[str],
        steps: int,
        of: int,
        traits: tuple[str, ...] = (),
        where: str = "",
        of_parameters: bool = True,
    ) -> Breach:
        sizes = {self._parameters[key]: p.numel() for key, held in self._owners.items() if (p := held()) is not None}
        elements = sum(sizes.get(name, 0) for name in names) if of_parameters else 0
        return Breach(kind, tuple(names[:MOST_NAMES]), len(names), steps, of, elements, where or self._where, traits)

    def _setup(self) -> Setup:
        owned = self._owned()
        sizes = {key: p.numel() for key, held in self._owners.items() if (p := held()) is not None}
        trained = [key for key in sizes if key in owned and self._parameters[key] in self._arrived]
        modes = {model.training for model, _ in self._models}
        low = [dtype for dtype, _ in self._products.values() if dtype not in ("float32", "float64")]
        draws = self._draws.get(self._trained_on)
        return Setup(
            tensors=len(sizes),
            elements=sum(sizes.values()),
            trained=len(trained),
            trained_elements=sum(sizes[key] for key in trained),
            training=modes.pop() if len(modes) == 1 else None,
            modules=len(self._products),
            low_modules=len(low),
            low=max(set(low), key=low.count) if low else "",
            meant=self._meant,
            batch="" if draws is None else f"{draws.last:x}",
        )


class Draws:
    """The batches that came from one data set."""

    def __init__(self) -> None:
        self.drawn = self.repeats = self.workers = 0
        self.batches = 0  # of one pass; 0: not known
        self.last = 0
        self.leaves: set[int] = set()
        self._before: list[int] = []
        self._run = 0

    def add(self, iterator: Any, batch: Any) -> None:
        self.workers = int(getattr(iterator, "_num_workers", 0))
        self.batches = _batches_of(iterator)
        sums = fingerprints(batch)
        if not sums:
            return
        self.drawn += 1
        self.leaves, self.last = set(sums), hash(tuple(sums)) & 0xFFFFFFFFFFFF
        # workers that draw alike give the same batch one after the other: 2 of 2, then the next
        if self.last in self._before:
            self._run += 1
            self.repeats = self._run
        elif len(self._before) == max(self.workers, 1) and not self._new_round():
            self._run = self.repeats = 0
        self._before = [*self._before, self.last][-max(self.workers, 1) :]

    def _new_round(self) -> bool:
        """All workers have given this one, and it is the next one's turn."""
        return self.workers > 1 and len(set(self._before)) == 1


def _batches_of(iterator: Any) -> int:
    """Of one pass; 0: not known. A sampler of the program is not asked: some draw their batches to answer."""
    asked: Any = getattr(iterator, "_index_sampler", None)
    sampler = asked
    while sampler is not None:
        if not getattr(getattr(type(sampler), "__len__", None), "__module__", "").startswith("torch."):
            return 0 if getattr(iterator, "_num_yielded", 0) > 1 else 1
        sampler = getattr(sampler, "sampler", None)
    try:
        return len(asked)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


def sample_of(tensor: Tensor) -> Tensor:
    return thin(as_line(tensor), SAMPLE).clone()


def gradient_sample(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([thin(as_line(g), SAMPLE).float() for p in parameters if (g := gradient_of(p)) is not None])


def are_nonzero(tensors: Sequence[Tensor]) -> list[bool]:
    return [bool(as_line(t).any()) for t in tensors]


def any_nonzero(tensors: Iterable[Tensor]) -> bool:
    return any(bool(as_line(t).any()) for t in tensors)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizers_alive() -> list[Optimizer]:
    """Everything that Python holds is gone through: only where a parameter seems to have none."""
    return [one for one in gc.get_objects() if issubclass(type(one), Optimizer) and hasattr(one, "param_groups")]


def is_sharded_whole(models: Sequence[tuple[nn.Module, str]]) -> bool:
    """FSDP of the first kind keeps parameters in flat ones of its own."""
    return any(type(m).__name__ == "FullyShardedDataParallel" for model, _ in models for m in model.modules())


def frozen_norms(model: nn.Module) -> Iterator[tuple[str, Any, Tensor]]:
    """Norms in train mode within a stage whose weights are all frozen, and one of these weights."""
    for name, module in model.named_modules():
        if not isinstance(module, _NormBase) or not module.training or module.running_mean is None or not name:
            continue
        if module.momentum is None or any(p.requires_grad for p in module.parameters()):
            continue
        stage = model.get_submodule(name.rpartition(".")[0])
        own = {id(p) for p in module.parameters()}
        weights = [p for p in stage.parameters() if id(p) not in own and p.dim() > 1]
        if weights and not any(p.requires_grad for p in stage.parameters()):
            yield f"{name}.running_mean", module, weights[0]


def changed_by_mode(model: nn.Module) -> list[str]:
    """Modules that compute something else in evaluation mode: dropout, norms with running statistics."""
    return [
        name
        for name, m in model.named_modules()
        if (isinstance(m, _DropoutNd) and m.p > 0)
        or (isinstance(m, _NormBase) and m.track_running_stats and m.momentum is not None)
    ]


def said_frozen(models: Sequence[tuple[nn.Module, str]]) -> Iterator[str]:
    """Parts that were told to be frozen in a way that does nothing: an attribute that torch does not know."""
    for model, prefix in models:
        inner = unwrapped(model)
        for name, module in inner.named_modules():
            if module.__dict__.get("requires_grad") is False and any(p.requires_grad for p in module.parameters()):
                yield prefix + name
        for name, p in inner.named_parameters():
            if p.requires_grad and any(getattr(p, "__dict__", {}).get(word) is False for word in SAID_FROZEN):
                yield prefix + name


def experts_of(models: Sequence[tuple[nn.Module, str]], trace: StepTrace) -> Iterator[str]:
    """Members of a list of alike modules that did not run, or on nothing, or on what another got: one of many is chosen."""
    for model, prefix in models:
        for name, group in unwrapped(model).named_modules():
            if not isinstance(group, (nn.ModuleList, nn.ModuleDict)):
                continue
            members = {f"{prefix}{name}.{key}" if name else f"{prefix}{key}": child for key, child in group.named_children()}
            for path, child in members.items():
                alike = [other for other, sibling in members.items() if other != path and type(sibling) is type(child)]
                given = _given(path, trace)
                if alike and (given is None or given[1] == 0 or any(_given(other, trace) == given for other in alike)):
                    yield path
            parent = name.rpartition(".")[0]
            for key, child in unwrapped(model).get_submodule(parent).named_children():
                if isinstance(child, nn.Linear) and child.out_features == len(members) > 1:  # it chooses among them
                    yield prefix + (f"{parent}.{key}" if parent else key)


def _given(path: str, trace: StepTrace) -> tuple[int, int] | None:
    """Identity and size of the first tensor that a module, or what is in it, was called with."""
    return next((what for site, what in trace.given.items() if site == path or site.startswith(f"{path}.")), None)
