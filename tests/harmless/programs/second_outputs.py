"""What modules return and take: things that cannot be walked, copied, summed, asked or held."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn

from ..program import Program, program, training


class Returns(nn.Module):
    """Computes, and returns something odd beside."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: torch.Tensor, *ignored: Any, **more: Any) -> Any:
        y = self.inner(x)
        return y, self.make(self, y)


class Takes(nn.Module):
    """Takes something odd beside its input, as an argument and as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, odd: Any, *, again: Any = None) -> torch.Tensor:
        return self.inner(x)


def _odd(make: Any, **more: Any) -> Program:
    model = nn.ModuleList([Returns(make), Takes()])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y, odd = model[0](x)
        return model[1](y, odd, again=odd).square().mean()

    return training(model, loss, **more)


@program("second_output_of_two_to_the_forty_elements", "second: outputs")
def huge(seed: int) -> Program:
    """An expanded tensor of 2**40 elements with one number behind it: reading it whole never ends, copying it fails."""
    return _odd(lambda m, y: y[0, 0].expand(2**40))


@program("second_output_sparse_of_huge_shape", "second: outputs")
def huge_sparse(seed: int) -> Program:
    """Sparse tensors of shape (2**40,) and (2**20, 2**20) with two values: making them dense fails."""

    def make(m: nn.Module, y: torch.Tensor) -> Any:
        one = torch.sparse_coo_tensor(torch.tensor([[1, 2**39]]), y[0, :2], (2**40,))
        two = torch.sparse_coo_tensor(torch.tensor([[1, 2], [3, 3]]), y[0, :2], (2**20, 2**20))
        return [one, two]

    return _odd(make)


@program("second_output_is_a_dead_weak_proxy", "second: outputs")
def dead_proxy(seed: int) -> Program:
    """A weak proxy whose thing is gone: even isinstance raises ReferenceError."""

    class Thing:
        pass

    return _odd(lambda m, y: weakref.proxy(Thing()))


@program("second_output_is_a_mock", "second: outputs")
def mocked(seed: int) -> Program:
    """MagicMocks have every attribute, are callable, iterable and of any length; calls on them are noted."""
    thing = mock.MagicMock()
    other = mock.MagicMock(spec=torch.Tensor)
    return _odd(lambda m, y: [thing, {"other": other}], extra=lambda: [len(thing.mock_calls), len(other.mock_calls)])


@program("second_output_lies_about_its_class", "second: outputs")
def lies(seed: int) -> Program:
    """An object whose __class__ is Tensor, one whose __class__ raises, one whose every attribute raises KeyboardInterrupt."""

    class Liar:
        __class__ = torch.Tensor  # type: ignore[assignment]

    class Silent:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("no class")

    class Stops:
        def __getattr__(self, name: str) -> Any:
            raise LookupError(f"{name}?")

        def __iter__(self) -> Any:
            raise LookupError("iter?")

        def __len__(self) -> int:
            raise LookupError("len?")

    return _odd(lambda m, y: (Liar(), Silent(), Stops()))


@program("second_output_infinite_sequences", "second: outputs")
def infinite(seed: int) -> Program:
    """range(10**15), itertools.count, a Sequence that never ends, and a Mapping with ever new keys."""

    class Endless(Sequence):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2**60

        def __getitem__(self, i: Any) -> Any:
            return i

    class Keys(Mapping):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 2**60

        def __iter__(self) -> Any:
            return itertools.count()

        def __getitem__(self, key: Any) -> Any:
            return key

    counter = itertools.count()
    return _odd(lambda m, y: (range(10**15), counter, Endless(), Keys()), extra=lambda: next(counter))


@program("second_output_dictionary_that_loads_lazily", "second: outputs")
def lazy_dictionary(seed: int) -> Program:
    """A dict subclass draws random numbers when an item, a value or its length is asked for, and counts."""
    asked: list[str] = []

    class Lazy(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            asked.append(f"item {key}")
            return torch.rand(2)

        def values(self) -> Any:
            asked.append("values")
            return [torch.rand(2) for _ in range(3)]

        def items(self) -> Any:
            asked.append("items")
            return [(key, torch.rand(2)) for key in "abc"]

        def __iter__(self) -> Any:
            asked.append("iter")
            torch.rand(1)
            return iter("abc")

        def __len__(self) -> int:
            asked.append("len")
            torch.rand(1)
            return 3

    return _odd(lambda m, y: Lazy(a=y), extra=lambda: asked)


@program("second_output_named_tuple_that_cannot_be_rebuilt", "second: outputs")
def stubborn_tuple(seed: int) -> Program:
    """Named tuples with a __new__ of their own, tuples and lists that must stay the same objects: identity is noted."""

    class Base(NamedTuple):
        a: Any
        b: Any

    class Stubborn(Base):
        def __new__(cls, a: Any, *, secret: str) -> Any:
            return super().__new__(cls, a, secret)

    class Strict(list):  # type: ignore[type-arg]
        def __init__(self, *items: Any) -> None:
            super().__init__(items)

    notes: list[Any] = []
    kept: list[Any] = []

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            out = Stubborn(self.inner(x), secret="s"), Strict(x, 1)
            kept[:] = [out]
            return out

    model = nn.ModuleList([Holder(), nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        out = model[0](x)
        notes.append([out is kept[0], type(out[0]).__name__, type(out[1]).__name__, out[1][0] is x])
        kept.clear()
        return model[1](out[0].a).square().mean()

    return training(model, loss, extra=lambda: notes)


@program("second_output_holds_model_optimizer_and_graph", "second: outputs")
def holds_all(seed: int) -> Program:
    """The output holds the module itself, a graph node, a storage, a generator, a dtype, numpy objects and a code object."""

    def make(m: nn.Module, y: torch.Tensor) -> Any:
        return {
            m: m, "node": y.grad_fn, "storage": y.untyped_storage(), "generator": torch.default_generator, "size": y.shape,
            "objects": np.array([y.detach(), m, None], dtype=object), "record": np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
            "code": make.__code__, "module": types, "stream": torch.device("cpu"), 3: {None: ..., (1, 2): NotImplemented},
            "memory": memoryview(b"abc"), "date": np.datetime64("NaT"), "slice": slice(y, None), "view": {}.keys(),
            "finfo": torch.finfo(y.dtype),
        }  # fmt: skip

    return _odd(make)


@program("second_output_list_cleared_by_its_reader", "second: outputs")
def cleared(seed: int) -> Program:
    """Boxed arguments: the caller passes a list that the module empties to free memory; tensors in it must die at once."""
    alive: list[Any] = []

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, box: list[torch.Tensor]) -> list[torch.Tensor]:
            x = box.pop()
            ref = weakref.ref(x)
            y = self.inner(x.detach() * 1)
            del x
            alive.append(ref() is None)
            return [y]

    model = nn.Sequential(Boxed(), Boxed(), Boxed())

    def loss(i: int) -> torch.Tensor:
        return model([torch.ones(4, 8) * (i + 1)])[0].square().mean()

    return training(model, loss, extra=lambda: alive)


@program("second_output_tensors_of_odd_devices_and_kinds", "second: outputs")
def odd_kinds(seed: int) -> Program:
    """Meta, bit, string-less, zero-size, conjugated, negated, lazily broadcast, 25-dimensional and strided-over tensors."""

    def make(m: nn.Module, y: torch.Tensor) -> Any:
        return [
            torch.empty(10**6, 10**6, device="meta"),
            torch.empty(0, 3, requires_grad=True),
            torch.view_as_complex(y.view(4, 4, 2)).conj(),
            torch.view_as_complex(y.view(4, 4, 2)).conj().imag,
            y.view(*([1] * 23), 4, 8),
            y.as_strided((4, 4), (1, 1)),
            y[:, ::3].t(),
            torch.zeros(3, dtype=torch.uint16),
            torch.zeros(3, dtype=torch.float8_e4m3fn),
            torch.zeros(3, dtype=torch.float8_e8m0fnu),
            torch.zeros(4, dtype=torch.bool).expand(3, 4),
            torch._efficientzerotensor((3, 3)),
            torch.quantize_per_channel(y.detach(), torch.ones(8), torch.zeros(8), 1, torch.qint8),
            y.to_mkldnn() if y.is_contiguous() else y,
            torch.full((2,), float("nan")),
        ]

    return _odd(make)


@program("second_outputs_freed_by_resizing_storage", "second: outputs")
def freed_output(seed: int) -> Program:
    """Right after a module returns, the user frees the storage of its output and input by resizing it to nothing."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            given = x.clone()
            y = model[0](given)
            given.untyped_storage().resize_(0)
            z = model[1](y)
            y.untyped_storage().resize_(0)
            value = z.sum().item()
            z.untyped_storage().resize_(0)
        return model[2](model[0](x)).square().mean() + value * 0

    return training(model, loss)


@program("second_output_written_by_another_thread_later", "second: outputs")
def written_later(seed: int) -> Program:
    """The output is a preallocated ring that later steps overwrite; gradients are copied into a pinned-like pool."""
    ring = torch.zeros(2, 4, 8)

    class Ring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.at = nn.Linear(8, 8), 0

        def forward(self, x: torch.Tensor) -> Any:
            y = self.inner(x)
            self.at = (self.at + 1) % 2
            with torch.no_grad():
                ring[self.at].copy_(y)
            return y, ring[self.at]

    model = nn.ModuleList([Ring(), nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y, held = model[0](x)
        before = held.clone()
        model[0](x * 2)
        model[0](x * 3)
        return model[1](y + before + held).square().mean()

    return training(model, loss, extra=lambda: ring)


@program("second_nested_subclass_two_tensors_parameter", "second: outputs")
def two_tensors(seed: int) -> Program:
    """Parameters are TwoTensors (a wrapper subclass from torch's own tests), whose inner tensors are compared."""
    from torch.testing._internal.two_tensor import TwoTensor

    TwoTensor.plain_tensors = lambda self: [self.a, self.b]
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    for m in (model[0], model[2]):
        m.weight = nn.Parameter(TwoTensor(m.weight.detach(), m.weight.detach() * 2))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.05))


@program("second_input_of_two_to_the_thirty_six_elements", "second: outputs")
def expanded_input(seed: int) -> Program:
    """An input of 2**36 elements with one number behind it goes through modules that read its corner."""

    class Corner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[:4, :8])

    model = nn.Sequential(nn.Identity(), Corner(), nn.Linear(8, 4))
    x = torch.tensor(0.5).expand(2**18, 2**18)
    return training(model, lambda i: model(x).square().mean())
