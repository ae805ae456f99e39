"""What a tool could leave behind: replaced functions, hooks, modes, threads, files, open descriptors."""

from __future__ import annotations

import builtins
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import torch
import torch.nn.utils.clip_grad
import torch.nn.utils.parametrize
import torch.utils.checkpoint
import torch.utils.data
from torch import nn
from torch.utils import _python_dispatch

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch._C.TensorBase": torch._C.TensorBase,
    "torch._C": torch._C,
    "torch.amp": torch.amp,
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "torch.amp.autocast": torch.amp.autocast,
    "torch.amp.grad_scaler": torch.amp.grad_scaler,
    "torch.autograd": torch.autograd,
    "torch.autograd.Function": torch.autograd.Function,
    "torch.autograd.graph": torch.autograd.graph,
    "torch.cuda.amp": torch.cuda.amp,
    "torch.func": torch.func,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.jit": torch.jit,
    "torch.nn": nn,
    "torch.nn.functional": nn.functional,
    "torch.nn.init": nn.init,
    "torch.nn.modules.module": nn.modules.module,
    "torch.nn.Module": nn.Module,
    "torch.nn.Parameter": nn.Parameter,
    "torch.nn.utils": nn.utils,
    "torch.nn.utils.clip_grad": nn.utils.clip_grad,
    "torch.nn.utils.parametrize": nn.utils.parametrize,
    "torch.optim": torch.optim,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.lr_scheduler": torch.optim.lr_scheduler,
    "torch.optim.swa_utils": torch.optim.swa_utils,
    "torch.overrides": torch.overrides,
    "torch.random": torch.random,
    "torch.utils._python_dispatch": _python_dispatch,
    "torch.utils.checkpoint": torch.utils.checkpoint,
    "torch.utils.data.DataLoader": torch.utils.data.DataLoader,
    "builtins": builtins,
    "warnings": warnings,
    "threading": threading,
    "threading.Thread": threading.Thread,
    "os": os,
    "sys": sys,
    **{f"torch.optim.{name}": kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)},
    **{f"torch.nn.{name}": kind for name, kind in vars(nn).items() if isinstance(kind, type)},
}
_NOT_OURS = {"sys.modules", "sys.path_importer_cache", "sys.last_exc", "sys.last_type", "sys.last_value", "sys.last_traceback"}


def functions() -> dict[str, Any]:
    """Every function and class of torch that a tool may be tempted to replace, by name."""
    found = {
        f"{space}.{name}": value
        for space, thing in _NAMESPACES.items()
        for name, value in list(vars(thing).items())
        if callable(value) or isinstance(value, (property, classmethod, staticmethod))
    }
    return {name: value for name, value in found.items() if name not in _NOT_OURS}


def replaced(before: dict[str, Any]) -> list[str]:
    now = functions()
    changed = [f"{name} replaced" for name, value in before.items() if name in now and now[name] is not value]
    return changed + [f"{name} gone" for name in before if name not in now]


def surroundings() -> dict[str, Any]:
    """What is the same for a process before and after a well-behaved tool."""
    hooks = {
        name: len(value)
        for module in (nn.modules.module, sys.modules["torch.optim.optimizer"])
        for name, value in vars(module).items()
        if name.startswith("_global") and hasattr(value, "__len__") and len(value)
    }
    return {
        "global hooks": hooks,
        "dispatch modes": _python_dispatch._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved tensor hooks": str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), str(torch.get_autocast_dtype("cpu"))],
        "anomaly mode": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "matmul precision": torch.get_float32_matmul_precision(),
        "flush denormal": float(torch.tensor([1e-39]) * 1.0) == 0.0,
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)],
        "excepthooks": [sys.excepthook is sys.__excepthook__, str(sys.gettrace()), str(sys.getprofile())],
        "log handlers": [len(logging.getLogger().handlers), logging.getLogger().level],
        "warning filters": len(warnings.filters),
        "directory": os.getcwd(),
        "environment": sorted(os.environ),
        "threads": _threads(),
        "children": _children(),
        "descriptors": _descriptors(),
    }


_STAYING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _threads() -> list[str]:
    """Names of running threads; one that was told to end has a second to do so, once."""
    for _ in range(20):
        running = [t for t in threading.enumerate() if t is not threading.main_thread()]
        if all(t in _STAYING for t in running):
            break
        time.sleep(0.05)
    else:
        _STAYING.update(running)
    return sorted(t.name for t in running)


def _children() -> int:
    path = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
    return len(path.read_text().split()) if path.exists() else 0


def _descriptors() -> list[str]:
    folder = pathlib.Path("/proc/self/fd")
    if not folder.exists():
        return []
    targets = []
    for entry in folder.iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("/") and not target.startswith(("/proc", "/dev")):
            targets.append(os.path.basename(target))
    return sorted(targets)


def marks(models: list[nn.Module], optimizers: list[Any]) -> dict[str, Any]:
    """Hooks, attributes and classes of a program's own objects."""
    found: dict[str, Any] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules(remove_duplicate=False):
            found[f"{number}.{name}"] = _marks_of(module)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found[f"{number}.{name} (parameter)"] = _marks_of(parameter)
    for number, optimizer in enumerate(optimizers):
        found[f"optimizer {number}"] = _marks_of(optimizer)
    return found


def _marks_of(thing: Any) -> list[str]:
    marks = [type(thing).__qualname__]
    for name, value in sorted(vars(thing).items()):
        if "hook" in name and hasattr(value, "__len__"):
            marks += [f"{name}: {len(value)}"] if len(value) else []
        elif name not in ("grad", "_dynamo_dynamic_indices", "_dynamo_static_input_type"):
            marks.append(name)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if isinstance(thing, torch.Tensor) and getattr(thing, name, None):
            marks.append(f"{name}: {len(getattr(thing, name))}")
    return marks


def files_below(folder: str) -> list[str]:
    root = pathlib.Path(folder)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
