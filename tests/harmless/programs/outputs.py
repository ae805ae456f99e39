"""Models that return what is not a tensor, or take what is not one."""

from __future__ import annotations

import array
import ast
import asyncio
import collections
import ctypes
import ctypes.util
import dataclasses
import itertools
import types
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn

from ..program import Program, batch, mlp, program, sick, training


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenAnswer:
    logits: torch.Tensor
    nothing: None = None


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Holder:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Hostile:
    """Refuses to be looked at."""

    __slots__ = ("_value",)

    def __init__(self, value: torch.Tensor) -> None:
        object.__setattr__(self, "_value", value)

    def take(self) -> torch.Tensor:
        return self._value

    def __iter__(self) -> Any:
        raise RuntimeError("do not iterate over me")

    def __len__(self) -> int:
        raise RuntimeError("do not measure me")

    def __bool__(self) -> bool:
        raise RuntimeError("do not ask me")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")

    __hash__ = None

    def __repr__(self) -> str:
        raise RuntimeError("do not print me")


class ModelOutput(OrderedDict):
    """Like that of transformers: a mapping that is indexed by number and by attribute."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(name) from None


class UserMapping(collections.UserDict):
    pass


class Wrapping(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.inner = mlp()
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.inner(x))


def wrapped(wrap: Any, take: Any) -> Program:
    model = nn.Sequential(Wrapping(wrap))
    x = torch.randn(4, 8)
    return training(model, lambda i: take(model(x)).square().mean())


@program("dataclass_output", "outputs")
def dataclass_output(seed: int) -> Program:
    return wrapped(lambda y: Answer(y, y * 2), lambda out: out.logits + out.hidden)


@program("frozen_slots_dataclass_output", "outputs")
def frozen_output(seed: int) -> Program:
    return wrapped(FrozenAnswer, lambda out: out.logits)


@program("namedtuple_output", "outputs")
def namedtuple_output(seed: int) -> Program:
    return wrapped(lambda y: Pair(y, y.detach()), lambda out: out.logits + out.hidden)


@program("nested_dict_output", "outputs")
def nested_dict_output(seed: int) -> Program:
    return wrapped(lambda y: {"a": [y, {"b": (y * 2, None, 3, "text")}], 7: {1: y}}, lambda out: out["a"][1]["b"][0] + out[7][1])


@program("generator_output", "outputs")
def generator_output(seed: int) -> Program:
    return wrapped(lambda y: (part for part in y.unbind(0)), lambda out: torch.stack(list(out)))


@program("iterator_output_read_once", "outputs")
def iterator_output(seed: int) -> Program:
    return wrapped(lambda y: iter([y, y + 1]), lambda out: next(out) + next(out))


@program("none_output", "outputs")
def none_output(seed: int) -> Program:
    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.kept: Any = None

        def forward(self, x: Any) -> None:
            self.kept = self.inner(x)

    side = Side()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        assert side(x) is None
        kept, side.kept = side.kept, None
        return kept.square().mean()

    return training(side, loss)


@program("custom_object_output", "outputs")
def custom_object_output(seed: int) -> Program:
    return wrapped(Holder, lambda out: out.logits)


@program("hostile_object_output", "outputs")
def hostile_object_output(seed: int) -> Program:
    return wrapped(Hostile, lambda out: out.take())


@program("model_output_mapping", "outputs")
def model_output(seed: int) -> Program:
    return wrapped(lambda y: ModelOutput(loss=y.sum(), logits=y), lambda out: out.logits + out[0])


@program("user_dict_output", "outputs")
def user_dict_output(seed: int) -> Program:
    return wrapped(lambda y: UserMapping(logits=y), lambda out: out["logits"])


@program("defaultdict_output_grows_when_read", "outputs")
def defaultdict_output(seed: int) -> Program:
    seen: list[int] = []

    def wrap(y: torch.Tensor) -> Any:
        out = collections.defaultdict(lambda: seen.append(1) or y)
        out["logits"] = y
        return out

    made = wrapped(wrap, lambda out: out["logits"] + len(out))
    made.extra = lambda: seen
    return made


@program("simple_namespace_output", "outputs")
def namespace_output(seed: int) -> Program:
    return wrapped(lambda y: types.SimpleNamespace(logits=y, self_=None), lambda out: out.logits)


@program("self_referencing_output", "outputs")
def self_referencing_output(seed: int) -> Program:
    def wrap(y: torch.Tensor) -> Any:
        out: dict[str, Any] = {"logits": y}
        out["self"] = out
        out["list"] = [out]
        return out

    return wrapped(wrap, lambda out: out["self"]["logits"])


@program("deeply_nested_output", "outputs")
def deeply_nested_output(seed: int) -> Program:
    def wrap(y: torch.Tensor) -> Any:
        out: Any = y
        for _ in range(3000):
            out = [out]
        return out

    def take(out: Any) -> torch.Tensor:
        while isinstance(out, list):
            out = out[0]
        return out

    return wrapped(wrap, take)


@program("list_output_of_thousand_tensors", "outputs")
def many_outputs(seed: int) -> Program:
    return wrapped(lambda y: [y[:, i % 4] * i for i in range(1000)], lambda out: torch.stack(out))


@program("scalar_and_text_outputs", "outputs")
def plain_outputs(seed: int) -> Program:
    class Talk(nn.Module):
        def forward(self, x: Any) -> Any:
            return 3.5, "text", True, b"bytes", range(3), {1, 2}

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.talk = mlp(), Talk()

        def forward(self, x: Any) -> Any:
            return self.inner(x) * self.talk(x)[0]

    model = Whole()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("property_output_counts_reads", "outputs")
def property_output(seed: int) -> Program:
    reads: list[int] = []

    class Counting:
        def __init__(self, y: torch.Tensor) -> None:
            self._y = y

        @property
        def logits(self) -> torch.Tensor:
            reads.append(1)
            return self._y

    made = wrapped(Counting, lambda out: out.logits)
    made.extra = lambda: len(reads)
    return made


@program("lambda_output", "outputs")
def lambda_output(seed: int) -> Program:
    return wrapped(lambda y: lambda scale: y * scale, lambda out: out(2.0))


@program("distribution_output", "outputs")
def distribution_output(seed: int) -> Program:
    return wrapped(lambda y: torch.distributions.Normal(y, 1.0), lambda out: out.rsample() - out.entropy())


@program("keyword_only_inputs_and_star_args", "outputs")
def keyword_inputs(seed: int) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, *parts: Any, mask: Any = None, **more: Any) -> Any:
            return self.inner(torch.cat(parts)) * mask + more["bias"][0]

    model = Model()
    x = torch.randn(2, 8)
    return training(model, lambda i: model(x, x * 2, mask=torch.ones(4, 4), bias=[torch.ones(4)], text="x").square().mean())


@program("inputs_in_dataclass_and_dict", "outputs")
def inputs_in_dataclass(seed: int) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, batch: Any) -> Any:
            return {"loss": self.inner(batch["a"].logits).square().mean()}

    model = Model()
    batch = {"a": Answer(torch.randn(4, 8), torch.zeros(1)), "id": "x"}
    return training(model, lambda i: model(batch)["loss"])


@program("output_is_the_input", "outputs")
def output_is_input(seed: int) -> Program:
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 4), nn.Identity(), nn.Dropout(0.0))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("output_is_a_parameter", "outputs")
def output_is_parameter(seed: int) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5))

        def forward(self) -> Any:
            return self.table

    model = Model()
    return training(model, lambda i: model().square().sum())


@program("outputs_of_structures_torch_and_python_have", "outputs")
def structures(seed: int) -> Program:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, kind: int) -> Any:
            y = self.inner(x)
            return [
                lambda: torch.max(y, 1),
                lambda: torch.sort(y, stable=True),
                lambda: nn.utils.rnn.pack_sequence([y[0:1], y[1:2]]),
                lambda: types.MappingProxyType({"a": y, "b": types.MappingProxyType({"c": y})}),
                lambda: collections.ChainMap({"a": y}, {"b": y}),
                lambda: collections.deque([y, y], maxlen=1),
                lambda: collections.UserList([y]),
                lambda: memoryview(y.detach().numpy()),
                lambda: array.array("f", y.flatten().tolist()),
                lambda: (ctypes.c_float * 3)(*y.flatten().tolist()[:3]),
                lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
                lambda: y.shape,
                lambda: y.grad_fn,
                lambda: torch.linalg.svd(y),
                lambda: (y.untyped_storage(), y.dtype, y.device, torch.finfo(y.dtype)),
                lambda: weakref.WeakValueDictionary({1: y}),
                lambda: map(torch.sum, [y]),
                lambda: {y: y, (1, y): 2},
                lambda: ast.parse("a + b"),
            ][kind]()

    model = Odd()

    def loss(i: int) -> torch.Tensor:
        total = torch.zeros(())
        for kind in range(19):
            out = model(sick(i, 4) if kind != 13 else batch(i), kind)
            match kind:
                case 0 | 1:
                    total = total + out.values.sum()
                case 2:
                    total = total + out.data.sum()
                case 3:
                    total = total + out["b"]["c"].sum()
                case 13:
                    total = total + out.S.sum()
                case 16:
                    total = total + next(out)
        return total

    return training(model, loss, steps=5)


@program("forward_is_a_coroutine", "outputs")
def coroutine(seed: int) -> Program:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            await asyncio.sleep(0)
            return self.inner(x)

    model = Later()

    async def both(i: int) -> torch.Tensor:
        first, second = await asyncio.gather(model(batch(i)), model(batch(i + 1)))
        return (first + second).square().mean()

    return training(model, lambda i: asyncio.run(both(i)), steps=4)


@program("outputs_are_futures", "outputs")
def futures(seed: int) -> Program:
    """A module gives a future that is not done yet, whose callbacks count."""
    counts = [0]

    class Promises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            future: Any = torch.futures.Future()
            chained = future.then(lambda done: (counts.__setitem__(0, counts[0] + 1), done.value())[1])
            self.waiting = (future, x)
            return chained

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Promises(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chained = self.first(x)
            future, given = self.first.waiting
            del self.first.waiting
            future.set_result(self.first.inner(given))
            return self.last(chained.wait())

    model = Keeps()
    return training(model, lambda i: model(batch(i)).square().mean(), steps=4, extra=lambda: counts)


@program("views_of_bytes_and_arrays_flow", "outputs")
def byte_views(seed: int) -> Program:
    """Between modules go memoryviews, arrays, ranges and decimals: nobody may exhaust, hash or compare them."""
    import array
    import decimal

    class Packs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return memoryview(x.numpy()), array.array("f", x.flatten().tolist()), range(10**12), decimal.Decimal("sNaN")

    class Unpacks(nn.Module):
        def forward(self, given: Any) -> torch.Tensor:
            view, numbers, many, odd = given
            assert odd.is_snan()
            assert many[-1] == 10**12 - 1
            return torch.tensor(numbers).reshape(view.shape)

    model = nn.Sequential(Packs(), Unpacks(), nn.Linear(8, 4))
    return training(model, lambda i: model(batch(i)).square().mean(), steps=4)


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


@program("output_of_two_to_the_forty_elements", "outputs")
def huge(seed: int) -> Program:
    """An expanded tensor of 2**40 elements with one number behind it: reading it whole never ends, copying it fails."""
    return _odd(lambda m, y: y[0, 0].expand(2**40))


@program("output_sparse_of_huge_shape", "outputs")
def huge_sparse(seed: int) -> Program:
    """Sparse tensors of shape (2**40,) and (2**20, 2**20) with two values: making them dense fails."""

    def make(m: nn.Module, y: torch.Tensor) -> Any:
        one = torch.sparse_coo_tensor(torch.tensor([[1, 2**39]]), y[0, :2], (2**40,))
        two = torch.sparse_coo_tensor(torch.tensor([[1, 2], [3, 3]]), y[0, :2], (2**20, 2**20))
        return [one, two]

    return _odd(make)


@program("output_is_a_dead_weak_proxy", "outputs")
def dead_proxy(seed: int) -> Program:
    """A weak proxy whose thing is gone: even isinstance raises ReferenceError."""

    class Thing:
        pass

    return _odd(lambda m, y: weakref.proxy(Thing()))


@program("output_is_a_mock", "outputs")
def mocked(seed: int) -> Program:
    """MagicMocks have every attribute, are callable, iterable and of any length; calls on them are noted."""
    thing = mock.MagicMock()
    other = mock.MagicMock(spec=torch.Tensor)
    return _odd(lambda m, y: [thing, {"other": other}], extra=lambda: [len(thing.mock_calls), len(other.mock_calls)])


@program("output_lies_about_its_class", "outputs")
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


@program("output_infinite_sequences", "outputs")
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


@program("output_dictionary_that_loads_lazily", "outputs")
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


@program("output_named_tuple_that_cannot_be_rebuilt", "outputs")
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


@program("output_holds_model_optimizer_and_graph", "outputs")
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


@program("output_list_cleared_by_its_reader", "outputs")
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


@program("output_tensors_of_odd_devices_and_kinds", "outputs")
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


@program("outputs_freed_by_resizing_storage", "outputs")
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


@program("output_written_by_another_thread_later", "outputs")
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


@program("nested_subclass_two_tensors_parameter", "outputs")
def two_tensors(seed: int) -> Program:
    """Parameters are TwoTensors (a wrapper subclass from torch's own tests), whose inner tensors are compared."""
    from torch.testing._internal.two_tensor import TwoTensor

    TwoTensor.plain_tensors = lambda self: [self.a, self.b]
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    for m in (model[0], model[2]):
        m.weight = nn.Parameter(TwoTensor(m.weight.detach(), m.weight.detach() * 2))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.05))


@program("input_of_two_to_the_thirty_six_elements", "outputs")
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
