"""`nanny ...` as a process of its own that need not import everything anew: forked from one that has done so."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

_PARENT = multiprocessing.get_context("forkserver")
_PARENT.set_forkserver_preload(["nanny.cli", "nanny.check.command", "nanny.runs.command", "nanny.runs.diagnose"])


def _become(module: str, words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, (path, mode) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
        os.dup2(os.open(path, mode), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (multiprocessing has put /dev/null there)
    sys.argv = [module, *words]
    sys.path.insert(0, cwd)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # as an interpreter ends, and multiprocessing does not
        atexit._run_exitfuncs()


def run_command(
    module: str, *words: str, cwd: Path, stdin: bytes = b"", timeout: float = 400, environment: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[bytes]:
    """`python -m module words`: what it printed, and how it ended."""
    whole = {**os.environ, **environment}
    if any(name.startswith("PYTHON") for name in environment):  # read when an interpreter starts
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, timeout=timeout, env=whole, check=False)
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdin", "stdout", "stderr")]
        for path, data in zip(files, (stdin, b"", b"")):
            Path(path).write_bytes(data)
        process = _PARENT.Process(target=_become, args=(module, list(words), str(cwd), whole, files))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess([module, *words], process.exitcode, *(Path(path).read_bytes() for path in files[1:]))
