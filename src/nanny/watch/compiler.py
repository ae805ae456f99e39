"""Where nothing of ours may be on: what torch's compiler takes for a part of the program, and some backward passes.

    compiler.register(part)    # part.go_aside(why) and part.come_back(), until compiler.unregister(part)

A dispatch mode, or a hook on all modules, that is on while a compiled function is called changes what is compiled (frames,
graphs, guards, warnings). So whoever has one on steps aside at the doors through which a program goes there: functions of torch
that are replaced as long as there is a part, and put back after. One that a later torch no longer has is not replaced;
tests/watch/test_compiler.py fails then.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from sys import _getframe  # that of now: programs replace it
from threading import get_ident
from types import CodeType
from typing import Any, Protocol

import torch
from torch.nn.modules import module as modules

COMPILED = (
    "a compiled function was called in it, and torch's compiler may not see who watches "
    "(torch.compiler.set_stance('force_eager') runs it as it was written)"
)


_frames = torch._C._dynamo.eval_frame
can_skip_frames = hasattr(_frames, "set_code_exec_strategy")  # private; tests/watch/test_op_stream.py fails if it goes


def skip_frames(code: CodeType, and_what_it_calls: bool = False) -> None:
    """Called from a compiled program: torch's compiler must leave this function of ours alone, and what it calls."""
    if can_skip_frames:
        skip, default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip if and_what_it_calls else default))


class Part(Protocol):
    def go_aside(self, why: str) -> None: ...
    def come_back(self) -> None: ...
    def before_backward(self) -> str:
        """Why nothing may be on in the backward pass that begins; empty: it may."""

    def step_out(self) -> bool:
        """For one call that cannot bear a mode: whether there is one to be taken away, until `step_in`."""

    def step_in(self) -> None: ...


class _Callers(torch.nn.Module):
    def forward(self) -> tuple[int, int]:
        """The lines of torch from which it is called."""
        frame: Any = _getframe(1)
        return frame.f_lineno, frame.f_back.f_lineno


def _lines_with_a_hook() -> dict[int, int]:
    if any(getattr(modules, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward")):
        return {}
    callers = _Callers()
    alone = callers()
    callers.register_forward_hook(lambda *call: None)
    return dict(zip(alone, callers()))


_LINES = _lines_with_a_hook()
_LINES |= {line: other for other, line in _LINES.items()}


def _share_warnings() -> None:
    """Python tells a warning once for each line; of those in the name of who calls forward, the line depends on hooks."""
    told: dict[Any, Any] = getattr(modules, "__warningregistry__", {})
    for key in [key for key in told if type(key) is tuple and len(key) == 3 and key[2] in _LINES]:
        told.setdefault((*key[:2], _LINES[key[2]]), told[key])


class ModuleHooks:
    """Hooks on all modules (or on anything else that the compiler looks at): each entry registers one and gives its handle."""

    def __init__(self, *register: Callable[[], Any]) -> None:
        self._register = register
        self._handles: list[Any] = []

    def open(self) -> None:
        try:
            register(self)
            self.come_back()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        try:
            unregister(self)
        finally:
            self.go_aside()

    def go_aside(self, why: str = "") -> None:
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            getattr(modules, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)  # torch forgets it
        with suppress(Exception):
            _share_warnings()

    def come_back(self) -> None:
        if not self._handles:
            for register in self._register:
                self._handles.append(register())
            _share_warnings()

    def before_backward(self) -> str:
        return ""

    def step_out(self) -> bool:
        return False

    def step_in(self) -> None:
        pass

    def __bool__(self) -> bool:
        return bool(self._handles)


def foreign_module_hooks() -> bool:
    """Does the program have hooks of its own on all modules?"""
    lists = (f"_global_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre"))
    ours = {handle.id for part in _parts if isinstance(part, ModuleHooks) for handle in part._handles}
    return any(not getattr(modules, name, {}).keys() <= ours for name in lists)


class _Door:
    """A function of torch, replaced while open."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self._original: Any = None
        self._wrapped: Any = None
        self._inherits = False

    def open(self) -> None:
        self._inherits = isinstance(self._owner, type) and self._name not in vars(self._owner)
        self._original = getattr(self._owner, self._name, None)
        if self._original is not None:
            self._wrapped = functools.wraps(self._original)(self._make(self._original))
            setattr(self._owner, self._name, self._wrapped)

    def close(self) -> None:
        if self._original is not None and getattr(self._owner, self._name) is self._wrapped:  # not if others have wrapped ours
            if self._inherits:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)


_parts: list[Part] = []
_watchers: list[CallWatcher] = []
_inside: set[tuple[int, int]] = set()  # compiled functions that run now: thread, and the frame of torch's wrapper of it
_entries = [0]
_lock = threading.RLock()


def register(part: Part) -> None:
    """Idempotent."""
    with _lock:
        if any(p is part for p in _parts):
            return
        if not _parts:
            _open_compiler_doors()
            for door in () if _inside else _OTHER_DOORS:
                door.open()
        _parts.append(part)


def unregister(part: Part) -> None:
    """Idempotent."""
    with _lock:
        at = next((i for i, p in enumerate(_parts) if p is part), None)
        if at is None:
            return
        del _parts[at]
        if not _parts:
            for door in () if _inside else _OTHER_DOORS:
                door.close()
            _close_compiler_doors()


class CallWatcher(Protocol):
    """Told of compiled functions that are not called by another: before each call, and after it."""

    def before_call(self, function: Any) -> None: ...
    def after_call(self) -> None: ...


def watch_calls(watcher: CallWatcher) -> None:
    """Idempotent."""
    with _lock:
        if all(one is not watcher for one in _watchers):
            _open_compiler_doors()
            _watchers.append(watcher)


def leave_calls(watcher: CallWatcher) -> None:
    """Idempotent."""
    with _lock:
        _watchers[:] = [one for one in _watchers if one is not watcher]
        _close_compiler_doors()


def _open_compiler_doors() -> None:
    if not _parts and not _watchers:
        _inside.clear()
        for door in _COMPILER_DOORS:
            door.open()


def _close_compiler_doors() -> None:
    if not _parts and not _watchers:
        for door in _COMPILER_DOORS:
            door.close()


def compiled_calls() -> int:
    """How many calls of compiled functions have been met, while there was a part or a watcher."""
    return _entries[0]


def is_inside() -> bool:
    """Does this thread run a compiled function?"""
    return any(thread == get_ident() for thread, _ in _inside)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled functions run as they were written, and nobody steps aside for them. What is compiled stays as it is."""
    with _stance("force_eager"):
        yield


_stance: Any = getattr(torch.compiler, "set_stance", None)  # torch 2.6 and later


def can_uncompile() -> bool:
    return _stance is not None and not torch.compiler.is_compiling()


def _runs_as_written() -> bool:
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", "") == "force_eager"


def _go_aside(why: str) -> None:
    for part in tuple(_parts):
        with suppress(Exception):
            part.go_aside(why)


def _tell_watchers(name: str, *about: Any) -> None:
    for watcher in tuple(_watchers):
        with suppress(Exception):
            getattr(watcher, name)(*about)


def _come_back() -> None:
    if not _inside:
        for part in tuple(_parts):
            with suppress(Exception):
                part.come_back()


def _wrap_depth(original: Any) -> Any:
    def get_dynamic_layer_stack_depth() -> Any:
        if _runs_as_written():
            return original()
        if _watchers and not is_inside():
            _tell_watchers("before_call", _getframe(1).f_locals.get("fn"))
        with _lock:
            if not _inside:
                for door in _OTHER_DOORS if _parts else ():
                    door.close()
            _inside.add((get_ident(), id(_getframe(1))))
            _entries[0] += 1
            _go_aside(COMPILED)
        return original()

    return get_dynamic_layer_stack_depth


def _wrap_undo(original: Any) -> Any:
    def pop_dynamic_layer_stack_and_undo_to_depth(depth: Any) -> Any:
        result = original(depth)
        with _lock:
            this = (get_ident(), id(_getframe(1)))
            if this in _inside:
                _inside.remove(this)
                if not _inside and _parts:
                    for door in _OTHER_DOORS:
                        door.open()
                    _come_back()
        if _watchers and not is_inside():
            _tell_watchers("after_call")
        return result

    return pop_dynamic_layer_stack_and_undo_to_depth


def _asked_for_hooks(original: Any) -> Any:
    def _has_any_global_hook() -> Any:
        _go_aside("")
        try:
            return bool(original())  # it gives the dictionary itself, into which ours come back
        finally:
            _come_back()

    return _has_any_global_hook


def _backward(original: Any) -> Any:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        why = ""
        with suppress(Exception):
            why = next((why for part in tuple(_parts) if (why := part.before_backward())), "")
        if not why:
            return original(*args, **kwargs)
        _go_aside(why)
        try:
            return original(*args, **kwargs)
        finally:
            _come_back()

    return _engine_run_backward


def _wrap_export(original: Any) -> Any:
    def export(*args: Any, **kwargs: Any) -> Any:
        _go_aside(COMPILED)
        try:
            return original(*args, **kwargs)
        finally:
            _come_back()

    return export


def _new_tensor(original: Any) -> Any:
    """`Subclass(2, 3)` and torch's CausalBias: torch cannot make a subclass of what has been through a dispatch mode."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Tensor or not torch._C._len_torch_dispatch_stack():
            return original(cls, *args, **kwargs)
        stepped_out = [part for part in tuple(_parts) if part.step_out()]
        try:
            return original(cls, *args, **kwargs)
        finally:
            for part in reversed(stepped_out):
                part.step_in()

    return __new__


_COMPILER_DOORS = (  # torch's wrapper of a compiled function goes in through the first and out through the second; nobody else
    _Door(torch._C._functorch, "get_dynamic_layer_stack_depth", _wrap_depth),
    _Door(torch._C._functorch, "pop_dynamic_layer_stack_and_undo_to_depth", _wrap_undo),
)
_OTHER_DOORS = (  # closed inside a compiled function: its frames must not meet them
    _Door(modules, "_has_any_global_hook", _asked_for_hooks),  # a compiled module asks, and warns
    _Door(torch.autograd, "_engine_run_backward", _backward),
    _Door(torch.Tensor, "__new__", _new_tensor),
    _Door(torch.export, "export", _wrap_export),
)
