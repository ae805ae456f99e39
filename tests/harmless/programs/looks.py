"""Programs that look at themselves and at what is on: frames, modes, referrers, the collector, what lies about in the heap."""

from __future__ import annotations

import bdb
import gc
import io
import sys
import threading
import unittest
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from ..program import NAN, Program, batch, mlp, program, sick, training


@program("asks_torch_which_modes_and_states_are_on", "looks")
def asks(seed: int) -> Program:
    seen: list[Any] = []

    def look() -> None:
        seen.append(
            [
                torch._C._len_torch_function_stack(), type(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)),
                torch._C._is_torch_function_mode_enabled(), torch._C._is_torch_function_enabled(), torch.jit.is_tracing(),
                torch.compiler.is_compiling(), torch._C._get_tracing_state() is None, torch.is_anomaly_enabled(),
                torch._C._current_graph_task_id() != -1, torch._C._autograd._profiler_enabled(), torch.is_grad_enabled(),
                str(torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()), torch.get_num_threads(),
                str(torch.overrides._get_current_function_mode()), sys.gettrace() is None, sys.getprofile() is None,
                threading.active_count() < 100, gc.isenabled(), sys.getrecursionlimit(),
            ]
        )  # fmt: skip

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            look()
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda grad: look())
            return out * (1 + torch._C._len_torch_function_stack())

    model = nn.Sequential(Looks(8, 8), nn.ReLU(), Looks(8, 2))
    return training(model, lambda i: model(sick(i)).square().mean(), steps=5, extra=lambda: seen)


@program("counts_the_dispatch_modes_that_are_on", "looks")
def counts_modes(seed: int) -> Program:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + torch._C._len_torch_dispatch_stack())

    model = nn.Sequential(Counts(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return training(model, lambda i: model(sick(i)).square().mean(), steps=5)


@program("referrers_and_ages_of_its_own_tensors", "looks")
def referrers(seed: int) -> Program:
    seen: list[Any] = []
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        x = sick(i)
        out = model(x)
        value = out.mean()
        seen.append([sys.getrefcount(x), sys.getrefcount(out), sys.getrefcount(value), out._version, x._version])
        value.backward()
        optimizer.step()
        seen.append([sys.getrefcount(x), sys.getrefcount(out), sys.getrefcount(value)])
        seen.append([x.untyped_storage()._use_count() if hasattr(x.untyped_storage(), "_use_count") else 0, out._use_count()])
        gone = weakref.ref(out)
        del out
        seen.append([gone() is None])
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: seen)


@program("tensor_rises_from_the_dead", "looks")
def resurrected(seed: int) -> Program:
    kept: list[Any] = []

    class Risen(torch.Tensor):
        def __del__(self) -> None:
            if len(kept) < 6:
                kept.append(self)

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).as_subclass(Risen)  # type: ignore[arg-type]

    model = nn.Sequential(Layer(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def loss(i: int) -> torch.Tensor:
        out = model(sick(i)).square().mean()
        return out + sum(float(one.detach().nan_to_num().sum()) for one in kept[:2]) * 0.001

    return training(model, loss, steps=5, extra=lambda: len(kept))


@program("under_a_debugger_that_stops_at_each_line", "looks")
def debugger(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    lines: list[int] = []

    class Stops(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            if frame.f_code.co_filename == __file__:
                lines.append(frame.f_lineno)
            self.set_step()

        def user_exception(self, frame: Any, error: Any) -> None:
            if frame.f_code.co_filename == __file__:
                lines.append(-frame.f_lineno)

    def one(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        try:
            if i == 1:
                raise LookupError(i)
        except LookupError:
            value = value * 2
        value.backward()
        optimizer.step()
        return value

    made = Program([model], [optimizer], one, extra=lambda: lines)

    def loop(watch: Any) -> None:
        for i in range(4):
            with watch.step(i):
                made.see(Stops(skip=["torch*", "nanny*"]).runcall(one, i))

    made.loop = loop
    return made


@program("as_a_test_case_with_warnings_and_subtests", "looks")
def test_case(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    counts: list[Any] = []
    made = Program([model], [optimizer], lambda i: None, extra=lambda: counts)

    def loop(watch: Any) -> None:
        class Case(unittest.TestCase):
            def test_all(self) -> None:
                for i in range(5):
                    with self.subTest(i=i), self.assertWarns(UserWarning) as caught, self.assertNoLogs("torch", "DEBUG"):
                        with watch.step(i):
                            optimizer.zero_grad()
                            value = model(sick(i)).mean()
                            warnings.warn("mine", stacklevel=1)
                            value.backward()
                            optimizer.step()
                            made.see(value)
                            assert bool(value.isfinite())
                        counts.append(str(caught.warning))

        result = unittest.TextTestRunner(io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
        counts.append([result.testsRun, len(result.failures), len(result.errors)])

    made.loop = loop
    return made


@program("frames_are_traced_line_by_line", "tracing")
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


class _LazyProxy:
    """What lazy imports and thread-local proxies are: to ask for the class loads the thing."""

    loaded = 0

    @property
    def __class__(self) -> Any:
        _LazyProxy.loaded += 1
        return dict

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AttributeError


class _BrokenProxy:
    asked = 0

    @property
    def __class__(self) -> Any:
        _BrokenProxy.asked += 1
        raise RuntimeError("working outside of a request")


@program("lazy_proxies_lie_about_in_the_heap", "heap")
def proxies(seed: int) -> Program:
    _LazyProxy.loaded = _BrokenProxy.asked = 0
    model = mlp()
    things: list[Any] = [_LazyProxy() for _ in range(50)] + [_BrokenProxy() for _ in range(50)]
    for thing in things:
        thing.__dict__["itself"] = thing
    return training(
        model,
        lambda i: model(torch.full((2, 8), float("nan") if i == 2 else 1.0)).sum(),
        steps=4,
        extra=lambda: (len(things), _LazyProxy.loaded, _BrokenProxy.asked),
    )


@program("dead_weak_proxies_in_lists_and_frames", "heap")
def dead_proxies(seed: int) -> Program:
    model = mlp()
    dead = weakref.proxy(nn.Linear(2, 2))
    rows = [dead, {"x": dead}, (dead, [dead])]
    model.notes = rows  # type: ignore[assignment]
    return training(model, lambda i: model(torch.ones(2, 8)).sum(), extra=lambda: len(rows))


@program("collector_debugs_and_has_callbacks", "heap")
def collector(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []
    found: list[str] = []

    def look(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            gc.callbacks.append(look)
        if i == 2:
            gc.callbacks.remove(look)
        notes.append((gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count() > 0))
        return model(torch.ones(2, 8)).sum()

    return training(model, loss, extra=lambda: notes)


@program("finalizers_and_refcounts_of_parameters", "heap")
def finalizers(seed: int) -> Program:
    model = mlp()
    gone: list[int] = []

    def loss(i: int) -> torch.Tensor:
        old = model[0].weight
        model[0].weight = nn.Parameter(old.detach().clone())
        weakref.finalize(model[0].weight, gone.append, i)
        return model(torch.ones(2, 8)).sum()

    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    return training(model, loss, optimizer, steps=4, extra=lambda: gone)
