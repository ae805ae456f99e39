"""Follows damage through a step: which operation made it, and where it arrived.

Every tensor that low precision reached has a tag beside its storage: how far it is from its FP32 twin, and which earlier
operation (suspect) is to blame for that. An operation whose inputs are close to their twins and whose output is not becomes a
suspect; one that only passes damage on inherits the blame; where the damage fades, so does the blame. At the end the tags of
loss, gradients and weights tell what each suspect did to them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..formats import format_of
from ..hazard_records import Operand, Suspect
from ..limits import Limits
from .beside import carried, key_of
from .damage_numbers import (
    EXACT,
    SPOILED,
    Extent,
    Level,
    absorption,
    bias_of,
    extent,
    family,
    flips,
    flush_numbers,
    level_of,
    lost_to_zero,
    operand_numbers,
    own_error,
    rms_of,
    scalars_in,
    tensors_in,
    tied_rows,
    whole_numbers_lost,
)
from .names import short_dtype
from .shadow import LOW, Operation, written_by
from .whereabouts import Spot

DECISIONS = frozenset(["argmax", "argmin", "topk", "sort", "argsort", "multinomial", "searchsorted", "bucketize", "kthvalue"])
ADDITIVE = frozenset(["add", "sub", "rsub", "sum", "cat", "stack", "mean"])
ADDITIONS = frozenset(["add", "sub"])
SELECTS = frozenset(["threshold_backward", "max_pool2d_with_indices_backward", "clamp", "where", "relu", "maximum", "minimum"])
LOSSES = frozenset(["nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss", "mse_loss", "smooth_l1_loss", "l1_loss"])
SOFTMAXES = frozenset(["softmax", "log_softmax", "safe_softmax"])
MATMULS = frozenset(["mm", "bmm", "addmm", "baddbmm"])
JUMP_SEEN = 2.0
PASSES_ON = frozenset(["to_copy", "clone", "copy", "detach", "alias", "expand", "contiguous"])  # the value stays the same
MAY_BE_WHOLE = frozenset(["to_copy", "arange", "cumsum", "linspace", "embedding", "add", "mul", "sum", "index", "copy", "stack"])
FILLS = frozenset(
    ["fill", "full", "full_like", "masked_fill", "where", "new_full", "scalar_tensor", "lift_fresh", "zeros", "ones"]
)
UNWRITTEN = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"])
_ANCESTORS = 48
_SWEEP_OPS = 256
_MOST_SUSPECTS = 4096


@dataclass(eq=False)
class Doing:
    """A suspect while the step runs."""

    trouble: str
    op: str
    spot: Spot
    order: int
    facts: dict[str, Any] = field(default_factory=dict)
    root: Doing | None = None
    met: dict[str, None] = field(default_factory=dict)  # in order
    reached: set[str] = field(default_factory=set)
    destroyed: bool = False
    destroyed_reference: bool = False
    energy: float = 0.0  # squared absolute error that arrived in gradients
    silenced: int = 0  # elements of gradients that are zero throughout because of it
    on_purpose: bool = False

    def meets(self, op: str) -> None:
        if op not in PASSES_ON:
            self.met[op] = None

    @property
    def jumped(self) -> bool:
        """It made its error itself; else a slowly growing one only became visible there."""
        made = self.facts.get("level", math.inf) >= JUMP_SEEN * self.facts.get("input_level", 0.0)
        return made and self.op not in SELECTS


@dataclass(frozen=True)
class Tag:
    """What is known of the values in a storage."""

    producer: str = ""
    source: tuple[str, str] = ("", "")  # role and name of what it is a copy of
    order: int = 0
    made: int = 0  # the operation that computed it, copies passed over
    choice: bool = False  # a decision, not a value
    of_gradient: bool = False  # computed from gradients in the loop's own code
    factor: float | None = None  # the number it was multiplied with
    level: float = 0.0
    error: float = 0.0
    origin: Doing | None = None  # to blame for the level
    bad: Doing | None = None  # to blame for NaN or infinities
    quiet: bool = False  # they are such as masks have
    reference_bad: Doing | None = None
    reference_quiet: bool = False
    zeros: Doing | None = None
    whole: Doing | None = None
    ancestors: frozenset[int] = frozenset()


class Tags:
    """By storage, for as long as it lives."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, Tag]] = {}
        self._new = 0

    def find(self, tensor: Tensor) -> Tag | None:
        held = self._held.get(key_of(tensor))
        if held is None:
            return None
        if held[0].expired():
            del self._held[key_of(tensor)]
            return None
        return held[1]

    def put(self, tensor: Tensor, tag: Tag) -> None:
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = (StorageWeakRef(storage), tag)
        self._new += 1
        if self._new > _SWEEP_OPS:
            self._new = 0
            for key in [key for key, (alive, _) in self._held.items() if alive.expired()]:
                del self._held[key]


class Follower:
    """`see` every operation of a step, in order."""

    def __init__(self, limits: Limits, twin_of: Callable[[Tensor], Tensor], roles: Mapping[int, tuple[str, str]]) -> None:
        self.limits = limits
        self.tags = Tags()
        self.suspects: list[Doing] = []
        self.order = 0
        self.low_dtype: torch.dtype | None = None
        self._twin_of = twin_of
        self._roles = roles
        self._names: list[str] = []
        self._lines: Counter[tuple[str, Any, int, str]] = Counter()
        self._last_at: dict[tuple[str, Any, int, str], int] = {}  # line -> the operation that ran there last
        self._purpose = Doing("purpose", "", _NOWHERE, -1, on_purpose=True)

    # what the rest of the sanitizer asks

    def unit_roundoff(self, dtype: torch.dtype) -> float:
        low = dtype if dtype in LOW else self.low_dtype
        return format_of(low).unit_roundoff if low is not None else 0.0

    def threshold(self, dtype: torch.dtype) -> float:
        return min(self.limits.rel_l2_warn_roundoffs * self.unit_roundoff(dtype), self.limits.diff_centred_warn)

    def graded(self, level: Level, dtype: torch.dtype) -> float:
        """The plain error, or the centred one brought to its scale."""
        coarse = self.unit_roundoff(dtype) * 2**8  # the centred limit is that of bf16
        return level.graded(self.threshold(dtype) / (self.limits.diff_centred_warn * coarse) if coarse else 0.0)

    # one operation

    def see(self, op: Operation, spot: Spot, overwritten: Mapping[int, Tensor]) -> None:
        """`overwritten`: values of low-precision tensors as they were before this operation wrote into them."""
        self.order += 1
        name = family(op.name)
        self._names.append(name)
        if op.is_view or name in UNWRITTEN:
            return
        outs, twins = self._results(op)
        inputs = [t for t in tensors_in((op.args, dict(op.kwargs))) if carried(t)]
        tags = [tag for t in inputs if (tag := self.tags.find(t)) is not None]
        concerned = op.twin_out is not op.out and any(o is not t for o, t in zip(outs, twins))
        if not concerned and not tags and not outs:
            return
        line = self._line(spot, name)
        step = _Step(op, name, spot, inputs, tags, overwritten, self._lines[line] + 1, self._last_at.get(line, -1))
        if concerned:
            self._lines[line] += 1
            if name not in PASSES_ON:
                self._last_at[line] = self.order
        for real, twin in zip(outs, twins):
            if real.is_floating_point():
                self._floating(step, real, twin)
            elif concerned and twin is not None and not real.is_complex() and real.numel():
                self._whole(step, real, twin)

    @staticmethod
    def _line(spot: Spot, name: str) -> tuple[str, Any, int, str]:
        return (spot.place.site, spot.code, spot.instruction, name)

    def _results(self, op: Operation) -> tuple[list[Tensor], list[Tensor | None]]:
        outs = [t for t in tensors_in(op.out) if carried(t)]
        if outs or op.out is not None:
            made = [t for t in tensors_in(op.twin_out) if carried(t)] if op.twin_out is not None else []
            return outs, [*made] if len(made) == len(outs) else [None] * len(outs)
        outs = [t for t in written_by(op.func, op.args, op.kwargs) if carried(t)]
        return outs, [self._twin_of(t) for t in outs]

    def _floating(self, step: _Step, real: Tensor, twin: Tensor | None) -> None:
        if real.dtype in LOW:
            self.low_dtype = real.dtype
        span = extent(real)
        same = twin is real
        wide = span if same or twin is None else extent(twin)
        if same and span.finite and not step.tags:
            return
        bad, quiet = self._badness(step, real, span, reference=False)
        if same:
            reference_bad, reference_quiet = bad, quiet
        else:
            reference_bad, reference_quiet = self._badness(step, twin if twin is not None else real, wide, reference=True)
        if bad is not None and not bad.on_purpose:
            self._settle(step, bad, real, twin, span, wide, reference_bad is not None)
        tag = Tag(
            producer=self._producer(step),
            source=self._role(step.inputs[0]) if step.name in PASSES_ON and step.inputs else ("", ""),
            order=self.order,
            made=self._made(step),
            factor=step.factor,
            of_gradient=step.spot.place.phase == "loop" and any(self._role(t)[0] == "gradient" for t in step.inputs),
            bad=bad,
            quiet=quiet,
            reference_bad=reference_bad,
            reference_quiet=reference_quiet,
            ancestors=self._ancestors(step),
            whole=next((t.whole for t in step.tags if t.whole is not None), None),
        )
        if not same and twin is not None and real.numel():
            tag = self._beside(step, real, twin, span, tag)
        self.tags.put(real, tag)

    # NaN and infinities

    def _badness(self, step: _Step, value: Tensor, span: Extent, reference: bool) -> tuple[Doing | None, bool]:
        if span.finite:
            return None, False
        inherited = [(t.reference_bad, t.reference_quiet) if reference else (t.bad, t.quiet) for t in step.tags]
        loud = [bad for bad, quiet in inherited if bad is not None and not quiet]
        if loud:
            return loud[0], False
        still = [bad for bad, quiet in inherited if bad is not None and quiet]
        if still and not span.nan and span.only_minus_infinity:
            return still[0], True
        overflowed = [bad for bad in still if not bad.on_purpose]
        if overflowed and (step.name not in SOFTMAXES or overflowed[0].op in MATMULS):
            return overflowed[0], False
        if any(math.isinf(s) for s in step.scalars) and step.name in FILLS and not span.nan:
            return self._purpose, True
        given = None if still else self._given(step)
        if given is not None:
            return given, given.on_purpose
        found = next((s for s in self.suspects[-4:] if s.order == self.order and s.trouble == "nonfinite"), None)
        if found is None:
            found = self._suspect(step, "nonfinite")
            found.root = self._root_of_nonfinite(step)
        return found, span.only_minus_infinity

    def _given(self, step: _Step) -> Doing | None:
        """An input that was not finite before any operation touched it."""
        for tensor in step.inputs:
            if not tensor.is_floating_point() or self.tags.find(tensor) is not None or id(tensor) in step.written:
                continue
            span = extent(tensor)
            if span.finite:
                continue
            role, name = self._roles.get(key_of(tensor), ("given", ""))
            if not span.nan and role in ("given", "buffer", "input") and span.high < math.inf:
                return self._purpose
            doing = self._suspect(step, "given")
            doing.facts |= {"operands": (Operand(role, name, nonfinite=True, dtype=short_dtype(tensor.dtype)),), "nan": span.nan}
            return doing
        return None

    def check_given(self, tensor: Tensor, role: str, name: str, spot: Spot) -> None:
        """Something from outside that is about to be added to."""
        span = extent(tensor)
        if span.finite:
            return
        doing = Doing("given", "add", spot, self.order)
        doing.facts = {"operands": (Operand(role, name, nonfinite=True, dtype=short_dtype(tensor.dtype)),), "nan": span.nan}
        self.suspects.append(doing)
        self.tags.put(tensor, Tag(order=self.order, bad=doing, reference_bad=doing))

    def _root_of_nonfinite(self, step: _Step) -> Doing | None:
        """Division by a number that flushed, the root of a variance that cancelled: the first producer is to blame."""
        for tag in step.tags:
            if tag.zeros is not None and step.name in _DIVIDES:
                return tag.zeros
        worst = max(step.tags, key=lambda t: t.level, default=None)
        return worst.origin if worst is not None and worst.origin is not None and worst.level >= _MOSTLY_WRONG else None

    def _settle(
        self, step: _Step, bad: Doing, real: Tensor, twin: Tensor | None, span: Extent, wide: Extent, in_reference: bool
    ) -> None:
        if bad.order != self.order:
            bad.meets(step.name)
            return
        if "share" in bad.facts:
            return
        finite = torch.isfinite(real)
        bad.facts |= {
            "share": 1 - float(finite.double().mean()),
            "count": real.numel(),
            "dtype": short_dtype(real.dtype),
            "nan": span.nan,
            "in_reference": in_reference,
            "reference_absmax": wide.absmax if wide.finite else math.inf,
            "reference_rms": rms_of(twin) if twin is not None else 0.0,
            "operands": self._operands(step),
        }
        first = [a for a in step.op.args[:2] if isinstance(a, Tensor)]
        if len(first) == 2 and first[0] is first[1]:
            bad.facts["numbers"] = {"of_itself": True}
        if step.name in SOFTMAXES and span.nan and isinstance(step.op.args[1], int):
            source = step.op.args[0]
            bad.facts["numbers"] = {
                "masked_rows": float((source == -math.inf).all(step.op.args[1]).double().mean()),
                "plus_infinity": bool((source == math.inf).any()),
                "nan_in": bool(source.isnan().any()),
            }

    # error beside the twin

    def _beside(self, step: _Step, real: Tensor, twin: Tensor, span: Extent, tag: Tag) -> Tag:
        if step.spot.place.phase == "optimizer" and real.dtype not in LOW:
            return tag
        spoiled = tag.bad is not None and tag.reference_bad is None and not tag.quiet
        level = SPOILED if spoiled else level_of(real, twin) if span.finite or tag.quiet else EXACT
        graded = self.graded(level, real.dtype)
        zeros = self._zeros(step, real, twin)
        whole = tag.whole or self._whole_numbers(step, real, twin)
        if real.dtype in LOW and step.name in ADDITIONS and step.spot.place.phase != "backward":
            self._absorbed(step, real)
        origin = None
        if spoiled:
            origin = tag.bad
        elif graded > self.threshold(real.dtype) / _FADES:
            origin = self._blame(step, real, twin, level, graded, whole)
        return replace(tag, level=graded, error=level.error, origin=origin, zeros=zeros, whole=whole)

    def _blame(self, step: _Step, real: Tensor, twin: Tensor, level: Level, graded: float, whole: Doing | None) -> Doing | None:
        given = [t for t in step.tags if t.origin is not None]
        for tag in given:
            assert tag.origin is not None
            tag.origin.meets(step.name)
            if tag.choice:
                tag.origin.met["target" if step.name in LOSSES else "choice"] = None
        if given:
            additive = step.name in ADDITIVE
            worst = max(given, key=lambda t: t.error if additive else t.level)
            passes_on = worst.level >= graded / _JUMP or (additive and worst.error >= level.error / _JUMP)
            if worst.origin is not None and (passes_on or worst.origin.jumped):
                return worst.origin
        if graded <= self.threshold(real.dtype):
            return None
        same = next((s for s in self.suspects[-4:] if s.order == self.order and s.trouble == "error"), None)
        return same or self._error_suspect(step, real, twin, level, graded, whole)

    def _error_suspect(self, step: _Step, real: Tensor, twin: Tensor, level: Level, graded: float, whole: Doing | None) -> Doing:
        doing = self._suspect(step, "error")
        doing.root = whole if whole is not None else self._zeros_behind(step)
        outs = [t for t in tensors_in(step.op.out) if t.is_floating_point()]
        seeded = torch.Tag.nondeterministic_seeded in step.op.func.tags
        numbers = flush_numbers(real, twin)
        numbers |= {"bias": b} if (b := bias_of(real, twin)) is not None else {}
        if step.name in ("sin", "cos") and step.inputs:
            numbers["phase_error"] = float((step.inputs[0].double() - self._twin_of(step.inputs[0]).double()).abs().median())
        doing.facts |= {
            "dtype": short_dtype(real.dtype),
            "count": real.numel(),
            "plain": level.plain,
            "centred": level.centred,
            "level": graded,
            "input_level": max((t.level for t in step.tags), default=0.0),
            "absmax": extent(real).absmax,
            "reference_absmax": extent(twin).absmax,
            "reference_rms": rms_of(twin),
            "own": None if step.written or seeded else own_error(step.op.func, step.op.args, step.op.kwargs, outs),
            "operands": self._operands(step),
            "numbers": numbers,
        }
        return doing

    @staticmethod
    def _zeros_behind(step: _Step) -> Doing | None:
        return next((t.zeros for t in step.tags if t.zeros is not None), None) if step.name in _DIVIDES else None

    def _zeros(self, step: _Step, real: Tensor, twin: Tensor) -> Doing | None:
        inherited = next((t.zeros for t in step.tags if t.zeros is not None), None)
        if (real.dtype not in LOW and inherited is None) or lost_to_zero(real, twin) <= 0:
            return None
        tiny = self._tiny_constant(step, real)
        if inherited is not None and tiny is None:
            return inherited
        doing = self._suspect(step, "zeros")
        doing.facts |= {"dtype": short_dtype(real.dtype), "count": real.numel(), "operands": self._named(step)}
        doing.facts["numbers"] = flush_numbers(real, twin) | ({"constant": tiny} if tiny is not None else {})
        return doing

    def _tiny_constant(self, step: _Step, real: Tensor) -> float | None:
        """A number given to protect from zero that is itself zero in this format."""
        if step.name not in _PROTECTS or real.dtype not in LOW:
            return None
        smallest = format_of(real.dtype).flush_at
        return next((s for s in step.scalars if 0 < abs(s) <= smallest), None)

    def _whole_numbers(self, step: _Step, real: Tensor, twin: Tensor) -> Doing | None:
        if real.dtype not in LOW or step.name not in MAY_BE_WHOLE or step.spot.place.phase == "backward":
            return None
        lost = whole_numbers_lost(real, twin)
        return None if lost is None else self._integers(step, real, lost)

    def _whole_numbers_cast(self, step: _Step) -> Doing | None:
        """Read back as integers: they were meant to be whole, whatever they were stored with."""
        source = step.inputs[0]
        lost = whole_numbers_lost(source, self._twin_of(source)) if source.dtype in LOW else None
        return None if lost is None else self._integers(step, source, lost)

    def _integers(self, step: _Step, real: Tensor, lost: dict[str, float]) -> Doing:
        doing = self._suspect(step, "integers")
        doing.facts |= {"dtype": short_dtype(real.dtype), "count": real.numel(), "share": lost["changed"], "numbers": lost}
        doing.facts["operands"] = self._named(step)
        return doing

    def _absorbed(self, step: _Step, real: Tensor) -> None:
        args = [a for a in step.op.args[:2] if isinstance(a, Tensor) and a.is_floating_point()]
        if len(args) < 2 or not carried(args[0]) or not carried(args[1]):
            return
        values = [step.overwritten.get(key_of(a), a) if id(a) in step.written else a for a in args]
        if any(id(a) in step.written and key_of(a) not in step.overwritten for a in args):
            return
        tags = [self.tags.find(a) or Tag() for a in args]
        for large, small in ((0, 1), (1, 0)):
            if values[large].shape != real.shape:
                continue
            sign = -1.0 if step.name == "sub" and small == 1 else 1.0
            alpha = float(step.op.kwargs.get("alpha", 1)) if small == 1 else 1.0
            lost = absorption(values[large], values[small].float() * (sign * alpha), real)
            if lost is None or lost.kept >= self.limits.damage_kept:
                continue
            doing = self._suspect(step, "absorbed")
            doing.facts |= {
                "dtype": short_dtype(real.dtype),
                "count": real.numel(),
                "share": lost.unchanged,
                "kept": lost.kept,
                "unchanged": lost.unchanged,
                "repeats": step.repeats if tags[large].made == step.previous else 1,
                "residual": tags[large].made in tags[small].ancestors and tags[large].made > 0,
                "operands": self._operands(step),
                "numbers": {"ratio": lost.ratio, "factor": tags[large].factor, "in_place": bool(step.written)},
            }
            return

    # decisions

    def _whole(self, step: _Step, real: Tensor, twin: Tensor) -> None:
        count = 0 if twin is real else flips(real, twin)
        if not count:
            return
        worst = max(step.tags, key=lambda t: t.level, default=None)
        origin = worst.origin if worst is not None else None
        if origin is not None:
            origin.meets(step.name)
        chooses = step.name in DECISIONS or step.name == "to_copy"
        if origin is None and (not (chooses or real.dtype == torch.bool) or step.spot.place.phase == "backward"):
            return
        if origin is None and step.name == "to_copy":
            origin = next((t.whole for t in step.tags if t.whole is not None), None) or self._whole_numbers_cast(step)
        if origin is None:
            origin = self._suspect(step, "decision")
            origin.facts |= {
                "dtype": short_dtype(step.inputs[0].dtype) if step.inputs else "",
                "count": real.numel(),
                "share": count / real.numel(),
                "input_level": worst.level if worst is not None else 0.0,
                "operands": self._named(step),
                "numbers": {"flips": count, "ties": self._ties(step)},
            }
        self.tags.put(
            real,
            Tag(self._producer(step), order=self.order, level=count / real.numel(), error=count, origin=origin, choice=chooses),
        )

    def _ties(self, step: _Step) -> float:
        if step.name not in ("argmax", "topk") or not step.inputs or not step.inputs[0].dim():
            return 0.0
        values, args = step.inputs[0], step.op.args
        if step.name == "topk":
            k, dim = int(args[1]), int(args[2]) if len(args) > 2 else -1
        else:
            k, dim = 1, int(args[1]) if len(args) > 1 and args[1] is not None else -1
        return tied_rows(values, self._twin_of(values), dim, k)

    # small things

    def _suspect(self, step: _Step, trouble: str) -> Doing:
        doing = Doing(trouble, step.name, step.spot, self.order)
        after = {self._names[o - 1] for t in step.tags for o in t.ancestors}
        doing.facts |= {"scalars": step.scalars, "after": frozenset(after), "repeats": step.repeats}
        doing.facts["differentiable"] = torch.is_grad_enabled()
        if len(self.suspects) < _MOST_SUSPECTS:
            self.suspects.append(doing)
        return doing

    def _producer(self, step: _Step) -> str:
        if step.name in PASSES_ON:
            source = next((self.tags.find(t) for t in step.inputs if t.is_floating_point()), None)
            return source.producer if source is not None else ""
        return step.name

    def _made(self, step: _Step) -> int:
        return step.tags[0].made if step.name in PASSES_ON and step.tags else self.order

    def _ancestors(self, step: _Step) -> frozenset[int]:
        if step.spot.place.phase == "backward":
            return frozenset()
        older = frozenset().union(*(t.ancestors for t in step.tags))
        if len(older) >= _ANCESTORS:
            older = frozenset(sorted(older)[-_ANCESTORS + 1 :])
        return older | {self.order}

    def _named(self, step: _Step) -> tuple[Operand, ...]:
        out = []
        for tensor in step.inputs[:4]:
            role, name = self._role(tensor)
            tag = self.tags.find(tensor)
            out.append(
                Operand(role, name, tag.producer if tag else "", short_dtype(tensor.dtype), level=tag.level if tag else 0.0)
            )
        return tuple(out)

    def _operands(self, step: _Step) -> tuple[Operand, ...]:
        """With their sizes; a tensor that was overwritten tells none."""
        return tuple(
            replace(operand, **({} if id(tensor) in step.written else operand_numbers(tensor)))
            for operand, tensor in zip(self._named(step), step.inputs)
        )

    def _role(self, tensor: Tensor) -> tuple[str, str]:
        known = self._roles.get(key_of(tensor))
        if known is not None:
            return known
        tag = self.tags.find(tensor)
        if tag is None:
            return "given", ""
        return ("gradient", "") if tag.of_gradient else tag.source


class _Step:
    """One operation with what is known of its inputs."""

    def __init__(
        self,
        op: Operation,
        name: str,
        spot: Spot,
        inputs: list[Tensor],
        tags: list[Tag],
        overwritten: Mapping[int, Tensor],
        repeats: int,
        previous: int,
    ) -> None:
        self.op, self.name, self.spot, self.inputs, self.tags = op, name, spot, inputs, tags
        self.overwritten, self.repeats, self.previous = overwritten, repeats, previous
        self.written = {id(t) for t in written_by(op.func, op.args, op.kwargs)}
        self.scalars = scalars_in(op.args, op.kwargs)

    @property
    def factor(self) -> float | None:
        return self.scalars[0] if self.name in ("mul", "lerp") and self.scalars else None


_FADES = 5.0  # blame is kept down to this part of the level at which it begins
_JUMP = 4.0  # an operation that makes an error this many times larger is the one to ask
_MOSTLY_WRONG = 0.5
_DIVIDES = frozenset(
    ["div", "reciprocal", "rsqrt", "log", "log2", "log10", "log1p", "logit", "pow", "addcdiv", "sqrt_backward", "mul", "div_"]
)
_PROTECTS = frozenset(["add", "clamp_min", "clamp", "maximum", "where", "sub", "rsub", "full", "fill", "masked_fill", "addcmul"])
_NOWHERE: Any = None


def suspects_of(doings: list[Doing], gradient_size: float, elements: int) -> tuple[Suspect, ...]:
    """As plain data. What broke because of an earlier suspect is told with that one."""
    then: dict[int, list[Doing]] = {}
    repeats: Counter[tuple[Any, ...]] = Counter()
    for doing in doings:
        key = _same_line(doing)
        repeats[key] = max(repeats[key], doing.facts.get("repeats", 1))
        root = _first(doing)
        if root is not doing:
            then.setdefault(id(root), []).append(doing)
            root.destroyed |= doing.destroyed
            root.destroyed_reference |= doing.destroyed_reference
            root.energy += doing.energy
            root.reached |= doing.reached
            root.silenced += doing.silenced
            root.met |= {doing.op: None, **doing.met}
    return tuple(
        Suspect(
            trouble=doing.trouble,
            op=doing.op,
            place=doing.spot.resolved(),
            order=doing.order,
            met=frozenset(doing.met),
            next=tuple(doing.met)[:3],
            then=tuple(f"{d.trouble}: {d.op}" for d in then.get(id(doing), [])[:8]),
            destroyed=doing.destroyed,
            reached=tuple(sorted(doing.reached)),
            consequence=math.inf if doing.destroyed else math.sqrt(doing.energy) / gradient_size if gradient_size else 0.0,
            silenced=doing.silenced / elements if elements else 0.0,
            **{**doing.facts, "repeats": repeats[_same_line(doing)]},
        )
        for doing in doings
        if _first(doing) is doing
    )


def _same_line(doing: Doing) -> tuple[Any, ...]:
    return (doing.trouble, doing.op, doing.spot.place.site, doing.spot.code, doing.spot.instruction)


def _first(doing: Doing) -> Doing:
    seen = 0
    while doing.root is not None and seen < 64:
        doing, seen = doing.root, seen + 1
    return doing
