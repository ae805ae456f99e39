"""The text report of `auto_diff`: verdict first, then the numbers behind it. Computes nothing.

Lines, tables and lists are made once, here; the page (`page.py`) shows the same ones beside its figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..core.finding import Severity
from ..core.formats import short_name
from ..core.limits import Limits
from ..core.numbers import amount, deviation, share, short
from ..core.ops import MEMORY, SAME_VALUE
from ..show.findings import danger, render_text
from ..show.tables import Column, Table, report_line, table_text, titled_lines, translate_table
from ..show.term import DEFAULT_WIDTH, paint
from ..show.translation import translate
from .records import MODEL, Advice, CallDiff, DiffReport, GradDiff, OpUse

MOST_CALLS = 40
MOST_GRADIENTS = 12
MOST_OPERATIONS = 16
MOST_RESEEDS = 3
MOST_NAME = 26  # characters up to which a module's class stands behind its name in a narrow terminal
WIDE = 130  # columns from which the table of calls shows everything
_STYLES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "good"}
T = TypeVar("T")


def render_diff(
    report: DiffReport, colour: bool = False, width: int = DEFAULT_WIDTH, every_call: bool = False, lang: str = "en"
) -> str:
    operations = _operations_by_module(report) if every_call else operations_table(report)
    calls = calls_table(report, wide=width >= WIDE)
    tables = [replace(calls, most=None) if every_call else calls, *gradient_tables(report)]
    sections = [
        _head(report, width, colour, lang),
        render_text(report.findings, colour=colour, width=width, lang=lang),
        _advice(report, width, lang),
        *(table_text(translate_table(table, lang), width, colour) for table in tables if table.rows),
        *(titled_lines(title, lines, width, lang) for title, lines in lists_of(report)),
        table_text(translate_table(operations, lang), width) if operations.rows else "",
        titled_lines("notes", [f"- {note}" for note in notes_of(report)], width, lang),
    ]
    return "\n\n".join(section for section in sections if section)


def verdict(report: DiffReport) -> str:
    healthy = f"nothing wrong in {report.target} so far (interrupted)" if report.partial else f"healthy in {report.target}"
    return danger(report.findings, report.target) or healthy


def _head(report: DiffReport, width: int, colour: bool, lang: str) -> str:
    told = paint(translate(verdict(report), lang), _STYLES[report.worst or Severity.INFO], colour)
    lines = [part for line in result_lines(report) for part in report_line(line, width, lang)]
    return "\n".join([f"{report.model}: {told}", *lines])


def result_lines(report: DiffReport) -> list[str]:
    """What was compared, and how far outputs, loss and gradient are off."""
    mode = "training" if report.training else "eval"
    lines = [
        f"{report.target} ({report.policy} policy, {report.device}) against {report.reference}, {mode} mode, "
        f"{amount(report.batches, 'batch', 'batches')}",
    ]
    for out in report.outputs:
        if nothing_left(out):
            lines.append(f"output    {bad_counts(out)} of {out.error.count}: nothing is left to compare")
            continue
        bad = f"{bad_counts(out)} of {out.error.count}; the rest " if out.error.spoiled else ""
        explained = f"at this depth rounding explains about {share(report.floor)}"
        lines.append(f"output    {bad}{deviation(out.error.rel_l2)} off; {explained}")
    if report.loss is not None and report.reference_loss is not None:
        lines.append(f"loss      {short(report.loss, 6)}, {report.reference} {short(report.reference_loss, 6)}")
    spoiled = [g for g in report.gradients if g.error.spoiled]
    if spoiled:
        lines.append(f"gradient  not finite in {len(spoiled)} of {amount(len(report.gradients), 'parameter')}")
    elif report.total is not None:
        scale = f", loss scale {short(report.total.loss_scale)}" if report.total.loss_scale != 1 else ""
        lines.append(f"gradient  {deviation(report.total.rel_l2)} off as a whole{scale}")
    return lines


def _advice(report: DiffReport, width: int, lang: str) -> str:
    if report.advice is None:
        return ""
    code = [f"            {line}" for line in report.advice.code.splitlines()]
    return "\n".join([*report_line(f"advice    {advice_text(report.advice)}", width, lang), *code])


def advice_text(advice: Advice) -> str:
    """The sentence before the code to write."""
    if not advice.wide:
        told = "nothing needs to stay wide" if advice.reached else "no set of modules was found that brings it there"
        return f"the output is {deviation(advice.before)} off, the goal is {share(advice.goal)}: {told}"
    reached = "" if advice.reached else ", which does not reach the goal"
    names = ", ".join(f"`{site}`" if site else "the model's own code between its layers" for site in advice.wide)
    flops = "" if advice.flop_share is None else f" and {share(advice.flop_share)} of the matmul and convolution FLOPs"
    return (
        f"keep {names} in FP32 ({share(advice.parameter_share)} of the parameters{flops}): the output error falls "
        f"from {deviation(advice.before)} to {deviation(advice.after)}, goal {share(advice.goal)}{reached}; "
        f"confirmed by {amount(advice.runs, 'run')}; write"
    )


def bad_counts(found: CallDiff | GradDiff) -> str:
    """`3 NaN 1 Inf`, or nothing."""
    return " ".join(f"{n} {word}" for n, word in ((found.error.nan, "NaN"), (found.error.inf, "Inf")) if n)


def calls_table(report: DiffReport, wide: bool = True, most: int = MOST_CALLS) -> Table:
    """`wide`: with all that is known of a call."""
    rows, styles = [], []
    with_class = not wide and all(len(c.name) + len(c.module) < MOST_NAME for c in report.calls)
    for call in report.calls:
        e = call.error
        rows.append(
            (
                f"{call.name} ({call.module})" if with_class else call.name,
                call.module,
                short_name(call.dtype),
                "x".join(map(str, call.shape)),
                if_comparable(call, e.rel_l2),
                call.own.rel_l2 if call.own else None,
                call.inherited,
                e.centred,
                if_comparable(call, e.max_abs),
                angle(call),
                e.bias,
                if_comparable(call, f"{short(e.ulp_p50, 2)}/{short(e.ulp_p99, 2)}") or "-",
                bad_counts(call),
            )
        )
        styles.append("error" if e.spoiled else "")
    columns = (
        Column("site", "module", elastic=True), Column("class"), Column("dtype"), Column("shape"),
        Column("error", "error", _with_mark), Column("own", "own", deviation), Column("inherited", "inherited", deviation),
        Column("centred", "centred", deviation), Column("max_abs", "max abs"), Column("cosine", "1 - cos"),
        Column("bias", "bias of error"), Column("ulps", "ulp p50/p99"), Column("bad", "not finite" if wide else ""),
    )  # fmt: skip
    kept = [i for i, column in enumerate(columns) if wide or column.name not in ("class", "max_abs", "cosine", "bias")]
    title = "module calls, in the order in which they ended (! above 1 %, !! above 10 %)"
    shown = [[row[i] for i in kept] for row in rows]
    return Table(tuple(columns[i] for i in kept), shown, title, most, "calls", styles)


def _with_mark(error: float | None) -> str:
    limits = Limits()
    mark = "" if error is None else "!!" if error > limits.rel_mark_error else "!" if error > limits.rel_mark_warn else ""
    return f"{deviation(error)} {mark}".rstrip()


def gradient_tables(report: DiffReport, most: int = MOST_GRADIENTS) -> list[Table]:
    """Of parameters, and of activations."""
    parameters = sorted(report.gradients, key=lambda g: (-g.error.spoiled, -g.error.rel_l2 * g.energy**0.5))
    activations = sorted(report.activation_gradients, key=lambda g: (-g.error.spoiled, -g.error.rel_l2))
    return [
        _gradient_table(
            "parameter gradients, largest error first",
            (Column("name", "gradient of", elastic=True), Column("energy", "share of gradient", deviation)),
            [(g, g.name, if_comparable(g, g.energy)) for g in parameters],
            report.reference,
            most,
        ),
        _gradient_table(
            "activation gradients, largest error first (own: added by one module, on exact values)",
            (Column("name", "gradient at the output of", elastic=True), Column("own_site", "added by", elastic=True)),
            [(g, _call_name(g), "-" if g.own is None else g.own_site or MODEL) for g in activations],
            report.reference,
            most,
        ),
    ]


def _gradient_table(
    title: str, ends: tuple[Column, Column], rows: Sequence[tuple[GradDiff, str, Any]], reference: str, most: int
) -> Table:
    """`ends`: the column of the name, and the one in which the two kinds of gradients differ."""
    columns = (
        ends[0],
        Column("dtype"),
        Column("error", "error", deviation),
        Column("own", "own", deviation),
        ends[1],
        Column("norm", f"{reference} norm"),
        Column("cosine", "1 - cos"),
        Column("bad", "not finite"),
    )
    cells = [
        (
            name,
            short_name(g.dtype),
            if_comparable(g, g.error.rel_l2),
            g.own,
            other,
            if_comparable(g, g.error.reference_norm),
            angle(g),
            bad_counts(g),
        )
        for g, name, other in rows
    ]
    return Table(columns, cells, title, most, "gradients", ["error" if g.error.spoiled else "" for g, _, _ in rows])


def _call_name(gradient: GradDiff) -> str:
    return f"{gradient.name or MODEL}#{gradient.call}" if gradient.call else gradient.name or MODEL


def nothing_left(found: CallDiff | GradDiff) -> bool:
    """Whether no element is finite in both runs, so that an error of 0 would say nothing."""
    return bool(found.error.spoiled) and not found.error.reference_norm


def if_comparable(found: CallDiff | GradDiff, value: T) -> T | None:
    """None where nothing finite is left that could be compared."""
    return None if nothing_left(found) else value


def angle(found: CallDiff | GradDiff) -> float | None:
    """1 - cos: what is left of it where both point the same way."""
    return None if found.error.cosine is None else 1 - found.error.cosine


def lists_of(report: DiffReport) -> list[tuple[str, list[str]]]:
    """What else was seen, a line each under a title; only what there is."""
    lists = [
        ("where the error sits, in calls that stand out", _dimensions(report)[:MOST_CALLS]),
        ("sums of products (matmul, convolution) of unlike magnitudes", _mixes(report)[:MOST_OPERATIONS]),
        (f"decisions that {report.reference} makes otherwise", _flips(report)[:MOST_OPERATIONS]),
    ]
    return [(title, lines) for title, lines in lists if lines]


def _dimensions(report: DiffReport) -> list[str]:
    lines: list[str] = []
    for call in report.calls:
        for d in () if nothing_left(call) else call.dimensions:
            ratio = "" if d.rms_ratio is None else f"{short(d.rms_ratio)} times the median; "
            lines.append(
                f"{call.name}, dim {d.dim} of {d.size}: index {d.index} has {share(d.error_share)} of the error; loudest "
                f"index {d.loudest} ({ratio}rms {short(d.rms_min)} to {short(d.rms_max)})"
            )
    return lines


def _mixes(report: DiffReport) -> list[str]:
    return [
        f"{m.site or MODEL}: {m.op}, index {m.index} contributes {short(m.ratio)} times the median index"
        for m in sorted(report.mixes, key=lambda m: -m.ratio)
    ]


def _flips(report: DiffReport) -> list[str]:
    return [f"{f.site or MODEL}: {f.op}, {share(f.share)} of {f.count}" for f in report.flips]


def operations_table(report: DiffReport, most: int = MOST_OPERATIONS) -> Table:
    """How often each operation ran in each type, the most frequent first."""
    by_type: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    for use in _computations(report):
        by_type[(use.op, use.dtype)] += use.count
        totals[use.op] += use.count
    dtypes = sorted({dtype for _, dtype in by_type})
    rows = [(op, *(by_type.get((op, dtype)) for dtype in dtypes)) for op, _ in totals.most_common()]
    title = f"what the {report.policy} policy ran in which type (calls in the first batch; per module with --all)"
    return Table((Column("operation"), *(Column(dtype) for dtype in dtypes)), rows, title, most, "operations")


def _computations(report: DiffReport) -> list[OpUse]:
    return [use for use in report.operations if use.op not in MEMORY | SAME_VALUE]


def _operations_by_module(report: DiffReport) -> Table:
    rows = [(use.site or MODEL, use.op, use.dtype, use.count) for use in _computations(report)]
    columns = (Column("module", elastic=True), Column("operation"), Column("dtype"), Column("calls"))
    return Table(columns, rows, f"what the {report.policy} policy ran in which type")


def notes_of(report: DiffReport) -> list[str]:
    kinds = sorted(report.reseeds.items(), key=lambda item: -item[1])
    return [
        *report.notes,
        *(f"the reference starts anew from the {report.target} value at {why} ({n} times)" for why, n in kinds[:MOST_RESEEDS]),
        *([f"and at {amount(len(kinds) - MOST_RESEEDS, 'more place')}"] if len(kinds) > MOST_RESEEDS else []),
    ]
