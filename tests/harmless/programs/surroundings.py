"""A step inside modes, settings and tools of the user."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import signal
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..program import NAN, Program, batch, mlp, program, training


def _inside(context: Any, keep: Any = None, autocast: bool = False) -> Program:
    """The usual step inside a context manager, whose result `keep` reads."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().mean()

    made = training(model, loss)
    inner = made.step

    def step(i: int) -> Any:
        with context() as mode:
            value = inner(i)
        return value, keep(mode) if keep else None

    made.step = step
    return made


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionNames(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Rounding(TorchDispatchMode):
    """Changes every result, as emulation of a format does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            return out.to(torch.bfloat16).to(out.dtype)
        return out


@program("flop_counter", "modes")
def flops(seed: int) -> Program:
    return _inside(lambda: FlopCounterMode(display=False), lambda mode: mode.get_total_flops())


@program("dispatch_mode_of_the_user", "modes")
def dispatch_mode(seed: int) -> Program:
    return _inside(Names, lambda mode: None)


@program("dispatch_mode_sees_the_same_operations", "modes")
def dispatch_mode_names(seed: int) -> Program:
    return _inside(Names, lambda mode: mode.names)


@program("dispatch_mode_that_rounds", "modes")
def rounding(seed: int) -> Program:
    return _inside(Rounding)


@program("dispatch_mode_around_the_loop", "modes")
def mode_around(seed: int) -> Program:
    made = _inside(contextlib.nullcontext)

    def loop(watch: Any) -> None:
        with Rounding(), FlopCounterMode(display=False) as counter:
            for i in range(3):
                with watch.step(i):
                    value = made.step(i)
        made.see([value, counter.get_total_flops()])

    made.loop = loop
    return made


@program("dispatch_mode_entered_in_one_step_left_in_next", "modes")
def mode_across(seed: int) -> Program:
    made = _inside(contextlib.nullcontext)
    inner = made.step
    mode = Rounding()

    def step(i: int) -> Any:
        if i == 0:
            mode.__enter__()
        value = inner(i)
        if i == 1:
            mode.__exit__(None, None, None)
        return value

    made.step = step
    return made


@program("function_mode_of_the_user", "modes")
def function_mode(seed: int) -> Program:
    return _inside(FunctionNames)


@program("function_mode_sees_the_same_functions", "modes")
def function_mode_names(seed: int) -> Program:
    return _inside(FunctionNames, lambda mode: mode.names)


@program("default_device_mode", "modes")
def device_mode(seed: int) -> Program:
    return _inside(lambda: torch.device("cpu"))


@program("default_dtype_float64", "settings")
def default_dtype(seed: int) -> Program:
    torch.set_default_dtype(torch.float64)
    made = _inside(contextlib.nullcontext)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                made.see(made.step(i))
        torch.set_default_dtype(torch.float32)

    made.loop = loop
    return made


@program("default_dtype_bf16_inside_step", "settings")
def default_bf16(seed: int) -> Program:
    @contextlib.contextmanager
    def bf16() -> Any:
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    return _inside(bf16)


@program("default_device_meta_inside_step", "settings")
def default_meta(seed: int) -> Program:
    @contextlib.contextmanager
    def meta() -> Any:
        torch.set_default_device("meta")
        try:
            yield torch.empty(3)
        finally:
            torch.set_default_device(None)

    return _inside(meta, lambda made: made)


@program("deterministic_algorithms", "settings")
def deterministic(seed: int) -> Program:
    @contextlib.contextmanager
    def on() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return _inside(on, autocast=True)


@program("deterministic_fill_uninitialized", "settings")
def fill_uninitialized(seed: int) -> Program:
    @contextlib.contextmanager
    def on() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            yield torch.empty(3)
        finally:
            torch.use_deterministic_algorithms(False)

    return _inside(on, lambda made: made)


@program("anomaly_detection", "settings")
def anomaly(seed: int) -> Program:
    return _inside(torch.autograd.detect_anomaly)


@program("anomaly_detection_raises", "settings")
def anomaly_raises(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        model.zero_grad()
        with torch.autograd.detect_anomaly():
            try:
                (model(x) * 0).sqrt().sum().mul(0).backward()
            except RuntimeError as error:
                return str(error)[:60]
        return None

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)


@program("profiler_on", "settings")
def profiler(seed: int) -> Program:
    from torch.profiler import ProfilerActivity, profile

    return _inside(lambda: profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=False))


@program("warnings_as_errors", "settings")
def warnings_errors(seed: int) -> Program:
    @contextlib.contextmanager
    def strict() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    return _inside(strict, autocast=True)


@program("warnings_as_errors_with_hostile_output", "settings")
def warnings_errors_hostile(seed: int) -> Program:
    from .outputs import Hostile

    class Wrap(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Hostile(x)

    model = nn.Sequential(nn.Linear(8, 4), Wrap())

    def step(i: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.zero_grad()
            loss = model(torch.randn(4, 8)).take().square().mean()
            loss.backward()
        return loss

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)


@program("warnings_as_errors_around_everything", "settings")
def warnings_errors_around(seed: int) -> Program:
    from .tensors import Refusing

    model = mlp()
    x = torch.randn(4, 8).as_subclass(Refusing)
    y = torch.randn(4, 8)

    def step(i: int) -> Any:
        model.zero_grad()
        (model(x).square().mean()).backward()
        loss = model(y).square().mean()
        loss.backward()
        return loss

    made = Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)

    def loop(watch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(3):
                with watch.step(i):
                    value = step(i)
                made.see(value)
            watch.close()

    made.loop = loop
    return made


@program("grad_modes_inside_training", "settings")
def grad_modes(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            a = model(x)
        with torch.inference_mode():
            b = model(x)
            c = b.clone().add_(1)
        model.eval()
        with torch.set_grad_enabled(False):
            d = model(x)
        model.train()
        return (model(x) - a - b.clone() - d).square().mean() + float(c.sum())

    return training(model, loss)


@program("inference_mode_around_a_step", "settings")
def inference(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        with torch.inference_mode(i == 1):
            out = model(x)
        if i != 1:
            out.square().mean().backward()
        return out.detach().clone()

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)


@program("model_made_in_inference_mode", "settings")
def inference_model(seed: int) -> Program:
    with torch.inference_mode():
        model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        with torch.inference_mode():
            return model(x).clone()

    return Program([model], [], step)


@program("eval_steps_only", "settings")
def eval_only(seed: int) -> Program:
    model = mlp().eval()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        with torch.no_grad():
            return model(x)

    return Program([model], [], step)


@program("random_states_used_and_restored", "random")
def random_states(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def loss(i: int) -> torch.Tensor:
        state = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            noise = torch.randn(4, 8)
        x = torch.randn(4, 8) * random.random() + float(np.random.rand()) + noise
        y = model(x)
        torch.set_rng_state(state)
        return (y - model(x)).square().mean() + torch.rand(())

    return training(model, loss)


@program("dropout_and_noise_bf16", "random")
def dropout_noise(seed: int) -> Program:
    return _inside(contextlib.nullcontext, autocast=True)


@program("trace_and_profile_functions_of_the_user", "settings")
def settrace(seed: int) -> Program:
    @contextlib.contextmanager
    def traced() -> Any:
        counts = {"calls": 0}

        def profile(frame: Any, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code.co_name == "forward" and "torch/nn" in frame.f_code.co_filename:
                counts["calls"] += 1

        sys.setprofile(profile)
        try:
            yield counts
        finally:
            sys.setprofile(None)

    return _inside(traced, lambda counts: counts)


@program("signal_arrives_inside_step", "settings")
def signals(seed: int) -> Program:
    got: list[int] = []

    @contextlib.contextmanager
    def alarm() -> Any:
        before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
        try:
            yield
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    made = _inside(alarm)
    made.extra = lambda: len(got)
    return made


@program("garbage_collector_off", "settings")
def gc_off(seed: int) -> Program:
    @contextlib.contextmanager
    def off() -> Any:
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    return _inside(off, lambda _: gc.isenabled())


@program("root_logger_at_debug_with_raising_handler", "settings")
def logging_debug(seed: int) -> Program:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(f"nobody logs here: {record.name}")

    @contextlib.contextmanager
    def logged() -> Any:
        handler, logger = Raising(), logging.getLogger()
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    return _inside(logged)


@program("working_directory_changes_inside_step", "settings")
def directory(seed: int) -> Program:
    import os
    import tempfile

    @contextlib.contextmanager
    def elsewhere() -> Any:
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                yield folder
            finally:
                made.seen.append(sorted(os.listdir(folder)))
                os.chdir(before)

    made = _inside(elsewhere)
    return made


@program("nan_loss_all_the_time", "settings")
def nan_loss(seed: int) -> Program:
    model = mlp()
    x = torch.full((4, 8), float("nan"))
    return training(model, lambda i: model(x).square().mean(), steps=4)


@program("loss_explodes", "settings")
def explodes(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).pow(4).mean(), torch.optim.SGD(model.parameters(), 50.0), steps=8)


@program("loss_is_complicated_to_read", "settings")
def no_item(seed: int) -> Program:
    class NoItem(torch.Tensor):
        def item(self) -> Any:
            raise RuntimeError("no item")

        def __float__(self) -> Any:
            raise RuntimeError("no float")

    model = mlp()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean().as_subclass(NoItem))


@program("user_patches_torch_before_and_in_step", "patches")
def patches(seed: int) -> Program:
    calls: list[str] = []
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    backward, linear = torch.Tensor.backward, nn.functional.linear

    def own_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("backward")
        return backward(self, *args, **kwargs)

    def own_linear(*args: Any, **kwargs: Any) -> Any:
        calls.append("linear")
        return linear(*args, **kwargs)

    def loop(watch: Any) -> None:
        try:
            torch.Tensor.backward = own_backward
            for i in range(3):
                with watch.step(i):
                    nn.functional.linear = own_linear
                    made.see(made.step(i))
                    nn.functional.linear = linear
        finally:
            watch.close()
            torch.Tensor.backward = backward
            nn.functional.linear = linear

    made.loop = loop
    made.extra = lambda: calls
    return made


@program("user_patches_inside_and_keeps_after_close", "patches")
def patches_kept(seed: int) -> Program:
    calls: list[str] = []
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())

    def loop(watch: Any) -> None:
        with watch.step(0):
            made.see(made.step(0))
            backward = torch.Tensor.backward

            def own(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append("backward")
                return backward(self, *args, **kwargs)

            torch.Tensor.backward = own
        with watch.step(1):
            made.see(made.step(1))
        watch.close()
        made.see(made.step(2))
        made.see(torch.Tensor.backward is own)
        torch.Tensor.backward = _BACKWARD

    made.loop = loop
    made.extra = lambda: calls
    return made


_BACKWARD = torch.Tensor.backward


class _Census(TorchDispatchMode):
    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notes.append(str(func))
        return func(*args, **(kwargs or {}))


@program("census_from_hook_to_hook_of_the_optimizer", "modes")
def census_of_step(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[str]]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    modes: list[Any] = []

    def enter(*args: Any) -> None:
        modes.append(_Census(notes).__enter__())

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(lambda *args: modes.pop().__exit__(None, None, None))
    return training(model, lambda i: model(batch(i)).square().mean(), optimizer, extra=lambda: notes)


@program("census_of_backward_only", "modes")
def census_of_backward(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[str]]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i) * (NAN if i == 2 else 1)).square().mean()
        with _Census(notes):
            value.backward()
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=4, extra=lambda: notes)


@program("function_mode_refuses_looking", "modes")
def refuses_looking(seed: int) -> Program:
    """Whoever asks for the health of a tensor inside this mode ends the run."""
    asked: list[str] = []
    forbidden = {torch.isfinite, torch.isnan, torch.Tensor.isfinite, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.sum}

    class Refuses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(torch.overrides.resolve_name(func) or "?")
            if func in forbidden:
                raise PermissionError(f"{func} is forbidden")
            return func(*args, **(kwargs or {}))

    model = mlp()
    made = training(model, lambda i: model(batch(i) * (NAN if i == 2 else 1)).square().mean(), steps=4, extra=lambda: asked)
    inner = made.step

    def step(i: int) -> Any:
        with Refuses():
            return inner(i)

    made.step = step
    return made


@program("dispatch_mode_replaces_backward_results", "modes")
def replaces_backward(seed: int) -> Program:
    """Noise of its own in each product of backward: any extra operation would shift it."""
    generator = torch.Generator().manual_seed(3)

    class Noise(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                out = out + torch.randn(out.shape, generator=generator) * 0.01
            return out

    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), steps=4)
    inner = made.step

    def step(i: int) -> Any:
        with Noise():
            return inner(i)

    made.step = step
    return made
