"""Who moves: steps that change nothing, parameters that no optimizer has, and what moves although it is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ...core.step import Breach, Update
from ...measure.transfer import PendingRead
from ...watch.names import unwrap
from ...watch.optimizers import lr_of
from ...watch.tensors import gradient_of, is_readable
from ..updates import UpdateProbe
from .watched import EVERY, Watched, leaves_of, sample_of

MOST_FROZEN = 32
COLLAPSED = 1e-3  # of the highest learning rate: whether weights still move is asked again
SAID_FROZEN = ("require_grad", "require_grads", "requires_grads", "trainable")  # what does nothing on a parameter


class Movement:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.has_moved = False
        self._probed: list[tuple[UpdateProbe, PendingRead]] = []  # on their way to the host
        self._still = 0  # looks at steps that moved nothing
        self._still_without_rate = self._still_without_gradient = 0
        self._rates: list[float] = []
        self._narrow_only = False
        self._nearly = False  # a few elements did move, which were about 0
        self._stop = Standstill(watched)
        self._unowned: dict[str, tuple[Tensor, Tensor, int]] = {}  # the weight, its gradient, looks
        self._reached: set[int] = set()  # parameters in which the losses of this step end
        self._owns_nothing = False  # no optimizer has any parameter of ours
        self._moves: set[str] = set()  # although no optimizer has it
        self._frozen: list[tuple[str, Tensor, Tensor]] = []
        self._frozen_moves: dict[str, int] = {}
        self._norms: dict[str, tuple[Tensor, Tensor, int]] = {}
        self._looks_at_norms = 0

    def begin(self) -> None:
        self._frozen = []
        self._reached = set()
        self._stop.begin()

    def before_backward(self, root: Tensor) -> None:
        if self._watched.is_close and self._watched.parameters.keys() - self._watched.owned_ids():
            self._reached |= leaves_of(root, self._watched.parameters)

    def before_update(self, optimizer: Optimizer, mine: list[Tensor]) -> None:
        self._stop.before_update(optimizer)
        if self._watched.is_due or self._frozen_moves:
            self._look_at_frozen(mine)

    def after_step(self) -> None:
        for name, p, before in self._frozen:
            if not torch.equal(before, sample_of(p)):
                self._frozen_moves[name] = self._frozen_moves.get(name, 0) + 1
        self._frozen = []

    @property
    def wants_probe(self) -> bool:
        return self._stop.wants_probe if self.has_moved else self._watched.is_close

    def late(self) -> Iterator[Breach]:
        """Late in a run: what moves no more, and what was frozen and has moved for the second time."""
        yield from self._stop.breaches()
        if max(self._frozen_moves.values(), default=0) == 2:
            yield from self.of_frozen()

    def probed(self, probes: Sequence[UpdateProbe]) -> None:
        if probes:
            self._probed = [(probe, probe.start_read()) for probe in probes]
        if self._probed and all(read.ready() for _, read in self._probed):
            self._look_at_updates([u for probe, read in self._probed for u in probe.updates(read)])
            self._probed = []

    def _look_at_updates(self, every: Sequence[Update]) -> None:
        updates = [u for u in every if u.count]
        moved = sum(u.count - u.unchanged for u in updates)
        narrow_only = bool(updates) and all(u.may_be_lost for u in updates)
        moves = moved > 0.01 * sum(u.count for u in updates) or (not updates and any(u.update_rms for u in every))
        if self.has_moved:
            self._stop.looked(moves or narrow_only or not updates, moved > 0)
        elif moves:
            self.has_moved = True
        elif every:
            self._still += 1
            self._still_without_rate += all(u.lr == 0 for u in every)
            self._still_without_gradient += not updates  # there was one when it was measured, or the rule is silent
            self._rates.append(max(u.lr for u in every))
            self._narrow_only = narrow_only
            self._nearly |= moved > 0

    def look_for_unowned(self) -> None:
        """Trainable, with a gradient that is new at each look, in no optimizer: those that also do not move from look to look."""
        watched = self._watched
        owned = watched.owned_ids()
        looked: dict[str, tuple[Tensor, Tensor, int]] = {}
        for key, name in watched.parameters.items():
            p = watched.owners[key]() if key not in owned and name not in self._moves else None
            grad = None if p is None or not p.requires_grad else gradient_of(p)
            if p is None or grad is None or not is_readable(p) or not is_readable(grad):
                continue
            home = watched.home_of(key)
            if home is None or not home.training or is_sharded_whole(watched.models):
                continue
            now, arrived, before = sample_of(p), sample_of(grad), self._unowned.get(name)
            if before is not None and not torch.equal(before[0], now):
                self._moves.add(name)
            elif before is not None and key not in self._reached and torch.equal(before[1], arrived):
                looked[name] = before  # nothing came: its part of the program is over
            else:
                looked[name] = (now, arrived, 1 if before is None else before[2] + 1)
        self._unowned = looked
        if any(times == 2 for *_, times in looked.values()):
            watched.search()
            owned = watched.owned_ids()
            keys = {name: key for key, name in watched.parameters.items()}
            self._unowned = {name: seen for name, seen in looked.items() if keys[name] not in owned}
        self._owns_nothing = owned.isdisjoint(watched.parameters)
        if self._owns_nothing and looked and watched.has_masters():
            self._unowned = {}

    def _look_at_frozen(self, mine: list[Tensor]) -> None:
        frozen = [p for p in mine if not p.requires_grad and is_readable(p)]
        if not frozen or len(frozen) == len(mine):
            return
        frozen.sort(key=lambda p: gradient_of(p) is None)
        if self._watched.is_close or gradient_of(frozen[0]) is not None:
            self._frozen = [(self._watched.parameters[id(p)], p, sample_of(p)) for p in frozen[:MOST_FROZEN]]

    def look_at_norms(self) -> None:
        """Running statistics that move in a stage that is frozen and stands still."""
        self._looks_at_norms += 1
        looked: dict[str, tuple[Tensor, Tensor, int]] = {}
        for model, prefix in self._watched.models:
            for name, norm, weight in frozen_norms(unwrap(model)):
                statistics, still = sample_of(norm.running_mean), sample_of(weight)
                before = self._norms.get(prefix + name)
                times = 0
                if before is not None and before[1].shape == still.shape and torch.equal(before[1], still):
                    times = before[2] + (not torch.equal(before[0], statistics))
                looked[prefix + name] = (statistics, still, times)
        self._norms = looked

    def breaches(self) -> Iterator[Breach]:
        watched = self._watched
        looks = max((times for *_, times in self._unowned.values()), default=0)
        names = [name for name, (*_, times) in self._unowned.items() if times > 1]
        if names and watched.searches:
            nothing = self._owns_nothing
            yield watched.breach("still" if nothing else "unowned", names, looks, watched.total, ("others",) if nothing else ())
        rises = len(self._rates) > 1 and self._rates[-1] > self._rates[0]  # a warm-up is on its way
        if self._still and not self.has_moved and not (self._narrow_only and self._nearly):
            traits = {
                "no_rate": self._still_without_rate == self._still,
                "cleared": self._still_without_gradient == self._still,
                "rises": rises,
                "nearly": self._nearly,
                "narrow": self._narrow_only,
            }
            yield watched.breach(
                "still", [], self._still, watched.total, tuple(trait for trait, is_so in traits.items() if is_so)
            )
        yield from self._stop.breaches()
        yield from self.of_frozen()
        moving = [name for name, (_, _, times) in self._norms.items() if times]
        if moving:
            times = max(self._norms[name][2] for name in moving)
            yield watched.breach("frozen_statistics", moving, times, self._looks_at_norms, of_parameters=False)
        if watched.is_close and self.has_moved:
            said = list(said_frozen(watched.models))
            if said:
                yield watched.breach("said_frozen", said, watched.total, watched.total, of_parameters=False)

    def of_frozen(self) -> Iterator[Breach]:
        if self._frozen_moves:
            names, times = list(self._frozen_moves), max(self._frozen_moves.values())
            yield self._watched.breach("frozen_moves", names, times, self._watched.total)


class Standstill:
    """Steps that move nothing although the ones before did: a schedule that has come to 0, or close to it, and stays there.

    Only a learning rate that has collapsed is a reason to look: a model that has converged may stand still by itself.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._highest = self._last = 0.0  # learning rates
        self._high_at = -1  # the last step of the run at which one was not low
        self._is_low = False  # so are those of all optimizers that stepped in this step of the run
        self._since: int | None = None  # optimizer steps before the first that moved nothing
        self._low_since: int | None = None  # optimizer steps before the rates were low, for good
        self._told_low = False
        self._nearly = False
        self._moves_all_the_same = False
        self.has_news = False

    def begin(self) -> None:
        self.has_news = self._is_low = False

    def before_update(self, optimizer: Optimizer) -> None:
        rates = (lr_of(group) for group in optimizer.param_groups)
        if all(rate <= COLLAPSED * self._highest for rate in rates):
            self._is_low = self._is_low or self._high_at != self._watched.position
            self._low_since = self._watched.total - 1 if self._low_since is None else self._low_since
            return
        first = lr_of(optimizer.param_groups[0])
        self._highest, self._last = max(self._highest, first), first
        self._high_at, self._is_low, self._since, self._moves_all_the_same = self._watched.position, False, None, False
        self._low_since = None

    @property
    def wants_probe(self) -> bool:
        watched = self._watched
        is_new = not self._moves_all_the_same and (self._since is None or watched.total - self._since <= EVERY)
        return self._is_low and (is_new or watched.position % EVERY == 0)

    def looked(self, moves: bool, nearly: bool) -> None:
        self.has_news, self._moves_all_the_same = not moves, moves
        self._nearly = nearly or (self._nearly and self._since is not None)
        self._since = None if moves else self._watched.total - 1 if self._since is None else self._since

    def breaches(self) -> Iterator[Breach]:
        if self.has_news and self._since is not None:
            traits = {"sudden": self._last > 0.5 * self._highest, "nearly": self._nearly}
            steps = self._watched.total - self._since
            named = ("later", *(trait for trait, is_so in traits.items() if is_so))
            yield self._watched.breach("still", [], steps, self._since, named)
        elif self._low_since and not self._told_low and self._watched.total - self._low_since > max(self._low_since, EVERY):
            self._told_low = True
            yield self._watched.breach("still", [], self._watched.total - self._low_since, self._low_since, ("faded",))


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


def said_frozen(models: Sequence[tuple[nn.Module, str]]) -> Iterator[str]:
    """Parts that were told to be frozen in a way that does nothing: an attribute that torch does not know."""
    for model, prefix in models:
        said: dict[int, str] = {}
        for name, module in unwrap(model).named_modules():
            if module.__dict__.get("requires_grad") is False and any(p.requires_grad for p in module.parameters()):
                yield prefix + name
            for key, p in module._parameters.items():
                words = getattr(p, "__dict__", None)
                if words and p.requires_grad and any(words.get(word) is False for word in SAID_FROZEN):
                    said.setdefault(id(p), f"{prefix}{name}.{key}" if name else prefix + key)
        yield from said.values()
