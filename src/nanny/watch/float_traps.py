"""Work of ours in a process that lets the float unit raise SIGFPE (`feenableexcept`): the first NaN compared would end it.

with Untrapped():       # where no trap is set, one short call
    ...
"""

from __future__ import annotations

import ctypes
from typing import Any

_LARGEST_STATE = 512  # bytes; a fenv_t has 8 to 32


def _of_glibc() -> tuple[Any, Any, Any]:
    try:
        libm = ctypes.PyDLL("libm.so.6")
        return libm.fegetexcept, libm.feholdexcept, libm.fesetenv
    except Exception:  # noqa: BLE001 - elsewhere nobody sets traps in this way; or somebody forbids to ask, by whatever error
        return (lambda: 0), None, None


traps_are_set, _hold, _restore = _of_glibc()  # the first: more than 0 if any is


class Untrapped:
    """For this thread, until it is left; then traps and flags are as they were."""

    __slots__ = ("_state",)

    def __enter__(self) -> None:
        self._state = ctypes.create_string_buffer(_LARGEST_STATE) if traps_are_set() > 0 else None
        if self._state is not None:
            _hold(self._state)

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            _restore(self._state)
