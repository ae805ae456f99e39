"""`nanny check PATH...`: finds mixed-precision mistakes in source code before the first GPU hour.

Exit code 0: nothing as bad as `--fail-on` (default: warning), 1: findings, 2: wrong usage. After `--fix` what remains counts;
`--diff` gives 1 if there is something to change.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO

from ..core.command_line import Parser, add_language, terminal_language, whole
from ..core.finding import Finding, NannyError, Severity
from ..core.numbers import amount
from ..core.terminal import complain, progress_shown, say, visible_lines
from ..show.findings import (
    errors_first,
    fold,
    in_language,
    in_order,
    render_concise,
    render_statistics,
    render_text,
    statistics,
    summary,
    worst_code,
)  # fmt: skip
from ..show.term import wants_colour, width_of
from ..show.translation import translate
from .cache import user_cache
from .config import AMP_DTYPES, DEVICES, Config, amp_dtype_name, find_config, forget_configs, known_codes
from .files import NO_TEXTS, STDIN, Report, check_paths, check_text, merge
from .fixes import FIXABLE
from .walk import KINDS, LARGEST, Found, Text, find_files, read_text

FORMATS = ("text", "concise", "json", "jsonl", "github", "gitlab", "junit", "sarif")
WATCH_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    if options.jobs is not None and options.jobs < 1:
        raise NannyError(f"--jobs {options.jobs}: at least one process is needed")
    if options.explain and options.output_format != "text":
        raise NannyError(f"--explain is for text; {options.output_format} has the chains without it")
    if options.statistics and options.output_format not in ("text", "json"):
        raise NannyError(f"--statistics comes as text or json, not as {options.output_format}")
    if options.fix or options.diff:
        if "-" in options.paths:
            raise NannyError("--fix and --diff change files; save standard input to a file and name that")
        if options.watch:
            raise NannyError("--watch only looks; use --fix or --diff without it")
    overrides = Config(
        select=known_codes(_split(options.select), "--select: "),
        ignore=known_codes(_split(options.ignore), "--ignore: "),
        exclude=tuple(_split(options.exclude)),
        device=options.device,
        amp_dtype=amp_dtype_name(options.amp_dtype, "--"),
    )
    return _watch(options, overrides) if options.watch else _check_once(options, overrides)


def _check_once(options: argparse.Namespace, overrides: Config) -> int:
    if options.diff:
        return _show_diff(options, overrides)
    report = _fixed_report(options, overrides) if options.fix else _report(options, overrides)
    if options.write_baseline:
        from .baseline import write_baseline

        write_baseline(options.write_baseline, report.findings, report.lines)
        report.notes.append(f"{options.write_baseline}: {len(report.findings)} findings written, they count as known now")
        report = replace(report, findings=[])
    if not report.files and not report.findings:
        report.notes.append(f"{' '.join(options.paths)}: no Python file, notebook or settings file was checked")
    _complain(report.notes, options)
    _put_out(report, options)
    worst = max((finding.severity for finding in report.findings), default=Severity.INFO)
    is_bad = bool(report.findings) and worst >= Severity.parse(options.fail_on)
    return 1 if is_bad and not options.exit_zero else 0


def _fixed_report(options: argparse.Namespace, overrides: Config) -> Report:
    """What is left after fixing; read again from disk if a file could not be written."""
    from .fix import fix_all, write_all

    fixed = fix_all(lambda texts: _report(options, overrides, texts), options.paths, options.unsafe_fixes)
    if options.output_file:  # what cannot be told is not changed
        with _writing(options.output_file, "a"):
            pass
    notes, all_written = write_all(fixed)
    report = fixed.report if all_written else _report(options, overrides)
    return replace(report, notes=report.notes + notes)


def _show_diff(options: argparse.Namespace, overrides: Config) -> int:
    from .fix import diff_of, fix_all

    fixed = fix_all(lambda texts: _report(options, overrides, texts), options.paths, options.unsafe_fixes)
    _complain(fixed.report.notes + fixed.notes, options)
    if not fixed.texts:
        return 0
    say(diff_of(fixed))
    _complain(
        [f"{amount(fixed.count, 'finding')} would be fixed in {amount(len(fixed.texts), 'file')}; --fix writes it"], options
    )
    return 0 if options.exit_zero else 1


def _report(options: argparse.Namespace, overrides: Config, texts: Mapping[str, str] = NO_TEXTS) -> Report:
    report = _whole_report(options, overrides, texts)
    return _without_known(report, options.baseline) if options.baseline else report


def _whole_report(options: argparse.Namespace, overrides: Config, texts: Mapping[str, str]) -> Report:
    paths = [path for path in options.paths if path != "-"]
    cache = None if options.no_cache or texts else user_cache()
    with progress_shown():
        report = check_paths(paths, overrides, options.jobs or 0, texts=texts, cache=cache)
    if cache is not None:
        cache.close()
    if "-" in options.paths:
        name = options.stdin_filename or STDIN
        config = merge(find_config(options.stdin_filename or os.curdir), overrides)
        kind = KINDS.get(os.path.splitext(name)[1].lower(), "python")
        text = sys.stdin.buffer.read(LARGEST[kind] + 1)
        if len(text) > LARGEST[kind]:
            raise NannyError(f"standard input holds more than the {LARGEST[kind] >> 20} MB that are read; name a smaller file")
        report += check_text(text, name, config, kind)
        report = replace(report, findings=in_order(report.findings))
    return report


def _without_known(report: Report, path: str) -> Report:
    from .baseline import new_findings, read_baseline

    new, gone = new_findings(report.findings, report.lines, path, read_baseline(path), report.files)
    notes = [f"{path}: {gone} of its findings are gone; --write-baseline {path} brings it up to date"] if gone else []
    return replace(report, findings=new, notes=report.notes + notes)


def _complain(notes: Sequence[str], options: argparse.Namespace) -> None:
    for note in notes:
        complain(translate(note, terminal_language(options.lang)))


@contextlib.contextmanager
def _writing(path: str, mode: str) -> Iterator[IO[str]]:
    try:
        with open(path, mode, encoding="utf-8") as stream:
            yield stream
    except OSError as error:
        raise NannyError(f"{path}: cannot be written ({error.strerror})") from error


def _put_out(report: Report, options: argparse.Namespace) -> None:
    if options.output_file:
        text = render(report, options, colour=False, width=100)
        with _writing(options.output_file, "w") as stream:
            stream.write(f"{visible_lines(text)}\n" if text else "")
        _complain([f"{options.output_file}: {len(report.findings)} findings written"], options)
        return
    colour = wants_colour(sys.stdout)
    text = render(report, options, colour, width_of(sys.stdout))
    if text:
        say(text, colour=colour)


def render(report: Report, options: argparse.Namespace, colour: bool, width: int) -> str:
    findings, form, lang = report.findings, options.output_format, terminal_language(options.lang)
    if options.statistics:
        return _statistics(report, form, colour, lang)
    if form in ("text", "concise"):
        findings = errors_first(fold(findings, "REGION_DEPRECATED"))
    if form == "text":
        lines, whys = (_lines_of_chains(report), _whys(findings, lang)) if options.explain else (report.lines, None)
        in_full = [f for f in findings if whys is not None or f.severity > Severity.INFO]
        remarks = [in_language(f, lang) for f in findings[len(in_full) :]]
        parts = (
            render_text(in_full, lines, colour, width, whys, lang),
            render_concise(remarks, colour),
            _ending(report, options, lang),
        )
        return "\n\n".join(part for part in parts if part)
    if form == "concise":
        shown = render_concise([in_language(finding, lang) for finding in findings], colour)
        return "\n".join(part for part in (shown, _total(report, lang)) if part)
    if form in ("json", "jsonl"):
        from ..core.plain_json import render_json, render_jsonl

        return render_json(findings) if form == "json" else render_jsonl(findings)
    here = os.getcwd()
    if form == "sarif":
        from ..show.sarif import render_sarif
        from .pages import checker_pages

        return render_sarif(findings, {code: text for code, (_, text) in checker_pages().items()}, here)
    from ..show import reports

    if form == "junit":
        return reports.render_junit(findings)
    return (reports.render_github if form == "github" else reports.render_gitlab)(findings, here)


def _lines_of_chains(report: Report) -> dict[tuple[str, int | None], list[str]]:
    """The lines of every file that a chain goes through."""
    lines = dict(report.lines)
    for file in {link.file for finding in report.findings for link in finding.chain if link.cell is None}:
        if (file, None) not in lines and os.path.isfile(file):
            text = read_text(Found(file, "python"))
            lines[file, None] = text.text.split("\n") if isinstance(text, Text) else []
    return lines


def _whys(findings: Sequence[Finding], lang: str) -> dict[str, str]:
    """The reason that the page of each code gives."""
    from ..show.rule_text import why_of
    from .pages import checker_pages

    pages = checker_pages()
    return {code: why_of(code, pages[code][1], lang) for code in {finding.code for finding in findings} if code in pages}


def _total(report: Report, lang: str) -> str:
    return translate(summary(report.findings, len(report.files)), lang)


def _statistics(report: Report, form: str, colour: bool, lang: str) -> str:
    if form == "text":
        return render_statistics(report.findings, colour) or _total(report, lang)
    from ..core.plain_json import to_text

    return to_text([{"code": code, "severity": s, "count": count} for count, code, s in statistics(report.findings)])


def _ending(report: Report, options: argparse.Namespace, lang: str) -> str:
    next_step = f"Next: nanny rule {worst_code(report.findings)}" if report.findings else ""
    lines = (summary(report.findings, len(report.files)), _also_read(report), _can_be_fixed(report, options), next_step)
    return "\n".join(translate(line, lang) for line in lines if line)


def _also_read(report: Report) -> str:
    """Names what was read only because a checked file imports it."""
    if not report.read_too:
        return ""
    names = ", ".join(report.read_too[:5]) + (" ..." if len(report.read_too) > 5 else "")
    who = "it imports" if len(report.files) == 1 else "they import"
    return f"Read {amount(len(report.read_too), 'more file')} that {who}: {names}"


def _can_be_fixed(report: Report, options: argparse.Namespace) -> str:
    """A line about findings of a kind that can be fixed; whether each can is known only when it is tried."""
    codes = [finding.code for finding in report.findings if finding.code in FIXABLE and finding.cell is None]
    if not codes or options.fix:
        return ""
    return f"[*] up to {len(codes)} fixable with --fix ({', '.join(sorted(set(codes)))}); --diff shows how"


def _watch(options: argparse.Namespace, overrides: Config) -> int:
    """Checks again whenever a file changes, appears or goes. Ctrl-C is its regular end, so it is no verdict: always 0."""
    if "-" in options.paths:
        raise NannyError("--watch needs files to watch; standard input is read only once")
    last: dict[str, tuple[int, int]] | None = None
    try:
        while True:
            forget_configs()
            try:
                now = _stamps(options.paths, overrides)
                if now != last:
                    last = now
                    _check_once(options, overrides)
                    clock = time.strftime("%H:%M:%S")
                    complain(f"{clock} watching {len(now)} files, Ctrl-C ends")
            except NannyError as error:  # settings in the middle of being edited
                if last is None:
                    raise
                if last != {}:
                    complain(str(error))
                last = {}
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return 0


def _stamps(paths: Sequence[str], overrides: Config) -> dict[str, tuple[int, int]]:
    """Time and size of every file that is checked, and of the settings above it."""
    stamps = {}
    for path in paths:
        config = merge(find_config(path), overrides)
        files = [found.path for found in find_files(path, [], config.exclude, config.root)]
        for file in [*files, *([os.path.join(config.root, "pyproject.toml")] if config.root else [])]:
            try:
                status = os.stat(file)
            except OSError:  # gone since it was listed
                continue
            stamps[file] = (status.st_mtime_ns, status.st_size)
    return stamps


def _split(values: Sequence[str] | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanny check",
        description="Find mixed-precision mistakes in source code, notebooks and settings files. Torch is not needed.",
        epilog="Silence one line with `# noqa: CODE`, a file with `# nanny: noqa`; settings live in [tool.nanny] of "
        "pyproject.toml. `nanny rule CODE` explains a finding.",
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="script, notebook, DeepSpeed/Accelerate/HF/Lightning settings, folder, or -")
    add(
        "--select",
        action="append",
        metavar="CODES",
        help="only these codes, or beginnings of codes (SCALER,NUM_EPS)",
    )
    add("--ignore", action="append", metavar="CODES", help="not these, in addition to those of pyproject.toml")
    add("--exclude", action="append", metavar="PATTERNS", help="files and folders to leave out")
    add("--device", choices=DEVICES, help="where the code runs, if it does not say so itself")
    add("--amp-dtype", metavar="{" + ",".join(AMP_DTYPES) + "}", help="autocast's format, if the code does not say so")
    add("--format", "--output-format", dest="output_format", choices=FORMATS, default="text", help="default: text")
    add(
        "-o",
        "--output",
        "--output-file",
        dest="output_file",
        metavar="FILE",
        help="write the findings there instead of to the terminal",
    )
    add_language(parser, "text and concise", chosen_by="the locale")
    add("--explain", action="store_true", help="the chain of each finding in full, and why it matters")
    add("--statistics", action="store_true", help="how many findings of each code")
    add("--fail-on", choices=("info", "warning", "error"), default="warning", help="exit code 1 from here (warning)")
    add("--exit-zero", action="store_true", help="exit code 0 even with findings")
    add("--fix", action="store_true", help="mend what can be mended safely, then report what remains")
    add("--diff", action="store_true", help="show what --fix would change, and write nothing")
    add("--unsafe-fixes", action="store_true", help="also those that may change dtypes or numbers elsewhere")
    add("--baseline", metavar="FILE", help="leave out the findings in this file")
    add("--write-baseline", metavar="FILE", help="write today's findings as known")
    add("--stdin-filename", metavar="NAME", help="what to call standard input")
    add("--jobs", type=whole, metavar="N", help="processes to use (all cores)")
    add("--no-cache", action="store_true", help="check every file again, also those that have not changed")
    add("--watch", action="store_true", help="check again when a file changes")
    return parser
