"""What `auto_diff` tells: frozen records of plain numbers, without torch. Errors are fractions of 1, against the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

from ..core.finding import Finding, Severity
from ..measure.records import DimensionError, ErrorStats
from ..show.notebook import ShownReport

if TYPE_CHECKING:
    from ..diagnose.evidence import Evidence

MODEL = "(model)"  # how the model itself, whose site is "", is named
LOSS = "(loss)"  # the site of what runs after the model: the loss function
REFERENCES = ("fp32", "fp64")
POLICIES = ("native", "cuda", "cpu", "full")  # the device's autocast, that of a GPU or a CPU, a plain .to(dtype)


@dataclass(frozen=True)
class CallDiff:
    """One call of one module, in the order in which the calls ended. Numbers are of the worst batch."""

    site: str
    call: int  # of the same module, from 0
    module: str  # class
    order: int
    dtype: str
    shape: tuple[int, ...]
    error: ErrorStats
    own: ErrorStats | None = None  # its own operations in the target precision on exact inputs, its children exact
    inherited: float | None = None  # what the error of the inputs became: relative L2 between the run and `own`
    inputs_spoiled: bool = False  # something that came in was not finite, but finite in the reference
    dimensions: tuple[DimensionError, ...] = ()
    mean_rel_l2: float = 0.0  # over batches
    batch: int = 0  # the worst

    @property
    def name(self) -> str:
        return f"{self.site or MODEL}#{self.call}" if self.call else self.site or MODEL


@dataclass(frozen=True)
class GradDiff:
    """A gradient, unscaled, beside the reference gradient."""

    name: str
    kind: str  # parameter, activation
    order: int  # in backward; parameters in the model's order
    dtype: str
    shape: tuple[int, ...]
    error: ErrorStats
    call: int = 0
    energy: float = 0.0  # share of the whole gradient (parameters only)
    own: float | None = None  # relative error that the last module's backward adds, on exact gradients and exact saved values
    own_site: str = ""  # that module


@dataclass(frozen=True)
class Flip:
    """A discrete outcome (argmax, top-k, comparison, ...) that the reference decides otherwise."""

    site: str
    op: str
    flipped: int
    count: int

    @property
    def share(self) -> float:
        return self.flipped / self.count if self.count else 0.0


@dataclass(frozen=True)
class OpUse:
    """How often an operation ran in a dtype inside a module."""

    site: str
    op: str
    dtype: str
    count: int


@dataclass(frozen=True)
class IntegerLoss:
    """Whole numbers (positions, ids, counts) that the target format cannot tell apart."""

    site: str
    op: str
    largest: float
    changed: float  # share of the elements looked at


@dataclass(frozen=True)
class Mix:
    """A sum of products (matmul, convolution) whose terms are of unlike magnitude: the small are absorbed from 1/u on."""

    site: str
    op: str
    ratio: float  # of the loudest index's contribution to a typical one's
    index: int


@dataclass(frozen=True)
class NonfiniteOp:
    """The first operation of a module that made NaN or Inf out of finite values, where the reference stays finite."""

    site: str
    op: str
    nan: bool
    reference_absmax: float  # of its result
    input_absmax: tuple[float, ...]  # of each operand
    input_absmin: tuple[float, ...]
    backward: bool = False


@dataclass(frozen=True)
class OpError:
    """An operation that stands out: its own error and that of those before it in the same module's code."""

    site: str  # "" is the model's own code, `LOSS` the loss function's
    op: str
    rel_l2: float
    centred: float | None = None
    spoiled: int = 0
    backward: bool = False
    order: int = 0  # module calls that had ended before it


@dataclass(frozen=True)
class WideTrial:
    """The model run again with one module kept in FP32."""

    site: str
    output: float  # error, as `Advice.before`
    gradient: float | None


@dataclass(frozen=True)
class Failure:
    """The model raised in one precision only."""

    precision: str  # target, reference
    site: str
    message: str


@dataclass(frozen=True)
class GradTotals:
    """The whole parameter gradient."""

    rel_l2: float
    cosine: float | None
    reference_norm: float
    loss_scale: float


@dataclass(frozen=True)
class Advice:
    """The smallest set of modules found that, kept in FP32, brings the output error under the goal."""

    goal: float
    before: float  # output error: plain, or centred on the scale of plain ones; infinite if NaN or Inf come out
    after: float
    wide: tuple[str, ...]  # "" is the model's own code, without its layers
    parameter_share: float  # of the model's parameters that stay wide
    runs: int  # that confirmed it
    code: str  # the regions to write
    flop_share: float | None = None  # of the matmul and convolution FLOPs of a forward pass; None: the model has none

    @property
    def reached(self) -> bool:
        return self.after <= self.goal


@dataclass(frozen=True)
class DiffReport(ShownReport):
    """The answer of `auto_diff`. Print it for the text report."""

    looks: ClassVar[str] = "nanny.diff.text:render_diff"

    model: str
    target: str  # short name of the format
    reference: str
    policy: str
    device: str
    training: bool
    batches: int
    calls: tuple[CallDiff, ...]
    gradients: tuple[GradDiff, ...]
    activation_gradients: tuple[GradDiff, ...]
    total: GradTotals | None
    loss: float | None
    reference_loss: float | None
    floor: float  # what rounding alone explains at this depth
    # What a change of one rounding does to the FP32 model (`floor.py`); None if nothing asked for it.
    output_floor: float | None = None
    input_floor: float | None = None
    gradient_floor: float | None = None
    input_nan: int = 0  # in the sample itself, with its target
    flips: tuple[Flip, ...] = ()
    operations: tuple[OpUse, ...] = ()
    flops: Mapping[str, int] = field(default_factory=dict)  # of matmuls and convolutions in each module's own code, forward
    integers: tuple[IntegerLoss, ...] = ()
    faults: tuple[NonfiniteOp, ...] = ()  # in the order in which they happened
    op_errors: tuple[OpError, ...] = ()
    loss_own: float | None = None  # relative error of the loss that its own code makes of exact outputs
    trials: tuple[WideTrial, ...] = ()
    mixes: tuple[Mix, ...] = ()
    failure: Failure | None = None
    partial: bool = False  # interrupted: what was seen until then
    reseeds: Mapping[str, int] = field(default_factory=dict)
    advice: Advice | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def culprits(self) -> tuple[str, ...]:
        """Modules, parameters and operations (`op:exp`) that findings blame, the first culprit first."""
        sites = {call.name: call.site or MODEL for call in self.calls}  # a module, whichever of its calls it was
        blamed = (sites.get(f.site, f.site) for f in self.findings if f.severity >= Severity.WARNING and f.site)
        return tuple(dict.fromkeys(blamed))

    @property
    def outputs(self) -> tuple[CallDiff, ...]:
        """The calls of the model itself: what the user gets."""
        return tuple(call for call in self.calls if not call.site)

    def evidence(self) -> Evidence:
        """What `diagnose` works from."""
        found: Evidence = resolve_name("nanny.diff.evidence:diff_evidence")(self)
        return found
