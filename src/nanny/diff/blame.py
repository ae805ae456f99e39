"""Whose fault a difference is: from own errors, operations and trial runs to one culprit. No torch.

A module is blamed for its *own* error. Rounding its exact inputs counts as its own, so a layer that only receives what another
one stored badly looks guilty too; a run with the suspect kept in FP32 tells the two apart.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ..core.examination import operation
from ..core.finding import Severity
from ..core.formats import format_of
from ..core.limits import Limits
from ..measure.records import ErrorStats
from .records import LOSS, CallDiff, DiffReport, NonfiniteOp, OpError, WideTrial

MOST_SUSPECTS = 4
_BACKWARD = re.compile(r"_backward(_data|_input|_params|_default)?$")


@dataclass(frozen=True)
class Blame:
    """The first culprit of an error, and who else stands out."""

    site: str  # as a finding names it: a module call, or `op:NAME` for code outside of named modules
    module: str  # "" is the model's own code, `LOSS` the loss function's
    plain: float
    centred: float | None
    op: str  # the operation where it begins, if one was found
    call: CallDiff | None = None  # None: code whose result is no module's output
    others: tuple[str, ...] = ()
    trial: WideTrial | None = None  # that confirmed it

    @property
    def worst(self) -> float:
        return max(self.plain, self.centred or 0.0)


def warn_limit(report: DiffReport, limits: Limits) -> float:
    return limits.rel_l2_warn_roundoffs * format_of(report.target).unit_roundoff


def largest_error(error: ErrorStats, report: DiffReport, limits: Limits) -> float:
    """The plain error, or the centred one brought to its scale: either may pass `warn_limit`."""
    return max(error.rel_l2, (error.centred or 0.0) * warn_limit(report, limits) / limits.diff_centred_warn)


def gradient_limit(report: DiffReport, limits: Limits) -> float:
    """ReLU signs and max-pool ties flip in health and move gradients, and near an optimum their terms cancel: the measured floor
    knows by how much.
    """
    return max(limits.diff_grad_warn, limits.diff_floor_times * (report.gradient_floor or 0.0))


def output_error(report: DiffReport, limits: Limits) -> float:
    return max((largest_error(c.error, report, limits) for c in report.outputs if not c.error.spoiled), default=0.0)


def needs_floor(report: DiffReport, limits: Limits) -> bool:
    """Is something large enough to ask what rounding alone would do to this model?"""
    gradient = report.total.rel_l2 if report.total is not None else 0.0
    return output_error(report, limits) > warn_limit(report, limits) or gradient > limits.diff_grad_warn


def needs_closer_look(report: DiffReport, limits: Limits) -> bool:
    """Is there trouble whose operation is worth another run?"""
    lost = any(g.error.all_zero and g.error.reference_norm > 0 for g in report.gradients)
    spoiled = any(c.error.spoiled for c in report.calls) or any(g.error.spoiled for g in report.gradients)
    return spoiled or lost or loss_is_spoiled(report) or needs_floor(report, limits)


def loss_is_spoiled(report: DiffReport) -> bool:
    loss, reference = report.loss, report.reference_loss
    return loss is not None and reference is not None and not math.isfinite(loss) and math.isfinite(reference)


def consequence(report: DiffReport, limits: Limits) -> Severity:
    """How far damage has come: INFO while outputs and gradients are as a healthy model's.

    Outputs that any change of the input by one rounding moves as far (a difference of scores that is all but 0) do not count.
    """
    excused = limits.diff_floor_times * (report.input_floor or 0.0)
    output = output_error(report, limits)
    output = output if output > excused else 0.0
    largest = max((c.error.worst for c in report.outputs if c.error.rel_l2 > excused), default=0.0)
    gradient = report.total.rel_l2 if report.total and report.total.rel_l2 > gradient_limit(report, limits) else 0.0
    lost = any(c.error.spoiled for c in report.outputs) or any(g.error.spoiled for g in report.gradients)
    if lost or loss_is_spoiled(report) or largest >= limits.rel_l2_error or gradient >= limits.diff_grad_error:
        return Severity.ERROR
    return Severity.WARNING if output > warn_limit(report, limits) or gradient > limits.diff_grad_warn else Severity.INFO


def first_culprit(report: DiffReport, limits: Limits) -> Blame | None:
    """The first of those with a large own error, unless trial runs say that an earlier one is behind it."""
    chief = _by_own_error(report, limits)
    trial = confirming_trial(report, limits) if chief is not None and chief.module != LOSS else None
    if chief is None or trial is None or trial.site == chief.module:
        return None if chief is None else replace(chief, trial=trial)
    call = next((c for c in report.calls if c.site == trial.site and c.own is not None), None)
    if call is None or call.own is None:
        return chief
    others = tuple(name for name in (chief.site, *chief.others) if name != call.name)
    return replace(_blame(report, call, call.own, limits), others=others, trial=trial)


def _by_own_error(report: DiffReport, limits: Limits) -> Blame | None:
    guilty = _with_own_errors(report, limits)
    most = max((min(b.worst, 1.0) for b in guilty), default=0.0)
    chief = next((b for b in guilty if b.worst >= limits.diff_culprit_share * most), None)
    return None if chief is None else replace(chief, others=tuple(b.site for b in guilty if b is not chief))


def _with_own_errors(report: DiffReport, limits: Limits) -> list[Blame]:
    """In the order in which they ran: module calls, the code of containers between their layers, and the loss function."""
    limit = warn_limit(report, limits)
    calls = [c for c in report.calls if c.own is not None and not c.own.spoiled and largest_error(c.own, report, limits) > limit]
    found = [(c.order + 0.5, _blame(report, c, c.own, limits)) for c in calls if c.own is not None]
    named = {c.site for c in calls}
    parents = {"", *(c.site.rpartition(".")[0] for c in report.calls)}
    for site in sorted(parents - named):
        # What such code makes may go into a layer and not come out by itself: only its operations tell.
        error = _first_op_error(report, site, False, limits)
        if error is not None and not error.spoiled:
            name = site_of_op(site, error.op)
            found.append((error.order, Blame(name, site, error.rel_l2, error.centred, plain_op(error.op))))
    loss = loss_own(report)
    if loss > limit:
        op = _first_op(report, LOSS, limits)
        found.append((math.inf, Blame(site_of_op(LOSS, op) if op else LOSS, LOSS, loss, None, op)))
    return [blame for _, blame in sorted(found, key=lambda pair: pair[0])]


def _blame(report: DiffReport, call: CallDiff, own: ErrorStats, limits: Limits) -> Blame:
    op = _first_op(report, call.site, limits)
    site = site_of_op("", op) if op and not call.site else call.name
    return Blame(site, call.site, own.rel_l2, own.centred, op, call)


def loss_own(report: DiffReport) -> float:
    """What the loss function itself adds to the gradient of the outputs. (Its value may be near 0 and then tells nothing.)

    A gradient below the range of the format wants a loss scale; that is not the loss function's fault.
    """
    scale = report.total.loss_scale if report.total else 1.0
    smallest = 16 * format_of(report.target).min_normal
    made = [g for g in report.activation_gradients if g.own_site == LOSS and g.own is not None]
    return max((g.own or 0.0 for g in made if g.error.reference_absmax * scale > smallest), default=0.0)


def suspects(report: DiffReport, limits: Limits) -> tuple[str, ...]:
    """Modules that are worth a run with them kept in FP32: the first culprit, and the loudest before it."""
    chief = _by_own_error(report, limits)
    if chief is None:
        return _suspects_in_backward(report, limits)
    if chief.module == LOSS or chief.call is None:
        return ()
    before = [
        c
        for c in report.calls
        if c.own is not None
        and c.site
        and not c.own.spoiled
        and c.order < chief.call.order
        and not c.site.startswith(f"{chief.module}.")
    ]
    loudest = sorted(before, key=lambda c: -largest_error(c.own, report, limits) if c.own else 0.0)
    sites = tuple(dict.fromkeys([chief.module, *(c.site for c in loudest)]))
    return sites[:MOST_SUSPECTS] if chief.module and before else ()


def _suspects_in_backward(report: DiffReport, limits: Limits) -> tuple[str, ...]:
    if report.total is None or report.total.rel_l2 <= limits.diff_grad_warn:
        return ()
    limit = warn_limit(report, limits)
    loud = sorted((g for g in report.activation_gradients if (g.own or 0.0) > limit), key=lambda g: -(g.own or 0.0))
    sites = dict.fromkeys(g.own_site for g in loud if g.own_site not in ("", LOSS))
    return tuple(sites)[:MOST_SUSPECTS]


def confirming_trial(report: DiffReport, limits: Limits) -> WideTrial | None:
    """The suspect that, kept in FP32, takes the damage away; None if none does.

    The first suspect stands if it helps by itself. If not, what came in was damaged already, and the nearest one before it that
    helps is the one that stored it badly. (Those further back help too: what they return in FP32 stays so for a while.)
    """
    if not report.trials:
        return None
    before = _damage(output_error(report, limits), report.total.rel_l2 if report.total else None, report, limits)
    damages = {t.site: _damage(t.output, t.gradient, report, limits) for t in report.trials}
    first = report.trials[0]
    if damages[first.site] <= before / 2:
        return first
    helpful = [t for t in report.trials[1:] if damages[t.site] <= before / 2]
    order = {c.site: c.order for c in report.calls}
    return max(helpful, key=lambda t: order.get(t.site, -1), default=None)


def _damage(output: float, gradient: float | None, report: DiffReport, limits: Limits) -> float:
    return max(output / warn_limit(report, limits), (gradient or 0.0) / limits.diff_grad_warn)


def first_fault(report: DiffReport, site: str, backward: bool = False) -> NonfiniteOp | None:
    return next((f for f in report.faults if f.site == site and f.backward == backward), None)


def plain_op(name: str) -> str:
    """`_log_softmax_backward_data` as `log_softmax`."""
    return _BACKWARD.sub("", name).strip("_")


def site_of_op(site: str, op: str) -> str:
    """A module by its name; code outside of named modules by its operation."""
    return site if site not in ("", LOSS) else operation(plain_op(op))


def named_site(report: DiffReport, call: CallDiff) -> str:
    """A module call by its name; the model's own code by the operation that made the first NaN or Inf in it."""
    fault = first_fault(report, "") if not call.site else None
    return site_of_op("", fault.op) if fault is not None else call.name


def _first_op(report: DiffReport, site: str, limits: Limits) -> str:
    """Where the error of a piece of code begins."""
    for backward in (False, True):
        error = _first_op_error(report, site, backward, limits)
        fault = first_fault(report, site, backward)
        if error is not None or fault is not None:
            return plain_op(error.op if error is not None else fault.op if fault is not None else "")
    return ""


def _first_op_error(report: DiffReport, site: str, backward: bool, limits: Limits) -> OpError | None:
    """The first operation with a quarter of the largest own error in this code, if that is large at all."""
    errors = [e for e in report.op_errors if (e.site, e.backward) == (site, backward)]
    most = max((min(_op_worst(e), 1.0) for e in errors), default=0.0)
    plain = max((e.rel_l2 for e in errors), default=0.0)
    centred = max((e.centred or 0.0 for e in errors), default=0.0)
    if plain <= warn_limit(report, limits) and centred <= limits.diff_centred_warn:
        return None
    return next(e for e in errors if _op_worst(e) >= limits.diff_culprit_share * most)


def _op_worst(error: OpError) -> float:
    return math.inf if error.spoiled else max(error.rel_l2, error.centred or 0.0)
