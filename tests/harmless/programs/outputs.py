"""Models that return what is not a tensor, or take what is not one."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn

from ..program import Program, mlp, program, training


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
