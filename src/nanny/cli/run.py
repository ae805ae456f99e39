"""`nanny run`: the monitor's command; when all is over, the diagnosis in full and the path of its picture are the last words."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.command_line import terminal_language
from ..core.finding import NannyError
from ..core.terminal import tell
from ..show.translation import translate, with_label

if TYPE_CHECKING:
    from ..runs.source import Source

NO_STEP = "no training step was seen: nothing in this process called a model and then backward"


def main(argv: Sequence[str] | None = None) -> int:
    from ..monitor.command import main as start
    from ..monitor.command import parse

    lang = terminal_language(parse(sys.argv[1:] if argv is None else argv).lang)
    atexit.register(_tell_end, os.getpid(), lang)  # before the monitor registers its own end: last in, first out
    return start(argv)


def _tell_end(pid: int, lang: str) -> None:
    """Of this process alone, and whatever fails here is no matter of the script's."""
    from ..monitor.command import recorded_at, saw_nothing

    place = recorded_at() if os.getpid() == pid else None
    if place is None:
        if os.getpid() == pid and saw_nothing():
            tell(f"nanny: {translate(NO_STEP, lang)}")
        return
    try:
        tell_end(*place, lang)
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001 - the script is over, its exit code stands
        tell(f"nanny: the diagnosis cannot be shown here ({type(error).__name__}: {error}); type: nanny diagnose --db {place[0]}")


def tell_end(store: Path, run: int, lang: str = "en") -> None:
    """A run that is healthy gets no picture, and has nothing to tell but what comes towards it. Of a job the last rank to end
    tells: it alone knows all."""
    from ..runs.card import card_svg
    from ..runs.diagnose import diagnosis_lines_of
    from ..runs.opening import open_job
    from ..runs.summary import summarize
    from ..runs.text.summary import ahead_lines
    from ..show.tables import Line, lines_text
    from ..show.term import wants_colour, width_of

    ranks = _ranks_of(store, run)
    alone = len(ranks) == 1
    with open_job(str(store if alone else store.parent), ranks[0][1]) as (sources, notes):
        picture = store.parent / f"run-{ranks[0][1]}.svg"
        if not alone and not _is_last(sources, picture):
            return
        summary = summarize(sources, notes)
        if summary.verdict.healthy is not False:
            picture.unlink(missing_ok=True)
            if ahead := ahead_lines(summary, lang, only_if_near=True):
                tell(lines_text(ahead, width_of(sys.stderr)))
            return
        whole = [Line(translate(f"all {len(sources)} ranks: {summary.verdict.text}", lang), indent=4)] if len(sources) > 1 else []
        lines = [Line(""), *whole, *diagnosis_lines_of(summary, lang)]
        picture.write_text(card_svg(summary, lang), encoding="utf-8")
    lines.append(Line(f"   {with_label(translate('picture', lang), str(picture), lang)}", "quiet", whole=True))
    tell(lines_text(lines, width_of(sys.stderr), wants_colour(sys.stderr)), colour=True)


def _ranks_of(store: Path, run: int) -> list[tuple[Path, int]]:
    """Store and run of each rank of this job in the folder; another rank's number may be another one."""
    from ..runs.opening import open_job
    from ..web.runlist import places_of_job

    with suppress(NannyError), open_job(str(store.parent), None) as (sources, _):
        newest = [(source.path, source.run.id) for source in sources]
        if (store, run) in newest:
            return newest
    return places_of_job(store, run)


def _is_last(sources: Sequence[Source], picture: Path) -> bool:
    """The end of a rank is on record before it asks. So the last one finds all of them ended; of several that do, the first to
    begin the picture tells."""
    if any(source.run.status == "running" for source in sources):
        return False
    with suppress(FileNotFoundError):
        if picture.stat().st_mtime < min(source.run.started for source in sources):
            picture.unlink()  # of a run whose record is gone
    try:
        picture.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
