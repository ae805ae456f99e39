"""What can go wrong around a run: processes die, disks fill, clocks jump. Nothing acknowledged is lost, training goes on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from nanny.core.finding import Finding, Severity
from nanny.core.step import SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store import reader
from nanny.store.writer import RunWriter

PRELUDE = """
import os, resource, sqlite3, sys, time
import numpy as np
from nanny.core.finding import Finding, Severity
from nanny.core.step import RunInfo, Sample, Site
from nanny.store import database, writer as writer_module
from nanny.store.writer import RunWriter

folder = sys.argv[1]
said = []

def start(**options):
    return RunWriter(folder, RunInfo(started=time.time()), on_warning=said.append, **options)

def finding(step):
    return Finding("NAN", Severity.ERROR, "output has NaN", step=step)

def sample(step, sites=100):
    return Sample("output", step, ("count", "norm"), np.full((2, sites), step + 1, "<f4").tobytes())
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]


def run_script(body: str, folder: Path, wrapper: tuple[str, ...] = ()) -> str:
    done = subprocess.run([*wrapper, *script(body), str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_script(body: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*script(body), str(folder)], stdout=subprocess.PIPE, text=True)


def check_integrity(path: Path) -> None:
    with reader.reading(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def found_steps(path: Path, run: int) -> list[int | None]:
    with reader.reading(path) as db:
        return [finding.step for finding in reader.findings(db, run)]


BUSY_TRAINING = """
if sys.argv[2] == "network":
    database.network_file_system = lambda path: "nfs4"
writer = start()
writer.add_sites([Site("output", str(i)) for i in range(100)])
print(writer.run, flush=True)
for step in range(10**9):
    writer.add_sample(sample(step))
    writer.add_scalars(step, {"loss": 1.0})
    if step % 3 == 0:
        writer.add_finding(finding(step))
        os.write(1, b"%d\\n" % step)
    if step % 50 == 0:
        writer.flush()
"""


def kill_at_random_moments(folder: Path, times: int, disk: str) -> None:
    """Every run but the first starts on what the one killed before it has left behind."""
    for seed in range(times):
        child = subprocess.Popen([*script(BUSY_TRAINING), str(folder), disk], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        run = int(child.stdout.readline())
        time.sleep(random.Random(seed).uniform(0, 0.3))
        child.kill()
        acknowledged = [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        child.wait()
        child.stdout.close()
        found = found_steps(folder / "metrics.db", run)
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) - len(acknowledged) in (0, 1)  # the last one may have died between commit and acknowledgement
        check_integrity(folder / "metrics.db")
        with reader.reading(folder / "metrics.db") as db:
            assert [row.status for row in reader.runs(db)] == ["interrupted"] * run
            steps, norms = reader.samples(db, run, "output", "norm")
            assert (norms == steps[:, None] + 1).all()
    assert [file.name for file in folder.glob("*.db")] == ["metrics.db"]


@pytest.mark.parametrize("disk", ["local", "network"])
def test_kill_9_loses_no_acknowledged_finding(tmp_path, disk):
    kill_at_random_moments(tmp_path, 3, disk)


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["local", "network"])
def test_kill_9_loses_no_acknowledged_finding_in_50_tries(tmp_path, disk):
    kill_at_random_moments(tmp_path, 50, disk)


def test_a_process_killed_inside_a_transaction_in_rollback_mode_leaves_a_readable_store(tmp_path):
    run_script(
        """
        database.network_file_system = lambda path: "nfs4"
        writer = start()
        writer.add_finding(finding(0))

        def die(store):
            store.db.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
            for step in range(1000):
                store.put_samples([sample(step)])
            os._exit(0)

        writer._enqueue_urgent([die], wait=True)
        """,
        tmp_path,
    )
    assert (tmp_path / "metrics.db-journal").stat().st_size
    assert found_steps(tmp_path / "metrics.db", 1) == [0]
    check_integrity(tmp_path / "metrics.db")
    with reader.reading(tmp_path / "metrics.db") as db:
        assert reader.pick_run(db, 1).status == "interrupted"
        assert reader.sample_steps(db, 1, "output").size == 0


def test_a_full_disk_is_said_once_and_written_when_there_is_space_again(tmp_path):
    out = run_script(
        """
        writer_module.RETRY_SECONDS = 0.05
        writer = start()
        writer.add_finding(finding(0))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        for step in range(1000):
            writer.add_sample(sample(step))
        while not writer.failed:
            writer.flush(1)
        writer.add_finding(finding(1))
        print(len(said), writer.failed)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        while writer.failed:
            time.sleep(0.01)
        print(writer.flush(), writer.failed, writer.dropped)
        writer.close()
        print(len(said), said[0])
        """,
        tmp_path,
    ).splitlines()
    assert out[0].startswith("1 cannot write to")
    assert out[1] == "True None 0"
    assert out[2].startswith("1 ")
    assert "training goes on" in out[2]
    assert found_steps(tmp_path / "metrics.db", 1) == [0, 1]
    check_integrity(tmp_path / "metrics.db")
    with reader.reading(tmp_path / "metrics.db") as db:
        steps, norms = reader.samples(db, 1, "output", "norm")
        assert steps.tolist() == list(range(1000))
        assert (norms == steps[:, None] + 1).all()


MOUNT_TINY = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=400k none "$0" && exec "$@"')


@pytest.fixture
def may_mount() -> None:
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")


@pytest.mark.usefixtures("may_mount")
def test_a_disk_that_stays_full_loses_only_what_did_not_fit(tmp_path):
    out = run_script(
        """
        writer = start(queue_bytes=1 << 20)
        writer.add_finding(finding(0))
        for step in range(3000):
            writer.add_sample(sample(step))
            writer.add_scalars(step, {"loss": 1.0})
        writer.flush()
        for step in range(1, 50):
            writer.add_finding(finding(step))
        writer.close()
        db = sqlite3.connect(writer.path)
        print(len(said), writer.dropped > 2000, "full" in said[0])
        print(db.execute("PRAGMA integrity_check").fetchone()[0], db.execute("SELECT min(step) FROM finding").fetchone()[0])
        """,
        tmp_path,
        (*MOUNT_TINY, str(tmp_path)),
    ).splitlines()
    assert out == ["1 True True", "ok 0"]


def test_a_folder_that_cannot_be_made_is_said_once_and_training_goes_on(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    said: list[str] = []
    writer = RunWriter(blocker / "nanny_logs", RunInfo(started=time.time()), on_warning=said.append)
    writer.add_sites([Site("output", "a")])
    for step in range(100):
        writer.add_sample(Sample("output", step, ("count",), bytes(4)))
        writer.add_scalars(step, {"loss": 1.0})
        writer.add_finding(Finding("X", Severity.INFO, "x"))
    writer.set_meta(amp_dtype="float16")
    assert not writer.flush()
    writer.close()
    assert len(said) == 1
    assert "cannot open a store" in said[0]
    assert "Not a directory" in str(writer.failed)


@pytest.mark.usefixtures("may_mount")
def test_a_read_only_folder_is_said_once_and_training_goes_on(tmp_path):
    read_only = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro none "$0" && exec "$@"', str(tmp_path))
    body = """
        writer = start()
        writer.add_finding(finding(0))
        writer.close()
        print(len(said), "Read-only file system" in said[0])
        """
    assert run_script(body, tmp_path, read_only) == "1 True\n"


NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int flock(int fd, int op) { errno = ENOLCK; return -1; }
#define FCNTL(name) int name(int fd, int cmd, ...) { va_list a; va_start(a, cmd); void *p = va_arg(a, void *); va_end(a); \\
  if (cmd == F_SETLK || cmd == F_SETLKW || cmd == F_GETLK) { errno = ENOLCK; return -1; } \\
  return ((int (*)(int, int, void *))dlsym(RTLD_NEXT, #name))(fd, cmd, p); }
FCNTL(fcntl)
FCNTL(fcntl64)
"""


@pytest.mark.slow
def test_on_a_file_system_without_locks_a_run_is_recorded_and_read(tmp_path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    library = tmp_path / "no_locks.so"
    made = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(library), "-", "-ldl"]
    subprocess.run(made, input=NO_LOCKS, text=True, check=True)
    body = """
        for run in range(2):
            writer = start()
            writer.add_finding(finding(run))
            writer.close()
            print(said, writer.failed, writer.path.name)
        from nanny.store import reader
        with reader.reading(writer.path) as db:
            print([f.step for f in reader.findings(db, 1)], sorted(os.listdir(folder)))
        """
    out = run_script(body, tmp_path / "logs", ("env", f"LD_PRELOAD={library}"))
    assert out.splitlines() == ["[] None metrics.db", "[] None metrics.2.db", "[1] ['metrics.2.db', 'metrics.db']"]


def test_a_dead_writer_thread_is_said_once_and_training_goes_on(tmp_path):
    said: list[str] = []
    writer = RunWriter(tmp_path, RunInfo(started=time.time()), on_warning=said.append)
    writer.add_finding(Finding("X", Severity.INFO, "x", step=0))
    writer.add_sample(Sample(object(), 0, ("count",), bytes(4)))  # type: ignore[arg-type]  # a kind that SQLite cannot hold
    assert not writer.flush()
    for step in range(100):
        writer.add_scalars(step, {"loss": 1.0})
        writer.add_finding(Finding("X", Severity.INFO, "x", step=step))
    writer.close()
    assert len(said) == 1
    assert "nothing more is recorded" in said[0]
    assert writer.dropped == 201
    assert found_steps(writer.path, 1) == [0]


def test_without_a_callback_trouble_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="nanny: cannot open a store"):
        RunWriter(tmp_path / "file" / "x", RunInfo(started=time.time())).close()


def test_a_second_live_process_gets_its_own_file_and_says_so(tmp_path):
    body = """
        writer = start()
        writer.add_finding(finding(7))
        print("ready", flush=True)
        sys.stdin.read()
        time.sleep(60)
        """
    child = start_script(body, tmp_path)
    assert child.stdout is not None
    child.stdout.readline()
    said: list[str] = []
    writer = RunWriter(tmp_path, RunInfo(started=time.time()), on_warning=said.append)
    writer.add_finding(Finding("X", Severity.INFO, "x", step=8))
    assert writer.path == tmp_path / "metrics.2.db"
    assert len(said) == 1
    assert f"process {child.pid}" in said[0]
    assert str(writer.path) in said[0]
    with reader.reading(tmp_path / "metrics.db") as db:
        assert reader.pick_run(db, None).status == "running"
    child.kill()
    child.wait()
    child.stdout.close()
    with reader.reading(tmp_path / "metrics.db") as db:
        assert reader.pick_run(db, None).status == "interrupted"
    writer.close()
    heir = RunWriter(tmp_path, RunInfo(started=time.time()))
    heir.close()
    assert (heir.path, heir.run) == (tmp_path / "metrics.db", 2)
    assert found_steps(tmp_path / "metrics.db", 1) == [7]
    assert found_steps(tmp_path / "metrics.2.db", 1) == [8]


def test_a_clock_that_runs_backwards_confuses_nothing(tmp_path, monkeypatch):
    now = iter(range(2_000_000_000, 0, -100_000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    for value in (1.0, 2.0):
        writer = RunWriter(tmp_path, RunInfo(started=time.time()))
        writer.add_scalars(0, {"loss": value})
        writer.flush()
        writer.add_scalars(1, {"loss": value})
        writer.close()
    with reader.reading(writer.path) as db:
        first, second = reader.runs(db)
        assert second.started < first.started
        assert all(run.finished is not None and 0 <= run.finished - run.started < 60 for run in (first, second))
        assert reader.pick_run(db, None).id == 2
        assert reader.scalars(db, 2)["loss"][1].tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_a_reader_sees_whole_steps_during_100_000_writes(tmp_path):
    body = """
        writer = start(queue_bytes=1 << 30)
        writer.add_sites([Site("output", str(i)) for i in range(4)])
        print("ready", flush=True)
        for step in range(50_000):
            writer.add_sample(sample(step, 4))
            writer.add_scalars(step, {"loss": float(step)})
            if step % 5000 == 0:
                writer.add_finding(finding(step))
                writer.flush()
        writer.close()
        print(writer.dropped, writer.failed, said)
        """
    child = start_script(body, tmp_path)
    assert child.stdout is not None
    child.stdout.readline()
    looks = seen = 0
    while child.poll() is None:
        with reader.reading(tmp_path / "metrics.db") as db:
            steps, norms = reader.samples(db, 1, "output", "norm", first=seen - 100)
            assert (norms == steps[:, None] + 1).all()
            assert (np.diff(steps) == 1).all()
            last = int(steps[-1]) if len(steps) else 0
            assert last >= seen
            looks, seen = looks + 1, last
    assert child.stdout.read() == "0 None []\n"
    child.stdout.close()
    assert looks > 5
    with reader.reading(tmp_path / "metrics.db") as db:
        assert reader.sample_steps(db, 1, "output").size == 50_000
        assert (reader.scalars(db, 1)["loss"][1] == np.arange(50_000)).all()
    check_integrity(tmp_path / "metrics.db")


def test_a_reader_interrupted_by_the_writer_sees_one_moment(tmp_path):
    writer = RunWriter(tmp_path, RunInfo(started=time.time()))
    writer.add_sample(Sample("output", 0, ("count", "norm"), np.ones((2, 3), "<f4").tobytes()))
    writer.flush()

    def write_in_between(sql: str) -> None:
        if "FROM sample" in sql:  # the reader already knows the layouts, and this adds one
            writer.add_sample(Sample("output", 1, ("count", "max"), np.ones((2, 3), "<f4").tobytes()))
            assert writer.flush()

    with reader.reading(writer.path) as db:
        db.set_trace_callback(write_in_between)
        assert reader.samples(db, 1, "output", "norm")[0].tolist() == [0]
        db.set_trace_callback(None)
        assert reader.samples(db, 1, "output", "norm")[0].tolist() == [0, 1]
    writer.close()


@pytest.mark.slow
def test_a_run_of_1_gigabyte_stays_readable(tmp_path):
    sites, steps = 1000, 30_000
    rows = np.random.default_rng(0).lognormal(size=(len(SAMPLE_STATS), sites)).astype("<f4")
    writer = RunWriter(tmp_path, RunInfo(started=time.time()), queue_bytes=1 << 30)
    writer.add_sites([Site("output", str(i)) for i in range(sites)])
    for step in range(steps):
        rows[0] = step + 1
        writer.add_sample(Sample("output", step, SAMPLE_STATS, rows.tobytes()))
        writer.add_scalars(step, {"loss": float(step)})
        if step % 1000 == 0:
            writer.add_finding(Finding("X", Severity.INFO, "x", step=step))
            writer.flush()
    writer.close(timeout=60)
    assert writer.path.stat().st_size > 900e6
    with reader.reading(writer.path) as db:
        assert reader.steps(db, 1) == (0, steps - 1)
        assert reader.pick_run(db, None).dropped == 0
        assert len(reader.findings(db, 1)) == steps // 1000
        taken, counts = reader.samples(db, 1, "output", "count", first=20_000, last=20_099)
        assert (counts == taken[:, None] + 1).all()
        assert reader.scalars(db, 1)["loss"][1].size == steps
    writer.path.unlink()  # pytest keeps the folders of its last runs


def test_a_full_queue_drops_samples_and_counts_them_but_keeps_findings(tmp_path):
    writer = RunWriter(tmp_path, RunInfo(started=time.time()), queue_bytes=10_000)
    blocker = sqlite3.connect(writer.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    for step in range(100):
        writer.add_sample(Sample("output", step, ("count",), np.full(250, 1, "<f4").tobytes()))
    writer.add_findings([Finding("X", Severity.INFO, "x", step=step) for step in range(100)])
    for step in range(100, 200):
        writer.add_finding(Finding("X", Severity.INFO, "x", step=step))
    blocker.execute("ROLLBACK")
    blocker.close()
    assert writer.flush()
    writer.close()
    assert writer.dropped == 90
    assert found_steps(writer.path, 1) == list(range(200))
    with reader.reading(writer.path) as db:
        assert reader.pick_run(db, None).dropped == 90
        assert reader.sample_steps(db, 1, "output").tolist() == list(range(10))


def test_a_forked_child_writes_nothing_and_breaks_nothing(tmp_path):
    out = run_script(
        """
        import gc
        writer = start()
        for step in range(12):
            for k in range(20):
                writer.add_sample(sample(20 * step + k))
            child = os.fork()
            if child == 0:
                writer.add_sample(sample(9999))
                writer.add_finding(finding(9999))
                own = sqlite3.connect(":memory:")
                own.execute("CREATE TABLE t (x)")
                writer.flush()
                writer.close("child")
                del writer
                gc.collect()
                sys.exit(0) if step % 2 else os._exit(0)
            writer.add_finding(finding(step))
            assert os.waitpid(child, 0)[1] == 0
        writer.close()
        print(writer.failed, writer.dropped, said)
        """,
        tmp_path,
    )
    assert out == "None 0 []\n"
    assert found_steps(tmp_path / "metrics.db", 1) == list(range(12))
    check_integrity(tmp_path / "metrics.db")
    with reader.reading(tmp_path / "metrics.db") as db:
        assert reader.sample_steps(db, 1, "output").tolist() == list(range(240))
        assert reader.pick_run(db, None).status == "finished"


def test_a_child_forked_while_the_writer_holds_its_queue_does_not_hang(tmp_path):
    out = run_script(
        """
        import threading
        writer = start()
        held, done = threading.Event(), threading.Event()

        def hold():
            with writer._changed:
                held.set()
                done.wait()

        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if child == 0:
            import signal
            signal.alarm(10)
            writer.add_finding(finding(1))
            writer.add_scalars(1, {"loss": 1.0})
            writer.flush()
            writer.close()
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        done.set()
        writer.close()
        """,
        tmp_path,
    )
    assert out == "0\n"


def test_children_forked_in_the_middle_of_writing_can_use_sqlite_themselves(tmp_path):
    out = run_script(
        """
        writer = start(queue_bytes=1 << 30)
        deadline = time.monotonic() + 2
        forks = step = 0
        while time.monotonic() < deadline and forks < 100:
            for _ in range(100):
                writer.add_sample(sample(step))
                step += 1
            writer._flush_to = step
            with writer._changed:
                writer._changed.notify_all()
            child = os.fork()
            if child == 0:
                own = sqlite3.connect(os.path.join(folder, f"own{forks}"))
                own.execute("CREATE TABLE t (x)")
                own.close()
                os._exit(0)
            patience = time.monotonic() + 10
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > patience:
                    os.kill(child, 9)
                    sys.exit("the child hangs")
                time.sleep(0.001)
            forks += 1
        writer.close()
        print(forks > 10, writer.failed)
        """,
        tmp_path,
    )
    assert out == "True None\n"


def test_a_surviving_child_does_not_keep_a_dead_trainers_store_locked(tmp_path):
    body = """
        writer = start()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        time.sleep(60)
        """
    trainer = start_script(body, tmp_path)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    try:
        heir = RunWriter(tmp_path, RunInfo(started=time.time()))
        heir.close()
        assert heir.path == tmp_path / "metrics.db"
    finally:
        os.kill(worker, signal.SIGKILL)
        trainer.stdout.close()


# the file is taken away


LOSSES = {
    "folder deleted": "shutil.rmtree(folder)",
    "folder moved": "os.rename(folder, folder + '.old')",
    "file deleted": "os.unlink(writer.path)",
    "file moved": "os.rename(writer.path, folder + '/elsewhere')",
    "file and journal deleted": "[os.unlink(f) for f in glob.glob(folder + '/metrics*')]",
    "journal deleted": "os.unlink(str(writer.path) + '-wal')",
    "overwritten with text": "open(writer.path, 'w').write('notes ' * 20_000)",
    "cut to nothing": "open(writer.path, 'w').close()",
    "replaced by a folder": "os.unlink(writer.path); os.mkdir(writer.path)",
    "replaced by another store": "os.replace(other, writer.path)",
    "overwritten by another store": "shutil.copyfile(other, writer.path)",
}

QUICK = [("folder deleted", "local"), ("overwritten with text", "local")]


@pytest.mark.parametrize(
    ("loss", "disk"),
    [
        pytest.param(loss, disk, marks=[] if (loss, disk) in QUICK else pytest.mark.slow)
        for disk in ("local", "network")
        for loss in LOSSES
    ],
)
def test_a_run_whose_file_is_taken_away_goes_on_in_a_new_one_and_says_so_once(tmp_path, loss, disk):
    body = f"""
        import glob, shutil
        if {disk!r} == "network":
            database.network_file_system = lambda path: "nfs4"
        first = RunWriter(folder + ".other", RunInfo(started=1.0))
        first.add_finding(finding(99))
        first.close()
        other = str(first.path)
        writer = start()
        writer.add_sites([Site("output", str(i)) for i in range(100)])
        writer.add_finding(finding(0))
        writer.add_sample(sample(0))
        writer.set_meta(amp_dtype="float16")
        for step in range(-250 if "overwritten" in {loss!r} else 0, 0):  # more than the journal holds
            writer.add_sample(sample(step, 5000))
        assert writer.flush()
        if {disk!r} == "local" or "journal" not in {loss!r}:
            {LOSSES[loss]}
        for step in range(1, 4):
            writer.add_sample(sample(step))
            writer.add_finding(finding(step))
            assert writer.flush(), writer.failed
        writer.close()
        print(len(said), writer.dropped, writer.failed)
        print(writer.path)
        """
    folder = tmp_path / "logs"
    out = run_script(body, folder).splitlines()
    taken = disk == "local" or "journal deleted" not in loss
    assert out[0] == f"{int(taken)} 0 None"
    path = Path(out[1])
    check_integrity(path)
    with reader.reading(path) as db:
        run = reader.pick_run(db, None)
        assert (run.status, run.amp_dtype) == ("finished", "float16")
        assert [finding.step for finding in reader.findings(db, run.id)] == [0, 1, 2, 3]
        assert len(reader.sites(db, run.id, "output")) == 100
        steps, norms = reader.samples(db, run.id, "output", "norm")
        assert steps.tolist() == [1, 2, 3] if taken else [0, 1, 2, 3]
        assert (norms == steps[:, None] + 1).all()
    if loss in ("folder moved", "file moved"):  # what was written before is whole where it is now
        moved = tmp_path / "logs.old" / "metrics.db" if loss == "folder moved" else folder / "elsewhere"
        with reader.reading(moved) as db:
            assert reader.samples(db, reader.pick_run(db, None).id, "output", "norm")[0].tolist() == [0]
    if "another store" in loss:
        assert found_steps(folder / "metrics.db", 1) == [99]
    assert not [*folder.glob("metrics*-wal"), *folder.glob("*.lock")]


def test_a_folder_that_cannot_be_made_again_is_said_and_training_goes_on(tmp_path):
    out = run_script(
        """
        import shutil
        writer_module.RETRY_SECONDS = 0.05
        writer = start()
        writer.add_finding(finding(0))
        shutil.rmtree(folder)
        open(folder, "w").close()
        writer.add_finding(finding(1))
        writer.flush(1)
        print(len(said), "cannot be made" in writer.failed or "no other can be made" in writer.failed)
        os.unlink(folder)
        while writer.failed:
            time.sleep(0.01)
        writer.close()
        """,
        tmp_path / "logs",
    )
    assert out == "1 True\n"
    assert found_steps(tmp_path / "logs" / "metrics.db", 1) == [0, 1]


def test_touching_or_checkpointing_the_file_is_no_loss(tmp_path):
    said: list[str] = []
    writer = RunWriter(tmp_path, RunInfo(started=1.0), on_warning=said.append)
    writer.add_finding(Finding("X", Severity.INFO, "x", step=0))
    os.utime(writer.path)
    writer.add_finding(Finding("X", Severity.INFO, "x", step=1))
    subprocess.run(
        [sys.executable, "-c", "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA wal_checkpoint')", writer.path],
        check=True,
    )
    writer.add_finding(Finding("X", Severity.INFO, "x", step=2))
    writer.close()
    assert not said
    assert found_steps(tmp_path / "metrics.db", 1) == [0, 1, 2]
