"""Where two runs part: curve by curve and layer by layer, aligned by step and name, across formats.

RUN_A is the reference, usually the FP32 run. Each is a number in the same store (--db), or a path:
other/metrics.db, other/metrics.db:3 or a folder. Two runs have parted where their gap outlasts
noise and exceeds what rounding explains.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

from ..core.finding import NannyError
from ..core.limits import Limits
from ..core.numbers import counted, factor, short
from ..show.tables import Answer, Column, Line, Table
from .parted import Comparison, Parted, compare_runs
from .source import Source, open_run, positive, title_of

SHOWN = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", help="the reference: a number, or a path such as fp32/metrics.db:1")
    parser.add_argument("run_b", metavar="RUN_B", help="the other run")
    parser.add_argument("--layer", metavar="GLOB", help="only layers whose name matches, such as 'encoder.*'")
    parser.add_argument("--limit", type=positive, metavar="N", help=f"rows of the table in text and markdown (default: {SHOWN})")


def answer(args: argparse.Namespace) -> Answer:
    if args.run is not None:
        raise NannyError("`nanny compare` takes the numbers of both runs, RUN_A and RUN_B; leave --run out")
    with _open(args.run_a, args.db) as a, _open(args.run_b, args.db) as b:
        result = compare_runs(a, b, Limits(), args.layer)
        lines = [*_verdict(result), Line(""), Line(f"A: {title_of(a)}", indent=4), Line(f"B: {title_of(b)}", indent=4)]
        lines += [Line(note, "warning", 4) for note in result.notes]
        first = result.first
        layer = first.name if first is not None and first.kind != "curve" else ""
        places = [source.command("layer", layer) for source in (a, b)] if layer else []
    return Answer(
        lines=lines,
        tables=[_curve_table(result), _layer_table(result, args.limit or SHOWN)],
        flat=_flat(result),
        data=_data(result),
        next=list(dict.fromkeys(places)) or [f"nanny runs{_db_flag(args.db)}"],
    )


@contextlib.contextmanager
def _open(text: str, db: str | None) -> Iterator[Source]:
    """`3` is a run of the store at hand; anything else is a path, with `:3` after it or not."""
    path, colon, number = text.rpartition(":")
    if text.isdecimal():
        target: tuple[str | None, int | None] = (db, int(text))
    elif colon and number.isdecimal() and path:
        target = (path, int(number))
    else:
        target = (text, None)
    with open_run(*target) as source:
        yield source


def _db_flag(db: str | None) -> str:
    return f" --db {shlex.quote(db)}" if db else ""


def _verdict(result: Comparison) -> list[Line]:
    """The first place where they part, then the first curve, if it is another."""
    if result.first is None:
        text = f"The runs do NOT PART in {counted(result.steps, 'common step')}: all gaps stay within noise and rounding."
        return [Line(text, "good", 4)]
    first = result.first
    word, style = ("PART FIRST at", "error") if result.for_good else ("PART FOR A WHILE, AND END TOGETHER, from", "warning")
    lines = [Line(f"The runs {word} step {first.step}: {_place(first)} {_what(first)}", style, 4)]
    for curve in result.curves:
        if curve.step is not None and curve is not first:
            lines.append(Line(f"  - from step {curve.step} on {_place(curve)} {_what(curve)}", indent=4))
    apart = [parted for parted in result.layers if parted.step is not None]
    if apart:
        lines.append(Line(f"  - {len(apart)} of {len(result.layers)} layer statistics part, first {_place(apart[0])}", indent=4))
    return lines


def _place(parted: Parted) -> str:
    names = {"loss": "the loss", "grad_norm": "the gradient norm"}
    if parted.kind == "curve":
        return names.get(parted.name, parted.name)
    words = {"output": "the output of", "output_grad": "the gradient at the output of", "grad": "the gradient of"}
    return f"{words.get(parted.kind, parted.kind)} {parted.name}"


def _what(parted: Parted) -> str:
    if parted.broke:
        seen = f" ({short(parted.b)})" if parted.kind == "curve" else ""
        return f"is not finite in B{seen}, in A it is {short(parted.a)}"
    numbers = f"A {short(parted.a)}, B {short(parted.b)}"
    back = "" if parted.still_apart else f", but they come back together by step {parted.last_step}"
    return f"is {factor(parted.ratio)} in B ({numbers}){back}"


def _curve_table(result: Comparison) -> Table:
    columns = (Column("curve"), Column("parts", "parts at step"), Column("a", "A there"), Column("b", "B there"),
               Column("last_a", "A at the end"), Column("last_b", "B at the end"), Column("floor", "noise floor"))  # fmt: skip
    rows = [[c.name, c.step, c.a, c.b, c.last_a, c.last_b, c.floor] for c in result.curves]
    return Table(columns, rows, styles=["error" if c.step is not None else "" for c in result.curves])


def _layer_table(result: Comparison, most: int) -> Table:
    columns = (
        Column("layer", elastic=True), Column("kind"), Column("parts", "parts at"), Column("a", "rms in A"),
        Column("b", "rms in B"), Column("ratio", "B / A"), Column("last_ratio", "at the end"),
    )  # fmt: skip
    rows = [[p.name, p.kind, p.step, p.a, p.b, p.ratio, p.last_ratio] for p in result.layers]
    styles = ["" if p.step is None else "error" if p.broke else "warning" for p in result.layers]
    apart = sum(p.step is not None for p in result.layers[most:])
    rest = f"statistics, {apart} of which part" if apart else "statistics, none of which part"
    return Table(columns, rows, title="layers, the first to part first", most=most, rest=rest, styles=styles)


def _flat(result: Comparison) -> Table:
    rows = [list(vars(parted).values()) for parted in (*result.curves, *result.layers)]
    return Table(tuple(Column(name) for name in vars((*result.curves, *result.layers)[0])), rows)


def _data(result: Comparison) -> dict[str, Any]:
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
