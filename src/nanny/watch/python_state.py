"""What the Python code of a model can change besides tensors: found before it runs a second time, and put back behind it.

    reached = Reached([model, args, kwargs])
    reached.obstacle        # "" or what could not be put back: a reader, a generator, something shared with other threads
    ...                     # the second run
    reached.put_back()

From the things it is given it goes on to whatever they hold, to what their classes have under the names that the code uses which
was reached so far (a model of a library can also upload itself, and does not in forward), and to the variables that it names.
Code of torch, numpy and Python itself is not followed.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import datetime
import decimal
import enum
import functools
import gc
import inspect
import logging
import operator
import queue
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .places import is_users_own

MOST_THINGS = 200_000
MOST_NUMBERS = 1 << 22  # of an array that is copied
_LIBRARIES = {"torch", "numpy", "nanny", *sys.stdlib_module_names}
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, logging.Logger, logging.Handler),
    *(types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType, types.EllipsisType),
    *(types.NotImplementedType, types.GenericAlias, types.UnionType, types.CodeType, np.dtype, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator, torch.jit.ScriptFunction)
_UNCHANGING = (
    *(re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, types.MappingProxyType),
    *(
        operator.itemgetter,
        operator.attrgetter,
        operator.methodcaller,
        contextvars.ContextVar,
    ),  # the last in a copy
)
_MADE_BY_PYTHON = 1 << 9  # a class whose instances may be given another
_CACHED = functools._lru_cache_wrapper
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_NOT_PUT_BACK = (Iterator, *_LOCKS, queue.SimpleQueue, bytearray, memoryview)
_OF_CLASSES = (
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__"),
    *("__init_subclass__", "__set_name__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),  # not run by a call
)
_MAKE = ("__init__", "__new__", "__post_init__")  # run where the class itself is named, not where there is one of it


class Reached:
    """The state that these things lead to, as it was when they were given."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.obstacle = ""
        self.tensors: list[Tensor] = []
        self.code: set[types.CodeType] = set()  # of the functions that were found, and of those inside them
        self._kept: list[tuple[Callable[[], bool], Callable[[], None]]] = []  # is it as it was? make it so
        self._caches: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []  # where caches of functions are held
        self._seen: dict[int, Any] = {}
        self._used: set[str] = {"forward"}  # names in the code so far
        self._unused: dict[str, list[tuple[type, str, Any]]] = {}  # what classes have under other names
        self._waiting = list(roots)
        while self._waiting:
            if len(self._seen) > MOST_THINGS:
                self.obstacle = f"its code reaches more than {MOST_THINGS} things"
                break
            self._look(self._waiting.pop())

    def hide_caches(self) -> None:
        """Until all is put back, a function with a cache answers from a copy of it: nothing in it is used, added or dropped."""
        for _, put, original in self._caches:
            with contextlib.suppress(Exception):  # of a Python that lays them out otherwise
                put(_CopiedCache(original))

    def is_untouched(self) -> bool:
        return all(is_same() for is_same, _ in self._kept)

    def put_back(self) -> None:
        for get, put, original in self._caches:
            if type(get()) is _CopiedCache:
                put(original)
        for is_same, restore in self._kept:
            if not is_same():
                restore()

    def _look(self, thing: Any) -> None:
        kind = type(thing)
        if issubclass(kind, type):
            self._look_into_class(thing)
            self._use(f"{one.__module__}.{one.__qualname__}()" for one in thing.__mro__)
        if issubclass(kind, _LEAVES) or id(thing) in self._seen or _root_of(kind.__module__) == "nanny":
            return
        self._seen[id(thing)] = thing
        if issubclass(kind, Tensor):
            self.tensors.append(thing)
            self._keep_attributes(thing, kind)
        elif issubclass(kind, (tuple, frozenset)):
            self._waiting += thing
        elif issubclass(kind, types.FunctionType):
            self._look_into_function(thing)
        elif issubclass(kind, (types.MethodType, functools.partial)):
            inner = (thing.func, thing.args, thing.keywords) if kind is functools.partial else (thing.__func__, thing.__self__)
            self._waiting += inner
        elif issubclass(kind, (staticmethod, classmethod)):
            self._waiting.append(thing.__func__)
        elif issubclass(kind, property):
            self._waiting += (thing.fget, thing.fset, thing.fdel)
        elif issubclass(kind, weakref.ref):
            self._waiting.append(thing())
        else:
            self._look_into_object(thing, kind)

    def _look_into_object(self, thing: Any, kind: type) -> None:
        is_known = self._keep_content(thing, kind)
        if issubclass(kind, _OPERATORS):
            return  # what its kernel remembers is no business of Python's; operators are looked at when they run
        if self._keep_attributes(thing, kind):
            is_known = is_known or not issubclass(kind, _NOT_PUT_BACK)
        elif not is_known and any("__slots__" in vars(one) for one in kind.__mro__):
            self._keep_slots(thing, kind)
            is_known = not issubclass(kind, _NOT_PUT_BACK)
        elif not is_known:
            of_arrays = _root_of(kind.__module__) in ("torch", "numpy") and not issubclass(kind, np.ndarray)
            is_known = kind is object or issubclass(kind, (type, *_UNCHANGING)) or of_arrays or hasattr(kind, "__get__")
        if not is_known and not (issubclass(kind, _LOCKS) and _is_free(thing)):
            self.obstacle = f"its code reaches a {kind.__name__}, which cannot be put back"

    def _keep_attributes(self, thing: Any, kind: type) -> bool:
        """Whether it has any of its own."""
        try:  # whatever the class makes of a look; what belongs to a thread has a way of its own
            attributes = thing.__dict__ if kind is threading.local else object.__getattribute__(thing, "__dict__")
        except AttributeError:
            return False
        if type(attributes) is not dict:
            return False
        self._keep_mapping(attributes)
        self._waiting += attributes.values()
        self._look_into_class(kind)
        if kind.__flags__ & _MADE_BY_PYTHON:
            self._keep(lambda: type(thing) is kind, lambda: object.__setattr__(thing, "__class__", kind))
        return True

    def _keep_content(self, thing: Any, kind: type) -> bool:
        """Of a container or a source of random numbers; by the methods of the plain class, whatever the program made of it."""
        if issubclass(kind, dict):
            self._keep_mapping(thing)
            self._waiting += (*dict.keys(thing), *dict.values(thing))
        elif issubclass(kind, (list, collections.deque)):
            plain: Any = list if issubclass(kind, list) else collections.deque
            content = list(plain.__iter__(thing))
            self._keep(
                lambda: _are_same(list(plain.__iter__(thing)), content),
                lambda: (plain.clear(thing), plain.extend(thing, content)),
            )
            self._waiting += content
        elif issubclass(kind, set):
            content_set = set(set.__iter__(thing))
            self._keep(
                lambda: set.__len__(thing) == len(content_set) and set.issuperset(thing, content_set),
                lambda: (set.clear(thing), set.update(thing, content_set)),
            )
            self._waiting += content_set
        elif issubclass(kind, np.ndarray) and thing.size <= MOST_NUMBERS and not thing.dtype.hasobject:
            copy = thing.copy()
            self._keep(lambda: copy.tobytes() == thing.tobytes(), lambda: np.copyto(thing, copy))
        elif issubclass(kind, (np.random.Generator, np.random.BitGenerator)):
            bits = thing if isinstance(thing, np.random.BitGenerator) else thing.bit_generator
            stand = bits.state
            self._keep(lambda: repr(bits.state) == repr(stand), lambda: setattr(bits, "state", stand))
        elif issubclass(kind, np.random.RandomState):
            state = thing.get_state()
            self._keep(lambda: repr(thing.get_state()) == repr(state), lambda: thing.set_state(state))
        elif issubclass(kind, random.Random):
            drawn = thing.getstate()
            self._keep(lambda: thing.getstate() == drawn, lambda: thing.setstate(drawn))
        elif issubclass(kind, torch.Generator):
            position = thing.get_state()
            self._keep(lambda: torch.equal(thing.get_state(), position), lambda: thing.set_state(position))
        else:
            return False
        return True

    def _keep_slots(self, thing: Any, kind: type) -> None:
        for slot in [m for one in kind.__mro__ for m in vars(one).values() if type(m) is types.MemberDescriptorType]:
            with contextlib.suppress(AttributeError):  # empty
                value = slot.__get__(thing, kind)
                self._keep(functools.partial(_holds, slot, thing, value), functools.partial(slot.__set__, thing, value))
                self._waiting.append(value)
        self._look_into_class(kind)

    def _keep(self, is_same: Callable[[], bool], restore: Callable[[], Any]) -> None:
        self._kept.append((is_same, restore))

    def _keep_mapping(self, thing: dict[Any, Any]) -> None:
        content = list(dict.items(thing))  # not dict.copy: of an OrderedDict it asks the program's own __getitem__
        plain: Any = collections.OrderedDict if isinstance(thing, collections.OrderedDict) else dict

        def restore() -> None:
            plain.clear(thing)
            for key, value in content:
                plain.__setitem__(thing, key, value)

        self._keep(
            lambda: (
                _are_same(dict.keys(thing), (k for k, _ in content)) and _are_same(dict.values(thing), (v for _, v in content))
            ),
            restore,
        )
        for key, value in content:
            self._note_cache(functools.partial(dict.get, thing, key), functools.partial(plain.__setitem__, thing, key), value)

    def _look_into_function(self, function: types.FunctionType) -> None:
        self._waiting.append(function.__dict__.get("__wrapped__"))
        space = function.__globals__
        if is_of_library(space.get("__name__")):
            return
        found = set(_code_in(function.__code__))
        self.code |= found
        if any(one.co_flags & _AWAITED and is_users_own(one.co_filename) for one in found):  # of libraries nobody calls them
            self.obstacle = "its code is a coroutine, which somebody has to wait for"
        self._waiting += (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for cell in function.__closure__ or ():
            self._keep_cell(cell)
        names = names_in(function.__code__)
        self._keep_names(space, names)
        self._use(names)

    def _use(self, names: Iterable[str]) -> None:
        for name in {*names} - self._used:
            self._used.add(name)
            for kind, attribute, value in self._unused.pop(name, ()):
                self._keep_attribute(kind, attribute, value)

    def _keep_names(self, space: dict[str, Any], names: set[str]) -> None:
        """Variables of a module, and those of the modules of the program among them."""
        for name in names & space.keys():
            value = space[name]
            self._keep_name(space, name, value)
            if isinstance(value, types.ModuleType) and not is_of_library(value.__name__):
                for attribute in names & vars(value).keys():
                    self._keep_name(vars(value), attribute, vars(value)[attribute])

    def _keep_name(self, space: dict[str, Any], name: str, value: Any) -> None:
        self._keep(lambda: _original(space.get(name)) is value, lambda: space.update({name: value}))
        self._note_cache(lambda: space.get(name), functools.partial(space.__setitem__, name), value)
        self._waiting.append(value)

    def _keep_cell(self, cell: types.CellType) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            return
        self._keep(lambda: _original(cell.cell_contents) is content, lambda: setattr(cell, "cell_contents", content))
        self._note_cache(lambda: cell.cell_contents, functools.partial(setattr, cell, "cell_contents"), content)
        self._waiting.append(content)

    def _look_into_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if is_of_library(one.__module__) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            for name, value in list(vars(one).items()):
                used = f"{one.__module__}.{one.__qualname__}()" if name in _MAKE else name
                if name in _OF_CLASSES:
                    continue
                if used in self._used or (name == used and name.startswith("__") and name.endswith("__")):
                    self._keep_attribute(one, name, value)
                else:
                    self._unused.setdefault(used, []).append((one, name, value))

    def _keep_attribute(self, kind: type, name: str, value: Any) -> None:
        self._waiting.append(value)
        self._note_cache(lambda: vars(kind).get(name), functools.partial(type.__setattr__, kind, name), value)
        if not isinstance(value, (types.FunctionType, property, staticmethod, classmethod)):
            self._keep(lambda: _original(vars(kind).get(name)) is value, lambda: type.__setattr__(kind, name, value))

    def _note_cache(self, get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> None:
        if isinstance(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value, _CACHED):
            self._caches.append((get, put, value))


class _CopiedCache:
    """Stands for what `functools.lru_cache` made. Its counters and its order cannot be put back, only left alone."""

    def __init__(self, original: Any) -> None:
        self.original = original
        cached: Any = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
        self.__wrapped__ = cached.__wrapped__
        self.cache_info, self.cache_clear = cached.cache_info, cached.cache_clear  # calls of these are refused as effects
        self._typed, self._keeps = cached.cache_parameters()["typed"], cached.cache_parameters()["maxsize"] != 0
        held = gc.get_referents(cached)  # to ask it would count
        at = max(i for i, one in enumerate(held) if type(one) is dict and one is not cached.__dict__)
        self._mark = next((one for one in held[at:] if type(one) is object), None)  # before arguments by keyword
        self._answers = dict(held[at])
        if cached.cache_parameters()["maxsize"]:  # answers are in a list of links, each behind its key
            keys, links = {id(key) for key in held[at]}, iter(held[:at])
            self._answers = {key: next(links) for key in links if id(key) in keys}
        if len(self._answers) != cached.cache_info().currsize:
            raise LookupError

    def __get__(self, thing: Any, kind: Any) -> Any:
        if isinstance(self.original, classmethod):
            return types.MethodType(self, kind)
        return self if thing is None or isinstance(self.original, staticmethod) else types.MethodType(self, thing)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key: Any = (*args, *((self._mark, *(part for item in kwargs.items() for part in item)) if kwargs else ()))
        if self._typed:
            key += (*map(type, args), *map(type, kwargs.values()))
        elif len(args) == 1 and not kwargs and type(args[0]) in (int, str):
            key = args[0]
        if key in self._answers:
            return self._answers[key]
        answer = self.__wrapped__(*args, **kwargs)
        if self._keeps:
            self._answers[key] = answer
        return answer


def _original(thing: Any) -> Any:
    return thing.original if type(thing) is _CopiedCache else thing


def _holds(slot: types.MemberDescriptorType, thing: Any, value: Any) -> bool:
    try:
        return slot.__get__(thing, type(thing)) is value
    except AttributeError:  # emptied
        return False


def _is_free(lock: Any) -> bool:
    """Nobody holds it, and no thread of the program is there that could: what it guards is ours for now."""
    held = lock.locked() if hasattr(lock, "locked") else lock._is_owned()
    targets = (getattr(t, "_target", None) or type(t) for t in threading.enumerate() if t is not threading.current_thread())
    return not held and all(is_of_library(getattr(target, "__module__", "")) for target in targets)


def _are_same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    first, second = list(these), list(those)
    return len(first) == len(second) and all(_original(a) is b for a, b in zip(first, second))


def is_of_library(module: Any) -> bool:
    """By its name: torch, numpy, Python's own, ours."""
    return _root_of(module) in _LIBRARIES


def _root_of(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def names_in(code: types.CodeType) -> set[str]:
    """Every name of a variable or an attribute that this code and the functions inside it use, or give to `getattr`."""
    names: set[str] = set()
    for one in _code_in(code):
        names.update(one.co_names, (c for c in one.co_consts if isinstance(c, str) and c.isidentifier()))
    return names


_AWAITED = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _code_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_in(constant)
