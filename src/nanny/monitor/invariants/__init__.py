"""What holds in every sound loop, looked at while a run goes on: who owns, moves and clears what, in which mode and precision.

Nothing is judged here: a `Breach` says what did not hold and how often, and `rules/` say from when on that cannot be meant. The
first steps are looked at one by one, then ever more rarely, and at every traced step; what is proved right is not asked again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from ...core.step import Breach, Setup, StepRecord
from ...watch.calls import ModelCall
from ...watch.hooks import add_module_hook
from ...watch.names import unwrap
from ...watch.tensors import float_leaves, short_dtype
from ..trace import LOW, StepTrace
from .arrivals import Arrivals
from .batches import Batches
from .calls import Calls, ThisStep
from .movement import Movement
from .watched import MOST_NAMES, Watched


class Invariants:
    """Told by the recorder what happens; `finish` says what it makes of a step."""

    def __init__(self) -> None:
        self.step = ThisStep()
        self.watched = Watched()
        self.know = self.watched.know
        self._movement = Movement(self.watched)
        self._arrivals = Arrivals(self.watched)
        self._calls = Calls(self.watched)
        self._batches = Batches(self.watched)
        self.given = self._batches.given
        self.batch_drawn = self._batches.drawn
        self._between = Between()
        self._products: dict[str, tuple[str, int]] = {}
        self._meant = ""
        self._partly = ""  # by what the formats of the first step were meant, if only a part has them
        self._excludes = False  # the program switches autocast off where it wants to
        self._evaluates = 0
        self._quiet_steps = self._quiet_calls = 0
        self._is_quiet = False

    def begin(self, record: StepRecord, quiet_calls: int) -> None:
        self.watched.begin(record.traced)
        self.step = ThisStep()
        self._movement.begin()
        self._between.begin()
        self._is_quiet = quiet_calls > 0 and self.watched.position > 1
        if self._is_quiet:
            self._quiet_steps += 1
            self._quiet_calls += quiet_calls

    def before_backward(self, root: Tensor, made: Sequence[ModelCall]) -> None:
        watched = self.watched
        self._calls.before_backward(self.step, root, made)
        self._movement.before_backward(root)
        self.step.evaluates = bool(watched.models) and not any(model.training for model, _ in watched.models)
        if watched.is_close or (watched.is_early and self.given.is_open):
            self.given.add(made)

    def cleared(self, optimizer: Optimizer) -> None:
        self._calls.cleared(self.step, optimizer)

    def cleared_by_model(self, model: nn.Module) -> None:
        if self.watched.is_early:
            self._calls.cleared_by_model(self.step, model)

    def before_step(self, optimizer: Optimizer, mine: list[Tensor], has_closure: bool) -> None:
        watched = self.watched
        watched.total += 1
        watched.note_line()
        if not mine:
            self.step.other_optimizers += 1
            watched.others[id(optimizer)] = weakref.ref(optimizer)
        else:
            self._calls.before_step(self.step, watched.stepping(optimizer), mine, has_closure)

    def before_update(self, optimizer: Optimizer, mine: list[Tensor]) -> None:
        """The gradients are complete: behind the closure, where there is one."""
        watched = self.watched
        if mine:
            self._movement.before_update(optimizer, mine)
        if watched.is_close:
            self._movement.look_for_unowned()
            if mine:
                self._arrivals.look(mine)
                self._movement.look_at_norms()

    def before_scaler_step(self) -> None:
        self._calls.before_scaler_step(self.step)

    @property
    def wants_probe(self) -> bool:
        return self._movement.wants_probe

    def after_step(self) -> None:
        self._calls.after_step()
        self._movement.after_step()

    def autocast_entered(self, ended: bool) -> None:
        """`ended`: between two steps, where the next batch is made."""
        if self.watched.is_early and torch.is_grad_enabled():
            kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            entered = short_dtype(torch.get_autocast_dtype(kinds[0])) if kinds else ""
            self._excludes |= not kinds
            if ended:
                self._between.entered(entered)
            else:
                self.step.autocast = self.step.autocast or entered

    def finish(self, record: StepRecord, trace: StepTrace | None, scaled: bool, last: bool) -> None:
        """Fills in what was seen of the step."""
        step, watched = self.step, self.watched
        self._calls.count(step, record)
        self._evaluates = self._evaluates + 1 if step.evaluates and step.stepped else 0
        self._movement.probed([] if record.skipped else step.probes)
        if trace is not None:
            self._arrivals.traced(trace)
            record.experts = self._arrivals.experts
            self._batches.traced(trace)
            self._products = trace.products
            step.autocast = step.autocast or (trace.amp[1] if trace.amp is not None else "")  # entered before the step began
            self._meant = step.autocast or ("float16" if scaled else "")
        self._between.over(bool(step.autocast))
        record.breaches = tuple(self._breaches(trace, last))
        if watched.is_close and watched.models and (step.stepped or step.backwards):
            record.setup = self._setup()
        step.probes = []  # they hold parameters
        self._movement.begin()
        if last:
            self.close()

    def close(self) -> None:
        self._calls.close()
        self._between.begin()
        self.given.end_look()

    # what did not hold

    def _breaches(self, trace: StepTrace | None, last: bool) -> Iterator[Breach]:
        if self.watched.is_early:
            yield from self._movement.breaches()
            yield from self._arrivals.breaches()
            yield from self._calls.breaches(last)
            yield from self._batches.breaches()
            if trace is not None and self._meant and not (trace.low_elsewhere and not self._low()):
                by = "autocast" if self.step.autocast else "scaler"
                if self._low() and self.watched.position == 0:
                    self._partly = by  # who excludes a part from autocast may have done so before the first step was seen
                elif not (self._low() and self._excludes):
                    yield from self._of_precision(self._meant, by)
                if self.step.autocast and trace.in_threads:
                    ran = trace.in_threads
                    traits = ("thread", self._meant, self._products[ran[0]][0])
                    yield Breach("full_precision", tuple(ran[:MOST_NAMES]), len(ran), 1, len(self._products), traits=traits)
                elif self.step.autocast and not self._excludes:
                    yield from self._before_autocast(trace.outside)
            elif self._partly and self._meant:
                by, self._partly = self._partly, ""
                if not self._excludes:
                    yield from self._of_precision(self._meant, by)
            elif self._between.alone > 2 and not self._meant:
                yield from self._of_precision(self._between.format, "autocast")
        else:
            yield from self._movement.late()
            if self._calls.is_never and (last or self.watched.position % 64 == 0):
                yield from self._calls.of_never(last)
        if self.watched.is_early or self._evaluates or self._is_quiet:
            yield from self._of_mode()

    def _of_mode(self) -> Iterator[Breach]:
        watched = self.watched
        if not self._evaluates and not self._quiet_calls:
            return
        names = [prefix + n for model, prefix in watched.models for n in changed_by_mode(unwrap(model))]
        if not names:
            return
        trains_all = all(p.requires_grad for model, _ in watched.models for p in model.parameters())
        homes = {home for key in watched.parameters if (home := watched.home_of(key)) is not None}
        if self._evaluates and trains_all and not any(home.training for home in homes):
            yield watched.breach("evaluation_mode", names, self._evaluates, watched.total, of_parameters=False)
        if self._quiet_calls:
            yield watched.breach(
                "training_mode", names, self._quiet_calls, watched.position, (f"{self._quiet_steps}",), of_parameters=False
            )

    def _low(self) -> list[str]:
        return [dtype for dtype, _ in self._products.values() if dtype not in ("float32", "float64")]

    def _of_precision(self, meant: str, by: str) -> Iterator[Breach]:
        products = self._products
        full = [name for name, (dtype, _) in products.items() if dtype in ("float32", "float64")]
        elements = {name: count for name, (_, count) in products.items()}
        share = sum(elements[name] for name in full) / max(sum(elements.values()), 1)
        if full and 2 * len(full) > len(products) and share > 0.5:
            traits = (by, meant, products[full[0]][0])
            yield Breach("full_precision", tuple(full[:MOST_NAMES]), len(full), 1, len(products), traits=traits)

    def _before_autocast(self, outside: set[str]) -> Iterator[Breach]:
        """Layers that ran before the first one that is low. One that comes after it was given FP32 by somebody's own cast."""
        products = self._products
        formats = [dtype for dtype, _ in products.values()]
        first = next((i for i, dtype in enumerate(formats) if dtype not in ("float32", "float64")), 0)
        early = [name for name in list(products)[:first] if name in outside]
        share = sum(products[name][1] for name in early) / max(sum(count for _, count in products.values()), 1)
        if share > 0.1:
            traits = ("before", self._meant, formats[0])
            yield Breach("full_precision", tuple(early[:MOST_NAMES]), len(early), 1, len(products), traits=traits)

    def _setup(self) -> Setup:
        watched = self.watched
        owned = watched.owned_ids()
        sizes = {key: p.numel() for key, held in watched.owners.items() if (p := held()) is not None}
        trained = [key for key in sizes if key in owned and watched.parameters[key] in self._arrivals.arrived]
        modes = {model.training for model, _ in watched.models}
        low = self._low()
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
            batch=self._batches.checksum,
        )


class Between:
    """Autocast that is entered between two steps, with gradients on: around what makes the batch, unless a model runs there."""

    def __init__(self) -> None:
        self.format = ""
        self.alone = 0  # times that it was entered there and not in the step that followed, and nothing ran low
        self._entered = self._runs_low = self._was_entered = False
        self._unhook: Callable[[], Any] | None = None

    def entered(self, format: str) -> None:
        if format and not self._runs_low:
            self.format, self._entered = format, True
            if self._unhook is None:
                self._unhook = add_module_hook(register_module_forward_hook, self._after_forward)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._runs_low = self._runs_low or any(t.dtype in LOW for t in float_leaves(output))

    def begin(self) -> None:
        """The next step."""
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
        self._was_entered, self._entered = self._entered and not _is_autocast_on(), False  # else the model runs in it

    def over(self, entered_in_step: bool) -> None:
        self.alone = 0 if entered_in_step or self._runs_low else self.alone + self._was_entered


def _is_autocast_on() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def changed_by_mode(model: nn.Module) -> list[str]:
    """Modules that compute something else in evaluation mode: dropout, norms with running statistics."""
    return [
        name
        for name, m in model.named_modules()
        if (isinstance(m, _DropoutNd) and m.p > 0)
        or (isinstance(m, _NormBase) and m.track_running_stats and m.momentum is not None)
    ]
