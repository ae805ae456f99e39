"""`nanny check --fix`: findings turned into edits, checked again before anything is written, and written whole or not at all.

A change stays only if the checker, asked about the text as it would be, has lost the finding and gained no other.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import tokenize
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.finding import Finding, NannyError
from ..core.numbers import amount
from ..core.regular_files import read_regular
from .files import NO_TEXTS, Report
from .fixers import Change, all_fixers
from .walk import LARGEST, Found, Text, read_text

DEEPEST = 300  # code nested more deeply is left to its author
ROUNDS = 40  # checks of the whole in one run; each of them either takes changes or throws one away
Check = Callable[[Mapping[str, str]], Report]
Taken = dict[str, list[tuple[Finding, Change]]]  # file -> what is tried there


@dataclass
class Fixed:
    """What fixing led to: the report of the texts as they are now, and which texts those are."""

    report: Report
    texts: dict[str, str] = field(default_factory=dict)  # by file, only those that differ
    before: dict[str, str] = field(default_factory=dict)
    count: int = 0
    notes: list[str] = field(default_factory=list)


def need_libcst() -> None:
    try:
        import libcst  # noqa: F401
    except ImportError:
        raise NannyError("fixes need libcst: pip install 'precision-nanny[fix]'") from None


def changes_for(text: str, findings: Sequence[Finding], unsafe: bool) -> Iterator[tuple[Finding, Change]]:
    """What could be done about each finding of one file, the best first; nothing for a text that cannot be parsed."""
    wanted = [f for f in findings if f.code in all_fixers() and f.cell is None]
    if not wanted:
        return
    from libcst import ParserSyntaxError

    from .tree import Tree

    try:
        tree = Tree(text) if _depth(text) <= DEEPEST else None
    except (SyntaxError, ParserSyntaxError, RecursionError, ValueError, MemoryError):
        tree = None
    if tree is None:
        return
    for finding in wanted:
        for change in all_fixers()[finding.code](tree, finding):
            if change.edits and (unsafe or change.is_safe):
                yield finding, change


def _depth(text: str) -> int:
    """How deeply the code is nested; libcst ends the whole process where its stack does."""
    deepest, waiting = 0, [(ast.parse(text), 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]  # type: ignore[misc]
    return deepest


def good_changes(check: Check, file: str, text: str, findings: Sequence[Finding], finding: Finding) -> Iterator[Change]:
    """The changes for one finding that do their work when made alone, unsafe ones too."""
    start = Fixed(Report(list(findings)), {file: text}, {file: text})
    for _, change in changes_for(text, [finding], unsafe=True):
        taken = {file: [(finding, change)]}
        texts = {file: _apply(text, taken[file])}
        if not _failures(start, check(texts), taken, texts):
            yield change


def fix_all(check: Check, paths: Sequence[str], unsafe: bool, before: Mapping[str, str] = NO_TEXTS) -> Fixed:
    """Changes texts until nothing more can be done; no file is written. `before`: texts that are not on disk as they are."""
    need_libcst()
    fixed = Fixed(check({}))
    may = _Allowed(paths, fixed, before)
    refused: set[tuple[str, ...]] = set()
    alone: set[str] = set()  # files in which one change at a time is tried, after several of them did not go together
    for _ in range(ROUNDS):
        taken = _take(fixed, may, unsafe, refused, alone)
        if not taken:
            break
        texts = {**fixed.texts, **{file: _apply(fixed.texts[file], part) for file, part in taken.items()}}
        report = check(texts)
        bad = _failures(fixed, report, taken, texts)
        if not bad:
            fixed.texts, fixed.report, fixed.count = texts, report, fixed.count + sum(map(len, taken.values()))
            continue
        for file, failed in bad.items():
            if len(taken[file]) > 1 and len(failed) == len(taken[file]):
                alone.add(file)
            else:
                refused |= {_name(file, finding, change, fixed.texts[file]) for finding, change in failed}
    fixed.texts = {file: text for file, text in fixed.texts.items() if text != fixed.before[file]}
    return fixed


class _Allowed:
    """Which files may be changed: Python files below the given paths, by their real place too."""

    def __init__(self, paths: Sequence[str], fixed: Fixed, before: Mapping[str, str]):
        self._before = before
        self._tops = [os.path.realpath(path) for path in paths]
        self._fixed = fixed
        self._known: dict[str, bool] = {}

    def __call__(self, file: str) -> bool:
        if file not in self._known:
            self._known[file] = self._ask(file)
        return self._known[file]

    def _ask(self, file: str) -> bool:
        if file.endswith(".ipynb"):
            self._fixed.notes.append(f"{file}: notebooks are not fixed, change the cells by hand")
            return False
        real = os.path.realpath(file)
        if not any(real == top or real.startswith(os.path.join(top, "")) for top in self._tops):
            self._fixed.notes.append(f"{file}: not fixed, it lies outside the given paths")
            return False
        text = Text(self._before[file]) if file in self._before else read_text(Found(file, "python"))
        if not isinstance(text, Text):
            self._fixed.notes.append(text)
            return False
        self._fixed.texts[file] = self._fixed.before[file] = text.text
        return True


def _take(fixed: Fixed, may: _Allowed, unsafe: bool, refused: Collection[tuple[str, ...]], alone: Collection[str]) -> Taken:
    """For each file the changes that do not touch each other, one for each finding."""
    taken: Taken = {}
    for file, findings in _by_file(fixed.report.findings).items():
        if not any(f.code in all_fixers() for f in findings) or not may(file):
            continue
        part: list[tuple[Finding, Change]] = []
        for finding, change in changes_for(fixed.texts[file], findings, unsafe):
            if any(finding is other for other, _ in part) or (part and file in alone):
                continue
            if _name(file, finding, change, fixed.texts[file]) in refused or any(_touch(change, c) for _, c in part):
                continue
            if any(start <= e.start <= end for start, end in change.rests_on for _, c in part for e in c.edits):
                continue
            part.append((finding, change))
        if part:
            taken[file] = part
    return taken


def _touch(one: Change, other: Change) -> bool:
    """Whether two changes cannot be made together; the very same one (an import that two uses share) can."""
    if one.edits == other.edits:
        return False
    return any(a.start <= b.end and b.start <= a.end for a in one.edits for b in other.edits)


def _apply(text: str, part: Sequence[tuple[Finding, Change]]) -> str:
    from .tree import apply_edits

    return apply_edits(text, [edit for edits in dict.fromkeys(change.edits for _, change in part) for edit in edits])


def _name(file: str, finding: Finding, change: Change, text: str) -> tuple[str, ...]:
    """What a change is known by, once it has failed, while other lines move."""
    lines = text.split("\n")
    at = _offset(lines, finding)
    edits = [f"{edit.start - at}:{edit.text}" for edit in change.edits]
    return file, finding.code, lines[(finding.line or 1) - 1], str(finding.column), *edits


def _failures(fixed: Fixed, report: Report, taken: Taken, texts: Mapping[str, str]) -> Taken:
    """The changes that did not do their work, by file: their finding is still there, or another has come."""
    bad: Taken = {}
    old, new = _by_file(fixed.report.findings), _by_file(report.findings)
    counts = [Counter(f.code for f in findings) for findings in (fixed.report.findings, report.findings)]
    tried = {finding.code for part in taken.values() for finding, _ in part}
    less = {code for code in tried if counts[1][code] <= counts[0][code]}  # one that stood behind another may come forward
    for file in {*old, *new}:
        moved = _Moved(fixed.texts.get(file, ""), texts.get(file, ""), taken.get(file, ()))
        places = {(f.code, place) for f in new.get(file, ()) for place in [moved.after(f)]}
        for finding, change in taken.get(file, ()):
            if any((finding.code, place) in places for place in moved.before(finding)):
                bad.setdefault(file, []).append((finding, change))
        known = {(f.code, place) for f in old.get(file, ()) for place in moved.before(f)}
        rows = {(code, moved.row(place)) for code, place in known}
        come = [f for f in new.get(file, ()) if (f.code, moved.after(f)) not in known and (f.code, f.line) not in rows]
        come = [f for f in come if f.code not in less]
        if come and file not in bad:
            for culprit in [file] if file in taken else list(taken):
                bad[culprit] = list(taken[culprit])
    return bad


class _Moved:
    """Places of one text in the next one; a text that did not change has the same ones."""

    def __init__(self, before: str, after: str, part: Sequence[tuple[Finding, Change]]):
        self._edits = [e for edits in dict.fromkeys(change.edits for _, change in part) for e in edits]
        self._old, self._new = before.split("\n"), after.split("\n")

    def before(self, finding: Finding) -> set[int]:
        """Where what a finding was about begins now, without and with what was put in right there."""
        at = _offset(self._old, finding)
        sure = sum(len(e.text) - (e.end - e.start) for e in self._edits if e.end <= at and e.start < at)
        here = sum(len(e.text) for e in self._edits if e.start == e.end == at)
        return {at + sure, at + sure + here}

    def after(self, finding: Finding) -> int:
        return _offset(self._new, finding)

    def row(self, offset: int) -> int:
        for row, line in enumerate(self._new, 1):
            offset -= len(line) + 1
            if offset < 0:
                return row
        return len(self._new)


def _offset(lines: Sequence[str], finding: Finding) -> int:
    return sum(len(line) + 1 for line in lines[: (finding.line or 1) - 1]) + (finding.column or 1) - 1


def _by_file(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    out: dict[str, list[Finding]] = {}
    for finding in findings:
        out.setdefault(finding.file, []).append(finding)
    return out


# writing


def diff_of(fixed: Fixed) -> str:
    """All changes as one patch."""
    parts: list[str] = []
    for file, text in sorted(fixed.texts.items()):
        old, new = (t.splitlines(keepends=True) for t in (fixed.before[file], text))
        lines = difflib.unified_diff(old, new, file, file)
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts).rstrip("\n")


def write_all(fixed: Fixed) -> tuple[list[str], bool]:
    """Writes each changed file whole, or leaves it and says why; what to tell the user, and whether all went well."""
    problems = {file: _write(file, fixed.before[file], text) for file, text in sorted(fixed.texts.items())}
    left = [f"{file}: not fixed, {problem}" for file, problem in problems.items() if problem]
    if not left and fixed.texts:
        return [*fixed.notes, f"{amount(fixed.count, 'finding')} fixed in {amount(len(fixed.texts), 'file')}"], True
    return [*fixed.notes, *left], not left


def _write(file: str, before: str, after: str) -> str:
    """Replaces the file in one step, if it still holds what was checked; else the reason why not."""
    real = os.path.realpath(file)
    part = f"{real}.nanny-{os.getpid()}"
    try:
        data = read_regular(real, LARGEST["python"])
        codec = _codec(data)
        text = data.decode(codec)
        if text.encode(codec) != data:
            return f"its bytes are no clean {codec}"
        if text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n") != before:
            return "it was changed meanwhile; run --fix again"
        new = _with_line_ends(text, before, after).encode(codec)
        try:
            with open(part, "xb") as stream:
                stream.write(new)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(part, os.stat(real).st_mode & 0o7777)
            if read_regular(real, LARGEST["python"]) != data:
                return "it was changed meanwhile; run --fix again"
            os.replace(part, real)
        finally:
            if os.path.lexists(part):
                os.unlink(part)
    except (UnicodeError, LookupError, SyntaxError):
        return "its encoding is not one that can be written back"
    except OSError as error:
        return f"it cannot be written ({error.strerror})"
    return ""


def _codec(data: bytes) -> str:
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


def _with_line_ends(raw: str, before: str, after: str) -> str:
    """The new text with the line ends of the file: those of lines that stayed, and the most frequent one for new lines."""
    if "\r" not in raw:
        return after
    ends = list(_ends(raw))
    usual = max(set(ends) or {"\n"}, key=ends.count)
    old, new = before.split("\n"), after.split("\n")
    kept = [usual] * len(new)
    for a, b, size in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        for i in range(size):
            if a + i < len(ends):
                kept[b + i] = ends[a + i]
    return "".join(line + (kept[i] if i < len(new) - 1 else "") for i, line in enumerate(new))


def _ends(raw: str) -> Iterator[str]:
    at = 0
    while at < len(raw):
        if raw[at] == "\r":
            yield "\r\n" if raw[at + 1 : at + 2] == "\n" else "\r"
            at += 1 if raw[at + 1 : at + 2] == "\n" else 0
        elif raw[at] == "\n":
            yield "\n"
        at += 1
