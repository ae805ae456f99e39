"""The text report of `auto_diff`: verdict first, then the numbers behind it. Computes nothing."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from ..core.finding import Severity
from ..core.limits import Limits
from ..core.numbers import counted, deviation, share, short
from ..show.findings import render_text
from ..show.tables import Column, Table, table_text
from ..show.term import DEFAULT_WIDTH, painted
from .records import CallDiff, DiffReport, GradDiff

MOST_CALLS = 40
MOST_GRADIENTS = 12
MOST_OPERATIONS = 16
MOST_RESEEDS = 3
MOST_NAME = 26  # characters up to which a module's class stands behind its name in a narrow terminal
WIDE = 130  # columns from which the table of calls shows everything
_STYLES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "good"}
COMPUTES_NOTHING = frozenset(["_to_copy", "clone", "copy_", "empty", "empty_like", "zeros", "ones", "fill_", "detach"])


def render_diff(report: DiffReport, colour: bool = False, width: int = DEFAULT_WIDTH, every_call: bool = False) -> str:
    sections = [
        _head(report, colour),
        render_text(report.findings, colour=colour, width=width),
        _advice(report, width),
        _calls(report, width, colour, every_call),
        _gradients(report, width, colour),
        _dimensions(report, width),
        _mixes(report),
        _flips(report),
        _operations_by_module(report, width) if every_call else _operations(report, width),
        _notes(report, width),
    ]
    return "\n\n".join(section for section in sections if section)


def verdict(report: DiffReport) -> str:
    serious = [f for f in report.findings if f.severity >= Severity.WARNING]
    if not serious:
        return f"healthy in {report.target}" if not report.partial else f"nothing wrong in {report.target} so far (interrupted)"
    errors = sum(f.severity == Severity.ERROR for f in serious)
    parts = [counted(n, word) for n, word in ((errors, "error"), (len(serious) - errors, "warning")) if n]
    return f"{'not safe' if errors else 'risky'} in {report.target}: {' and '.join(parts)}"


def _head(report: DiffReport, colour: bool) -> str:
    mode = "training" if report.training else "eval"
    lines = [
        f"{report.model}: {painted(verdict(report), _STYLES[report.worst or Severity.INFO], colour)}",
        f"{report.target} ({report.policy} policy, {report.device}) against {report.reference}, {mode} mode, "
        f"{counted(report.batches, 'batch', 'batches')}",
    ]
    for out in report.outputs:
        if nothing_left(out):
            lines.append(f"output    {_bad(out)} of {out.error.count}: nothing is left to compare")
            continue
        bad = f"{_bad(out)} of {out.error.count}; the rest " if out.error.spoiled else ""
        explained = f"at this depth rounding explains about {share(report.floor)}"
        lines.append(f"output    {bad}{deviation(out.error.rel_l2)} off; {explained}")
    if report.loss is not None and report.reference_loss is not None:
        lines.append(f"loss      {short(report.loss, 6)}, {report.reference} {short(report.reference_loss, 6)}")
    spoiled = [g for g in report.gradients if g.error.spoiled]
    if spoiled:
        lines.append(f"gradient  not finite in {len(spoiled)} of {counted(len(report.gradients), 'parameter')}")
    elif report.total is not None:
        scale = f", loss scale {short(report.total.loss_scale)}" if report.total.loss_scale != 1 else ""
        lines.append(f"gradient  {deviation(report.total.rel_l2)} off as a whole{scale}")
    return "\n".join(lines)


def _advice(report: DiffReport, width: int) -> str:
    advice = report.advice
    if advice is None:
        return ""
    if not advice.wide:
        told = "nothing needs to stay wide" if advice.reached else "no set of modules was found that brings it there"
        text = f"advice    the output is {deviation(advice.before)} off, the goal is {share(advice.goal)}: {told}"
        return "\n".join(textwrap.wrap(text, width, subsequent_indent=" " * 10))
    reached = "" if advice.reached else ", which does not reach the goal"
    names = ", ".join(site or "the model's own code between its layers" for site in advice.wide)
    flops = "" if advice.flop_share is None else f" and {share(advice.flop_share)} of the matmul and convolution FLOPs"
    told = (
        f"advice    keep {names} in FP32 ({share(advice.parameter_share)} of the parameters{flops}): the output error falls "
        f"from {deviation(advice.before)} to {deviation(advice.after)}, goal {share(advice.goal)}{reached}; "
        f"confirmed by {counted(advice.runs, 'run')}; write"
    )
    code = [f"            {line}" for line in advice.code.splitlines()]
    return "\n".join([*textwrap.wrap(told, width, subsequent_indent=" " * 10), *code])


def _bad(call: CallDiff | GradDiff) -> str:
    parts = [f"{n} {word}" for n, word in ((call.error.nan, "NaN"), (call.error.inf, "Inf")) if n]
    return " ".join(parts)


def _calls(report: DiffReport, width: int, colour: bool, every_call: bool) -> str:
    limits = Limits()
    columns = [
        Column("site", "module", elastic=True),
        Column("dtype"),
        Column("shape"),
        Column("error", "error", deviation),
        Column("own", "own", deviation),
        Column("inherited", "inherited", deviation),
        Column("centred", "centred", deviation),
        Column("ulps", "ulp p50/p99"),
        Column("bad", ""),
    ]
    more = [Column("max_abs", "max abs"), Column("cosine", "1-cos"), Column("bias")] if width >= WIDE else []
    rows, styles = [], []
    with_class = width >= WIDE or all(len(c.name) + len(c.module) < MOST_NAME for c in report.calls)
    for call in report.calls:
        e = call.error
        marked = "!!" if e.rel_l2 > limits.rel_mark_error else "!" if e.rel_l2 > limits.rel_mark_warn else ""
        nothing = nothing_left(call)
        extra = (None if nothing else e.max_abs, None if e.cosine is None else 1 - e.cosine, e.bias)
        rows.append(
            (
                f"{call.name} ({call.module})" if with_class else call.name,
                _type(call.dtype),
                "x".join(map(str, call.shape)),
                None if nothing else e.rel_l2,
                call.own.rel_l2 if call.own else None,
                call.inherited,
                e.centred,
                "-" if nothing else f"{short(e.ulp_p50, 2)}/{short(e.ulp_p99, 2)}",
                " ".join(part for part in (marked, _bad(call)) if part),
                *(extra if more else ()),
            )
        )
        styles.append("error" if e.spoiled else "")
    most = None if every_call else MOST_CALLS
    title = "module calls, in the order in which they ended (! above 1 %, !! above 10 %)"
    return table_text(Table((*columns, *more), rows, title, most, "calls", styles), width, colour) if rows else ""


def _gradients(report: DiffReport, width: int, colour: bool) -> str:
    parts = [
        _parameter_gradients(report, width, colour) if report.gradients else "",
        _activation_gradients(report, width, colour) if report.activation_gradients else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _parameter_gradients(report: DiffReport, width: int, colour: bool) -> str:
    columns = (
        Column("name", "gradient of", elastic=True),
        Column("dtype"),
        Column("error", "error", deviation),
        Column("own", "own", deviation),
        Column("energy", "share of gradient", deviation),
        Column("norm", f"{report.reference} norm"),
        Column("cosine", "1-cos"),
        Column("bad", ""),
    )
    chosen = sorted(report.gradients, key=lambda g: (-g.error.spoiled, -g.error.rel_l2 * g.energy**0.5))
    rows = [
        (g.name, _type(g.dtype), _compared(g, g.error.rel_l2), g.own, _compared(g, g.energy), _norm(g), _angle(g), _bad(g))
        for g in chosen
    ]
    title = "parameter gradients, largest error first"
    return table_text(Table(columns, rows, title, MOST_GRADIENTS, "gradients"), width, colour)


def _activation_gradients(report: DiffReport, width: int, colour: bool) -> str:
    columns = (
        Column("name", "gradient at the output of", elastic=True),
        Column("dtype"),
        Column("error", "error", deviation),
        Column("own", "own", deviation),
        Column("own_site", "added by", elastic=True),
        Column("norm", f"{report.reference} norm"),
        Column("cosine", "1-cos"),
        Column("bad", ""),
    )
    chosen = sorted(report.activation_gradients, key=lambda g: (-g.error.spoiled, -g.error.rel_l2))
    rows = [
        (
            f"{g.name or '(model)'}{f'#{g.call}' if g.call else ''}",
            _type(g.dtype),
            _compared(g, g.error.rel_l2),
            g.own,
            "-" if g.own is None else g.own_site or "(model)",
            _norm(g),
            _angle(g),
            _bad(g),
        )
        for g in chosen
    ]
    title = "activation gradients, largest error first (own: added by one module, on exact values)"
    return table_text(Table(columns, rows, title, MOST_GRADIENTS, "gradients"), width, colour)


def nothing_left(found: CallDiff | GradDiff) -> bool:
    """Whether no element is finite in both runs, so that an error of 0 would say nothing."""
    return bool(found.error.spoiled) and not found.error.reference_norm


def _compared(gradient: GradDiff, value: float) -> float | None:
    return None if nothing_left(gradient) else value


def _norm(gradient: GradDiff) -> float | None:
    return _compared(gradient, gradient.error.reference_norm)


def _type(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(dtype, dtype)


def _angle(gradient: GradDiff) -> float | None:
    return None if gradient.error.cosine is None else 1 - gradient.error.cosine


def _dimensions(report: DiffReport, width: int) -> str:
    lines: list[str] = []
    for call in report.calls:
        for d in () if nothing_left(call) else call.dimensions:
            ratio = "" if d.rms_ratio is None else f"{short(d.rms_ratio)} times the median; "
            told = (
                f"{call.name}, dim {d.dim} of {d.size}: index {d.index} has {share(d.error_share)} of the error; loudest "
                f"index {d.loudest} ({ratio}rms {short(d.rms_min)} to {short(d.rms_max)})"
            )
            lines += textwrap.wrap(told, width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(["where the error sits, in calls that stand out", *lines[:MOST_CALLS]]) if lines else ""


def _mixes(report: DiffReport) -> str:
    lines = [
        f"  {m.site or '(model)'}: {m.op}, index {m.index} contributes {short(m.ratio)} times the median index"
        for m in sorted(report.mixes, key=lambda m: -m.ratio)
    ]
    return "\n".join(["sums of products (matmul, convolution) of unlike magnitudes", *lines[:MOST_OPERATIONS]]) if lines else ""


def _flips(report: DiffReport) -> str:
    lines = [f"  {f.site or '(model)'}: {f.op}, {share(f.share)} of {f.count}" for f in report.flips]
    return "\n".join([f"decisions that {report.reference} makes otherwise", *lines[:MOST_OPERATIONS]]) if lines else ""


def _operations(report: DiffReport, width: int) -> str:
    by_type: Counter[tuple[str, str]] = Counter()
    for use in report.operations:
        if use.op not in COMPUTES_NOTHING:
            by_type[(use.op, use.dtype)] += use.count
    if not by_type:
        return ""
    dtypes = sorted({dtype for _, dtype in by_type})
    totals = Counter[str]()
    for (op, _), count in by_type.items():
        totals[op] += count
    rows = [(op, *(by_type.get((op, dtype)) for dtype in dtypes)) for op, _ in totals.most_common()]
    columns = (Column("operation"), *(Column(dtype) for dtype in dtypes))
    title = f"what the {report.policy} policy ran in which type (calls in the first batch; per module with --all)"
    return table_text(Table(columns, rows, title, MOST_OPERATIONS, "operations"), width)


def _operations_by_module(report: DiffReport, width: int) -> str:
    rows = [(use.site or "(model)", use.op, use.dtype, use.count) for use in report.operations if use.op not in COMPUTES_NOTHING]
    columns = (Column("module", elastic=True), Column("operation"), Column("dtype"), Column("calls"))
    return table_text(Table(columns, rows, f"what the {report.policy} policy ran in which type"), width) if rows else ""


def _notes(report: DiffReport, width: int) -> str:
    kinds = sorted(report.reseeds.items(), key=lambda item: -item[1])
    texts: Sequence[str] = [
        *report.notes,
        *(f"the reference starts anew from the {report.target} value at {why} ({n} times)" for why, n in kinds[:MOST_RESEEDS]),
        *([f"and at {counted(len(kinds) - MOST_RESEEDS, 'more place')}"] if len(kinds) > MOST_RESEEDS else []),
    ]
    if not texts:
        return ""
    lines = [line for t in texts for line in textwrap.wrap(t, width, initial_indent="  - ", subsequent_indent="    ")]
    return "\n".join(["notes", *lines])
