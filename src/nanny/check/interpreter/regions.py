"""Autocast regions: device, dtype and whether enabled, from the call that opens one."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .values import NOTHING, Args, Kwargs, Value

AUTOCAST = {
    "torch.autocast": "",
    "torch.amp.autocast": "",
    "torch.amp.autocast_mode.autocast": "",
    "torch.cuda.amp.autocast": "cuda",
    "torch.cuda.amp.autocast_mode.autocast": "cuda",
    "torch.cpu.amp.autocast": "cpu",
    "torch.cpu.amp.autocast_mode.autocast": "cpu",
}
NO_GRAD = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.grad_mode.no_grad"}


@dataclass(frozen=True, slots=True)
class Region:
    device: str  # cuda, cpu, mps, ...; empty: not known
    dtype: str  # fp16, bf16, half (not known which), or what the code says
    enabled: bool | None  # None: decided at run time
    line: int = 0
    text: str = ""
    has_cache: bool = True
    node: ast.AST | None = None
    file: str = ""
    is_off_by_default: bool = False  # enabled= is a parameter whose default is False
    is_framework: bool = False  # accelerator.autocast() and the like: the framework owns scaler and dtype

    @property
    def is_on(self) -> bool:
        return self.enabled is not False and self.dtype in ("fp16", "bf16", "half")

    def label_in(self, file: str) -> str:
        """How a message in `file` names the region: `autocast on cuda in fp16 at line 41`."""
        at = f"line {self.line}" if self.file in ("", file) else f"{self.file}:{self.line}"
        where = f" on {self.device}" if self.device else ""
        kind = f" in {self.dtype}" if self.dtype in ("fp16", "bf16") else ""
        return f"autocast{where}{kind} at {at}"


CHOSEN_LATER = "chosen when the program runs"  # a framework's precision
_PRECISIONS = {"fp16": "fp16", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}


def framework_dtype(precision: object) -> str:
    """`fp16` or `bf16` for the name that Accelerate, Fabric or Lightning gives to mixed precision, else nothing."""
    return _PRECISIONS.get(str(precision), "") if isinstance(precision, (str, int)) and precision is not True else ""


def default_dtype(device: str) -> str:
    if device == "":
        return "half"
    return "bf16" if device == "cpu" else "fp16"


def region_of(name: str, args: Args, kwargs: Kwargs, node: ast.AST, file: str, device: str | None, dtype: str | None) -> Region:
    """The region that a call of one of AUTOCAST's names opens; `device` and `dtype` are what the user told us."""
    fixed = AUTOCAST[name]
    positional = ["enabled", "dtype", "cache_enabled"] if fixed else ["device_type", "dtype", "enabled", "cache_enabled"]
    given = {**dict(zip(positional, args)), **kwargs}
    where = fixed or _device(given.get("device_type")) or (device or "")
    asked = given.get("dtype")
    if asked is None or asked.is_none:
        kind = dtype or default_dtype(where)
    elif asked.kind == "dtype" and asked.const:
        kind = asked.const
    else:
        kind = dtype or "half"
    enabled = given.get("enabled")
    on: bool | None = True if enabled is None else None
    if enabled is not None and enabled.const is not NOTHING:
        on = bool(enabled.const)
    cache = given.get("cache_enabled")
    has_cache = not (cache is not None and cache.const is False)
    off = enabled is not None and "default_off" in enabled.tags
    return Region(where, kind, on, getattr(node, "lineno", 0), name, has_cache, node, file, off)


def _device(value: Value | None) -> str:
    if value is None or not isinstance(value.const, str) or not value.sure:  # an option, as it is if nobody asks for another
        return ""
    return value.const.partition(":")[0]
