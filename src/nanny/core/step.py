"""What is known of a run and of one training step: `RunInfo`, `Site`, `Sample`, `StepRecord` and its parts.

Frozen and plain, without tensors: whatever judges, stores or shows works from these alone, so the same rule runs live, on a
stored run and on literals in a test. Nothing here imports torch or touches a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from .formats import HALVES, NARROW, format_of


@dataclass(frozen=True)
class RunInfo:
    """One training process, as it introduces itself to the store."""

    started: float
    argv: tuple[str, ...] = ()
    torch: str = ""
    world_size: int = 1
    rank: int = 0
    amp_dtype: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """A place that is measured. Its position among the sites of its kind is its column in every sample of that kind."""

    kind: str  # output, output_grad, weight, grad, update, buffer
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Numbers of all sites of one kind at one step: `stats` names the rows, each row is one float32 per site.

    The first row is always `count`; it is 0 for a site that was not measured at this step. Zero and non-finite values in
    the other rows are measured values. Sites met later than this step are simply not in it.
    """

    kind: str
    step: int
    stats: tuple[str, ...]
    data: bytes  # float32, little endian, stat-major: len(stats) rows of n sites
    histograms: bytes = b""  # uint16, little endian, n sites x formats.HISTOGRAM_BINS; empty if not taken

    @property
    def sites(self) -> int:
        return len(self.data) // (4 * len(self.stats)) if self.stats else 0


SAMPLE_STATS = ("count", "min", "max", "norm", "mean", "nan", "posinf", "neginf")
GRADIENT_STATS = ("count", "norm", "min", "max")  # what every step keeps of every gradient
UPDATE_STATS = ("count", "unchanged", "update_rms", "weight_rms")  # of the parameters, where an optimizer step was probed


@dataclass(frozen=True)
class SiteTable:
    """Host numbers of all sites of one kind at one step; every column has one entry per name, `count` 0 means not measured."""

    names: tuple[str, ...]
    columns: Mapping[str, Any]  # stat name -> numpy array
    dtypes: tuple[str, ...] = ()
    histograms: Any = None  # numpy [sites, HISTOGRAM_BINS]
    shapes: tuple[tuple[int, ...], ...] = ()

    # asked by many rules at every step, so found out once

    @cached_property
    def bad(self) -> tuple[str, ...]:
        """Sites that hold NaN or infinities."""
        import numpy as np  # a command that reads no run starts without it

        low, high, count = (np.asarray(self.columns[name]) for name in ("min", "max", "count"))
        if math.isfinite(float(low @ low + high @ high)):  # two calls that never warn; a number that overflows is looked at
            return ()
        return tuple(self.names[i] for i in np.flatnonzero((count > 0) & ~(np.isfinite(low) & np.isfinite(high))))

    @cached_property
    def whole_norm(self) -> float | None:
        """Of all sites together; None if none was measured."""
        import numpy as np

        norms, count = np.asarray(self.columns["norm"], dtype=np.float64), np.asarray(self.columns["count"])
        if not count.all():
            norms = norms[count > 0]
        return whole_norm(norms) if len(norms) else None

    @cached_property
    def elements(self) -> float:
        """That were measured, of all sites."""
        import numpy as np

        return float(np.asarray(self.columns["count"]).sum())

    @cached_property
    def weakest(self) -> float:
        """The largest magnitude of the site that has the smallest one; NaN if one holds NaN."""
        import numpy as np

        low, high = np.asarray(self.columns["min"]), np.asarray(self.columns["max"])
        return float(np.maximum(-low, high).min(initial=math.inf))

    @cached_property
    def are_all_live(self) -> bool:
        """Was every site measured, with a norm that is finite and not 0?"""
        import numpy as np

        norms = np.asarray(self.columns["norm"])
        return bool(np.asarray(self.columns["count"]).all() and norms.all() and norms.max(initial=0.0) < math.inf)


def whole_norm(norms: Any) -> float:
    return math.sqrt(float(norms @ norms))


@dataclass(frozen=True)
class BadCall:
    """A module call whose output was not finite, in the order of execution."""

    site: str
    module: str  # class name
    dtype: str
    nan: int
    posinf: int
    neginf: int
    count: int
    counted: bool = True  # False: nan, posinf and neginf only say whether there are any
    inputs_clean: bool | None = None  # neither NaN nor +Inf came in (-Inf is what masks are made of); None: could not be known
    has_parameters: bool = False
    bad_parameters: tuple[str, ...] = ()  # its own parameters that are not finite
    finite_absmax: float = 0.0  # largest finite magnitude in the output
    input_absmax: float = 0.0


@dataclass(frozen=True)
class Autopsy:
    """What autograd's graph tells about the first bad number of a forward pass that nobody traced."""

    op: str  # the operation that made it
    inside: str = ""  # a parameter that this operation itself uses
    after: str = ""  # the parameter nearest before it
    weight: str = ""  # the parameter that was itself bad
    from_data: bool = False  # bad before the first operation
    dtype: str = ""  # of the tensor in which it was seen
    nan: bool = True  # False: only infinities
    sure: bool = True  # False: the operation kept nothing to prove it; the bad number may have come from a little before
    size: float | None = None  # largest magnitude of the operation's result in FP32, where it could be computed again
    by_zero: bool = False  # a division, in FP32 or wider, by what is exactly 0
    takes_in: bool = False  # one of its operands has no maker in the graph: the batch, or what the program computed
    count: int = 0  # of the numbers that the operation gives, where that operand was taken in
    is_factor: bool = False  # it has no gradient, and the batch is not all that may be: the program computes such, too
    variable: str = ""  # of the program, that holds it, and the line that made it of finite numbers
    file: str = ""
    line: int | None = None
    source: str = ""


@dataclass(frozen=True)
class Growth:
    """A norm that grows by a factor in every call of a module (time steps) or in every layer, within one step."""

    direction: str  # forward, backward
    site: str  # the module that is called again and again, or the one that holds the layers
    unit: str  # calls, layers
    calls: int
    factor: float  # from the first to the last

    @property
    def each(self) -> float:
        return float(self.factor ** (1 / max(self.calls - 1, 1)))


@dataclass(frozen=True)
class Update:
    """What one optimizer step did to the parameters, by a sample of their elements."""

    name: str  # parameter
    dtype: str
    lr: float
    count: int  # sampled elements with a non-zero gradient
    unchanged: int  # of these, left bit-identical
    update_rms: float
    weight_rms: float

    @property
    def may_be_lost(self) -> bool:
        """Weights of 16 bits or less that were to move: those that did not were rounded back."""
        return self.dtype in NARROW and bool(self.count and self.lr)


def unchanged_share(updates: Sequence[Update]) -> float | None:
    """Of the weights of 16 bits or less that were to move; None if there are none."""
    narrow = [u for u in updates if u.may_be_lost]
    total = sum(u.count for u in narrow)
    return sum(u.unchanged for u in narrow) / total if total else None


@dataclass(frozen=True)
class OptimizerState:
    """Facts about one optimizer that decide how it rounds."""

    name: str  # class
    rounds_to_nearest: bool  # torch's own: no stochastic rounding, no hidden master copy
    fused: bool
    lr: float
    eps: float | None = None
    beta2: float | None = None
    param_dtype: str = ""  # the narrowest
    state_dtype: str = ""  # the narrowest of exp_avg_sq / momentum
    eps_ratio: float | None = None  # median sqrt(v_hat)/eps over elements with v > 0
    weight_decay: float = 0.0
    decoupled: bool = False  # the decay is p *= 1 - lr * weight_decay, as in AdamW
    maximizes: bool = False  # what backward is given is to grow

    @property
    def has_half_weights(self) -> bool:
        return self.param_dtype in HALVES

    @property
    def stalls_at(self) -> float | None:
        """Half a roundoff of its averages, if 1 - beta2 is less, so that v * beta2 rounds back to v."""
        if self.beta2 is None or self.fused or not self.rounds_to_nearest or self.state_dtype not in HALVES:
            return None
        half = format_of(self.state_dtype).unit_roundoff / 2
        return half if 1 - self.beta2 < half else None


@dataclass(frozen=True)
class Setup:
    """What trains, in which mode and in which precision, as a traced step shows it."""

    tensors: int  # parameters of the models
    elements: int
    trained: int  # of them in an optimizer, and a gradient came
    trained_elements: int
    training: bool | None  # train mode, evaluation mode; None: several models that differ
    modules: int = 0  # that ran and that autocast would lower: linear layers, convolutions, recurrences
    low_modules: int = 0
    low: str = ""  # the format of those
    meant: str = ""  # the format that autocast, or a GradScaler, was there for
    batch: str = ""  # checksum of the batch that a DataLoader gave last


@dataclass(frozen=True)
class Breach:
    """Something that holds in every sound loop and has not held, up to this step."""

    kind: str
    names: tuple[str, ...] = ()  # parameters, buffers or modules; the first ones
    count: int = 0  # of all of them
    steps: int = 0  # how often
    of: int = 0  # times that it could have been so
    elements: int = 0
    where: str = ""  # file:line of the program
    traits: tuple[str, ...] = ()  # what tells its varieties apart


_TABLE = {"table": True}  # numbers of many sites: stored as samples, and too large to be kept of a step that is over


def _curve(name: str) -> dict[str, str]:
    """A number that is stored at every step that has one, and that evidence has as a curve of this name."""
    return {"curve": name}


@dataclass
class StepRecord:
    """All that is known about one training step, on the host.

    A new fact about a step is one field here, which the recorder fills. The store, the history of the run and the evidence of a
    diagnosis take it from the field: `history.RunHistory` counts the steps that told it, and keeps what was told first, last
    and at most (`RunFacts.counts`, `first`, `latest`, `largest`); a `_curve` is stored and can be read as one.
    """

    step: int
    seconds: float | None = None  # from its begin to the next one's
    loss: float | None = field(default=None, metadata=_curve("loss"))
    lr: float | None = field(default=None, metadata=_curve("lr"))  # the highest of all groups and optimizers
    scale: float | None = field(default=None, metadata=_curve("scale"))  # in force during backward
    scale_after: float | None = None
    growth_interval: int | None = None
    skipped: bool = False  # GradScaler refused the step
    stepped: bool = False  # an optimizer was asked to step (skipped or not)
    traced: bool = False
    clipped: float | None = field(
        default=None, metadata=_curve("clip")
    )  # max_norm, if gradients were clipped; what is recorded of them is from before
    clipped_scaled: bool = False
    stepped_scaled: bool = False  # an optimizer ran by itself, on gradients that nobody had unscaled through the scaler
    never_scaled: tuple[str, ...] = ()  # parameters whose gradients hold some of a loss that nobody had scaled, and were divided
    unscaled_again: bool = False  # gradients that were unscaled have been added to, and what there was is unscaled once more
    stale: tuple[str, ...] = ()  # parameters whose gradient was not finite before backward began
    local_bad: tuple[str, ...] = ()  # of many processes: gradients that were not finite here, before they met those of others
    updates_before: int | None = field(
        default=None, metadata=_curve("updates")
    )  # of many processes: how often weights had changed
    from_others: bool = False  # the bad numbers of this step came from another process: its own were finite
    grads: SiteTable | None = field(default=None, metadata=_TABLE)
    outputs: SiteTable | None = field(default=None, metadata=_TABLE)
    output_grads: SiteTable | None = field(default=None, metadata=_TABLE)
    weights: SiteTable | None = field(default=None, metadata=_TABLE)
    buffers: SiteTable | None = field(default=None, metadata=_TABLE)
    bad_calls: tuple[BadCall, ...] = ()
    autopsy: Autopsy | None = None
    singular: Autopsy | None = None  # what can have broken backward, if forward and loss are finite and gradients are not
    between: tuple[str, ...] = ()  # modules that ran, at the last traced step, between the autopsy's layer and the next
    root_site: str = ""  # the model itself, as a site
    zero_outputs: tuple[str, ...] = ()  # fp16 outputs that are all zero although the input is not
    called: frozenset[str] = frozenset()  # modules that ran on data, on a traced step
    updates: tuple[Update, ...] = ()
    optimizers: tuple[OptimizerState, ...] = ()
    amp_dtype: str = ""  # "" means no autocast was seen
    examined: bool = False
    calls: tuple[str, ...] = field(default=(), metadata={"if": "stepped"})  # of the loop, in order: scale, backward, clip ...
    backwards: int = 0
    loss_factor: float | None = None  # a number by which the loss was multiplied by hand right before backward
    loss_terms: int | None = None  # elements that the last sum before backward has added up
    growths: tuple[Growth, ...] = ()
    new_scaler: bool = False  # a GradScaler that no step before has used
    scale_given: bool = False  # update() was told the scale
    scale_static: bool = False  # the scaler in use can neither fall nor rise
    experts: tuple[str, ...] = ()  # modules of which others like them were chosen, on a traced step
    setup: Setup | None = None
    breaches: tuple[Breach, ...] = ()

    # of a step that is kept without its tables (`RunFacts.incidents`)
    bad_grads: tuple[str, ...] = ()  # not finite; the last one is nearest to the loss
    nan_grads: bool = False  # one of them holds NaN, not only infinities
    culprit_code: str = ""  # of the first producer, as the rules name it
    culprit_site: str = ""

    @property
    def loss_unit(self) -> float:
        """What the loss is made of: a sum over more terms, or times a larger number, is another quantity."""
        return (self.loss_terms or 1) * (abs(self.loss_factor or 1.0) or 1.0)

    @property
    def norm_unit(self) -> float:
        """What the norm of all gradients is made of: a head's alone says nothing of the whole model's, once that is thawed."""
        return self.loss_unit * (self.grads.elements if self.grads is not None else 1.0)

    @property
    def nonfinite(self) -> bool:
        """An output, the loss or a gradient holds NaN or an infinity."""
        bad_loss = self.loss is not None and not math.isfinite(self.loss)
        return bad_loss or bool(self.bad_calls) or (self.grads is not None and bool(self.grads.bad))

    def without_tables(self, **more: Any) -> StepRecord:
        """With the conclusions drawn from them instead."""
        dropped: dict[str, Any] = {**dict.fromkeys(TABLES), "called": frozenset(), "updates": (), "zero_outputs": ()}
        return replace(self, **(dropped | more))


@dataclass(frozen=True)
class QuietSteps:
    """Steps in a row, none of them skipped, that are alike but for the numbers in here: one entry of each array is a step's.

    All of them are finite, and there is no gradient of 0.
    """

    last: StepRecord  # of them, whole
    steps: list[int]
    seconds: Any  # numpy, like what follows
    losses: Any
    rates: Any  # None: no optimizer has told one
    low: Any  # [steps, sites], of the gradients, like what follows
    high: Any
    norms: Any
    whole_norms: Any  # of all sites together

    def __len__(self) -> int:
        return len(self.steps)


CURVES = {f.name: f.metadata["curve"] for f in fields(StepRecord) if "curve" in f.metadata}
TABLES = tuple(f.name for f in fields(StepRecord) if "table" in f.metadata)
# what a step may tell the run: field, the value that means nothing, the field that must hold for it to count
TOLD = tuple(
    (f.name, f.default, f.metadata.get("if", ""))
    for f in fields(StepRecord)
    if f.name not in (*TABLES, "step", "seconds", "between", "called", "experts", "updates", "zero_outputs", "bad_calls")
)
