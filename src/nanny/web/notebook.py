"""A run seen live in a notebook's cell: the picture and the verdict as they are now, drawn anew while the training goes on.

    view = nanny.live_cell("nanny_logs")     # before the training, in the same cell or one above
    ...
    view.stop()                              # or let it end with the run

It only reads the file that the run writes, from a thread of its own, and rests ten times as long as a look takes.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from ..core.finding import NannyError
from ..core.threads import start_thread
from ..runs.card import card_svg
from ..runs.diagnose import diagnosis_lines_of
from ..runs.opening import open_job
from ..runs.summary import summarize
from ..show.notebook import cell
from ..show.tables import lines_text

REST = 10  # times as long as a look takes, so that the training hardly notices
WIDTH = 100


class LiveCell:
    """What `live_cell` returns: `stop` ends it, and it ends by itself with the run."""

    def __init__(self, db: str | None, run: int | None, seconds: float, lang: str, shown: Any) -> None:
        self._of, self._seconds, self._lang, self._shown = (db, run), seconds, lang, shown
        self._not_before = time.time() if run is None else 0.0  # the newest run may be one of yesterday
        self._over = threading.Event()
        self._thread = start_thread("nanny-live-cell", self._follow)

    def stop(self) -> None:
        """Shows the run as it is now, and no more."""
        self._over.set()
        self._thread.join()

    def wait(self, seconds: float | None = None) -> bool:
        """Until the run has ended; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _follow(self) -> None:
        last = False
        while not last:
            last = self._over.is_set()
            started = time.perf_counter()
            looked = self._look()
            if looked is not None:
                html, ended = looked
                self._shown.update({"text/html": html, "text/plain": "nanny: live view"}, raw=True)
                last = last or ended
            if not last:
                self._over.wait(max(self._seconds, REST * (time.perf_counter() - started)))

    def _look(self) -> tuple[str, bool] | None:
        """The cell's HTML and whether the run is over; None where there is no run yet."""
        try:
            with open_job(*self._of) as (sources, notes):
                if sources[0].run.started < self._not_before:
                    return None
                summary = summarize(sources, notes)
                words = lines_text(diagnosis_lines_of(summary, self._lang), WIDTH, colour=True)
                return cell(words, card_svg(summary, self._lang)), sources[0].run.status != "running"
        except NannyError:  # nothing is written yet
            return None


def live_cell(
    db: str | os.PathLike[str] | None = None, run: int | None = None, *, seconds: float = 2.0, lang: str = "en"
) -> LiveCell:
    """Shows a run in this cell while it goes on: `run` by number, else the next that begins in the store or folder `db`."""
    try:
        from IPython.display import HTML, display
    except ImportError:
        raise NannyError("live_cell draws into a notebook, and there is none here; in a terminal type: nanny tail") from None
    shown = display(HTML("<p>nanny: waiting for a run</p>"), display_id=True)
    if shown is None:
        raise NannyError("live_cell draws into a notebook, and there is none here; in a terminal type: nanny tail")
    return LiveCell(None if db is None else str(Path(db)), run, seconds, lang, shown)
