"""Findings as text for people: with a code frame and caret, one line each, or counted by code.

Pure functions of a list of findings. Source lines come from outside (`lines`), so a finding of a running model, which has
a site and a step instead of a file, is shown by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..core.finding import Finding, Link, Severity, serious_ones
from ..core.numbers import amount
from ..core.terminal import visible
from .term import DEFAULT_WIDTH, columns_of, paint, wrap
from .translation import translate

Lines = Mapping[tuple[str, int | None], Sequence[str]]  # (file, cell) -> its lines
STYLES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "quiet"}
CONTEXT = 2  # lines of code shown above the one that is wrong
TAB = "    "


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """By place: a reader goes through a file from top to bottom."""
    return sorted(findings, key=lambda f: (f.file, f.cell or 0, f.line or 0, f.column or 0, f.step or 0, f.code))


def place(finding: Finding) -> str:
    """`model.py:12:5`, `notes.ipynb:cell 3:12:5`, or `encoder.layer.3, step 120, rank 1` for a running model."""
    if finding.file:
        parts = [finding.file]
        parts += [f"cell {finding.cell}"] if finding.cell is not None else []
        parts += [str(n) for n in (finding.line, finding.column) if n is not None]
        return visible(":".join(parts))
    parts = [finding.site] if finding.site else []
    parts += [f"step {finding.step}"] if finding.step is not None else []
    parts += [f"rank {finding.rank}"] if finding.rank is not None else []
    return visible(", ".join(parts))


def errors_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -finding.severity)


def fold(findings: Sequence[Finding], code: str) -> list[Finding]:
    """Of the findings of one code in a file only the first, with the number of the others."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.code == code:
            groups.setdefault(finding.file, []).append(finding)
    out = []
    for finding in findings:
        group = groups[finding.file] if finding.code == code else [finding]
        if finding is group[0]:
            more = f", and {amount(len(group) - 1, 'place')} more in this file" if len(group) > 1 else ""
            out.append(replace(finding, message=finding.message + more))
    return out


def in_language(finding: Finding, lang: str) -> Finding:
    """With its message, hint and chain as the reader of this language sees them."""
    if lang == "en":
        return finding
    chain = tuple(replace(link, what=translate(link.what, lang)) for link in finding.chain)
    return replace(finding, message=translate(finding.message, lang), hint=translate(finding.hint, lang), chain=chain)


def render_concise(findings: Sequence[Finding], colour: bool = False) -> str:
    """One line for each finding, in the form that editors and `grep` know."""
    lines = []
    for finding in findings:
        severity = paint(finding.severity.name, STYLES[finding.severity], colour)
        code = paint(finding.code, "strong", colour)
        lines.append(f"{place(finding)}: {severity} {code} {one_line(finding.message)}".lstrip(": "))
    return "\n".join(lines)


def render_text(
    findings: Sequence[Finding], lines: Lines | None = None, colour: bool = False, width: int = DEFAULT_WIDTH,
    whys: Mapping[str, str] | None = None, lang: str = "en",
) -> str:  # fmt: skip
    """Each finding with the code it is about, the message and what to do; with `whys` (code -> text), explained in full."""
    return "\n\n".join(_block(in_language(finding, lang), lines or {}, colour, width, whys, lang) for finding in findings)


def summary(findings: Sequence[Finding], checked: int, noun: str = "file") -> str:
    """`Found 2 errors and 1 warning in 7 files.`"""
    where = f"in {amount(checked, noun)}"
    if not findings:
        return f"No findings {where}."
    by_severity = Counter(finding.severity for finding in findings)
    words = {Severity.ERROR: ("error", ""), Severity.WARNING: ("warning", ""), Severity.INFO: ("remark", "")}
    parts = [amount(by_severity[s], *words[s]) for s in sorted(by_severity, reverse=True)]
    return f"Found {' and '.join([', '.join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)} {where}."


def worst_code(findings: Sequence[Finding]) -> str:
    """The code to read about next: of the highest severity the most frequent one."""
    counts = Counter((finding.severity, finding.code) for finding in findings)
    return max(counts, key=lambda pair: (pair[0], counts[pair]))[1]


def statistics(findings: Sequence[Finding]) -> list[tuple[int, str, Severity]]:
    """(count, code, severity), most frequent first."""
    counts = Counter(finding.code for finding in findings)
    worst: dict[str, Severity] = {}
    for finding in findings:
        worst[finding.code] = max(worst.get(finding.code, Severity.INFO), finding.severity)
    return [(count, code, worst[code]) for code, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]


def render_statistics(findings: Sequence[Finding], colour: bool = False) -> str:
    rows = statistics(findings)
    wide = max((len(str(count)) for count, _, _ in rows), default=0)
    long = max((len(code) for _, code, _ in rows), default=0)
    return "\n".join(
        f"{count:>{wide}}  {paint(f'{code:<{long}}', 'strong', colour)}  {paint(s.name.lower(), STYLES[s], colour)}"
        for count, code, s in rows
    )


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _chain(finding: Finding, lines: Lines, width: int, in_full: bool, lang: str) -> list[str]:
    """The way to the mistake: in one line, or a line for each place with its code."""

    def at(link: Link) -> str:
        cell = f"cell {link.cell}, " if link.cell is not None else ""
        return translate(f"{cell}line {link.line}", lang) if link.file == finding.file else f"{link.file}:{cell}{link.line}"

    if not in_full:
        if len(finding.chain) < 2:
            return []
        return _with_label("chain:", " > ".join(f"{at(k)} {k.what}" for k in finding.chain), width, lang)
    out = []
    for number, link in enumerate(finding.chain, 1):
        out += _indent(f"{number}. {at(link)}: {link.what}", width, rest="     ")
        source = lines.get((link.file, link.cell), ())
        if 1 <= link.line <= len(source):
            out.append(f"       {visible(source[link.line - 1].strip())[: width - 7]}")
    return out


def _block(finding: Finding, lines: Lines, colour: bool, width: int, whys: Mapping[str, str] | None, lang: str) -> str:
    head = f"{paint(place(finding), 'strong', colour)}: " if place(finding) else ""
    head += paint(f"{finding.severity.name} {finding.code}", STYLES[finding.severity], colour)
    out = [head, *_indent(finding.message, width)]
    source = lines.get((finding.file, finding.cell))
    if source is not None and finding.line is not None and 1 <= finding.line <= len(source):
        out += _frame(finding, source, colour, width)
    out += _chain(finding, lines, width, whys is not None, lang)
    if whys and whys.get(finding.code):
        out += _with_label("why:", whys[finding.code], width, lang)
    if finding.hint:
        fix, label = _with_label("fix:", finding.hint, width, lang), f"  {translate('fix:', lang)}"
        out += [paint(label, "good", colour) + fix[0].removeprefix(label), *fix[1:]]
    return "\n".join(out)


def _with_label(label: str, text: str, width: int, lang: str) -> list[str]:
    first = f"  {translate(label, lang)} "
    return _indent(text, width, first=first, rest=" " * columns_of(first))


def _indent(text: str, width: int, first: str = "  ", rest: str = "  ") -> list[str]:
    parts = [visible(part) for part in text.splitlines()] or [""]
    return [line for i, part in enumerate(parts) for line in wrap((rest if i else first) + part, width, columns_of(rest))]


def _frame(finding: Finding, source: Sequence[str], colour: bool, width: int) -> list[str]:
    """The line that is wrong with a few lines before it, and carets under the columns that are meant."""
    row = finding.line or 1
    first = max(1, row - CONTEXT)
    while first < row and not source[first - 1].strip():
        first += 1
    gutter = len(str(row))
    room = max(width - gutter - 4, 20)
    start = max((finding.column or 1) - 1, 0)
    one_row = finding.end_line in (None, row)
    end = (finding.end_column or start + 2) - 1 if one_row else len(source[row - 1])
    text, before, carets = _mark_columns(source[row - 1], start, end, room)
    out = [_numbered_line(number, source[number - 1], gutter, room, colour) for number in range(first, row)]
    out.append(f"{paint(f'{row:>{gutter}} |', 'quiet', colour)} {text}".rstrip())
    mark = paint("^" * carets, STYLES[finding.severity], colour)
    out.append(f"{paint(' ' * gutter + ' |', 'quiet', colour)} {' ' * before}{mark}")
    return [f"  {line}" for line in out]


def _numbered_line(number: int, line: str, gutter: int, room: int, colour: bool) -> str:
    text = visible(line.replace("\t", TAB)).rstrip()
    text = text if columns_of(text) <= room else f"{text[: room - 1]}…"
    return f"{paint(f'{number:>{gutter}} |', 'quiet', colour)} {text}".rstrip()


def _mark_columns(line: str, start: int, end: int, room: int) -> tuple[str, int, int]:
    """The line cut to a window around the marked part, the cells before the mark, and the cells under it."""
    shown = [visible(char.replace("\t", TAB)) for char in line.rstrip()]
    start = min(start, len(shown))
    end = min(max(end, start + 1), max(len(shown), start + 1))
    left = 0
    if columns_of("".join(shown)) > room:
        left = max(0, start - room // 3)
        shown = shown[: left + room - 2]
    text = "".join(shown[left:])
    before = columns_of("".join(shown[left:start])) + (1 if left else 0)
    under = max(columns_of("".join(shown[start:end])), 1)
    cut = "…" if len(shown) < len(line.rstrip()) else ""
    return f"{'…' if left else ''}{text}{cut}", before, under


def danger(findings: Sequence[Finding], target: str) -> str:
    """`not safe in fp16: 2 errors and 1 warning`; empty where nothing is serious."""
    is_unsafe, serious = any(f.severity is Severity.ERROR for f in findings), serious_ones(findings)
    return f"{'not safe' if is_unsafe else 'risky'} in {target}: {serious}" if serious else ""
