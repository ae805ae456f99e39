"""Which file is a store, which one is meant, and what is said about the others."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanny.core.finding import Finding, NannyError, Severity
from nanny.core.step import RunInfo
from nanny.store import database, lock, reader
from nanny.store.files import find_stores, network_file_system, store_name
from nanny.store.schema import APPLICATION_ID, SCHEMA_VERSION, schema_page
from nanny.store.writer import RunWriter

ROOT = Path(__file__).parents[2]


def record(folder: Path, rank: int = 0, findings: int = 1) -> Path:
    writer = RunWriter(folder, RunInfo(started=time.time(), rank=rank))
    writer.add_findings([Finding("X", Severity.INFO, "x" * 200, step=step) for step in range(findings)])
    writer.close()
    return writer.path


def test_the_schema_page_is_up_to_date():
    page = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    assert page == schema_page(), "type `make docs`"


def test_the_schema_page_names_every_table_and_column(tmp_path):
    page = schema_page()
    db = reader.connect(record(tmp_path))
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    assert len(tables) == 12
    for table in tables:
        section = page.split(f"\n## {table}")[1].split("\n## ")[0]
        for _, column, *_ in db.execute(f"PRAGMA table_info({table})"):
            assert f"| {column} |" in section or (table == "measured" and column in "run, kind, step, site, dtype"), (
                table,
                column,
            )
    db.close()


def test_a_store_can_be_told_from_other_databases(tmp_path):
    db = sqlite3.connect(record(tmp_path))
    assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    db.close()


def set_version(path: Path, version: int) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()


def make_foreign(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE run (id INTEGER)")
    db.commit()
    db.close()


def test_files_that_are_no_stores_are_refused_with_a_sentence(tmp_path):
    older, newer = tmp_path / "older.db", tmp_path / "newer.db"
    for path, version in ((older, SCHEMA_VERSION - 2), (newer, SCHEMA_VERSION + 1)):
        shutil.copy(record(tmp_path / path.stem), path)
        set_version(path, version)
    foreign, text, empty = tmp_path / "foreign.db", tmp_path / "text.db", tmp_path / "empty.db"
    make_foreign(foreign)
    text.write_text("loss,step\n" * 1000)
    empty.touch()
    for path, says in (
        (older, "older nanny.*record the run again"),
        (newer, "newer nanny.*pip install --upgrade"),
        (foreign, "no store of nanny.*--db PATH"),
        (text, "no store of nanny.*--db PATH"),
        (empty, "holds nothing yet.*--db PATH"),
        (tmp_path / "none.db", "no such file.*--db PATH"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(NannyError, match=says):
            reader.connect(path)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.6, 0.99])
def test_a_truncated_store_is_refused_with_a_sentence(tmp_path, share):
    path = record(tmp_path, findings=500)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(NannyError, match=r"metrics\.db"), reader.reading(path) as db:
        reader.findings(db, 1)


def test_damage_met_while_reading_is_a_sentence_too(tmp_path):
    path = record(tmp_path, findings=500)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 20000)
    with pytest.raises(NannyError, match="damaged"), reader.reading(path) as db:
        reader.findings(db, 1)


@pytest.mark.parametrize(
    "spoil", [make_foreign, lambda path: set_version(path, 99), lambda path: path.write_text("notes " * 1000)]
)
def test_a_new_run_beside_a_file_it_cannot_add_to_gets_its_own_and_says_so(tmp_path, spoil):
    path = record(tmp_path)
    if spoil is make_foreign:
        path.unlink()
    spoil(path)
    before = path.read_bytes()
    said: list[str] = []
    writer = RunWriter(tmp_path, RunInfo(started=time.time()), on_warning=said.append)
    writer.close()
    assert writer.path.name == "metrics.2.db"
    assert len(said) == 1
    assert str(path) in said[0]
    assert "recorded in" in said[0]
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.2.db", "metrics.db"]


def test_stores_are_found_by_file_folder_and_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NannyError, match=r"nanny_logs.*nanny run train.py"):
        find_stores(None)
    first, second = record(tmp_path / "nanny_logs" / "a"), record(tmp_path / "nanny_logs" / "b")
    ranked = record(tmp_path / "nanny_logs" / "b", rank=10), record(tmp_path / "nanny_logs" / "b", rank=2)
    for age, path in enumerate((ranked[1], second, first)):
        os.utime(path, (1e9 - age, 1e9 - age))
    os.utime(ranked[0], (1e9, 1e9))
    in_b = [second, ranked[1], ranked[0]]
    assert [path.resolve() for path in find_stores(None)] == in_b
    assert find_stores(first) == [first]
    assert find_stores(str(tmp_path / "nanny_logs" / "b")) == in_b
    newest = record(tmp_path / "nanny_logs" / "a")
    assert find_stores(tmp_path / "nanny_logs") == [newest]
    (tmp_path / "bare").mkdir()
    with pytest.raises(NannyError, match=r"bare: holds no metrics\.db"):
        find_stores("bare")
    with pytest.raises(NannyError, match="gone: no such file or folder"):
        find_stores("gone")


def test_odd_characters_in_a_path_do_no_harm(tmp_path):
    path = record(tmp_path / "a?mode=rw#b %20 é 'x'")
    with reader.reading(path) as db:
        assert len(reader.findings(db, 1)) == 1


def test_second_stores_of_a_folder_are_found_newest_first(tmp_path):
    path = record(tmp_path)
    second = tmp_path / store_name(0, 2)
    shutil.copy(path, second)
    shutil.copy(path, tmp_path / "other.db")
    os.utime(path, (1e9, 1e9))
    assert find_stores(tmp_path) == [second, path]


MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:26 / /home rw - nfs4 server:/home rw
31 30 0:27 / /home/me/scratch rw shared:1 - xfs /dev/sdb rw
32 22 0:28 / /mnt/my\040disk rw - fuse.sshfs host:/ rw
33 22 0:29 / /data rw - ext4 /dev/sdc rw
34 33 0:30 / /data rw - lustre mds:/fs rw
35 22 0:31 / /home2 rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/log", ""),
        ("/home/you", "nfs4"),
        ("/home", "nfs4"),
        ("/home/me/scratch/x", ""),
        ("/home/me/scratches", "nfs4"),
        ("/home2/x", ""),
        ("/mnt/my disk/run", "fuse.sshfs"),
        ("/data/x", "lustre"),
    ],
)
def test_network_file_systems_are_told_by_the_mount_that_holds_the_folder(path, kind):
    assert network_file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb3", "fuse", "fuse.ceph"]
)
def test_every_network_file_system_of_the_design_is_known(kind):
    assert network_file_system(Path("/x"), f"22 1 254:0 / / rw - {kind} host:/x rw") == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "nfsd"])
def test_local_file_systems_are_not_taken_for_network_ones(kind):
    assert network_file_system(Path("/x"), f"22 1 254:0 / / rw - {kind} /dev/x rw") == ""


def test_on_a_network_file_system_no_shared_memory_is_used_and_a_live_run_is_readable(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "network_file_system", lambda path: "nfs4")
    writer = RunWriter(tmp_path, RunInfo(started=time.time()))
    writer.add_finding(Finding("X", Severity.INFO, "x"))
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(("-wal", "-shm"))]
    with reader.reading(writer.path) as db:
        assert len(reader.findings(db, writer.run)) == 1
        assert db.execute("PRAGMA journal_mode").fetchone() != ("wal",)
    writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.db"]


def test_without_file_locks_every_process_makes_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    said: list[str] = []
    writers = [RunWriter(tmp_path, RunInfo(started=time.time()), on_warning=said.append) for _ in range(2)]
    for writer in writers:
        writer.close()
    assert [writer.path.name for writer in writers] == ["metrics.db", "metrics.2.db"]
    assert [writer.failed for writer in writers] == [None, None]


def test_the_lock_is_held_by_one_and_free_again_after_release(tmp_path):
    path = tmp_path / "a.lock"
    held = lock.try_lock(path)
    assert held is not None
    assert lock.is_held(path)
    assert lock.try_lock(path) is None
    assert "this process" in lock.holder(path)
    held.release()
    assert not path.exists()
    assert not lock.is_held(path)
    again = lock.try_lock(path)
    assert again is not None
    again.release()


def test_a_store_left_in_wal_mode_is_read_from_a_read_only_disk(tmp_path):
    path = record(tmp_path)
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    script = f"""
mount -t tmpfs none /mnt && cp {path} /mnt/ && mount -o remount,ro /mnt || exit 77
{sys.executable} -c "
from nanny.store import reader
with reader.reading('/mnt/metrics.db') as db:
    print(len(reader.findings(db, 1)))
"
"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 77 or "Operation not permitted" in done.stderr:
        pytest.skip("needs the right to mount")
    assert (done.stdout, done.stderr) == ("1\n", "")
