"""Which files to check, and their text: walking folders, and reading whatever encoding is met there.

Nothing here raises for one bad file among many: what is skipped is named in a note.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from ..core.finding import NannyError
from ..core.regular_files import read_regular

KINDS = {".py": "python", ".ipynb": "notebook", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
SKIPPED_FOLDERS = frozenset(
    (
        *(".git", ".hg", ".svn", ".venv", "venv", ".env", ".tox", ".nox", ".direnv", ".idea", ".vscode", "node_modules"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "__pycache__", ".ipynb_checkpoints"),
        *("build", "dist", "_build", "buck-out", ".eggs", "__pypackages__", "site-packages"),
    )
)
SETTINGS = ("json", "yaml", "toml")
LONGEST_SETTINGS = 1 << 16  # bytes of a settings file that nobody named; what is longer is data
SOURCE_FOLDERS = ("src", "lib")  # where a project keeps what its scripts import by bare name
# notebooks carry their pictures
LARGEST = {"python": 2 << 20, "notebook": 64 << 20, "json": 1 << 20, "yaml": 1 << 20, "toml": 1 << 20}
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True)
class Found:
    """A file to check: its path as the user will read it, and what is in it."""

    path: str
    kind: str
    named: bool = False  # on the command line, not met in a folder


@dataclass(frozen=True)
class Text:
    text: str
    note: str = ""  # what had to be assumed to read it


def matches_path(path: str, patterns: Sequence[str], root: str = "") -> bool:
    """`tests/*`, `*.ipynb`, `legacy` or `src/**/old.py` against the path below `root`, its name and each of its folders."""
    if not patterns:
        return False
    inside = os.path.relpath(os.path.abspath(path), root or os.curdir).replace(os.sep, "/")
    parts = inside.split("/")
    heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for pattern in patterns:
        bare = pattern.rstrip("/").removeprefix("./")
        forms = {bare, bare.replace("**/", "*/"), bare.replace("**/", "")}  # here `*` crosses folders
        if any(fnmatchcase(head, form) for form in forms for head in heads):
            return True
        if "/" not in bare and any(fnmatchcase(part, bare) for part in parts):
            return True
    return False


def find_files(path: str, notes: list[str], exclude: Sequence[str] = (), root: str = "") -> Iterator[Found]:
    """The file itself, or the files below a folder in the order of their names. Linked folders are not entered."""
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise NannyError(f"{path}: no such file or folder; give the path of a script, notebook, settings file or folder")
        yield Found(path, KINDS.get(os.path.splitext(path)[1].lower(), "python"), named=True)
        return
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        below = []
        for entry in _entries(folder, notes):
            shown = os.path.normpath(os.path.join(folder, entry.name))
            if entry.is_dir(follow_symlinks=False):
                if not (_is_skipped(entry) or matches_path(shown, exclude, root)):
                    below.append(shown)
                continue
            kind = KINDS.get(os.path.splitext(entry.name)[1].lower())
            if kind and _may_be_read(entry) and not matches_path(shown, exclude, root):
                yield Found(shown, kind)
        waiting += reversed(below)


_ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "environment.yml")


def project_root(folder: str) -> str:
    """The folder that holds the project of an absolute folder: the nearest with a mark of one, else the folder itself."""
    return _marked_above(folder) or folder


@cache
def _marked_above(folder: str) -> str:
    if any(os.path.exists(os.path.join(folder, mark)) for mark in _ROOT_MARKS):
        return folder
    above = os.path.dirname(folder)
    return _marked_above(above) if above != folder else ""


def folders_up(path: str) -> tuple[str, ...]:
    """The folder of a file and those above it, up to the root of its project, written as the path is."""
    return _folders_up(os.path.dirname(path))


@cache
def _folders_up(folder: str) -> tuple[str, ...]:
    root = project_root(os.path.abspath(folder))
    found = [folder]
    while (here := os.path.abspath(folder)) != root and os.path.dirname(here) != here:
        folder = os.path.normpath(os.path.join(folder, os.pardir))
        found.append(folder)
    return tuple(found)


def real_path(path: str) -> str:
    """As os.path.realpath, which looks at every folder above every file."""
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    return os.path.join(_real_folder(folder), name)


@cache
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


@cache
def _names_in(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder or os.curdir))
    except OSError:
        return frozenset()


def forget_files() -> None:
    """Files come and go between two checks."""
    for known in (_marked_above, _folders_up, _real_folder, _names_in, _is_installed):
        known.cache_clear()


def settings_named(name: str, importer: str) -> tuple[str, str] | None:
    """Path and text of a settings file that code in `importer` names, looked for beside it and in the folders above."""
    kind = KINDS.get(os.path.splitext(name)[1].lower(), "")
    if kind not in SETTINGS or os.path.isabs(name):
        return None
    for folder in folders_up(importer):
        path = os.path.normpath(os.path.join(folder, name))
        text = read_text(Found(path, kind)) if os.path.isfile(path) else None
        if isinstance(text, Text):
            return path, text.text
    return None


def settings_texts(folder: str) -> tuple[tuple[str, str], ...]:
    """Path and text of what may be a settings file right in a folder."""
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = sorted(e.name for e in entries if e.is_file() and e.stat().st_size <= LONGEST_SETTINGS)
    except OSError:
        return ()
    found = (settings_named(name, os.path.join(folder, name)) for name in names)
    return tuple(one for one in found if one is not None)


@cache
def _is_installed(folder: str, root: str) -> bool:
    """Whether a folder below the root is no part of the project: an environment, a build."""
    return not SKIPPED_FOLDERS.isdisjoint(os.path.relpath(os.path.abspath(folder), root).split(os.sep))


def find_module(importer: str, target: str, level: int) -> str | None:
    """The file below the project's root that `import target` (with so many leading dots) in a file means."""
    root = project_root(os.path.abspath(os.path.dirname(importer)))
    folders = folders_up(importer) if not level else ()
    if level:
        up = os.path.join(os.path.dirname(importer), *[os.pardir] * (level - 1))
        folders = (os.path.normpath(up) if level > 1 else up,)
    parts = target.split(".") if target else []
    for folder in folders:
        for base in (folder, *(os.path.join(folder, name) for name in SOURCE_FOLDERS)):
            if not parts and not level:
                continue
            if parts and not {parts[0], f"{parts[0]}.py"} & _names_in(base):
                continue
            path = os.path.join(base, *parts)
            for candidate in (f"{path}.py", os.path.join(path, "__init__.py")):
                inside, name = os.path.split(candidate)
                if name in _names_in(inside) and os.path.isfile(candidate) and not _is_installed(inside, root):
                    return os.path.normpath(candidate)
    return None


def read_text(found: Found) -> Text | str:
    """The text, or a note why there is none: gone, not readable, too large, binary."""
    try:
        data = read_regular(found.path, LARGEST[found.kind])
    except OSError as error:
        return _why_skipped(found.path, error)
    text = decode(data)
    if text is None:
        return f"{found.path}: skipped, it is a binary file"
    return Text(text.text, f"{found.path}: {text.note}" if text.note else "")


def decode(data: bytes) -> Text | None:
    """By byte-order mark, PEP 263 cookie or UTF-8, else latin-1; None for a binary file. Line breaks become `\\n`."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return Text(_lines_ended(data.decode(encoding, "replace").removeprefix("\ufeff")))
    if b"\0" in data:
        return None
    encoding, note = _declared_encoding(data), ""
    try:
        return Text(_lines_ended(data.decode(encoding)))
    except LookupError:
        note = f"unknown encoding {encoding!r} declared"
    except UnicodeError:
        note = f"not {encoding}"
    return Text(_lines_ended(data.decode("latin-1")), f"{note}; read as latin-1")


def _declared_encoding(data: bytes) -> str:
    for line in data.split(b"\n", 2)[:2]:
        cookie = _COOKIE.match(line)
        if cookie:
            return cookie[1].decode("ascii", "replace")
        if line.strip() and not line.lstrip().startswith(b"#"):
            break
    return "utf-8"


def _lines_ended(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _entries(folder: str, notes: list[str]) -> list[os.DirEntry[str]]:
    """None for a folder that went away or may not be read; the files beside it are still checked."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        notes.append(_why_skipped(folder, error))
        return []


def _why_skipped(path: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{path}: skipped, {reason[:1].lower()}{reason[1:]}"


def _is_skipped(entry: os.DirEntry[str]) -> bool:
    return entry.name in SKIPPED_FOLDERS or os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))


def _may_be_read(entry: os.DirEntry[str]) -> bool:
    """Not a linked folder, a pipe or a device; a broken link passes, so that reading it says so."""
    return os.path.isfile(entry.path) or (entry.is_symlink() and not os.path.exists(entry.path))
