"""`nanny run --on-finding TARGET`: tells somebody else, from a thread, one after another: the training never waits.

A URL gets the finding as JSON by POST; a command gets its line as the last argument and the JSON on its standard input.
"""

from __future__ import annotations

import atexit
import os
import queue
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable

from ..core.finding import Finding, NannyError, Severity
from ..core.plain_json import finding_object, to_text
from ..core.terminal import tell
from ..core.threads import signals_taken, start_thread
from .live_log import line

MOST_WAITING = 100  # findings; more come at once only from a run that is lost anyway
SECONDS = 20.0  # for one of them to be taken
AT_THE_END = 5.0  # seconds that the end of the script waits for what is still to be sent


def alarm(target: str) -> Callable[[Finding], None]:
    """What `on_finding` calls: warnings and errors go to `target`."""
    send = _post(target) if target.startswith(("http://", "https://")) else _run(target)
    waiting: queue.Queue[Finding] = queue.Queue(MOST_WAITING)
    pid = os.getpid()

    def work() -> None:
        failed = False
        while True:
            finding = waiting.get()
            try:
                send(finding)
            except Exception as error:  # noqa: BLE001 - the other side's own; told once
                if not failed:
                    tell(f"nanny: --on-finding {target} failed ({type(error).__name__}: {error}); the run goes on")
                failed = True
            finally:
                waiting.task_done()

    def drain() -> None:
        until = time.monotonic() + AT_THE_END
        while os.getpid() == pid and waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.02)

    def tell_other(finding: Finding) -> None:
        if finding.severity < Severity.WARNING or os.getpid() != pid or waiting.full():
            return
        waiting.put(finding)

    start_thread("nanny-alarm", work)
    atexit.register(drain)
    return tell_other


def _body(finding: Finding) -> bytes:
    return to_text({"text": line(finding), **finding_object(finding)}, indent=None).encode()


def _post(url: str) -> Callable[[Finding], None]:
    def send(finding: Finding) -> None:
        request = urllib.request.Request(url, _body(finding), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=SECONDS).close()

    return send


def _run(command: str) -> Callable[[Finding], None]:
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        raise NannyError(f"--on-finding {command!r}: there is no such command, and it is no http:// or https:// address")

    def send(finding: Finding) -> None:
        command = [*words, line(finding)]
        with signals_taken():
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            process.communicate(_body(finding), timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    return send
