"""What the models are trained on: batches that come from a DataLoader, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.step import Breach
from ...watch import op_stream
from ...watch.calls import ModelCall
from ...watch.op_stream import Op
from ...watch.storages import StorageMap
from ...watch.tensors import tensors_in
from ..trace import StepTrace, fingerprints
from .watched import Watched, Written, are_unwritten, versions_of

SUSPICIOUS = 12  # steps with the same numbers in new tensors, until somebody looks where they come from
MOST_LOOKS = 3
SETTLED = 8  # steps
SMALL_PART = 8  # a slice of less than this part of its memory is a batch, not a data set


class Batches:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._draws: dict[int, Draws] = {}  # by data set
        self._trained_on = 0
        self.given = Given()

    def drawn(self, iterator: Any, batch: Any) -> None:
        if self._watched.is_early or self._watched.position < 0:
            self._draws.setdefault(id(iterator._dataset), Draws()).add(iterator, batch)

    def traced(self, trace: StepTrace) -> None:
        """Which data set the model is trained on: the one whose last batch came in, or the only one."""
        for key, draws in self._draws.items():
            if draws.leaves & trace.root_inputs:
                self._trained_on = key

    @property
    def checksum(self) -> str:
        """Of the last batch that was trained on."""
        draws = self._draws.get(self._trained_on)
        last = self.given.last if draws is None else draws.last
        return f"{last:x}" if last else ""

    def breaches(self) -> Iterator[Breach]:
        key = self._trained_on or (next(iter(self._draws)) if len(self._draws) == 1 else 0)
        draws = self._draws.get(key)
        if draws is not None and draws.repeats and draws.batches != 1:
            yield Breach("same_batch", (), draws.batches, draws.repeats, draws.drawn, traits=(f"{draws.workers}",))
        elif not self._draws and self.given.origin:
            yield Breach("same_batch", (), 0, self.given.repeats + 1, self.given.steps, traits=("0", self.given.origin))


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
        self.batches = batches_of(iterator)
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


def batches_of(iterator: Any) -> int:
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


class Given:
    """What the models were called with before each backward pass: tensors made anew, with the numbers of the step before.

    One tensor that is kept is meant (a whole data set, one batch to see whether a model can learn), and so may be one that is
    made anew by rule (a grid, a mask). What is drawn at random is not, and no small slice of something larger.
    """

    def __init__(self) -> None:
        self.repeats = self.steps = 0
        self.origin = ""  # drawn, slice: where the same numbers came from at each step
        self.last = 0
        self._before: Written = ()
        self._looks = 0
        self._read: list[tuple[int, ...]] = []
        self._source: RandomSource | None = None
        self.must_end = False

    def add(self, made: Sequence[ModelCall]) -> None:
        given = [t for call in made for t in call.passed][:4]
        sums = fingerprints(given)
        if not sums or len(sums) < len(given):
            return
        self.steps += 1
        same = hash(tuple(sums)) & 0xFFFFFFFFFFFF == self.last
        self.repeats = self.repeats + 1 if same and not are_unwritten(given, self._before) else 0
        self.last = hash(tuple(sums)) & 0xFFFFFFFFFFFF
        self._before = versions_of(given)
        if not self.repeats:
            self.origin = ""
        elif self.repeats >= SUSPICIOUS and not self.origin and _is_small_slice(given):
            self.origin = "slice"

    @property
    def is_open(self) -> bool:
        """Batches that differ are not asked about again."""
        return self.repeats > 0 or self.steps < SETTLED

    # where they come from: between the end of a step and the next backward pass

    @property
    def wants_look(self) -> bool:
        return self.repeats >= SUSPICIOUS and not self.origin and self._source is None and self._looks < MOST_LOOKS

    def look(self) -> None:
        self._looks += 1
        if not torch._C._len_torch_dispatch_stack() and op_stream.may_change_modes():
            self._source = RandomSource(self.end_look)
            op_stream.join(self._source)

    def looked(self, made: Sequence[ModelCall]) -> None:
        source = self._source
        self.end_look()
        if source is None or not self.repeats:
            return
        self._read.append(tuple(source.read))
        is_drawn = any(source.is_random(t) for call in made for t in call.inputs)
        if is_drawn or (source.read and len(self._read) == MOST_LOOKS and len(set(self._read)) == 1):
            self.origin = "drawn"

    @property
    def is_looking(self) -> bool:
        return self._source is not None

    def end_look(self, *_: Any) -> None:
        if op_stream.is_set_aside():  # what is off for a moment cannot be taken away: `recorder.run` does it behind that
            self.must_end = True
            return
        source, self._source = self._source, None
        self.must_end = False
        if source is not None:
            op_stream.leave(source)


class RandomSource:
    """Follows random numbers from where they are drawn into whatever is made of them."""

    def __init__(self, on_trouble: Callable[[Any], None]) -> None:
        self.on_trouble: Callable[[Any], None] | None = on_trouble
        self._random: StorageMap[bool] = StorageMap()
        self.read: list[int] = []  # by the host, which may make anything of them

    def before(self, op: Op) -> bool:
        return True

    def after(self, op: Op, state: Any) -> None:
        is_random = torch.Tag.nondeterministic_seeded in op.func.tags
        if is_random or any(self.is_random(t) for t in op.inputs):
            if op.name == "_local_scalar_dense":
                self.read += fingerprints(op.inputs)
            for tensor in tensors_in(op.out):
                self._random.put(tensor, True)

    def passed_by(self, op: Op) -> None:
        pass

    def is_random(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and bool(self._random.find(tensor))


def _is_small_slice(given: Sequence[Tensor]) -> bool:
    """A few rows of something that has many more."""
    parts = [t for t in given if t.dim() > 0]
    return bool(parts) and all(t._base is not None and _is_few_of(t, t._base) for t in parts)


def _is_few_of(part: Tensor, whole: Tensor) -> bool:
    if whole.shape[1:] == part.shape:  # one of a stack of batches
        return len(whole) >= SMALL_PART
    return whole.shape[1:] == part.shape[1:] and len(whole) >= SMALL_PART * len(part)
