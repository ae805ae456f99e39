"""One training step, every operation beside its FP32 twin: `sanitize`, `examine`."""

from ..core.callable_room import make_callable

make_callable(__name__)
