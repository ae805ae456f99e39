"""From paths to findings: reads files of every kind, checks them together, and says what was skipped.

`check_model("train.py")` is the whole checker in one call; `check_paths` is what the command runs.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from ..core.finding import Finding, NannyError
from ..show.findings import in_order
from .broken import broken_code, too_deep
from .config import Config, amp_dtype_name, device_name, find_config
from .suppress import is_suppressed, read_suppressions
from .walk import Found, Text, decode, find_files, find_module, matches_path, read_text

if TYPE_CHECKING:
    from .notebook import Notebook

T = TypeVar("T")
STDIN = "<stdin>"
NO_TEXTS: Mapping[str, str] = {}
NO_OVERRIDES = Config()
SMALLEST_BATCH, LARGEST_BATCH = 48, 90  # files checked at a time: what they import is read once, and kept as long
STACK = 256 << 20  # for code that is nested beyond the usual limit
DEPTH = 20_000


@dataclass(frozen=True)
class Report:
    """What a check found, with the lines of the files that have findings and what could not be checked."""

    findings: list[Finding] = field(default_factory=list)
    lines: dict[tuple[str, int | None], list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    read_too: list[str] = field(default_factory=list)  # what they import, from below the root of their project

    def __add__(self, other: Report) -> Report:
        return Report(
            self.findings + other.findings,
            self.lines | other.lines,
            self.notes + other.notes,
            self.files + other.files,
            self.read_too + other.read_too,
        )


class Sources(Mapping[str, str]):
    """The Python files of a project by path, read when they are first asked for; `texts` stand in for what is on disk.

    What those import is found beside them, below the root of their project, and named in `read`.
    """

    def __init__(self, paths: Iterable[str], texts: Mapping[str, str] = NO_TEXTS, config: Config = NO_OVERRIDES):
        self._texts: dict[str, Text | str | None] = {path: Text(texts[path]) if path in texts else None for path in paths}
        self._given = frozenset(os.path.abspath(path) for path in self._texts)
        self._config = config
        self._beside: dict[tuple[str, str], str | None] = {}
        self.read_too: list[str] = []

    def read(self, path: str) -> Text | str:
        text = self._texts.get(path)
        if text is None:
            text = self._texts[path] = read_text(Found(path, "python"))
        return text

    def beside(self, importer: str, target: str, level: int) -> str | None:
        """The file behind an import that is not among those given; None for a library."""
        folder = os.path.dirname(importer)
        key = (folder, "." * level + target)
        if key not in self._beside:
            found = find_module(importer, target, level)
            if found is not None and (
                os.path.abspath(found) in self._given or matches_path(found, self._config.exclude, self._config.root)
            ):
                found = None
            self._beside[key] = found
            if found is not None and found not in self._texts:
                self._texts[found] = None
                self.read_too.append(found)
        return self._beside[key]

    def settings(self, name: str, importer: str) -> tuple[str, object, Mapping[tuple[str | int, ...], tuple[int, ...]]] | None:
        """A settings file that the code names: where it is, what it says, and where each key stands."""
        from .settings.check import read_settings

        return read_settings(name, importer)

    def __getitem__(self, path: str) -> str:
        text = self.read(path)
        return text.text if isinstance(text, Text) else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def check_model(
    path_or_source: str | os.PathLike[str], *, device: str | None = None, amp_dtype: str | None = None
) -> list[Finding]:
    """Mixed-precision mistakes in a file, a folder, a notebook, a settings file, or in source text.

    `device` ("cuda" or "cpu") and `amp_dtype` ("fp16" or "bf16") tell what the code itself leaves open.
    """
    if not isinstance(path_or_source, (str, os.PathLike)):
        kind = type(path_or_source).__name__
        raise NannyError(f"check_model takes a path or source text, not {kind}; for a model give inspect.getfile(type(model))")
    overrides = Config(device=device_name(device), amp_dtype=amp_dtype_name(amp_dtype))
    text = os.fspath(path_or_source)
    if isinstance(path_or_source, str) and not _is_path(text):
        return in_order(check_text(text, STDIN, overrides).findings)
    return check_paths([text], overrides, jobs=1).findings


def check_paths(
    paths: Sequence[str], overrides: Config = NO_OVERRIDES, jobs: int = 0, top: str = "", texts: Mapping[str, str] = NO_TEXTS
) -> Report:
    """Every file below the paths, each by the `[tool.nanny]` above the path that was given, but not above `top`.

    `texts` are Python files as they would be: what a fix makes of them, or an editor that has not saved them yet.
    """
    report = Report()
    seen: set[str] = set()
    groups: dict[Config, list[Found]] = {}
    for path in paths:
        config = merged(find_config(path, top), overrides)
        for found in find_files(path, report.notes, config.exclude, config.root):
            real = os.path.realpath(found.path)
            if real not in seen:
                seen.add(real)
                groups.setdefault(config, []).append(found)
    for config, found_files in groups.items():
        report += _check_group(found_files, config, jobs, texts)
    more = sorted(set(report.read_too) - set(report.files))
    return replace(report, findings=in_order(_one_for_each_place(report.findings)), read_too=more)


def check_text(text: str | bytes, filename: str, config: Config, kind: str = "python") -> Report:
    """One text that is not (or not yet) in a file, such as standard input."""
    if isinstance(text, bytes):
        decoded = decode(text)
        if decoded is None:
            raise NannyError(f"{filename}: binary data, not source code")
        text = decoded.text
    found = Found(filename, kind, named=True)
    with _quiet_interpreter():
        if kind == "python":
            report = _check_python(Sources([filename], {filename: text}, config), [filename], config)
        else:
            report = _check_other(found, text, config)
    return replace(report, findings=in_order([f for f in report.findings if config.wants(f)]))


def merged(config: Config, overrides: Config) -> Config:
    """The file's settings under those of the command line: `--select` replaces, `--ignore` adds."""
    return replace(
        config,
        select=overrides.select or config.select,
        ignore=config.ignore + overrides.ignore,
        exclude=config.exclude + overrides.exclude,
        device=overrides.device or config.device,
        amp_dtype=overrides.amp_dtype or config.amp_dtype,
    )


def _one_for_each_place(findings: Iterable[Finding]) -> list[Finding]:
    """A file that several others import is seen by each of their batches; the worst of what they say about a place stays."""
    from .engine import worse

    unique: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        place = (finding.file, finding.cell, finding.line, finding.column, finding.code)
        unique[place] = worse(unique.get(place), finding)
    return list(unique.values())


def _is_path(text: str) -> bool:
    """Whether a string names a file. A mistyped path must not pass for source text, which `src/modl` would be, too."""
    if not text.strip() or "\n" in text or "\0" in text:
        return False
    is_code = any(char in text for char in "()=;#") or text.startswith(("import ", "from "))
    return os.path.lexists(text) or text.endswith((".py", ".ipynb", ".json", ".yaml", ".yml")) or not is_code


def _check_group(found_files: list[Found], config: Config, jobs: int, texts: Mapping[str, str]) -> Report:
    """The files of one configuration, in this process or, if there are many, in several."""
    project = [found.path for found in found_files if found.kind == "python"]
    workers = jobs or _cores()
    size = min(max(len(found_files) // (4 * workers), SMALLEST_BATCH), LARGEST_BATCH)
    batches = [found_files[at : at + size] for at in range(0, len(found_files), size)]
    if min(workers, len(batches)) > 1:
        reports = _in_workers(batches, project, config, min(workers, len(batches)), texts)
    else:
        reports = [check_batch(batch, project, config, texts) for batch in batches]
    return sum(reports, Report())


def _in_workers(
    batches: list[list[Found]], project: list[str], config: Config, workers: int, texts: Mapping[str, str]
) -> list[Report]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("fork") if sys.platform == "linux" else None
    size = len(batches)
    try:
        with ProcessPoolExecutor(workers, context) as pool:
            return list(pool.map(check_batch, batches, [project] * size, [config] * size, [texts] * size))
    except BrokenProcessPool:  # a worker was killed, most often for its memory
        note = "a worker process was killed; checked everything again in one process"
        return [Report(notes=[note]), *(check_batch(batch, project, config, texts) for batch in batches)]


def check_batch(batch: list[Found], project: list[str], config: Config, texts: Mapping[str, str] = NO_TEXTS) -> Report:
    """Some files of a project, with the rest of it at hand for what they import."""
    report = Report()
    sources = Sources(project, texts, config)
    python = []
    with _quiet_interpreter():
        for found in batch:
            text = sources.read(found.path) if found.kind == "python" else read_text(found)
            if isinstance(text, str):
                report.notes.append(text)
                continue
            report.notes.extend([text.note] if text.note else [])
            if found.kind == "python":
                python.append(found.path)
            else:
                report += _check_other(found, text.text, config)
        report += _check_python(sources, python, config)
    report = replace(report, read_too=sources.read_too)
    if len(batch) >= SMALLEST_BATCH:
        gc.collect()  # what the engine knows about a batch is full of cycles
    return replace(report, findings=[finding for finding in report.findings if config.wants(finding)])


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """No warnings of the parser about other people's escape sequences, and fewer rounds of the garbage collector.

    Syntax trees are large and hold no cycles: with the usual thresholds a third of the parsing time is spent looking for them.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.set_threshold(*thresholds)


def _check_python(sources: Mapping[str, str], paths: Sequence[str], config: Config) -> Report:
    """Parses each of `paths`, then checks those that could have findings, together with what they import."""
    from .interpreter.source import says_half

    report = Report(files=list(paths))
    worth_it: dict[str, ast.Module] = {}
    is_deep = False
    for path in paths:
        text = sources[path]
        try:
            tree, needs_room = _parse(text, path)
        except SyntaxError as error:
            report.findings.append(broken_code(error, path))
        except ValueError as error:  # a NUL in the text
            report.notes.append(f"{path}: skipped, {error}")
        except (RecursionError, MemoryError):  # MemoryError: the parser's own stack is full
            report.notes.append(too_deep(path))
        else:
            is_deep |= needs_room
            if says_half(text):
                worth_it[path] = tree
    if worth_it:
        report.findings.extend(_engine_findings(sources, worth_it, config, is_deep, report.notes))
    kept = []
    for path in dict.fromkeys(finding.file for finding in report.findings):
        text = sources[path]
        suppressions = read_suppressions(text)
        lines = text.split("\n")
        mine = [_by_characters(f, lines) for f in report.findings if f.file == path and not is_suppressed(f, suppressions)]
        if mine:
            report.lines[path, None] = lines
            kept += mine
    return replace(report, findings=kept)


def _engine_findings(
    sources: Mapping[str, str], trees: Mapping[str, ast.Module], config: Config, is_deep: bool, notes: list[str]
) -> list[Finding]:
    """Of all files at once; if that is too deep even with room, one after the other, so that only one is lost."""
    from .engine import check_project
    from .interpreter.trace import Options

    options = Options(device=config.device, amp_dtype=config.amp_dtype)

    def run(only: list[str]) -> list[Finding]:
        by_file = check_project(sources, options, only, trees, notes)
        return [finding for findings in by_file.values() for finding in findings]

    try:
        if not is_deep:
            return run(list(trees))
    except RecursionError:
        pass
    out: list[Finding] = []
    for path in trees:
        try:
            out += _with_room(run, [path])
        except RecursionError:
            notes.append(too_deep(path))
    return out


def _parse(text: str, path: str) -> tuple[ast.Module, bool]:
    """The tree, and whether it needs more than the usual stack; raises what `ast.parse` raises."""
    try:
        return ast.parse(text, path), False
    except RecursionError:
        return _with_room(ast.parse, text, path), True


def _with_room(work: Callable[..., T], *args: object) -> T:
    """The result of `work` in a thread with a larger stack: valid code may be nested beyond the usual limit."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    limit, stack = sys.getrecursionlimit(), threading.stack_size(STACK)
    sys.setrecursionlimit(DEPTH)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work, *args).result()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(stack)


def _check_other(found: Found, text: str, config: Config) -> Report:
    if found.kind == "notebook":
        return _check_notebook(found, text, config)
    from .settings.check import check_settings

    report = check_settings(text, found.path, found.kind, found.named)
    if isinstance(report, str):
        return Report(notes=[report])
    if report is None:
        return Report()
    suppressions = read_suppressions(text, is_python=False) if found.kind == "yaml" else read_suppressions("")
    kept = [finding for finding in report if not is_suppressed(finding, suppressions)]
    lines: dict[tuple[str, int | None], list[str]] = {(found.path, None): text.split("\n")} if kept else {}
    return Report(kept, lines, files=[found.path])


def _check_notebook(found: Found, text: str, config: Config) -> Report:
    from .notebook import in_cell, read_notebook

    try:
        notebook = read_notebook(text)
    except (ValueError, RecursionError) as error:
        problem = SyntaxError(f"not a notebook: {error}")
        return Report([broken_code(problem, found.path, reader="")], files=[found.path])
    if notebook is None:
        return Report(notes=[f"{found.path}: skipped, its code is not Python"])
    inner = _check_python({found.path: notebook.source}, [found.path], config)
    findings = [in_cell(finding, notebook) for finding in inner.findings]
    findings += [broken_code(error, found.path, cell=cell.number) for cell, error in notebook.broken]
    return Report(findings, _cell_lines(findings, notebook, found.path), inner.notes, [found.path])


def _cell_lines(findings: list[Finding], notebook: Notebook, path: str) -> dict[tuple[str, int | None], list[str]]:
    wanted = {finding.cell for finding in findings}
    return {(path, cell.number): list(cell.lines) for cell in notebook.cells if cell.number in wanted}


def _by_characters(finding: Finding, lines: list[str]) -> Finding:
    """The parser counts columns in bytes; people and editors count characters."""
    if finding.line is None or finding.code == "SYNTAX_ERROR":
        return finding
    end = finding.end_line or finding.line
    if lines[finding.line - 1].isascii() and lines[end - 1].isascii():
        return finding
    return replace(
        finding,
        column=_characters(lines[finding.line - 1], finding.column),
        end_column=_characters(lines[end - 1], finding.end_column),
    )


def _characters(line: str, column: int | None) -> int | None:
    return None if column is None else len(line.encode()[: column - 1].decode(errors="ignore")) + 1


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
