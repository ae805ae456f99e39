"""Modules under parametrizations, lazy, mapped, copied, exchanged, and with traps in their attributes."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ..program import Program, mlp, program, training
from .fourth_process import batch

NAN = float("nan")


def _sick(i: int, at: int = 2) -> torch.Tensor:
    return batch(i) * (NAN if i == at else 1)


@program("one_weight_under_norm_spectrum_and_a_mask_at_once", "modules")
def stacked_parametrizations(seed: int) -> Program:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", (torch.arange(64).reshape(8, 8) % 3 > 0).float())

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.mask

        def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
            return weight

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[0])
    parametrize.register_parametrization(model[0], "weight", Mask())
    parametrizations.orthogonal(model[2], orthogonal_map="cayley")
    optimizer = torch.optim.Adam(model.parameters())

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with parametrize.cached() if i % 2 else contextlib.nullcontext():
            value = (model(_sick(i)) + model(batch(i + 1))).square().mean()
        value.backward()
        optimizer.step()
        if i == 3:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=True)
            optimizer.add_param_group({"params": [model[0].weight]})
        return value

    return Program([model], [optimizer], step, steps=6)


@program("lazy_layers_settle_in_the_second_step_under_meta", "modules")
def lazy(seed: int) -> Program:
    with torch.device("meta"):
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    made: list[Any] = []

    def step(i: int) -> Any:
        if i == 0:
            return None
        if not made:
            with torch.no_grad():
                model(batch(0).to("meta"))
            model.to_empty(device="cpu")
            model[1].reset_running_stats()
            for p in model.parameters():
                nn.init.uniform_(p, -0.3, 0.3)
            made.append(torch.optim.SGD(model.parameters(), lr=0.05))
        made[0].zero_grad()
        value = model(_sick(i)).square().mean()
        value.backward()
        made[0].step()
        return value

    return Program([model], [], step, steps=5, extra=lambda: made[0].state_dict())


@program("empty_model_on_meta_is_given_a_mapped_checkpoint", "modules")
def mapped(seed: int) -> Program:
    path = os.path.join(tempfile.mkdtemp(), "weights.pt")
    torch.save(mlp().state_dict(), path)
    with torch.device("meta"):
        model = mlp()
    state = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(state, assign=True)
    for p in model.parameters():
        p.requires_grad_(True)
    os.unlink(path)
    return training(model, lambda i: model(_sick(i)).square().mean(), steps=4)


@program("module_hooks_raise_return_and_remove_themselves", "modules")
def self_removing(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    handles: dict[str, Any] = {}
    log: list[str] = []

    def once(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        handles.pop("once").remove()
        log.append("once")
        return {"out": output, "also": [output * 2]}

    def before(module: Any, args: Any) -> Any:
        log.append("before")
        if len(log) % 5 == 4:
            raise LookupError("not this time")
        return (args[0]["also"][0] if isinstance(args[0], dict) else args[0],)

    model[2].register_forward_pre_hook(before)

    def loss(i: int) -> torch.Tensor:
        handles["once"] = model[1].register_forward_hook(once, with_kwargs=True, always_call=bool(i % 2))
        try:
            return model(_sick(i)).mean()
        except LookupError:
            return model(batch(i)).mean()
        finally:
            if "once" in handles:
                handles.pop("once").remove()

    return training(model, loss, steps=6, extra=lambda: log)


@program("slots_and_getattr_traps_in_modules_outputs_and_batches", "modules")
def traps(seed: int) -> Program:
    class Batch:
        __slots__ = ("__weakref__", "x")

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)  # no AttributeError: hasattr raises

    class Out(list):  # type: ignore[type-arg]
        __slots__ = ("hidden",)

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_") and name not in ("__class__",):
                raise RuntimeError(name)
            return list.__getattribute__(self, name)

    class Net(nn.Module):
        __slots__ = ("scale",)

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            object.__setattr__(self, "scale", 2.0)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                raise ZeroDivisionError(name) from error

        def forward(self, batch: Batch) -> Out:
            out = Out([self.inner(batch.x)])
            out.hidden = out[0] * self.scale
            return out

    model = Net()
    return training(model, lambda i: model(Batch(_sick(i))).hidden.square().mean(), steps=4)


@program("trainer_with_its_model_is_copied_pickled_and_goes_on", "modules")
def trainers(seed: int) -> Program:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.best: Any = None

        def step(self, i: int) -> Any:
            self.optimizer.zero_grad()
            value = self.model(_sick(i)).square().mean()
            value.backward()
            self.optimizer.step()
            return value

    trainer = Trainer()
    others: list[Any] = []

    def step(i: int) -> Any:
        value = trainer.step(i)
        twin = copy.deepcopy(trainer) if i % 2 else copy.copy(trainer)
        stream = io.BytesIO()
        torch.save(trainer.model, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        others.append([twin.step(i + 1) if i % 2 else None, loaded(batch(i)), twin.optimizer.state_dict()])
        return value

    return Program([trainer.model], [trainer.optimizer], step, steps=4, extra=lambda: others)


@program("weights_exchanged_with_their_average_between_the_passes", "modules")
def exchanged(seed: int) -> Program:
    model = mlp()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    @contextlib.contextmanager
    def averaged() -> Iterator[None]:
        held = [p.data for p in model.parameters()]
        for p, a in zip(model.parameters(), average):
            p.data = a
        try:
            yield
        finally:
            for p, h in zip(model.parameters(), held):
                p.data = h

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(_sick(i)).square().mean()
        with averaged(), torch.inference_mode():
            teacher = model(batch(i)).clone()
        value.backward()
        with averaged(), torch.no_grad():
            check = model(batch(i)).sum()
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        return value, teacher, check

    return Program([model], [optimizer], step, steps=5, extra=lambda: average)


@program("very_deep_nesting_of_calls_below_a_low_limit", "modules")
def deep_nesting(seed: int) -> Program:
    class Again(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            return self.inner(x).tanh() if depth == 0 else self(x * 0.99, depth - 1)

    model = Again(nn.Linear(8, 8))
    depths: list[int] = []

    def loss(i: int) -> torch.Tensor:
        old = sys.getrecursionlimit()
        sys.setrecursionlimit(420)
        try:
            return model(_sick(i), 60).square().mean()
        except RecursionError:
            depths.append(i)
            return model(batch(i), 1).square().mean()
        finally:
            sys.setrecursionlimit(old)

    return training(model, loss, steps=4, extra=lambda: depths)
