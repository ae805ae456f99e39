"""Fourth round: optimizers, errors and objects of Python that do as they like."""

from __future__ import annotations

import builtins
import functools
import sys
import types
import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ..program import Program, mlp, program, training

NAN = float("nan")


def batch(i: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8) * (i + 1)


class _Guarded(torch.optim.Optimizer):
    """Groups made anew at each look, no attribute but its own, a step that needs the loss and gives three things back."""

    writes: ClassVar[list[str]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"nobody asks for {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        _Guarded.writes.append(name)
        super().__setattr__(name, value)

    def step(self, loss: torch.Tensor, *, metrics: dict[str, float]) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.grad
        metrics["loss"] = float(loss.detach())
        return loss, metrics, self

    def zero_grad(self, really: bool = False) -> str:  # type: ignore[override]
        super().zero_grad(set_to_none=really)
        return "done"


@program("fourth_optimizer_with_its_own_signature", "fourth optimizers")
def own_signature(seed: int) -> Program:
    _Guarded.writes.clear()
    model = mlp()
    optimizer = _Guarded(model.parameters())
    notes: list[Any] = []

    def step(i: int) -> Any:
        notes.append(optimizer.zero_grad(really=i % 2 == 0))
        value = model(batch(i)).square().mean()
        value.backward()
        metrics: dict[str, float] = {}
        loss, same, me = optimizer.step(value, metrics=metrics)
        notes.append([same is metrics, me is optimizer, metrics["loss"]])
        return loss

    return Program([model], [optimizer], step, extra=lambda: [notes, [w for w in _Guarded.writes if "hook" not in w]])


@program("fourth_groups_made_anew_at_each_look", "fourth optimizers")
def fresh_groups(seed: int) -> Program:
    class Fresh(torch.optim.SGD):
        looks = 0

        @property
        def param_groups(self) -> Any:
            return [dict(group, params=list(group["params"])) for group in self.__dict__["hidden"]]

        @param_groups.setter
        def param_groups(self, value: Any) -> None:
            self.__dict__["hidden"] = value

        def add_param_group(self, group: dict[str, Any]) -> None:
            group["params"] = list(group["params"]) if not isinstance(group["params"], torch.Tensor) else [group["params"]]
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self.__dict__["hidden"].append(group)

    model = mlp()
    return training(model, lambda i: model(batch(i)).square().mean(), Fresh(model.parameters(), lr=0.05, momentum=0.9))


@program("fourth_step_is_a_partial_of_a_static_function", "fourth optimizers")
def static_step(seed: int) -> Program:
    model = mlp()

    class Static:
        def __init__(self) -> None:
            self.param_groups = [{"params": list(model.parameters()), "lr": 0.05}]
            self.state: dict[Any, Any] = {}
            self.step = functools.partial(self.update, self)

        @staticmethod
        def update(self: Any, *, by: float = 1.0) -> None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * by)

        def zero_grad(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = None

        def state_dict(self) -> Any:
            return {}

    optimizer = Static()

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        optimizer.step(by=0.5)
        return value

    return Program([model], [optimizer], step)


@program("fourth_closure_raises_and_is_called_again", "fourth optimizers")
def closure_raises(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    calls: list[str] = []

    def step(i: int) -> Any:
        def closure() -> Any:
            calls.append("call")
            optimizer.zero_grad()
            value = model(batch(i) * (NAN if i == 3 else 1)).square().mean()
            value.backward()
            if i == 1 and len(calls) % 3 == 2:
                raise FloatingPointError("once")
            return value

        try:
            return optimizer.step(closure)
        except FloatingPointError as error:
            calls.append(str(error))
            return optimizer.step(closure) if i != 1 else None

    return Program([model], [optimizer], step, steps=5, extra=lambda: calls)


@program("fourth_backward_replaced_by_a_descriptor", "fourth optimizers")
def backward_descriptor(seed: int) -> Program:
    """The user's own Tensor.backward and autograd.backward, set inside one step and taken away inside another."""
    model, notes = mlp(), []  # type: tuple[Any, list[str]]

    class Descriptor:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __get__(self, thing: Any, kind: Any) -> Any:
            notes.append("get")
            return self if thing is None else functools.partial(self.inner, thing)

    def counted(inner: Any) -> Any:
        return lambda *args, **kwargs: (notes.append("backward"), inner(*args, **kwargs))[1]

    made = training(model, lambda i: model(batch(i)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        tensor_backward, backward = torch.Tensor.backward, torch.autograd.backward
        try:
            for i in range(6):
                with watch.step(i):
                    if i == 1:
                        torch.Tensor.backward = Descriptor(torch.Tensor.backward)  # type: ignore
                        torch.autograd.backward = counted(torch.autograd.backward)
                    made.see(made.step(i))
                    if i == 3:
                        torch.Tensor.backward = tensor_backward  # type: ignore[method-assign]
                        torch.autograd.backward = backward
            watch.close()
        finally:
            torch.Tensor.backward = tensor_backward  # type: ignore[method-assign]
            torch.autograd.backward = backward

    made.loop, made.extra = loop, lambda: notes
    return made


class _Unspeakable(Exception):
    def __init__(self, must: Any, have: Any) -> None:
        self.must = must

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__

    def with_traceback(self, tb: Any) -> Any:
        raise RuntimeError("no traceback")


@program("fourth_errors_without_words", "fourth errors")
def wordless(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def hook(m: Any, a: Any, out: Any) -> None:
        if len(notes) < 3:
            raise _Unspeakable(1, 2)

    model[1].register_forward_hook(hook)
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=5)

    def loop(watch: Any) -> None:
        for i in range(6):
            try:
                with watch.step(i):
                    made.see(made.step(i))
            except _Unspeakable as error:
                here, depth = error.__traceback__, 0
                while here is not None:
                    depth += here.tb_frame.f_code.co_filename == __file__
                    here = here.tb_next
                notes.append([depth, error.__cause__ is None, error.__context__ is None, getattr(error, "__notes__", None)])

    made.loop, made.extra = loop, lambda: notes
    return made


@program("fourth_groups_of_errors_and_a_lone_stop_iteration", "fourth errors")
def groups_of_errors(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    group = getattr(builtins, "BaseExceptionGroup", lambda words, errors: errors[0])  # Python 3.10 has none
    errors: list[BaseException] = [
        group("several", [KeyboardInterrupt("a"), ValueError("b")]),
        StopIteration(7),
        StopAsyncIteration(8),
        MemoryError("no more"),
        RecursionError("too deep"),
        SystemExit(None),
    ]

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))
        if i < len(errors):
            raise errors[i]
        return out.square().mean()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        for i in range(8):
            try:
                with watch.step(i):
                    made.see(made.step(i))
            except BaseException as error:  # noqa: BLE001
                notes.append([type(error).__name__, error is errors[i], error.__context__ is None])

    made.loop, made.extra = loop, lambda: notes
    return made


@program("fourth_memory_error_in_every_place_once", "fourth errors")
def memory_errors(seed: int) -> Program:
    """An allocation that cannot be: the user catches it, halves the batch and goes on."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def loss(i: int) -> torch.Tensor:
        try:
            model[0](torch.empty(1 << 46, 8, device="cpu") if i == 1 else batch(i).expand(1 << 44, 4, 8))
        except RuntimeError as error:
            notes.append(str(error)[:60])
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: notes)


@program("fourth_frames_are_traced_line_by_line", "fourth tracing")
def line_by_line(seed: int) -> Program:
    """A debugger's view of this file: each line as often, in the same order, with the tracer still there."""
    model, lines = mlp(), []  # type: tuple[Any, list[int]]
    here = __file__

    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.sum()

    last = Steps()

    def loss(i: int) -> torch.Tensor:
        return last(model(batch(i) * (NAN if i == 2 else 1)))

    made = training(model, loss, steps=4)

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == here and frame.f_code.co_name in ("forward", "loss"):
            lines.append(frame.f_lineno)
            return tracer
        return None

    def loop(watch: Any) -> None:
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            for i in range(4):
                with watch.step(i):
                    made.see(made.step(i))
                made.see(sys.gettrace() is tracer)
        finally:
            sys.settrace(before)

    made.loop, made.extra = loop, lambda: lines
    return made


@program("fourth_loader_of_a_thread_and_endless_rows", "fourth data")
def endless_rows(seed: int) -> Program:
    class Endless(IterableDataset):  # type: ignore[type-arg]
        asked = 0

        def __iter__(self) -> Any:
            while True:
                self.asked += 1
                yield torch.rand(8)

        def __len__(self) -> int:
            raise TypeError("endless")

    rows = Endless()
    loader = DataLoader(rows, batch_size=4)
    model = mlp()
    stream = iter(loader)
    return training(model, lambda i: model(next(stream)).square().mean(), steps=5, extra=lambda: rows.asked)


@program("fourth_batch_objects_that_count_looks", "fourth data")
def counted_looks(seed: int) -> Program:
    looks: list[str] = []

    class Batch:
        def __init__(self, x: torch.Tensor) -> None:
            object.__setattr__(self, "hidden", x)

        def __getattribute__(self, name: str) -> Any:
            if name not in ("__class__",):
                looks.append(name)
            return object.__getattribute__(self, name)

        def __iter__(self) -> Any:
            looks.append("iter")
            raise RuntimeError("do not iterate")

        def __len__(self) -> int:
            looks.append("len")
            raise RuntimeError("do not count")

        def __eq__(self, other: Any) -> Any:
            looks.append("eq")
            raise RuntimeError("do not compare")

        def __hash__(self) -> int:
            looks.append("hash")
            raise RuntimeError("do not hash")

        def __bool__(self) -> bool:
            looks.append("bool")
            raise RuntimeError("neither")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, given: Any) -> Any:
            return Batch(self.inner(given.hidden))

    model = Net()

    def loss(i: int) -> torch.Tensor:
        return model(Batch(batch(i) * (NAN if i == 2 else 1))).hidden.square().mean()

    return training(model, loss, steps=5, extra=lambda: looks)


@program("fourth_modules_type_is_replaced_under_a_name", "fourth objects")
def fake_module(seed: int) -> Program:
    """The model is a module whose parameters() is a generator that ends in an error, and whose name lookup lies."""

    class Liar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.asked = 0

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            yield from super().named_modules(*args, **kwargs)
            if self.training and self.asked:
                raise RuntimeError("that was all")

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            yield from super().named_parameters(*args, **kwargs)
            if self.asked == 1:
                raise RuntimeError("that was all")

        def get_submodule(self, target: str) -> Any:
            raise RuntimeError("no such thing")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Liar()
    optimizer = torch.optim.SGD(model.inner.parameters(), 0.05)

    def loss(i: int) -> torch.Tensor:
        model.asked = 1
        return model(batch(i) * (NAN if i == 2 else 1)).square().mean()

    made = training(model, loss, optimizer, steps=5)
    inner = made.state

    def state() -> Any:
        model.asked = 0
        return inner()

    made.state = state  # type: ignore[method-assign]
    return made


@program("fourth_callbacks_of_weak_references_run_torch", "fourth objects")
def callbacks(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[float]]

    def loss(i: int) -> torch.Tensor:
        out = model[0](batch(i))
        loss.refs.append(weakref.ref(out, lambda r: notes.append(float(torch.rand(())))))  # type: ignore[attr-defined]
        return model[2](model[1](out)).square().mean()

    loss.refs = []  # type: ignore[attr-defined]
    return training(model, loss, steps=4, extra=lambda: notes)


@program("fourth_model_is_made_by_types", "fourth objects")
def made_by_types(seed: int) -> Program:
    """Classes without a module, a file or a qualified name, and methods bound to somebody else."""
    made_class = types.new_class("", (nn.Linear,), {}, lambda ns: ns.update(__module__=None, __qualname__="", __doc__=7))
    model = nn.Sequential(made_class(8, 8), nn.ReLU(), made_class(8, 4))
    other = nn.Linear(8, 8)
    model[0].forward = types.MethodType(nn.Linear.forward, other)
    return training(model, lambda i: model(batch(i) * (NAN if i == 2 else 1)).square().mean(), steps=4)


@program("fourth_generators_of_steps_left_open_everywhere", "fourth objects")
def open_generators(seed: int) -> Program:
    """Each step is a generator that pauses in forward, in backward's hook and before the update; some are never ended."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)

    def one(watch: Any, i: int) -> Any:
        with watch.step(i):
            optimizer.zero_grad()
            x = model[0](batch(i))
            yield
            value = model[2](model[1](x)).square().mean()
            yield
            value.backward()
            yield
            optimizer.step()
            made.see(value)

    def loop(watch: Any) -> None:
        kept = []
        for i in range(8):
            frame = one(watch, i)
            for _ in range(4 if i % 2 else i // 2 + 1):
                next(frame, None)
            kept.append(frame)
        kept[0].close()
        del kept[2:]
        for frame in kept:
            frame.close()

    made.loop = loop
    return made
