"""The text report of `analyze_tensor`: verdict first, then the numbers behind it. Computes nothing.

Lines and tables are made once, here; the page (`page.py`) shows the same ones beside its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.finding import Finding, Severity
from ..core.numbers import amount, deviation, share, short
from ..show.findings import danger, render_text
from ..show.tables import Column, Table, report_line, table_text, titled_lines, translate_table
from ..show.term import DEFAULT_WIDTH, paint
from ..show.translation import translate
from .records import Dimension, RangeFit, Reduction, Resolution, TensorReport, Tiles

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = ".:-=+*#@"
SHOWN_INDICES = 4
WHOLE = 1 << 16  # columns
PLAIN = str.maketrans({"–": "-", "…": "...", "×": "x", "�": "?"})


def render_tensor(
    report: TensorReport, plain: bool = False, colour: bool = False, width: int = DEFAULT_WIDTH, lang: str = "en"
) -> str:
    """`plain`: ASCII only, for terminals that show nothing else."""
    lang = "en" if plain else lang
    sections = [
        _head(report, colour, lang),
        render_text(report.findings, colour=colour, width=width, lang=lang),
        _block("values", value_lines(report), width, lang),
        _under("range", ranges_table(report, lang), width, lang),
        _block("resolution", resolution_text(report), width, lang),
        _dimensions(report, plain, width, lang),
        _tiles(report.tiles, report.target, plain, width, lang),
        _under("reductions", reductions_table(report, lang), width, lang) if report.reductions else "",
        titled_lines("advice, from what was measured", [f"- {r.advice}" for r in report.reductions if r.advice], width, lang),
        titled_lines("notes", [f"- {note}" for note in report.notes], width, lang),
    ]
    text = "\n\n".join(section for section in sections if section)
    return text.translate(PLAIN).encode("ascii", "replace").decode() if plain else text


def verdict(findings: Sequence[Finding], target: str) -> str:
    return danger(findings, target) or f"healthy in {target}" + (f", {amount(len(findings), 'remark')}" if findings else "")


def _head(report: TensorReport, colour: bool, lang: str) -> str:
    shape = " x ".join(map(str, report.shape)) or translate("a single value", lang)
    worst = report.worst or Severity.INFO
    style = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "good"}[worst]
    name = f"{report.name}: " if report.name else ""
    return f"{name}{report.source} {shape}, {paint(translate(verdict(report.findings, report.target), lang), style, colour)}"


def _block(label: str, lines: Sequence[str], width: int, lang: str) -> str:
    labels = [label, *[""] * len(lines)]
    return "\n".join(part for name, line in zip(labels, lines) for part in report_line(f"{name:<12}{line}", width, lang))


def _under(label: str, table: Table, width: int, lang: str) -> str:
    return "\n".join([_block(label, [table.title], width, lang), *_table_lines(replace(table, title=""), lang)])


def _table_lines(table: Table, lang: str, indent: int = 2) -> list[str]:
    """Whole, however narrow the terminal is: no column says what another one does."""
    return [" " * indent + line for line in table_text(translate_table(table, lang), WHOLE).splitlines()]


def value_lines(report: TensorReport) -> list[str]:
    v = report.values
    lines = [
        f"{v.count} elements, {v.zero} zero, {v.count - v.finite} not finite",
        f"from {short(v.minimum, 5)} to {short(v.maximum, 5)}, mean {short(v.mean)}, rms {short(v.rms)}",
    ]
    if v.absmin is not None:
        lines.append(f"non-zero magnitudes from {short(v.absmin)}, 1 % of them below {short(v.low_quantile)}")
    return lines


def ranges_table(report: TensorReport, lang: str | None) -> Table:
    in_words = partial(translate, lang=lang)
    columns = (
        Column("format"), Column("flushed", "become 0", share), Column("flushed_energy", "energy", share),
        Column("subnormal", "subnormal", share), Column("subnormal_energy", "energy", share),
        Column("overflowed", "overflow", share), Column("overflowed_energy", "energy", share),
        Column("headroom", show=bits), Column("footroom", show=bits), Column("scales", "scales 2**n", in_words),
    )  # fmt: skip
    title = f"shares of the {report.ranges[0].count} non-zero finite values, and of their energy; room in bits"
    styles = ["strong" if fit.format == report.target else "" for fit in report.ranges]
    return Table(columns, [_range_row(fit) for fit in report.ranges], title, styles=styles)


def _range_row(fit: RangeFit) -> list[Any]:
    small: list[float | None] = [fit.flushed, fit.flushed_energy, fit.subnormal, fit.subnormal_energy]
    if not fit.underflow_matters and not (fit.flushed or fit.subnormal):
        small = [None] * 4
    foot = fit.footroom_bits if fit.underflow_matters else None
    return [fit.format, *small, fit.overflowed, fit.overflowed_energy, fit.headroom_bits, foot, _scale_window(fit)]


def bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _scale_window(fit: RangeFit) -> str:
    if fit.scale_low is None or fit.scale_high is None:
        return "any"
    if fit.scale_low > fit.scale_high:
        return "none"
    return f"{fit.scale_low} .. {fit.scale_high}"


def resolution_text(report: TensorReport) -> list[str]:
    """One line for each thing that is known about the rounding of the cast."""
    r = report.resolution
    lines = [f"cast to {report.target}: relative L2 error {share(r.rel_l2)}"]
    if r.varying is not None:
        centred = "-" if r.centred is None else share(r.centred)
        part = f"{share(r.varying)} of the size; error against it: {centred}"
        lines.append(f"varying part over dim {r.varying_dim}: {part}")
    if r.spacing_ratio is not None:
        lines.append(f"spacing of the format over that variation: {short(r.spacing_ratio)}{_positions(r)}")
    lines.append(f"error in ulps: half of the elements below {short(r.ulp_p50)}, 99 % below {short(r.ulp_p99)}")
    lines.append(f"error against |x| + rms: half below {share(r.error_p50)}, 99 % below {share(r.error_p99)}")
    if r.bias is not None:
        lines.append(f"bias of the error (mean/std): {short(r.bias)}")
    if r.sqnr_db is not None and r.sqnr_expected_db is not None:
        lines.append(f"SQNR {r.sqnr_db:.1f} dB; a cast within the normal range has about {r.sqnr_expected_db:.1f} dB")
    if r.integers is not None:
        n = r.integers
        lines.append(
            f"integers: {n.distinct} distinct become {n.distinct_after} ({share(n.collisions)} collide), "
            f"{share(n.changed)} of the elements change; {n.sampled} elements looked at"
        )
    return lines


def _positions(r: Resolution) -> str:
    if r.spacing_ratio_median is None or r.positions_lost is None:
        return ""
    return f"; per position: median {short(r.spacing_ratio_median)}, above 1 in {share(r.positions_lost)}"


def _dimensions(report: TensorReport, plain: bool, width: int, lang: str) -> str:
    lines = []
    for d in report.dimensions:
        said = f"  dim {d.dim}, {d.size} indices: {loudest_text(d)}"
        lines += [*report_line(said, width, lang), f"    {heat_line(d.heat, plain)}", *_table_lines(indices_table(d), lang, 4)]
    title = report_line("dimensions  rms along each, everything else pooled", width, lang)
    return "\n".join([*title, *lines]) if lines else ""


def loudest_text(d: Dimension) -> str:
    """`loudest index is 3 times the median one (rms)`."""
    unit = "index" if d.group == 1 else f"group of {d.group} indices"
    return f"loudest {unit} is {_times(d.rms_ratio)} the median one (rms)" + (f"; {d.silent} all zero" if d.silent else "")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{short(ratio)} times"


def indices_table(d: Dimension) -> Table:
    """The loudest and the quietest."""
    if d.bottom:
        chosen = [*d.top[:SHOWN_INDICES], *d.bottom[:2]]
    else:
        chosen = list(d.top) if len(d.top) <= SHOWN_INDICES + 2 else [*d.top[:SHOWN_INDICES], *d.top[-2:]]
    columns = (Column("index"), Column("rms"), Column("absmax", "max"), Column("absmin", "min > 0"), Column("energy", show=share))
    return Table(columns, [[i.index, i.rms, i.absmax, i.absmin, i.energy] for i in chosen])


def _tiles(t: Tiles | None, target: str, plain: bool, width: int, lang: str) -> str:
    if t is None:
        return ""
    peak = [v for line in t.heat for v in line if v > 0]
    bounds = (min(peak), max(peak)) if peak else None
    said = _block("tiles", tile_lines(t, target), width, lang)
    return "\n".join([said, *(f"    {heat_line(line, plain, bounds)}" for line in t.heat)])


def tile_lines(t: Tiles, target: str) -> list[str]:
    return [
        f"{t.count} tiles of {t.rows} x {t.columns}{f', {t.silent} all zero' if t.silent else ''}; loudest at "
        f"{t.loudest}: {short(t.loudest_absmax)}, quietest {short(t.quietest_absmax)}; loudest over median "
        f"{_times(t.absmax_ratio)}",
        f"{target} with one power-of-two scale for the tensor: {share(t.error_per_tensor)} off, "
        f"{share(t.flushed_per_tensor)} become 0; one per tile: {share(t.error_per_tile)}, {share(t.flushed_per_tile)}",
    ]


def heat_line(values: Sequence[float], plain: bool = False, bounds: tuple[float, float] | None = None) -> str:
    """One mark per value, on a logarithmic scale of at least four binary orders; a space for zero."""
    marks = ASCII_BLOCKS if plain else BLOCKS
    sounding = [v for v in values if v > 0]
    if not sounding:
        return "(all zero)"
    low, high = bounds or (min(sounding), max(sounding))
    top = math.log2(high)
    span = max(top - math.log2(low), 4.0)

    def mark(value: float) -> str:
        if value <= 0:
            return " "
        height = 1 - (top - math.log2(value)) / span
        return marks[min(int(height * len(marks)), len(marks) - 1)]

    return "|" + "".join(map(mark, values)) + "|"


def reductions_table(report: TensorReport, lang: str | None) -> Table:
    in_words = partial(translate, lang=lang)
    columns = (
        Column("op", "reduction"), Column("terms"), Column("torch", "by torch", deviation), Column("overflow", show=in_words),
        Column("accumulator", "acc += x", deviation), Column("swallowed", show=share), Column("condition"),
        Column("measured", "measured on", in_words),
    )  # fmt: skip
    title = "error against float64: torch's kernel on the target dtype, and one accumulator in it"
    return Table(columns, [_reduction_row(r) for r in report.reductions], title)


def _reduction_row(r: Reduction) -> list[Any]:
    over = f"{r.library_overflow}/{r.results}" if r.library_overflow else "0"
    whole = r.measured == r.results == r.accumulator_results and r.accumulator_terms == r.terms
    some = f"{r.measured} of {r.results} results; acc: {r.accumulator_results} x {r.accumulator_terms} terms"
    return [
        f"{r.op} dim={r.dim}", r.terms, r.library_error, over, r.accumulator_error, r.swallowed, r.condition,
        "all" if whole else some,
    ]  # fmt: skip
