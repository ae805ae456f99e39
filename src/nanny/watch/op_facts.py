"""What is known of an operation before it runs: its name, whether it computes anything, whether it may be run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from ..core.finding import NannyError
from ..core.ops import ADD_UP, CONSTANTS, JUMP, MATMULS, MEMORY, MOVES
from .twins import LOW

_SEEDED = torch.Tag.nondeterministic_seeded
# Run again in any program without doing anything else than computing. A custom operation may communicate or draw numbers.
SAFE_NAMESPACES = frozenset({"aten", "prims", "torchvision", "quantized"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"})


def bare_name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def long_name(func: Any) -> str:
    """`torch.ops.aten.addmm`, as the log has it."""
    return f"torch.ops.{func.namespace}.{func.overloadpacket.__name__}"


@cache
def is_view_op(func: Any) -> bool:
    """It only gives another look at memory that an argument holds."""
    returns = func._schema.returns
    if func._schema.name in ("aten::_unsafe_view", "aten::detach"):  # the schema of the first does not say so
        return True
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def moves_values(func: Any) -> bool:
    return bare_name(func) in MOVES


def adds_up_wide(func: Any) -> bool:
    """Kernels of every device add up matrix products of 16-bit numbers in FP32."""
    return bare_name(func) in MATMULS


def device_roundoff(func: Any, device: torch.device, dtype: torch.dtype) -> float:
    """TF32, where the program allows it: FP32 products on CUDA keep 11 bits. 0: the type's own."""
    if device.type != "cuda" or dtype != torch.float32:
        return 0.0
    name = bare_name(func)
    if name.startswith(("convolution", "cudnn", "_cudnn")):
        return 2.0**-11 if torch.backends.cudnn.allow_tf32 else 0.0
    return 2.0**-11 if name in MATMULS and torch.backends.cuda.matmul.allow_tf32 else 0.0


def is_sum(func: Any) -> bool:
    return bare_name(func) in ADD_UP


def is_collective(func: Any) -> bool:
    return func.namespace in _COLLECTIVES


@cache
def why_left_out(func: Any) -> str:
    """Why an operation cannot be compared, whatever its arguments; empty if it can."""
    if is_collective(func):
        return "collective"
    if func.namespace == "profiler":
        return "computes nothing"
    if func.namespace not in SAFE_NAMESPACES:
        return f"custom operation of {func.namespace!r} (name it in target_list to run it again)"
    name = bare_name(func)
    if is_view_op(func):
        return "view"
    if name in MEMORY or name.startswith(("sym_", "_assert")):
        return "computes nothing"
    if name in JUMP or any(a.name == "rounding_mode" for a in func._schema.arguments):
        return "jumps at rounding"
    return ""


def is_random(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tagged operations with a dropout of 0 (attention) draw nothing."""
    if _SEEDED not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value != 0)
    return True


def puts_constants(func: Any) -> bool:
    return bare_name(func) in CONSTANTS


def puts_nonfinite(func: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    """Writes NaN, an infinity or a number near the end of the type on purpose: a mark or a mask."""
    if not puts_constants(func):
        return False
    end = torch.finfo(dtype).max / 2
    return any(isinstance(v, (int, float)) and (v != v or abs(v) >= end) for v in (*args, *kwargs.values()))


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def is_low(dtype: torch.dtype) -> bool:
    return dtype in LOW


def spelled(pattern: Any) -> str:
    """A name, glob or operation object as a pattern on long names: `addmm`, `aten::addmm`, `torch.ops.aten.addmm.default`."""
    if isinstance(pattern, torch._ops.OpOverload):
        return long_name(pattern)
    if isinstance(pattern, torch._ops.OpOverloadPacket):
        return "torch.ops." + str(pattern._qualified_op_name).replace("::", ".")
    if not isinstance(pattern, str):
        raise NannyError(f"{pattern!r} is no operation; write it as 'torch.ops.aten.addmm', 'addmm' or a glob such as '*mm'")
    text = pattern.strip().replace("::", ".").removeprefix("torch.ops.")
    parts = text.split(".")
    if len(parts) > 2 and not set(text) & set("*?["):
        parts = parts[:2]  # without its overload
    text = ".".join(parts)
    return "torch.ops." + (text if len(parts) > 1 else f"*.{text}")


def patterns(given: str | Iterable[Any] | None, what: str) -> tuple[str, ...]:
    if given is None:
        return ()
    listed = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    out = tuple(spelled(item) for item in listed)
    for name, item in zip(out, listed):
        bare = name.removeprefix("torch.ops.").removeprefix("aten.").removeprefix("*.")
        if isinstance(item, str) and not set(bare) & set("*?[.") and not hasattr(torch.ops.aten, bare):
            raise NannyError(f"{what}: torch has no operation {item!r}; write its aten name, such as 'torch.ops.aten.addmm'")
    return out


class Selection:
    """Which operations are looked at: all, or those of a list, less those of a white list; by operation and by module."""

    def __init__(self, targets: tuple[str, ...] = (), white: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        self._targets, self._white, self.modules = targets, white, modules
        self._wanted: dict[Any, bool] = {}

    def wants(self, func: Any) -> bool:
        wanted = self._wanted.get(func)
        if wanted is None:
            name = long_name(func)
            wanted = (not self._targets or self.names(func)) and not _any(name, self._white)
            self._wanted[func] = wanted
        return wanted

    def names(self, func: Any) -> bool:
        """Asked for by name, and not only because everything is."""
        return _any(long_name(func), self._targets)

    def is_white(self, func: Any) -> bool:
        return _any(long_name(func), self._white)

    def wants_site(self, site: str) -> bool:
        return not self.modules or any(fnmatchcase(site, p) for p in self.modules)


def _any(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
