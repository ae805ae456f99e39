"""How two runs look side by side: where they part first, and by how much."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from ...core.numbers import amount, factor, short
from ...show.tables import Answer, Column, Line, Table
from ..compare import ComparedSeries, RunComparison
from ..source import title_of

COMPARED_SHOWN = 15


def comparison_answer(result: RunComparison, limit: int | None, db: str | None) -> Answer:
    first = result.first
    layer = first.name if first is not None and first.kind != "curve" else ""
    places = [source.command("layer", layer) for source in (result.reference, result.other)] if layer else []
    return Answer(
        lines=comparison_lines(result),
        tables=[_curve_table(result), _compared_table(result, limit or COMPARED_SHOWN)],
        flat=_compared_rows(result),
        data=_comparison_data(result),
        next=list(dict.fromkeys(places)) or [f"nanny runs{f' --db {shlex.quote(db)}' if db else ''}"],
    )


def comparison_lines(result: RunComparison) -> list[Line]:
    """The verdict, the two runs, and what to know about them."""
    titles = [Line(f"A: {title_of(result.reference)}", indent=4), Line(f"B: {title_of(result.other)}", indent=4)]
    notes = [Line(note, "warning", 4) for note in result.notes]
    return [comparison_verdict(result), *_also_apart(result), Line(""), *titles, *notes]


def comparison_verdict(result: RunComparison) -> Line:
    """The first place where they part."""
    if result.first is None:
        text = f"The runs do NOT PART in {amount(result.steps, 'common step')}: all gaps stay within noise and rounding."
        return Line(text, "good", 4)
    first = result.first
    word, style = ("PART FIRST at", "error") if result.for_good else ("PART FOR A WHILE, AND END TOGETHER, from", "warning")
    return Line(f"The runs {word} step {first.step}: {_series_name(first)} {_gap(first)}", style, 4)


def _also_apart(result: RunComparison) -> list[Line]:
    lines = []
    for curve in result.curves:
        if curve.step is not None and curve is not result.first:
            lines.append(Line(f"  - from step {curve.step} on {_series_name(curve)} {_gap(curve)}", indent=4))
    apart = [series for series in result.layers if series.step is not None]
    if apart:
        text = f"  - {len(apart)} of {len(result.layers)} layer statistics part, first {_series_name(apart[0])}"
        lines.append(Line(text, indent=4))
    return lines


def _series_name(series: ComparedSeries) -> str:
    names = {"loss": "the loss", "grad_norm": "the gradient norm"}
    if series.kind == "curve":
        return names.get(series.name, series.name)
    words = {"output": "the output of", "output_grad": "the gradient at the output of", "grad": "the gradient of"}
    return f"{words.get(series.kind, series.kind)} {series.name}"


def _gap(series: ComparedSeries) -> str:
    if series.broke:
        seen = f" ({short(series.b)})" if series.kind == "curve" else ""
        return f"is not finite in B{seen}, in A it is {short(series.a)}"
    numbers = f"A {short(series.a)}, B {short(series.b)}"
    back = "" if series.still_apart else f", but they come back together by step {series.last_step}"
    return f"is {factor(series.ratio)} in B ({numbers}){back}"


def _curve_table(result: RunComparison) -> Table:
    columns = (Column("curve"), Column("parts", "parts at step"), Column("a", "A there"), Column("b", "B there"),
               Column("last_a", "A at the end"), Column("last_b", "B at the end"), Column("floor", "noise floor"))  # fmt: skip
    rows = [[c.name, c.step, c.a, c.b, c.last_a, c.last_b, c.floor] for c in result.curves]
    return Table(columns, rows, styles=["error" if c.step is not None else "" for c in result.curves])


def _compared_table(result: RunComparison, most: int) -> Table:
    columns = (
        Column("layer", elastic=True), Column("kind"), Column("parts", "parts at"), Column("a", "rms in A"),
        Column("b", "rms in B"), Column("ratio", "B / A"), Column("last_ratio", "at the end"),
    )  # fmt: skip
    rows = [[s.name, s.kind, s.step, s.a, s.b, s.ratio, s.last_ratio] for s in result.layers]
    styles = ["" if s.step is None else "error" if s.broke else "warning" for s in result.layers]
    apart = sum(s.step is not None for s in result.layers[most:])
    rest = f"statistics, {apart} of which part" if apart else "statistics, none of which part"
    return Table(columns, rows, title="layers, the first to part first", most=most, rest=rest, styles=styles)


def _compared_rows(result: RunComparison) -> Table:
    series = (*result.curves, *result.layers)
    return Table(tuple(Column(field.name) for field in fields(series[0])), [list(vars(one).values()) for one in series])


def _comparison_data(result: RunComparison) -> dict[str, Any]:
    return {
        "parts": result.first is not None,
        "first": None if result.first is None else vars(result.first),
        "for_good": result.for_good,
        "steps": result.steps,
        "same_start": result.same_start,
        "curves": [vars(curve) for curve in result.curves],
        "layers": [vars(layer) for layer in result.layers],
        "notes": list(result.notes),
    }
