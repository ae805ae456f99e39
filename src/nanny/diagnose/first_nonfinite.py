"""Who made the first NaN or infinity of a step, and who only passed it on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.examination import Examination, FirstBad, Hazard, Place, as_typed, operation
from ..core.formats import FP16
from ..core.numbers import amount, number
from ..core.ops import GROW
from ..core.step import Autopsy, BadCall, SiteTable, StepRecord


@dataclass(frozen=True)
class Culprit:
    code: str  # NAN, INF, OVERFLOW, INPUT_NONFINITE, WEIGHT_NONFINITE
    site: str
    message: str
    evidence: Mapping[str, Any]
    call: BadCall | None = None


def counts(call: BadCall) -> str:
    """`12 NaN, 3 +Inf of 512 values`."""
    if not call.counted:
        kinds = [what for n, what in ((call.nan, "NaN"), (call.posinf, "+Inf"), (call.neginf, "-Inf")) if n]
        return f"{' and '.join(kinds)} among {call.count:,} values"
    parts = [f"{n:,} {what}" for n, what in ((call.nan, "NaN"), (call.posinf, "+Inf"), (call.neginf, "-Inf")) if n]
    return f"{', '.join(parts)} of {call.count:,} values"


def is_trouble(call: BadCall) -> bool:
    """-Inf alone is what masks are made of; from a layer with weights it is an overflow."""
    return bool(call.nan or call.posinf or (call.neginf and call.has_parameters))


def forward_culprit(step: StepRecord) -> Culprit | None:
    """The first call whose inputs were clean. An operation between modules is charged to the module whose code holds it."""
    bad = [c for c in step.bad_calls if is_trouble(c)]
    if not bad:
        return None
    producer = next((c for c in bad if c.inputs_clean is not False), None)
    others = [c.site for c in bad if c is not producer and c.site != step.root_site and not _holds(c.site, bad)]
    if producer is None:
        first = bad[0]
        if step.from_others:
            return _from_other_rank(first.site, others)
        return Culprit(
            "INPUT_NONFINITE",
            "input",
            f"the batch itself is not finite: NaN or Inf came into `{first.site}` ({first.module}) from outside",
            {"first": first.site, "passed_on": others},
        )
    evidence: dict[str, Any] = {
        "nan": producer.nan, "posinf": producer.posinf, "neginf": producer.neginf, "count": producer.count,
        "dtype": producer.dtype, "module": producer.module, "input_absmax": producer.input_absmax,
        "finite_absmax": producer.finite_absmax, "passed_on": others,
    }  # fmt: skip
    tail = f"; passed on by {amount(len(others), 'later module')}" if others else ""
    if producer.bad_parameters:
        names = ", ".join(f"`{producer.site}.{p}`" for p in producer.bad_parameters)
        so = f"not finite, so the output holds {counts(producer)}{tail}"
        said = f"{names} is {so}" if len(producer.bad_parameters) == 1 else f"{names} are {so}"
        return Culprit("WEIGHT_NONFINITE", producer.site, said, evidence, producer)
    said = f"finite inputs (up to {producer.input_absmax:.4g}) became {counts(producer)} in {producer.dtype}"
    if _input_too_large(producer):
        said = f"the input reaches {producer.input_absmax:.4g} and does not fit into float16: {counts(producer)}"
    said += f" ({producer.module}){tail}"
    code = _code(producer)
    inner = step.autopsy
    if (
        inner is not None
        and code == "NAN"
        and _autopsy_code(inner) == "OVERFLOW"
        and _belongs(inner, producer.site, step.root_site)
    ):
        code = "OVERFLOW"  # the module's own code holds both the overflow and what made NaN of it
        said += f"; the first bad number came out of {_maker_said(inner)}"
        evidence |= {"op": inner.op, "size": inner.size}
    return Culprit(code, producer.site, said, evidence, producer)


def is_bad_from_outside(step: StepRecord) -> bool:
    """NaN or infinities came into the model with what it was given."""
    found = forward_culprit(step)
    if found is None:
        return step.autopsy is not None and step.autopsy.from_data
    return found.code == "INPUT_NONFINITE"


def _from_other_rank(site: str, passed_on: Sequence[str]) -> Culprit:
    said = f"NaN or Inf came into `{site}` from the stage before it, on another rank"
    return Culprit("NAN", site, said, {"from_others": True, "passed_on": list(passed_on)})


def _belongs(found: Autopsy, site: str, root: str) -> bool:
    near = found.inside or found.after
    return site == root or near.startswith(f"{site}.") or near.rpartition(".")[0] == site


def _holds(site: str, calls: Sequence[BadCall]) -> bool:
    """A container is bad because of what is in it."""
    return any(c.site.startswith(f"{site}.") for c in calls)


def _input_too_large(call: BadCall) -> bool:
    """A wider input that autocast casts to fp16 on the way in."""
    return call.dtype == "float16" and math.isfinite(call.input_absmax) and call.input_absmax >= FP16.overflow_at


def _code(call: BadCall) -> str:
    """Overflow, if the finite values that are left stand close below the limit of fp16, or the input was already above it."""
    infinite = call.posinf or call.neginf
    if _input_too_large(call):
        return "OVERFLOW"
    if (
        call.dtype == "float16"
        and infinite
        and (not call.counted or call.finite_absmax > FP16.max / 16 or call.posinf + call.neginf == call.count)
    ):
        return "OVERFLOW"
    return "NAN" if call.nan else "INF"


def turned_to_nan(step: StepRecord, culprit: Culprit) -> BadCall | None:
    """Where the culprit's infinity first became NaN."""
    if culprit.call is None or culprit.call.nan:
        return None
    return next((c for c in step.bad_calls if c.nan and c is not culprit.call), None)


def bad_sites(table: SiteTable | None) -> list[str]:
    return [] if table is None else list(table.bad)


def backward_culprit(step: StepRecord) -> Culprit | None:
    """Forward and loss are finite, a gradient is not: the one nearest the loss is where backward broke."""
    grads = bad_sites(step.grads)
    if not grads:
        return None
    arriving = bad_sites(step.output_grads)
    evidence: dict[str, Any] = {"parameters": grads, "bad_parameters": len(grads), "scale": step.scale}
    table = step.grads
    assert table is not None
    at = table.names.index(grads[-1])
    is_nan = math.isnan(float(np.asarray(table.columns["min"])[at]))
    code = "NAN" if is_nan else "INF"
    if step.from_others:
        said = f"this rank's loss and gradients were finite until they met those of another rank ({len(grads)} parameters got it)"
        return Culprit(code, grads[-1], said, {**evidence, "from_others": True, "passed_on": grads[:-1]})
    if arriving:
        site = arriving[-1]  # sites are in the order of execution: the last one is nearest to the loss
        evidence["arrives_at"] = site
        said = f"forward and loss are finite, but the gradient arriving at the output of `{site}` is not"
        said += f"; {len(grads)} parameters got it"
    else:
        site = grads[-1]
        known = "forward and loss are finite, but" if step.loss is not None else "no loss was seen;"
        said = f"{known} the gradient of `{site}` is not finite ({len(grads)} of {len(table.names)} parameters)"
    last = table.names[-1] if not arriving else step.output_grads.names[-1] if step.output_grads is not None else ""
    if site == last and step.loss is not None:
        said += "; it is the last one before the loss, so look between the model's output and the loss (sqrt, norm or log at 0)"
    return Culprit(code, site, said, {**evidence, "passed_on": [g for g in grads if g != site]})


def culprit_of(step: StepRecord) -> Culprit | None:
    """The first producer of this step, looking forward, then at the loss, then backward."""
    found = forward_culprit(step)
    if found is not None and not (found.code == "WEIGHT_NONFINITE" and _lost_before_an_update(step)):
        return found
    if step.loss is not None and not math.isfinite(step.loss):
        return _by_autopsy(step) or _bad_loss(step)
    if step.skipped:
        return None  # the scaler's own business: see the rules about the loss scale
    return (_by_autopsy(step) if bad_sites(step.grads) and not step.from_others else None) or backward_culprit(step)


def _lost_before_an_update(step: StepRecord) -> bool:
    """A step of several updates (a GAN): a loss was bad while the weights were not, and the first update has spoilt them."""
    last = max((i for i, call in enumerate(step.calls) if call == "backward"), default=0)
    updated = any(call in ("step", "scaler.step") for call in step.calls[:last])
    return updated and step.autopsy is not None and not step.autopsy.weight


def modules_between(trace: StepRecord | None, after: str) -> tuple[str, ...]:
    """What ran, at the last traced step, between the layer of parameter `after` and the next layer with parameters."""
    if trace is None or trace.outputs is None or trace.grads is None:
        return ()
    layers = {name.rpartition(".")[0] for name in trace.grads.names}
    order, layer = trace.outputs.names, after.rpartition(".")[0]
    if layer not in order:
        return ()
    out = []
    for name in order[order.index(layer) + 1 :]:
        if name in layers or name == trace.root_site:
            break
        if not layer.startswith(f"{name}.") and not any(other.startswith(f"{name}.") for other in layers):
            out.append(name)
    return tuple(out)


def _autopsy_code(found: Autopsy) -> str:
    if found.dtype == "float16" and not found.nan and found.op in GROW:
        return "OVERFLOW"
    return "NAN" if found.nan else "INF"


def _maker_said(found: Autopsy) -> str:
    size = found.size if found.size and FP16.max < found.size < math.inf else None
    return (
        ("" if found.sure else "(at the latest) ")
        + f"`{as_typed(found.op)}`"
        + ("" if size is None else f", which reaches about {number(float(f'{size:.2g}'))} in FP32")
    )


def _bad_loss(step: StepRecord) -> Culprit:
    assert step.loss is not None
    what = "NaN" if math.isnan(step.loss) else "infinite"
    seen = "module outputs were not traced at this step"
    if step.traced and step.outputs is not None:
        seen = "all module outputs are finite, so it arose in the code that computes the loss"
    return Culprit("NAN" if math.isnan(step.loss) else "INF", "loss", f"the loss is {what}; {seen}", {"loss": step.loss})


def _by_autopsy(step: StepRecord) -> Culprit | None:
    """From the graph of a loss that is bad, or has bad gradients: the operation, and the layer or the modules it belongs to."""
    found = step.autopsy
    if found is None or step.loss is None:
        return None
    if found.inside and step.outputs is not None and not step.bad_calls:
        return None  # the layers were measured, and all were finite
    what = "NaN" if math.isnan(step.loss) else "infinite" if math.isinf(step.loss) else "finite and its gradients are not"
    code = _autopsy_code(found)
    evidence = {"op": found.op, "after": found.after, "modules": list(step.between), "loss": step.loss, "size": found.size}
    made = _maker_said(found)
    if found.weight:
        site = found.weight.rpartition(".")[0] or found.weight
        return Culprit("WEIGHT_NONFINITE", site, f"the loss is {what} because `{found.weight}` is not finite", evidence)
    if found.variable:
        line = f"{found.file}:{found.line}"
        text = f"the loss is {what} because `{found.variable}` is not finite, made of finite numbers in {line}"
        return Culprit(code, f"loop:{found.variable}", text, evidence)
    if found.is_factor:
        return Culprit(
            "INPUT_NONFINITE", "input", f"the loss is {what} because a tensor without a gradient is not finite", evidence
        )
    if found.from_data and step.from_others:
        return _from_other_rank(step.root_site, [])
    if found.from_data:
        if found.dtype == "float16" and not found.nan:
            return Culprit(
                "OVERFLOW", "input", f"the loss is {what} because the batch is not finite when cast to float16", evidence
            )
        return Culprit("INPUT_NONFINITE", "input", f"the loss is {what} because the batch itself is not finite", evidence)
    if found.inside:
        site = found.inside.rpartition(".")[0] or found.inside
        return Culprit(code, site, f"the loss is {what}; the first bad number came out of {made} in this layer", evidence)
    if len(step.between) == 1:
        return Culprit(code, step.between[0], f"the loss is {what}; the first bad number came out of {made}", evidence)
    behind = f", behind `{found.after}`" if found.after else ""
    return Culprit(code, operation(found.op), f"the loss is {what}; the first bad number came out of {made}{behind}", evidence)


def first_bad_of(exam: Examination) -> FirstBad:
    """The first bad number of an examined step, with the hazard that it is."""
    first, other = exam.first_bad, exam.first_bad_reference
    assert first is not None
    seeded = of_seed(exam) if first.place.phase == "backward" else None
    if seeded is not None:
        return seeded
    hazard = _hazard_at(exam, first)
    stored = hazard is not None and (
        hazard.is_of_before
        or hazard.numbers.get("stored")
        or hazard.numbers.get("opaque")
        or (hazard.kind == "masked_rows" and exam.facts.get("stored_infinity"))
    )
    return replace(
        first,
        op=first.op.lstrip("_"),
        step=exam.step,
        dtype=hazard.dtype if hazard is not None else "",
        in_reference=False  # it did not fit when it was stored
        if hazard is not None and (hazard.numbers.get("flushed") or hazard.numbers.get("fell_together"))
        else None  # the twin began with what low precision had already made of it
        if stored
        else other is not None
        and (other.order <= first.order or (other.op == first.op and other.place.site == first.place.site)),
        hazard=hazard,
    )


def of_seed(exam: Examination) -> FirstBad | None:
    """A backward pass that was made again from gradients that were bad already: its twin began with them as well."""
    seed = exam.facts.get("seed_nonfinite", "")
    if not seed or exam.facts.get("tiny_probabilities"):
        return None  # the latter tells who made them
    op, dtype, fits = ("", "", None) if seed == "NaN" else ("to", "float16", False)
    nan, place = seed == "NaN", Place(phase="backward")
    return FirstBad(op, place, 0, nan, step=exam.step, dtype=dtype, in_reference=fits, source="gradients")


def _hazard_at(exam: Examination, first: FirstBad) -> Hazard | None:
    """The hazard that the first bad number is, or that led to it: the nearest at or before it with a consequence."""
    exact = [h for h in exam.hazards if h.order == first.order]
    if exact:
        return max(exact, key=lambda h: h.consequence)
    before = [h for h in exam.hazards if h.order < first.order and math.isinf(h.consequence)]
    return max(before, key=lambda h: h.order, default=None)
