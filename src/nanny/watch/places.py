"""Where the operation that is now being dispatched belongs: module by its real name, phase, and the user's source line.

    with Places(model) as places, watching(consumer):   # in consumer.before: places.here()
        loss = model(x).sum()
        loss.backward()

In forward it is the innermost open module call. In backward, autograd knows the node that runs, and a node carries the
sequence number it got when the forward operation ran: which module was open at which number gives the place, whatever the
module returns, whether its input has a gradient or not, in place or not, checkpointed or not.
"""

from __future__ import annotations

import linecache
import os
import re
import stat
import sysconfig
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from sys import _getframe  # that of now: programs replace it
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer

from ..core.examination import Place
from ..core.finding import warn
from ..core.numbers import plain_name
from . import events
from .compiler import ModuleHooks
from .names import parts_of, unwrap
from .op_stream import is_programs_own, leave_program, return_to_program

# Private names of torch, each in use by torch itself; tests/watch/test_places.py fails if one goes.
_counter = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node

_NO_TASK = -1
_WITHOUT_BUILTINS = "the function of a module has no __builtins__, and torch cannot show what is called from there"
_MOST_KEPT = 1 << 17  # operations and module calls that are remembered for backward: some hundred steps of a common model
_LARGEST_SOURCE = 16 << 20
_LONGEST_SOURCE = 300  # characters of a line that is shown
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NANNY = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_NANNY, "cli", "demo.py")  # trains as a user would
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SCRIPTS = sysconfig.get_paths()["scripts"] + os.sep

Models = nn.Module | Sequence[tuple[nn.Module, str]] | None


class Spot(NamedTuple):
    """A place that costs next to nothing to take and to keep; the line is worked out only when it is asked for."""

    place: Place
    classes: str  # of the open modules, outermost first: `Gpt/Block/Linear`
    code: CodeType | None = None
    instruction: int = 0

    def resolve(self) -> Place:
        if self.code is None:
            return self.place
        line = _line_of(self.code, self.instruction)
        source = _source_of(self.code, self.instruction, line)
        return replace(self.place, file=near(self.code.co_filename), line=line, source=source)


def near(path: str) -> str:
    """As one would type it here."""
    try:
        return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    except OSError:  # the folder is gone
        return path


class _Scope(NamedTuple):
    """A module call as the operations in it see it."""

    forward: Place
    backward: Place
    classes: str


class _Named(NamedTuple):
    """Known by identity, and only as long as it lives: another object may get the same address."""

    thing: Callable[[], Any]
    name: str


_OUTSIDE = _Scope(Place(phase="loop"), Place(phase="backward"), "")


def running_derivative() -> str:
    """The forward operation whose derivative autograd computes now: `acos` in `AcosBackward0`; "" outside, or of a custom one."""
    return derivative_of(_node())


def derivative_of(node: Any) -> str:
    """The forward operation that a node of the graph belongs to."""
    found = re.fullmatch(r"([A-Z]\w*?)Backward\d+", node.name()) if node is not None else None
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found[1]).lower() if found else ""


class Places:
    """Names places while open. Removes every hook on close; may be opened again, and beside others.

    `models=None`: models get their names when they are first called, the first without a prefix, further ones by class.
    """

    def __init__(self, models: Models = None, on_trouble: Callable[[BaseException], None] | None = None) -> None:
        self._given: list[tuple[nn.Module, str]] | None = (
            None if models is None else [(models, "")] if isinstance(models, nn.Module) else list(models)
        )
        self._is_open = False
        self._on_trouble = on_trouble or _warn_once
        self._hooks: ModuleHooks | None = None
        self._updates: _AroundSteps | None = None
        self._start()

    def _guard(self, work: Callable[..., None]) -> Callable[..., None]:
        """A hook of ours, whose failure is not the program's: from then on operations are at no place."""

        def hook(*given: Any) -> None:
            if not self._is_open:  # a hook removed while torch goes through them is still called once
                return
            try:
                return_to_program()
                work(*given)
                if self._open and _is_without_builtins(self._open[-1][0]):
                    leave_program(_WITHOUT_BUILTINS)
            except BaseException as error:
                if is_programs_own(error):
                    raise
                self.close()
                self._on_trouble(error)

        return hook

    def _start(self) -> None:
        self._names: dict[int, _Named] = {}
        self._parameters: dict[int, _Named] = {}
        self._buffers: dict[int, _Named] = {}
        self._scopes: dict[tuple[str, str, str], _Scope] = {}
        self._open: list[tuple[nn.Module, _Scope, int]] = []
        self._updating: Spot | None = None  # all operations of an optimizer step are at one place
        self._has_closure = False
        self._since: list[int] = []  # from this sequence number on, nodes belong to ...
        self._scope_since: list[_Scope] = []
        self._code_of_node: dict[int, tuple[CodeType, int]] = {}
        self._seen = 0

    def open(self) -> Places:
        if not self._is_open:
            self._is_open = True
            try:
                self._open_hooks()
            except BaseException:
                self.close()
                raise
        return self

    def _open_hooks(self) -> None:
        self._start()
        for model, prefix in self._given or ():
            self._name(model, prefix)
        self._seen = _counter()
        guard = self._guard
        self._hooks = ModuleHooks(
            lambda: register_module_forward_pre_hook(guard(self._enter)),
            lambda: register_module_forward_hook(guard(self._leave), always_call=True),
        )
        self._hooks.open()
        self._updates = _AroundSteps(guard(self._begin_update), guard(self._end_update))
        events.listen(self._updates)

    def close(self) -> None:
        self._is_open = False
        if self._updates is not None:
            events.leave(self._updates)
            self._updates = None
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
        self._open.clear()

    __enter__ = open

    def __exit__(self, *_: object) -> None:
        self.close()

    def here(self) -> Place:
        """Of the operation now being dispatched, without its line."""
        return self.spot().place

    def spot(self) -> Spot:
        task = _task()
        if task != _NO_TASK and not (self._open and self._open[-1][2] == task):  # else: recomputed inside backward
            return self._spot_in_backward()
        if self._updating is not None and not self._open and not (self._has_closure and torch.is_grad_enabled()):
            return self._updating
        scope = self._open[-1][1] if self._open else _OUTSIDE
        where = _user_frame(_getframe(1))
        self._note(scope, where)
        return Spot(scope.forward, scope.classes, *(where or ()))

    @property
    def in_closure_step(self) -> bool:
        """An optimizer steps that calls forward and backward itself."""
        return self._updating is not None and self._has_closure

    def storages(self) -> dict[int, str]:
        """Names of the parameters and buffers that are known, by the address of their storage now."""
        named = [*self._buffers.values(), *self._parameters.values()]
        return {t.untyped_storage()._cdata: n.name for n in named if (t := n.thing()) is not None and t.layout == torch.strided}

    def sites(self) -> list[str]:
        """Every name that an operation may be placed at, in the order of the models."""
        return [named.name for known in (self._names, self._parameters) for named in known.values() if named.name]

    def parameter_names(self) -> frozenset[str]:
        return frozenset(named.name for named in self._parameters.values())

    def _spot_in_backward(self) -> Spot:
        node: Any = _node()
        if node is None:
            return Spot(_OUTSIDE.backward, "")
        number = node._sequence_nr()
        if number >= 1 << 63:  # AccumulateGrad has no forward operation; it has a parameter
            return Spot(self._place_of_parameter(node.variable), "")
        at = bisect_right(self._since, number) - 1
        scope = self._scope_since[at] if at >= 0 else _OUTSIDE
        where = self._code_of_node.get(number)
        self._note(scope, where)
        return Spot(scope.backward, scope.classes, *(where or ()))

    def _note(self, scope: _Scope, where: tuple[CodeType, int] | None) -> None:
        """The node of this operation, if it has one, is the latest: remember where it was made."""
        now = _counter()
        if now <= self._seen:
            return
        self._seen = now
        self._mark(now - 1, scope)
        if where is not None:
            self._code_of_node[now - 1] = where
            if len(self._code_of_node) > _MOST_KEPT:
                for number in list(self._code_of_node)[: _MOST_KEPT // 2]:
                    del self._code_of_node[number]

    def _mark(self, number: int, scope: _Scope) -> None:
        if not self._since or number > self._since[-1]:
            if self._since and self._scope_since[-1] is scope:
                return
            self._since.append(number)
            self._scope_since.append(scope)
            if len(self._since) > _MOST_KEPT:
                del self._since[: _MOST_KEPT // 2], self._scope_since[: _MOST_KEPT // 2]
        elif number == self._since[-1]:
            self._scope_since[-1] = scope
        # smaller: another thread counts for itself (a CUDA device that recomputes); its nodes are not run by autograd

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled region has no module calls of its own
            return
        if not self._open:
            if not self._has_closure:  # a step that raised has not said that it ended
                self._updating = None
            if self._given is None and not _known(self._names, module) and _is_model(module):
                self._name(module, self._prefix_of(module))
        scope = self._scope_of(module)
        self._open.append((module, scope, _task()))
        self._mark(_counter(), scope)

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        at = next((i for i in range(len(self._open) - 1, -1, -1) if self._open[i][0] is module), None)
        if at is None:
            return
        del self._open[at:]
        self._mark(_counter(), self._open[-1][1] if self._open else _OUTSIDE)

    def _begin_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        where = _user_frame(_getframe(1))
        kind = type(optimizer).__name__
        self._updating = Spot(Place(module=kind, phase="optimizer"), kind, *(where or ()))
        self._has_closure = has_closure

    def _end_update(self, *_: Any) -> None:
        self._updating = None
        self._has_closure = False

    def _place_of_parameter(self, parameter: Any) -> Place:
        if not _known(self._parameters, parameter):
            return _OUTSIDE.backward
        return Place(self._parameters[id(parameter)].name, "Parameter", "backward")

    def _scope_of(self, module: nn.Module) -> _Scope:
        outer = self._open[-1][1] if self._open else _OUTSIDE
        site = self._names[id(module)].name if _known(self._names, module) else outer.forward.site
        kind = type(module).__name__
        key = (outer.classes, site, kind)
        scope = self._scopes.get(key)
        if scope is None:
            classes = f"{outer.classes}/{kind}" if outer.classes else kind
            scope = _Scope(Place(site, kind, "forward"), Place(site, kind, "backward"), classes)
            if len(self._scopes) < _MOST_KEPT:
                self._scopes[key] = scope
        return scope

    def _prefix_of(self, model: nn.Module) -> str:
        """The first model has none, nor one that contains all that was called before it; others their class."""
        inner = unwrap(model)
        met = {key for key, named in self._names.items() if named.thing() is not None}
        return "" if met <= {id(m) for m in inner.modules()} else f"{type(inner).__name__}."

    def _name(self, model: nn.Module, prefix: str) -> None:
        self._names = {key: named for key, named in self._names.items() if named.thing() is not None}
        for name, module in unwrap(model).named_modules():
            self._names[id(module)] = _Named(weakref.ref(module), prefix + plain_name(name) if name else prefix.rstrip("."))
        with torch._C.DisableTorchFunction():  # a function mode of the program is not to see that we ask
            parts = parts_of([(model, prefix)])
        self._parameters |= {key: _Named(parts.owners[key], name) for key, name in parts.parameters.items()}
        self._buffers |= {id(buffer()): _Named(buffer, name) for name, buffer in parts.buffers.items()}


def _warn_once(error: BaseException) -> None:
    warn(f"the nanny lost track of the modules and names no more of them ({type(error).__name__}: {error})")


class _AroundSteps(events.PartListener):
    def __init__(self, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self.before_optimizer_step, self.after_optimizer_step = begin, end


def _known(names: dict[int, _Named], thing: Any) -> bool:
    named = names.get(id(thing))
    return named is not None and named.thing() is thing


# classes of the program may answer for themselves
_mro_of, _dictionary_of = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__


def _is_without_builtins(module: nn.Module) -> bool:
    """torch imports what it needs to call a mode in the name of the running function, which raises where that has none."""
    owners = (object.__getattribute__(module, "__dict__"), *map(_dictionary_of, _mro_of(type(module))))
    forward = next((owner["forward"] for owner in owners if "forward" in owner), None)
    return type(forward) is FunctionType and "__builtins__" not in forward.__globals__


def _is_model(module: nn.Module) -> bool:
    """A criterion without weights belongs to the loop's own code."""
    return next(module.children(), None) is not None or next(module.parameters(), None) is not None


_is_users: dict[str, bool] = {}


def _user_frame(frame: FrameType | None) -> tuple[CodeType, int] | None:
    while frame is not None:
        code = frame.f_code
        users = _is_users.get(code.co_filename)
        if users is None:
            users = _is_users[code.co_filename] = _is_user_file(code.co_filename)
        if users:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def _own_frame(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The innermost of the program's own, behind what libraries call for it."""
    while frame is not None:
        if is_users_own(frame.f_code.co_filename):
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


def users_line() -> str:
    """`train.py:31`: the line of the program that is now being run."""
    found = _own_frame(_getframe(1)) or _user_frame(_getframe(1))
    return "" if found is None else f"{near(found[0].co_filename)}:{_line_of(*found)}"


def _is_user_file(name: str) -> bool:
    if name == _DEMO:
        return True
    if name.startswith((_TORCH, _NANNY, "<frozen", "<__array_function__")) or _is_console_script(name):
        return False
    return not name.startswith(_STDLIB) or "-packages" + os.sep in name


@lru_cache(maxsize=1024)
def is_users_own(name: str) -> bool:
    """Of the program itself, not of a library."""
    return _is_user_file(name) and "-packages" + os.sep not in name


def _is_console_script(name: str) -> bool:
    """What pip writes into `bin` only calls `main`: no line of anybody's."""
    return name.startswith(_SCRIPTS) and (not name.endswith(".py") or name.endswith(".exe" + os.sep + "__main__.py"))


def _line_of(code: CodeType, instruction: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= instruction < end), None)


def _text_of(file: str, line: int) -> str:
    """Code may claim to come from anything: a pipe would be waited for, a device or a dump read to its end."""
    with suppress(OSError, ValueError):  # what is not there linecache may know all the same
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_SOURCE:
            return ""
    return linecache.getline(file, line)


def _source_of(code: CodeType, instruction: int, line: int | None) -> str:
    text = _text_of(code.co_filename, line).rstrip() if line is not None else ""
    bare = text.lstrip()
    if not bare or len(bare) > _LONGEST_SOURCE or not bare.isprintable():
        return ""
    positions = getattr(code, "co_positions", None)  # from Python 3.11 on
    first, last, start, end = next(islice(positions(), instruction // 2, None), (None,) * 4) if positions else (None,) * 4
    if first != line or last != line or start is None or end is None:  # an operation over several lines has no carets
        return bare
    cut = len(text) - len(bare)
    before, marked = (len(part.decode()) for part in (text.encode()[:start], text.encode()[start:end]))  # counted in bytes
    return f"{bare}\n{' ' * (before - cut)}{'^' * marked}"
