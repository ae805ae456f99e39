"""What is known of the models under watch: their parameters, the modules that hold them, and every optimizer that was met."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.step import Breach
from ...measure import transfer
from ...measure.flatten import as_line, thin
from ...watch.names import Held, unwrap
from ...watch.optimizers import optimizers_alive, parameters_of
from ...watch.places import users_line
from ...watch.tensors import gradient_of, is_readable
from ..trace import version_of

EARLY = 64  # steps that are looked at one by one, of a run and of a model that comes in later
EVERY = 16  # steps after which what may change at any time is looked at again
FEW = 4  # parameters that stand for all of an optimizer
MOST_NAMES = 8  # of what is affected
MOST_SEARCHES = 3  # through everything that Python holds
SAMPLE = 64  # elements of a tensor
LARGEST_GRAPH = 20_000  # that is walked through
_TRAINS: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

Written = Sequence[tuple[weakref.ref[Tensor], int]]  # tensors, and how often each had been written to


def versions_of(tensors: Iterable[Tensor]) -> Written:
    return [(weakref.ref(t), version_of(t)) for t in tensors]


def are_unwritten(tensors: Sequence[Tensor], before: Written) -> bool:
    """The same tensors, not written since. An id would not tell: what comes after one may get its address."""
    return len(tensors) == len(before) and all(r() is t and was == version_of(t) for (r, was), t in zip(before, tensors))


@dataclass
class Stepping:
    """One optimizer of these models, and what came between its steps."""

    optimizer: weakref.ref[Optimizer]
    steps: int = 0
    backwards: int = 0  # since its last step
    in_closure: bool = False  # it is stepping, and what passes backward meanwhile is its closure's
    held: bool = False  # its gradients were there before each of these
    uncleared: int = 0  # steps in a row whose gradients held those of the step before
    gradients: Tensor | None = None  # a sample of those of its last step
    written: Written = ()  # which they were
    is_empty: bool = False  # it has stepped on no gradient after a backward pass
    where: str = ""


class Watched:
    def __init__(self) -> None:
        self.position = -1
        self.is_early = self.is_close = False
        self.models: Sequence[tuple[nn.Module, str]] = ()
        self.parameters: Mapping[int, str] = {}
        self.owners: Mapping[int, Held] = {}
        self.known: dict[int, Stepping] = {}  # optimizers that have stepped parameters of ours
        self.others: dict[int, weakref.ref[Optimizer]] = {}  # that hold none of our parameters, or have not stepped yet
        self.searches = 0
        self.total = 0  # steps of optimizers, ours or not
        self.where = ""
        self._homes: dict[int, weakref.ref[nn.Module]] = {}  # of parameters
        self._since = 0

    def know(self, models: Sequence[tuple[nn.Module, str]], parameters: Mapping[int, str], owners: Mapping[int, Held]) -> None:
        """Everything that has a name, whenever it was found anew. What is new to a run is looked at as a run that begins."""
        if parameters.keys() - self.parameters.keys():
            self._since = self.position + 1
            self.searches = 0
        self.models, self.parameters, self.owners = models, parameters, owners
        inner = [unwrap(model) for model, _ in models]
        self._homes = {id(p): weakref.ref(m) for model in inner for m in model.modules() for p in m._parameters.values()}

    def begin(self, traced: bool) -> None:
        self.position += 1
        age = self.position - self._since
        self.is_early = age < EARLY or traced
        self.is_close = traced or age < 4 or (age + 1) & age == 0

    @property
    def is_due(self) -> bool:
        """Time for a look at what may change later in a run."""
        return self.is_early or self.position % EVERY == 0

    def home_of(self, key: int) -> nn.Module | None:
        return self._homes.get(key, lambda: None)()

    def stepping(self, optimizer: Optimizer) -> Stepping:
        one = self.known.get(id(optimizer))
        if one is None or one.optimizer() is not optimizer:
            one = self.known[id(optimizer)] = Stepping(weakref.ref(optimizer))
        return one

    def trainable(self) -> list[Tensor]:
        return [p for held in self.owners.values() if (p := held()) is not None and p.requires_grad]

    def of_optimizer(self, one: Stepping) -> list[Tensor]:
        """Those of the models that it has, and that train."""
        optimizer = one.optimizer()
        return [] if optimizer is None else list(filter(_TRAINS, self.own_parameters(optimizer)))

    def own_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        every = parameters_of(optimizer)
        are_mine = all(map(self.parameters.__contains__, map(id, every)))  # in C: most often they all are
        return every if are_mine else [p for p in every if id(p) in self.parameters]

    def owned_ids(self) -> set[int]:
        return {id(p) for p in self._optimized_parameters()}

    def _optimized_parameters(self) -> list[Tensor]:
        references = [*(one.optimizer for one in self.known.values()), *self.others.values()]
        return [p for reference in references if (o := reference()) is not None for p in parameters_of(o)]

    def has_masters(self) -> bool:
        """Is there an optimizer of other tensors, of the shapes of ours, that get gradients? Then ours may be copies of them."""
        shapes = {p.shape for held in self.owners.values() if (p := held()) is not None}
        theirs = (p for p in self._optimized_parameters() if id(p) not in self.parameters)
        return any(p.shape in shapes and gradient_of(p) is not None for p in theirs)

    def search(self) -> None:
        """For optimizers that have not stepped yet."""
        if self.searches < MOST_SEARCHES:
            self.searches += 1
            for one in optimizers_alive():  # only where a parameter seems to have none
                self.others.setdefault(id(one), weakref.ref(one))

    def note_line(self) -> None:
        if self.is_close and not self.where:
            self.where = users_line()

    def breach(
        self,
        kind: str,
        names: Sequence[str],
        steps: int,
        of: int,
        traits: tuple[str, ...] = (),
        where: str = "",
        of_parameters: bool = True,
    ) -> Breach:
        elements = 0
        if names and of_parameters:
            wanted = set(names)
            held = (self.owners[key]() for key, name in self.parameters.items() if name in wanted)
            elements = sum(p.numel() for p in held if p is not None)
        return Breach(kind, tuple(names[:MOST_NAMES]), len(names), steps, of, elements, where or self.where, traits)


def few_of(parameters: Sequence[Tensor], few: int = 2 * FEW) -> Sequence[Tensor]:
    return parameters[:: max(1, len(parameters) // few)]


def sample_of(tensor: Tensor) -> Tensor:
    return thin(as_line(tensor), SAMPLE).clone()


def gradient_sample(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([thin(as_line(g), SAMPLE).float() for p in parameters if (g := gradient_of(p)) is not None])


def any_nonzero(tensors: Iterable[Tensor]) -> bool:
    return any(bool(as_line(t).any()) for t in tensors)


def any_gradient(parameters: Sequence[Tensor]) -> bool:
    found = [g for p in parameters if (g := gradient_of(p)) is not None]
    if any(not is_readable(g) or hasattr(g, "to_local") or not transfer.reads_freely(g.device) for g in found):
        return True  # sparse or sharded: it may be kept elsewhere
    return any_nonzero(found) if found else any(hasattr(p, "to_local") for p in parameters)


def leaves_of(root: Tensor, parameters: Mapping[int, str]) -> set[int]:
    """Those of these parameters in which the graph of a loss ends."""
    stack: list[Any] = [root.grad_fn]
    met: set[Any] = set()
    found: set[int] = set()
    while stack and len(met) < LARGEST_GRAPH:
        node = stack.pop()
        if node is None or node in met:
            continue
        met.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) in parameters:
            found.add(id(variable))
        stack.extend(following for following, _ in node.next_functions)
    return found
