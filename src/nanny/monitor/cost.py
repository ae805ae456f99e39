"""The time that watching a run takes, beside the time of the run; `core/cost.py` has the words for it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter  # the one of now: programs replace it to freeze time
from typing import Any

from ..core.cost import SHORT_RUN_SECONDS


class CostClock:
    """`watched` and `examined` give the seconds spent on each so far; what is left of a run's time is the training's."""

    def __init__(self, watched: Callable[[], float], examined: Callable[[], float]) -> None:
        self._watched, self._examined = watched, examined
        self._began: float | None = None
        self._ended = 0.0
        self._marks: tuple[tuple[int, float, float] | None, ...] = (None, None)  # steps, with the seconds until then

    def begin_step(self, position: int, step: int) -> None:
        if self._began is None:
            self._began = perf_counter()
        if position > 1 and position & (position - 1) == 0:  # 2, 4, 8 ...: behind the last but one lies most of a run
            self._marks = (self._marks[-1], (step, *self._seconds()))

    def end_step(self) -> None:
        self._ended = perf_counter()

    def _seconds(self) -> tuple[float, float]:
        """Of watching, and of the training without it and without examinations."""
        watched = self._watched()
        return watched, max(perf_counter(), self._ended) - (self._began or 0.0) - watched - self._examined()

    @property
    def percent(self) -> float:
        if self._began is None:
            return 0.0
        watched, trained = self._seconds()
        return 100.0 * watched / trained if trained > 0 else 0.0

    def totals(self) -> dict[str, Any]:
        """For `cost_text`."""
        cost: dict[str, Any] = {"cost_percent": round(self.percent, 3), "examined_seconds": round(self._examined(), 3)}
        if self._began is None:
            return cost
        watched, trained = self._seconds()
        cost |= {"watched_seconds": round(watched, 3), "run_seconds": round((self._ended or perf_counter()) - self._began, 3)}
        if self._marks[0] is not None:
            step, watched_before, trained_before = self._marks[0]
            share = (watched - watched_before) / max(trained - trained_before, 1e-9)
            cost |= {"later_from": step, "later_percent": round(100 * share, 2)}
        return cost

    def examinations_text(self) -> str:
        """Their seconds; and their share, where it is more than the start of a run may take anyway."""
        examined, trained = self._examined(), self._seconds()[1]
        share = examined / trained if trained >= SHORT_RUN_SECONDS else 0.0
        return f"{examined:.1f} s" + (f", {100 * share:.0f} % more" if examined > 1.0 and share > 0.01 else "")
