"""Watches the operations of a run beside their references: types, decisions, whole numbers, unlike magnitudes, first NaN or Inf.

Runs inside the dispatch, once for every operation, so what costs a pass over the data is done only on request (`closely`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..core.formats import Format, format_of
from ..core.limits import Limits
from ..measure.errors import channel_contributions, compare, contribution_ratio, contributions
from ..watch.storages import StorageMap
from ..watch.tensors import LOW, float_leaves, has_storage, in_backward, short_dtype
from ..watch.twins import Operation, Twins
from .records import IntegerLoss, Mix, OpError, OpFault

# Decisions: their results pick, route or mask. Comparisons count apart from them.
DECISIONS = frozenset(["argmax", "argmin", "topk", "sort", "argsort", "multinomial", "searchsorted", "bucketize", "kthvalue"])
MAKES_INTEGERS = frozenset(["_to_copy", "arange", "cumsum", "linspace", "embedding", "add", "mul"])
_INTEGERS_LOOKED_AT = 4096
_MATMULS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}  # the two factors
_MOST_ERRORS = 256


class OpWatcher:
    """`place()` names the module that runs: "" the model's own code, `LOSS` what comes after it. `order()` counts ended calls."""

    def __init__(
        self, target: Format, limits: Limits, place: Callable[[], str], order: Callable[[], int], closely: bool = False
    ) -> None:
        self._target = target
        self._limits = limits
        self._place = place
        self._order = order
        self._closely = closely
        self.shadows: Twins
        self.operations: Counter[tuple[str, str, str]] = Counter()
        self.flops: Counter[str] = Counter()
        self.flips: dict[tuple[str, str], tuple[int, int]] = {}
        self.integers: dict[tuple[str, str], IntegerLoss] = {}
        self.mixes: dict[str, Mix] = {}
        self.faults: dict[tuple[str, bool], OpFault] = {}
        self.errors: list[OpError] = []
        self._makers: StorageMap[str] = StorageMap()  # the operation that filled a storage
        self.other_ways: Counter[str] = Counter()  # operations whose result sends Python code another way than in the reference

    def __call__(self, op: Operation) -> None:
        backward = in_backward()
        if op.is_view or (backward and not self._closely):
            return
        if op.name == "_local_scalar_dense":
            self._look_for_branch(op)
            return
        first, twin = _first_results(op)
        if first is None:
            return
        site = self._place()
        if not backward:
            self._count(op, site, first)
        if twin is None or op.twin_out is op.out:
            return
        if not backward:
            self._compare(op, site, first, twin)
        if self._closely and first.is_floating_point() and first.numel() and first.layout == torch.strided:
            name = self._maker(op, first)
            self._look_for_fault(op, name, site, first, twin, backward)
            self._keep_error(name, site, first, twin, backward)

    def _count(self, op: Operation, site: str, first: Tensor) -> None:
        self.operations[(site, op.name, short_dtype(first.dtype))] += 1
        formula = flop_registry.get(op.func.overloadpacket)
        if formula is not None:
            self.flops[site] += int(formula(*op.args, **op.kwargs, out_val=op.out))

    def _compare(self, op: Operation, site: str, first: Tensor, twin: Tensor) -> None:
        if first.dtype in LOW:
            if op.name in MAKES_INTEGERS:
                self._look_for_integers(op.name, site, first, twin)
            if op.name in _MATMULS or op.name == "convolution":
                self._look_for_mix(op, site)
        if op.name in DECISIONS or first.dtype == torch.bool:
            self._count_flips(op, site)

    def _look_for_branch(self, op: Operation) -> None:
        """A whole number or truth value that Python reads decides what runs next."""
        if isinstance(op.out, (bool, int)) and op.twin_out is not None and op.twin_out != op.out:
            self.other_ways[self._place()] += 1

    def _look_for_mix(self, op: Operation, site: str) -> None:
        if op.name == "convolution":
            sizes = channel_contributions(op.args[0], op.args[1], transposed=op.args[6], groups=op.args[8])
        else:
            left, right = _MATMULS[op.name]
            sizes = contributions(op.args[left], op.args[right])
        ratio, index = contribution_ratio(sizes) if sizes is not None else (1.0, 0)
        notable = self._limits.imbalance_notable_roundoffs / self._target.unit_roundoff
        if notable < ratio < math.inf and (site not in self.mixes or self.mixes[site].ratio < ratio):
            self.mixes[site] = Mix(site, op.name, ratio, index)

    def _maker(self, op: Operation, first: Tensor) -> str:
        """A cast only stores what another operation has made: that one is named."""
        source = op.args[0] if op.name == "_to_copy" else None
        name = (self._makers.find(source) if isinstance(source, Tensor) and has_storage(source) else None) or op.name
        if has_storage(first):
            self._makers.put(first, name)
        return name

    def _look_for_fault(self, op: Operation, name: str, site: str, first: Tensor, twin: Tensor, backward: bool) -> None:
        if (site, backward) in self.faults or _is_finite(first):
            return
        operands = list(float_leaves((op.args, dict(op.kwargs))))
        spoiled = ~torch.isfinite(first) & torch.isfinite(twin)
        if not bool(spoiled.any()) or not all(_is_finite(t) for t in operands):
            return
        reached = twin[torch.isfinite(twin)].abs()
        self.faults[(site, backward)] = OpFault(
            site=site,
            op=name,
            nan=bool(first.isnan().any()),
            reference_absmax=float(reached.max()),
            input_absmax=tuple(float(t.abs().max()) for t in operands),
            input_absmin=tuple(float(t.abs().min()) for t in operands),
            backward=backward,
        )

    def _keep_error(self, name: str, site: str, first: Tensor, twin: Tensor, backward: bool) -> None:
        """Tells the operations inside a module, the model's own code or the loss apart."""
        own = self.shadows.own_gradient(first) if backward else self.shadows.own_value(first)
        if own is None or len(self.errors) >= _MOST_ERRORS:
            return
        error = compare(own, twin, self._target, self._limits)
        plain = self._limits.rel_l2_warn_roundoffs * self._target.unit_roundoff
        if error.spoiled or 4 * error.rel_l2 > plain or 4 * (error.centred or 0.0) > self._limits.diff_centred_warn:
            self.errors.append(OpError(site, name, error.rel_l2, error.centred, error.spoiled, backward, self._order()))

    def _count_flips(self, op: Operation, site: str) -> None:
        reals = op.out if isinstance(op.out, (tuple, list)) else [op.out]
        twins = op.twin_out if isinstance(op.twin_out, (tuple, list)) else [op.twin_out]
        for real, twin in zip(reals, twins):
            if isinstance(real, Tensor) and not real.is_floating_point() and real.numel():
                flipped, count = self.flips.get((site, op.name), (0, 0))
                self.flips[(site, op.name)] = (flipped + int((real != twin).sum()), count + real.numel())

    def _look_for_integers(self, name: str, site: str, real: Tensor, twin: Tensor) -> None:
        line, wide = real.reshape(-1), twin.reshape(-1)
        step = max(line.numel() // _INTEGERS_LOOKED_AT, 1)
        wide = wide[::step]
        if not wide.numel() or not bool((wide[:64] == wide[:64].round()).all()):
            return
        largest = float(wide.abs().max())
        if largest <= format_of(real.dtype).exact_integers or not bool((wide == wide.round()).all()):
            return
        changed = float((line[::step].to(wide.dtype) != wide).double().mean())
        if changed and len(wide.unique()) > 2:
            self.integers.setdefault((site, name), IntegerLoss(site, name, largest, changed))


def _first_results(op: Operation) -> tuple[Tensor | None, Tensor | None]:
    """The first tensor that an operation gives, and its reference."""
    reals = op.out if isinstance(op.out, (tuple, list)) else [op.out]
    twins = op.twin_out if isinstance(op.twin_out, (tuple, list)) else [op.twin_out] * len(reals)
    return next(((r, t) for r, t in zip(reals, twins) if isinstance(r, Tensor)), (None, None))


def _is_finite(tensor: Any) -> bool:
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
