"""From paths to findings: reads files of every kind, checks them together, and says what was skipped.

`check_model("train.py")` is the whole checker in one call; `check_paths` is what the command runs.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from ..core.finding import Finding, NannyError
from ..core.terminal import progress
from ..show.findings import in_order
from .broken import broken_code, too_deep
from .cache import Cache, Checked, Imports, Keys, digest, shared_by_size
from .config import Config, amp_dtype_name, device_name, find_config
from .suppress import is_suppressed, read_suppressions
from .walk import (
    Found,
    Text,
    decode,
    find_files,
    find_module,
    folders_up,
    forget_files,
    matches_path,
    read_text,
    real_path,
    settings_named,
    settings_texts,
)

if TYPE_CHECKING:
    from .interpreter.source import Project
    from .interpreter.trace import Options
    from .notebook import Notebook

T = TypeVar("T")
STDIN = "<stdin>"
NO_TEXTS: Mapping[str, str] = {}
NO_OVERRIDES = Config()
SMALLEST_BATCH, LARGEST_BATCH = 400_000, 2_000_000  # bytes checked at a time: what they import is read once, and kept as long
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
    checked: dict[str, Checked] = field(default_factory=dict)  # what a cache may keep of it
    imports: dict[str, Imports] = field(default_factory=dict)  # what those that were read for it import

    def __add__(self, other: Report) -> Report:
        return Report(
            self.findings + other.findings,
            self.lines | other.lines,
            self.notes + other.notes,
            self.files + other.files,
            self.read_too + other.read_too,
            self.checked | other.checked,
            self.imports | {path: {**self.imports.get(path, {}), **asked} for path, asked in other.imports.items()},
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
        self.asked: dict[str, Imports] = {}  # what imports mean, as far as that is not among the files given
        self._settings: dict[str, tuple[tuple[str, str], ...]] = {}
        self.asked_settings: dict[tuple[str, str], str] = {}  # what the file that is walked asks of settings files
        self._digests: dict[str, str] = {}
        self.holding: dict[str, bool] = {}  # whether the imports of a file still mean what a cache says

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
        self.asked.setdefault(importer, {})[target, level] = self._beside[key]
        return self._beside[key]

    def digest(self, path: str) -> str:
        if path not in self._digests:
            self._digests[path] = digest(self[path])
        return self._digests[path]

    def settings(self, name: str, importer: str) -> tuple[str, object, Mapping[tuple[str | int, ...], tuple[int, ...]]] | None:
        """A settings file that the code names: where it is, what it says, and where each key stands."""
        from .settings.check import read_settings

        self.asked_settings[name, importer] = self.settings_state(name, importer)
        return read_settings(name, importer)

    def settings_near(self, importer: str, framework: str, *keys: str) -> list[tuple[object, str, int]]:
        """What the settings files of a framework beside a file and above it say under a key, each value once."""
        from .settings.check import sections_of

        self.asked_settings["", importer] = self.settings_state("", importer)
        found: dict[object, tuple[object, str, int]] = {}
        for folder in folders_up(importer):
            for path, section in sections_of(self._settings_in(folder)):
                value = section.get(*keys)
                if section.framework == framework and isinstance(value, (str, int)):
                    found.setdefault(value, (value, path, section.row(*keys)))
        return list(found.values())

    def settings_state(self, name: str, importer: str) -> str:
        """A digest of the texts that such a question is answered from: of the file of that name, or of all near one."""
        texts = [settings_named(name, importer)] if name else list(map(self._settings_in, folders_up(importer)))
        return digest(repr(texts))

    def _settings_in(self, folder: str) -> tuple[tuple[str, str], ...]:
        if folder not in self._settings:
            self._settings[folder] = settings_texts(folder)
        return self._settings[folder]

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
    paths: Sequence[str],
    overrides: Config = NO_OVERRIDES,
    jobs: int = 0,
    top: str = "",
    texts: Mapping[str, str] = NO_TEXTS,
    cache: Cache | None = None,
) -> Report:
    """Every file below the paths, each by the `[tool.nanny]` above the path that was given, but not above `top`.

    `texts` are Python files as they would be: what a fix makes of them, or an editor that has not saved them yet.
    With a `cache`, what has not changed since it was last checked is not checked again.
    """
    with _quiet_interpreter():
        return _check_paths(paths, overrides, jobs, top, texts, cache)


def _check_paths(
    paths: Sequence[str], overrides: Config, jobs: int, top: str, texts: Mapping[str, str], cache: Cache | None
) -> Report:
    forget_files()
    report = Report()
    seen: set[str] = set()
    groups: dict[Config, list[Found]] = {}
    for path in paths:
        config = merge(find_config(path, top), overrides)
        for found in find_files(path, report.notes, config.exclude, config.root):
            real = real_path(found.path)
            if real not in seen:
                seen.add(real)
                groups.setdefault(config, []).append(found)
    for config, found_files in groups.items():
        report += _check_group(found_files, config, jobs, texts, cache)
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
    return replace(report, findings=in_order(_one_for_each_place(f for f in report.findings if config.wants(f))))


def merge(config: Config, overrides: Config) -> Config:
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
    unique: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        place = (finding.file, finding.cell, finding.line, finding.column, finding.code)
        if place in unique:
            from .engine import worse

            finding = worse(unique[place], finding)
        unique[place] = finding
    return list(unique.values())


def _is_path(text: str) -> bool:
    """Whether a string names a file. A mistyped path must not pass for source text, which `src/modl` would be, too."""
    if not text.strip() or "\n" in text or "\0" in text:
        return False
    is_code = any(char in text for char in "()=;#") or text.startswith(("import ", "from "))
    return os.path.lexists(text) or text.endswith((".py", ".ipynb", ".json", ".yaml", ".yml")) or not is_code


def _check_group(found_files: list[Found], config: Config, jobs: int, texts: Mapping[str, str], cache: Cache | None) -> Report:
    """The files of one configuration, in this process or, if there are many, in several; known ones and those that name
    nothing of mixed precision are only read."""
    project = [found.path for found in found_files if found.kind == "python"]
    sources = Sources(project, texts, config)
    keys = Keys(project, config.exclude, config.root, config.device, config.amp_dtype) if cache is not None else None
    report, work, sizes = Report(), [], []
    for found in found_files:
        text = sources.read(found.path) if found.kind == "python" else None
        if isinstance(text, Text):
            known = _from_cache(found.path, sources, cache, keys) if cache is not None and keys is not None else None
            if known is None and not found.named and not _is_worth_parsing(text.text):
                known = Checked([], {})
                if cache is not None and keys is not None:
                    cache.put(keys.of(found.path, sources.digest(found.path)), known)
            if known is not None:
                report.files.append(found.path)
                report.notes.extend([text.note] if text.note else [])
                report.findings.extend(known.findings)
                continue
        work.append(found)
        sizes.append(len(text.text) if isinstance(text, Text) else _size(found.path))
    report = replace(_without_silenced(report, sources), read_too=sources.read_too)
    report = replace(report, findings=[finding for finding in report.findings if config.wants(finding)])
    workers = jobs or _cores()
    batches = [work[part] for part in shared_by_size(sizes, 4 * workers, SMALLEST_BATCH, LARGEST_BATCH)]
    if min(workers, len(batches)) > 1:
        reports = _in_workers(batches, sources, config, min(workers, len(batches)))
    else:
        batch_of = BatchCheck(sources, config)
        reports = _count_on_terminal(map(batch_of.check, batches), batches)
    report = sum(reports, report)
    if cache is not None and keys is not None:
        for path, checked in report.checked.items():
            cache.put(keys.of(path, sources.digest(path)), checked)
        for path in {path for checked in report.checked.values() for path in checked.read}:
            cache.put_imports(keys.of(path, sources.digest(path), "imports"), report.imports.get(path, {}))
    return report


def _is_worth_parsing(text: str) -> bool:
    from .interpreter.source import says_half, starts_program  # not needed where everything is known

    return starts_program(text) or says_half(text)


def _from_cache(path: str, sources: Sources, cache: Cache, keys: Keys) -> Checked | None:
    """What was found when all texts were as they are, and every import meant what it means."""
    checked = cache.get(keys.of(path, sources.digest(path)))
    if checked is None or any(sources.digest(file) != text for file, text in checked.read.items()):
        return None
    if any(sources.settings_state(*asked) != state for asked, state in checked.settings.items()):
        return None
    for file in checked.read:
        if file not in sources.holding:
            asked = cache.imports(keys.of(file, sources.digest(file), "imports"))
            is_same = asked is not None and all(sources.beside(file, *name) == found for name, found in asked.items())
            sources.holding[file] = is_same
        if not sources.holding[file]:
            return None
    return checked


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


class BatchCheck:
    """Some files of a project after the other; what they import is parsed once."""

    def __init__(self, sources: Sources, config: Config):
        from .interpreter.source import Project

        self.sources, self.config, self.project = sources, config, Project(sources)

    def check(self, batch: list[Found]) -> Report:
        report, python, sources = Report(), [], self.sources
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
                    report += _check_other(found, text.text, self.config)
            report += _check_python(sources, python, self.config, self.project)
        imports = {name: sources.asked.get(name, {}) for checked in report.checked.values() for name in checked.read}
        report = replace(report, read_too=sources.read_too, imports=imports)
        return replace(report, findings=[finding for finding in report.findings if self.config.wants(finding)])


_batches: BatchCheck | None = None  # of a worker process


def _begin_worker(sources: Sources, config: Config) -> None:
    global _batches
    _batches = BatchCheck(sources, config)


def _work(batch: list[Found]) -> Report:
    assert _batches is not None
    return _batches.check(batch)


def _in_workers(batches: list[list[Found]], sources: Sources, config: Config, workers: int) -> list[Report]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    context = multiprocessing.get_context("fork") if sys.platform == "linux" else None
    try:
        with ProcessPoolExecutor(workers, context, _begin_worker, (sources, config)) as pool:
            return _count_on_terminal(pool.map(_work, batches), batches)
    except BrokenProcessPool:  # a worker was killed, most often for its memory
        note = "a worker process was killed; checked everything again in one process"
        alone = BatchCheck(sources, config)
        return [Report(notes=[note]), *(alone.check(batch) for batch in batches)]


def _count_on_terminal(reports: Iterable[Report], batches: list[list[Found]]) -> list[Report]:
    """All of them, and how far they are on the terminal of who waits."""
    out: list[Report] = []
    for batch, report in zip(batches, reports):
        out.append(report)
        progress(f"{sum(map(len, batches[: len(out)]))}/{sum(map(len, batches))} {batch[-1].path}")
    return out


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """No warnings of the parser about other people's escape sequences, and no rounds of the garbage collector.

    Syntax trees are large and hold no cycles, and walks untie theirs: a fifth of the time would be spent looking for them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if was_on:
            gc.enable()


def _check_python(sources: Mapping[str, str], paths: Sequence[str], config: Config, project: Project | None = None) -> Report:
    """Parses each of `paths` and, if it could have findings, checks it together with what it imports."""
    from .interpreter.source import Project
    from .interpreter.trace import Options

    report = Report(files=list(paths))
    options = Options(device=config.device, amp_dtype=config.amp_dtype)
    known = project if project is not None else Project(sources)
    for path in paths:
        try:
            _, is_deep = _tried(known.parse, path)
            entry = sources, known, path, options
            report += _with_room(_check_entry, *entry) if is_deep else _tried(_check_entry, *entry)[0]
        except SyntaxError as error:
            report.checked[path] = Checked([broken_code(error, path)], {})
            report.findings.extend(report.checked[path].findings)
        except ValueError as error:  # a NUL in the text
            report.notes.append(f"{path}: skipped, {error}")
        except (RecursionError, MemoryError):  # MemoryError: the parser's own stack is full
            report.notes.append(too_deep(path))
    return _without_silenced(report, sources)


def _check_entry(sources: Mapping[str, str], known: Project, path: str, options: Options) -> Report:
    from .engine import check_entries

    report = Report()
    if isinstance(sources, Sources):
        sources.asked_settings = {}
    for entry in check_entries(known, [path], options, report.notes):
        report.findings.extend(entry.findings)
        if isinstance(sources, Sources) and not report.notes:
            read = {name: sources.digest(name) for name in entry.read}
            report.checked[path] = Checked(entry.findings, read, sources.asked_settings)
    return report


def _without_silenced(report: Report, sources: Mapping[str, str]) -> Report:
    """Without what is silenced in the code, and with the lines of the files that are left."""
    kept = []
    by_file: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_file.setdefault(finding.file, []).append(finding)
    for path, findings in by_file.items():
        text = sources[path]
        suppressions = read_suppressions(text)
        lines = text.split("\n")
        mine = [_by_characters(finding, lines) for finding in findings if not is_suppressed(finding, suppressions)]
        if mine:
            report.lines[path, None] = lines
            kept += mine
    return replace(report, findings=kept)


def _tried(work: Callable[..., T], *args: object) -> tuple[T, bool]:
    """The result of `work`, and whether it needs more than the usual stack."""
    try:
        return work(*args), False
    except RecursionError:
        return _with_room(work, *args), True


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
    findings = [in_cell(finding, notebook) for finding in _one_for_each_place(inner.findings)]
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
