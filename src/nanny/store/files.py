"""Where stores lie: their names, the kind of file system under them, and how a path the user gave leads to them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..core.finding import NannyError

DEFAULT_FOLDER = "nanny_logs"
_NO_RUNS = frozenset([".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache"])
_NAME = re.compile(r"metrics(?:\.rank(\d+))?(?:\.(\d+))?\.db")

# Shared memory and locks of WAL mode do not work across machines, or not everywhere, on these.
_REMOTE = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs\w*|ceph|weka\w*|cifs|smb\w*|fuse\w*(\..*)?|9p|virtiofs|afs|panfs|orangefs|pvfs2|glusterfs|ocfs2|gfs2"
    r"|vboxsf|prl_fs|dfs|quobyte|daos"
)


def store_name(rank: int, number: int = 1) -> str:
    """`metrics.db`, `metrics.rank3.db`; `metrics.2.db` for a second live process in the same folder."""
    return "metrics" + (f".rank{rank}" if rank else "") + (f".{number}" if number > 1 else "") + ".db"


def network_file_system(path: Path, mountinfo: str | None = None) -> str:
    """The type of the network file system that holds `path`, or an empty string for a local one."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return ""
    real = os.path.realpath(path)
    best, found = -1, ""
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        parts = fields.split(" ")
        if len(parts) < 5 or not tail:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), parts[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:  # of two mounts on one point, the later covers the earlier
            best, found = len(mount), tail.split(" ")[0]
    return found if _REMOTE.fullmatch(found) else ""


def find_stores(path: str | Path | None) -> list[Path]:
    """The stores of a file, a folder, or (None) of the folder under ./nanny_logs that was written last.

    Lower ranks first, and the newest first among those of one rank.
    """
    target = Path(DEFAULT_FOLDER) if path is None else Path(path)
    if path is not None and target.is_file():
        return [target]
    if not target.exists():
        if path is None:
            raise NannyError(
                f"no runs here: there is no folder {DEFAULT_FOLDER} in {Path.cwd()}; "
                "record one with `nanny run train.py`, or name its folder with --db PATH"
            )
        raise NannyError(f"{target}: no such file or folder; name a metrics.db or its folder with --db PATH")
    stores = _stores_in(target)
    if not stores:
        below = {file.parent for file in target.rglob("metrics*.db") if is_store_name(file.name) and file.is_file()}
        stores = _stores_in(max(below, key=lambda folder: max(map(last_written, _stores_in(folder))))) if below else []
    if not stores:
        advice = "record a run with `nanny run train.py`, or name another --db PATH"
        raise NannyError(f"{target}: holds no metrics.db; {advice}")
    return stores


def stores_below(top: Path, most: int = 1000) -> list[Path]:
    """Every store in a folder and the folders in it, the one written last first; links to folders are not followed."""
    found: list[Path] = []
    folders = [top]
    while folders and len(found) < most:
        try:
            entries = sorted(folders.pop().iterdir())
        except OSError:
            continue
        found += [e for e in entries if is_store_name(e.name) and e.is_file()]
        folders += [e for e in entries if e.name not in _NO_RUNS and e.is_dir() and not e.is_symlink()]
    return sorted(found, key=lambda store: -last_written(store))[:most]


def is_store_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def rank_of(store: Path) -> int:
    """The rank in a store's name; 0 for other names."""
    match = _NAME.fullmatch(store.name)
    return int(match[1] or 0) if match else 0


def _stores_in(folder: Path) -> list[Path]:
    stores = [file for file in folder.iterdir() if is_store_name(file.name) and file.is_file()]
    return sorted(stores, key=lambda file: (rank_of(file), -last_written(file), file.name))


def last_written(store: Path) -> float:
    """When it was last written; in WAL mode the newest pages are in the side file."""
    times = []
    for file in (store, store.with_name(store.name + "-wal")):
        try:
            times.append(file.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times, default=0.0)
