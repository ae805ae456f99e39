"""From what was seen in a run to its root cause: `diagnose`, `nanny diagnose`."""

from ..core.callable_room import make_callable

make_callable(__name__)
