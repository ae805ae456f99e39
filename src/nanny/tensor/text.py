"""The text report of `analyze_tensor`: verdict first, then the numbers behind it. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.finding import Finding, Severity
from ..core.numbers import counted, share, short
from ..show.findings import danger, render_text
from ..show.tables import report_line
from ..show.term import DEFAULT_WIDTH, columns_of, painted
from ..show.translation import translate
from .records import Dimension, RangeFit, Reduction, Resolution, TensorReport, Tiles

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = ".:-=+*#@"
SHOWN_INDICES = 4
PLAIN = str.maketrans({"–": "-", "…": "...", "×": "x", "�": "?"})


def render_tensor(
    report: TensorReport, plain: bool = False, colour: bool = False, width: int = DEFAULT_WIDTH, lang: str = "en"
) -> str:
    """`plain`: ASCII only, for terminals that show nothing else."""
    lang = "en" if plain else lang
    sections = [
        _head(report, colour, lang),
        render_text(report.findings, colour=colour, width=width, lang=lang),
        _fit(_values(report), width, lang),
        _ranges(report, width, lang),
        _fit("resolution  " + f"\n{' ' * 12}".join(resolution_text(report)), width, lang),
        _dimensions(report, plain, width, lang),
        _fit(_tiles(report.tiles, report.target, plain), width, lang),
        _reductions(report.reductions, width, lang),
        _paragraphs("advice, from what was measured", [r.advice for r in report.reductions if r.advice], width, lang),
        _paragraphs("notes", report.notes, width, lang),
    ]
    text = "\n\n".join(section for section in sections if section)
    return text.translate(PLAIN).encode("ascii", "replace").decode() if plain else text


def verdict(findings: Sequence[Finding], target: str) -> str:
    return danger(findings, target) or f"healthy in {target}" + (f", {counted(len(findings), 'remark')}" if findings else "")


def _head(report: TensorReport, colour: bool, lang: str) -> str:
    shape = " x ".join(map(str, report.shape)) or translate("a single value", lang)
    worst = report.worst or Severity.INFO
    style = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "good"}[worst]
    name = f"{report.name}: " if report.name else ""
    return f"{name}{report.source} {shape}, {painted(translate(verdict(report.findings, report.target), lang), style, colour)}"


def _values(report: TensorReport) -> str:
    v = report.values
    lines = [
        f"values      {v.count} elements, {v.zero} zero, {v.count - v.finite} not finite",
        f"            from {short(v.minimum, 5)} to {short(v.maximum, 5)}, mean {short(v.mean)}, rms {short(v.rms)}",
    ]
    if v.absmin is not None:
        lines.append(f"            non-zero magnitudes from {short(v.absmin)}, 1 % of them below {short(v.low_quantile)}")
    return "\n".join(lines)


def _ranges(report: TensorReport, width: int, lang: str) -> str:
    head = ["", "become 0", "energy", "subnormal", "energy", "overflow", "energy", "headroom", "footroom", "scales 2**n"]
    rows = [head, *(_range_row(fit) for fit in report.ranges)]
    title = f"range       shares of the {report.ranges[0].count} non-zero finite values, and of their energy; room in bits"
    return "\n".join([*report_line(title, width, lang), *_align(rows, lang)])


def _range_row(fit: RangeFit) -> list[str]:
    small = [share(v) for v in (fit.flushed, fit.flushed_energy, fit.subnormal, fit.subnormal_energy)]
    if not fit.underflow_matters and not (fit.flushed or fit.subnormal):
        small = ["-"] * 4
    return [
        fit.format,
        *small,
        share(fit.overflowed),
        share(fit.overflowed_energy),
        bits(fit.headroom_bits),
        bits(fit.footroom_bits if fit.underflow_matters else None),
        scale_window(fit).replace("2**", "").replace(" to ", " .. "),
    ]


def bits(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.1f}{unit}"


def scale_window(fit: RangeFit) -> str:
    if fit.scale_low is None or fit.scale_high is None:
        return "any"
    if fit.scale_low > fit.scale_high:
        return "none"
    return f"2**{fit.scale_low} to 2**{fit.scale_high}"


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
        lines += [*report_line(said, width, lang), f"    {heat_line(d.heat, plain)}", *_indices(d, lang)]
    title = report_line("dimensions  rms along each, everything else pooled", width, lang)
    return "\n".join([*title, *lines]) if lines else ""


def loudest_text(d: Dimension) -> str:
    """`loudest index is 3 times the median one (rms)`."""
    unit = "index" if d.group == 1 else f"group of {d.group} indices"
    return f"loudest {unit} is {_times(d.rms_ratio)} the median one (rms)" + (f"; {d.silent} all zero" if d.silent else "")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{short(ratio)} times"


def _indices(d: Dimension, lang: str) -> list[str]:
    if d.bottom:
        chosen = [*d.top[:SHOWN_INDICES], *d.bottom[:2]]
    else:
        chosen = list(d.top) if len(d.top) <= SHOWN_INDICES + 2 else [*d.top[:SHOWN_INDICES], *d.top[-2:]]
    rows = [[str(i.index), short(i.rms), short(i.absmax), short(i.absmin), share(i.energy)] for i in chosen]
    return _align([["index", "rms", "max", "min > 0", "energy"], *rows], lang, indent=4)


def _tiles(t: Tiles | None, target: str, plain: bool) -> str:
    if t is None:
        return ""
    lines = [
        f"tiles       {t.count} tiles of {t.rows} x {t.columns}{f', {t.silent} all zero' if t.silent else ''}; loudest at "
        f"{t.loudest}: {short(t.loudest_absmax)}, quietest {short(t.quietest_absmax)}; loudest over median "
        f"{_times(t.absmax_ratio)}",
        f"            {target} with one power-of-two scale for the tensor: {share(t.error_per_tensor)} off, "
        f"{share(t.flushed_per_tensor)} become 0; one per tile: {share(t.error_per_tile)}, {share(t.flushed_per_tile)}",
    ]
    peak = [v for line in t.heat for v in line if v > 0]
    bounds = (min(peak), max(peak)) if peak else None
    return "\n".join([*lines, *(f"    {heat_line(line, plain, bounds)}" for line in t.heat)])


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


def _reductions(reductions: Sequence[Reduction], width: int, lang: str) -> str:
    if not reductions:
        return ""
    head = ["", "terms", "torch", "overflow", "acc += x", "swallowed", "condition", "measured on"]
    rows = [
        [name, str(terms), *errors, share(swallowed), short(condition), measured]
        for name, terms, *errors, swallowed, condition, measured in map(reduction_cells, reductions)
    ]
    title = "reductions  error against float64: torch's kernel on the target dtype, and one accumulator in it"
    return "\n".join([*report_line(title, width, lang), *_align([head, *rows], lang)])


def reduction_cells(r: Reduction) -> list[Any]:
    def error(value: float | None) -> str:
        return "Inf" if value == math.inf else share(value)

    over = f"{r.library_overflow} of {r.results}" if r.library_overflow else "0"
    whole = r.measured == r.results == r.accumulator_results and r.accumulator_terms == r.terms
    some = f"{r.measured} of {r.results} results; acc: {r.accumulator_results} x {r.accumulator_terms} terms"
    return [
        f"{r.op} dim={r.dim}", r.terms, error(r.library_error), over, error(r.accumulator_error), r.swallowed, r.condition,
        "all" if whole else some,
    ]  # fmt: skip


def _paragraphs(title: str, texts: Sequence[str], width: int, lang: str) -> str:
    lines = [line for text in texts for line in report_line(f"  - {text}", width, lang)]
    return "\n".join([translate(title, lang), *lines]) if lines else ""


def _fit(section: str, width: int, lang: str) -> str:
    return "\n".join(part for line in section.splitlines() for part in report_line(line, width, lang))


def _align(rows: Sequence[Sequence[str]], lang: str, indent: int = 2) -> list[str]:
    """First column to the left, the last as it comes, the others to the right."""
    rows = [[translate(cell, lang) for cell in row] for row in rows]
    widths = [max(columns_of(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        space = [" " * (width - columns_of(cell)) for cell, width in zip(row, widths)]
        cells = [row[0] + space[0], *(s + cell for cell, s in zip(row[1:-1], space[1:-1])), row[-1]]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines
