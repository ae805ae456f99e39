"""`nanny diff --format html`: how the error grows through the model, and whose it is. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.finding import Severity
from ..core.numbers import counted, deviation, share, short, shortened
from ..show.figures import BAD, CLAIM, OWN, QUIET, frame, graph_objects
from ..show.html import Section, document, finding_lines
from ..show.tables import Column, Line, Table
from .records import MODEL, CallDiff, DiffReport, GradDiff
from .text import angle, bad_counts, if_comparable, operations_table, verdict

NAMES_SHOWN = 60  # beside a figure; more would cover each other, and are shown under the pointer
NAME_WIDTH = 44
MOST_CALLS = 400
MOST_GRADIENTS = 200
MOST_OPERATIONS = 60


def render_diff(report: DiffReport, lang: str | None = None) -> str:
    figures: dict[str, Any] = {}
    sections = [_verdict(report), _advice(report), *_calls(report, figures), _gradients(report, figures), _loose_ends(report),
                _operations(report), _notes(report)]  # fmt: skip
    title = f"{report.model}: {verdict(report)}"
    healthy = (report.worst or Severity.INFO) <= Severity.INFO
    first, *rest = [section for section in sections if section is not None]
    # of a healthy model the curve of the error is enough; what stands under it is opened by who wants it
    rest = [replace(section, folded=healthy and section.figure != "calls") for section in rest]
    return document(title, [first, *rest], figures, lang)


def _verdict(report: DiffReport) -> Section:
    mode = "training" if report.training else "eval"
    lines = [line for finding in report.findings for line in finding_lines(finding)]
    if (report.worst or Severity.INFO) == Severity.INFO:
        lines.insert(0, Line(verdict(report), "good"))
    if report.failure is not None:
        failure = report.failure
        lines.append(Line(f"raised in the {failure.precision} run, in {failure.site}: {failure.message}", "error"))
    lines.append(
        Line(f"{report.target} ({report.policy} policy, {report.device}) against {report.reference}, {mode} mode, "
             f"{counted(report.batches, 'batch', 'batches')}", "quiet")
    )  # fmt: skip
    for out in report.outputs:
        explained = f"at this depth rounding explains about {share(report.floor)}"
        bad = bad_counts(out)
        lines.append(Line(f"output: {bad}", "error") if bad else Line(f"output {deviation(out.error.rel_l2)} off; {explained}"))
    if report.loss is not None and report.reference_loss is not None:
        lines.append(Line(f"loss {short(report.loss, 6)}, {report.reference} {short(report.reference_loss, 6)}"))
    spoiled = [g for g in report.gradients if g.error.spoiled]
    if spoiled:
        lines.append(Line(f"gradient: not finite in {len(spoiled)} of {counted(len(report.gradients), 'parameter')}", "error"))
    elif report.total is not None:
        lines.append(Line(f"gradient {deviation(report.total.rel_l2)} off as a whole"))
    return Section("Verdict", lines)


def _advice(report: DiffReport) -> Section | None:
    advice = report.advice
    if advice is None:
        return None
    fall = f"the output error falls from {deviation(advice.before)} to {deviation(advice.after)}, goal {share(advice.goal)}"
    names = ", ".join(f"`{site}`" if site else "the model's own code" for site in advice.wide) or "nothing"
    lines = [Line(f"keep in FP32: {names} ({share(advice.parameter_share)} of the parameters)", "strong"), Line(fall)]
    return Section("Advice", lines, code=advice.code)


def _calls(report: DiffReport, figures: dict[str, Any]) -> list[Section]:
    if not report.calls:
        return []
    owns = [call.own.rel_l2 if call.own else None for call in report.calls]
    figures["calls"] = _errors_figure(report.calls, owns, report.floor)
    _name_culprit(figures["calls"], report)
    columns = (
        Column("module"), Column("class"), Column("dtype"), Column("shape"), Column("error", show=deviation),
        Column("own", show=deviation), Column("inherited", show=deviation), Column("centred", show=deviation),
        Column("max_abs", "max abs"), Column("cosine", "1 - cos"), Column("ulps", "ulp p50 / p99"), Column("bad", "not finite"),
    )  # fmt: skip
    rows = [
        [
            call.name, call.module, call.dtype, " x ".join(map(str, call.shape)), if_comparable(call, call.error.rel_l2),
            call.own.rel_l2 if call.own else None, call.inherited, call.error.centred, if_comparable(call, call.error.max_abs),
            angle(call), if_comparable(call, f"{short(call.error.ulp_p50, 2)} / {short(call.error.ulp_p99, 2)}"),
            bad_counts(call),
        ]
        for call in report.calls
    ]  # fmt: skip
    styles = ["error" if call.error.spoiled else "" for call in report.calls]
    own = "own: what a module adds on exact inputs; inherited: what the error of its inputs became"
    table = Table(columns, rows, "", MOST_CALLS, "calls", styles)
    return [
        Section("Error through the model", [Line(own, "quiet")], (), "calls"),
        Section("module calls, in the order in which they ended", (), [table]),
    ]


def _errors_figure(found: Sequence[CallDiff | GradDiff], owns: Sequence[float | None] = (), floor: float = 0.0) -> Any:
    names = [one.name for one in found]
    figure = graph_objects().Figure()
    _add_line(figure, names, [one.error.rel_l2 for one in found], "error", OWN, "lines+markers")
    if owns:
        _add_line(figure, names, owns, "own", CLAIM, "markers")
    _add_spoiled(figure, found)
    if floor > 0:
        figure.add_scatter(x=[-0.5, len(found) - 0.5], y=[floor] * 2, mode="lines", line={"color": QUIET, "dash": "dash"},
                           name="what rounding explains at this depth", hoverinfo="skip")  # fmt: skip
    shows_names = len(names) <= NAMES_SHOWN
    figure.update_layout(**frame(470 if shows_names else 320, top=30))
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.12, "x": 0})
    if shows_names:
        labels = [_plain(shortened(name, NAME_WIDTH)) for name in names]
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=labels, tickangle=-55, automargin=True)
    figure.update_xaxes(zeroline=False)
    figure.update_layout(yaxis={"type": "log", "exponentformat": "power", "title": {"text": "relative error"}, "nticks": 7})
    return figure


def _gradients(report: DiffReport, figures: dict[str, Any]) -> Section | None:
    if not report.gradients:
        return None
    figures["gradients"] = _errors_figure(report.gradients)
    worst = sorted(report.gradients, key=lambda g: (-(g.error.spoiled > 0), -g.error.worst))
    columns = (
        Column("name", "parameter"), Column("dtype"), Column("error", show=deviation), Column("energy", "of the whole", share),
        Column("norm", "norm in the reference"), Column("cosine", "1 - cos"), Column("bad", "not finite"),
    )  # fmt: skip
    rows = [
        [g.name, g.dtype, if_comparable(g, g.error.rel_l2), None if g.error.spoiled else g.energy, g.error.reference_norm or None,
         angle(g), bad_counts(g)]
        for g in worst
    ]  # fmt: skip
    styles = ["error" if g.error.spoiled else "" for g in worst]
    table = Table(columns, rows, "worst first", MOST_GRADIENTS, "gradients", styles)
    return Section("Gradients of parameters", (), [table], "gradients")


def _add_line(figure: Any, names: Sequence[str], values: Sequence[float | None], name: str, colour: str, mode: str) -> None:
    """On a logarithmic axis; an exact zero and what is not finite have no place on it."""
    shown = [value if value is not None and 0 < value < math.inf else None for value in values]
    symbol = "circle" if name == "error" else "diamond"
    figure.add_scatter(x=list(range(len(names))), y=shown, mode=mode, name=name, line={"color": colour},
                       marker={"color": colour, "symbol": symbol, "size": 7}, customdata=[[_plain(n)] for n in names],
                       hovertemplate=f"%{{customdata[0]}}<br>{name} %{{y:.3g}}<extra></extra>")  # fmt: skip


def _add_spoiled(figure: Any, found: Sequence[CallDiff | GradDiff]) -> None:
    """NaN and infinities that the reference does not have: crosses at the upper edge."""
    at = [i for i, item in enumerate(found) if item.error.spoiled]
    if at:
        texts = [[_plain(f"{found[i].name}: {bad_counts(found[i]) or 'not finite'}")] for i in at]
        figure.add_scatter(x=at, y=[1.0] * len(at), yaxis="y2", mode="markers", name="not finite", customdata=texts,
                           marker={"symbol": "x", "color": BAD, "size": 10},
                           hovertemplate="%{customdata[0]}<extra></extra>")  # fmt: skip
        figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1.03], "visible": False, "fixedrange": True})


def _name_culprit(figure: Any, report: DiffReport) -> None:
    """The first call that a finding blames: an arrow with its name."""
    blamed = next((f.site for f in report.findings if f.severity >= Severity.WARNING), None)
    at = next((i for i, call in enumerate(report.calls) if blamed in (call.name, call.site or MODEL)), None)
    if at is None:
        return
    call = report.calls[at]
    error = if_comparable(call, call.error.rel_l2) or (call.own.rel_l2 if call.own else None)
    at_top = call.error.spoiled or not error or error == math.inf
    place = {"yref": "paper", "y": 0.95, "ay": 30} if at_top else {"y": math.log10(error or 1), "ay": -30}
    figure.add_annotation(x=at, text=_plain(f"◆ {shortened(call.name, NAME_WIDTH)}"), showarrow=True, arrowhead=2, ax=0,
                          font={"color": BAD, "size": 13}, arrowcolor=BAD, **place)  # fmt: skip


def _loose_ends(report: DiffReport) -> Section | None:
    """Errors at single indices, sums of unlike magnitudes, and decisions that turned out otherwise."""
    lines = []
    for call in report.calls:
        for d in (d for d in call.dimensions if d.error_share > 0):
            lines.append(f"{call.name}, dim {d.dim} of {d.size}: index {d.index} has {share(d.error_share)} of the error")
    for mix in sorted(report.mixes, key=lambda m: -m.ratio):
        place = mix.site or "(model)"
        lines.append(f"{place}: {mix.op} sums unlike magnitudes, index {mix.index} is {short(mix.ratio)} times the median index")
    for flip in report.flips:
        lines.append(f"{flip.site or '(model)'}: {flip.op} decides otherwise in {share(flip.share)} of {flip.count}")
    return Section("Where the error sits", [Line(line) for line in lines[:MOST_OPERATIONS]]) if lines else None


def _operations(report: DiffReport) -> Section | None:
    table = operations_table(report, "calls in the first batch", MOST_OPERATIONS)
    return Section(f"What the {report.policy} policy ran in which type", (), [table]) if table.rows else None


def _notes(report: DiffReport) -> Section | None:
    anew = f"the reference starts anew from the {report.target} value at"
    again = [f"{anew} {why} ({n} times)" for why, n in report.reseeds.items()]
    lines = [Line(note) for note in (*report.notes, *again)]
    return Section("Notes", lines) if lines else None


def _plain(text: str) -> str:
    """Plotly reads a little HTML in its texts; a layer's name is none."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
