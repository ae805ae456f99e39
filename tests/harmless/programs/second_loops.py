"""Loops around the steps: overlapping contexts, several tools, odd numbers, models that vanish."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..program import Program, mlp, program, training


def _usual(**more: Any) -> tuple[Program, nn.Module, torch.Tensor]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4)), torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), **more), model, x


def _dispatch() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Dispatch()


def _function() -> Any:
    from torch.overrides import TorchFunctionMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Function()


_CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "dispatch_mode": _dispatch,
    "function_mode": _function,
    "device": lambda: torch.device("cpu"),
    "fork_rng": lambda: torch.random.fork_rng(),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "catch_warnings": lambda: warnings.catch_warnings(),
    "warnings_recorded": lambda: warnings.catch_warnings(record=True),
    "redirect_stderr": lambda: contextlib.redirect_stderr(io.StringIO()),
    "cached_parametrizations": lambda: nn.utils.parametrize.cached(),
    "enable_grad": lambda: torch.enable_grad(),
    "profile": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "deterministic_attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "bottleneck_no_mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}

for _name, _context in _CONTEXTS.items():

    @program(f"second_overlaps_with_{_name}", "second: loops")
    def overlaps(seed: int, context: Any = _context) -> Program:
        """The context is entered before a step and left inside it, entered inside one and left after it, in turn."""
        made, _model, _x = _usual()

        def loop(watch: Any) -> None:
            for i in range(4):
                other = context()
                if i % 2:
                    other.__enter__()
                    watch.begin(i)
                    value = made.step(i)
                    other.__exit__(None, None, None)
                    made.step(i)
                    watch.end()
                else:
                    watch.begin(i)
                    other.__enter__()
                    value = made.step(i)
                    watch.end()
                    made.step(i)
                    other.__exit__(None, None, None)
                made.see(value)
            made.see([torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled()])

        made.loop = loop
        return made


@program("second_odd_step_numbers", "second: loops")
def odd_numbers(seed: int) -> Program:
    """Step numbers are numpy integers, booleans, 0-dimensional tensors, negative, huge, and go backwards."""
    made, _, _ = _usual()

    def loop(watch: Any) -> None:
        for i in (np.int64(3), np.uint8(255), True, -1, 2**40, 0, np.int32(-5), 2**70, torch.tensor(7).item()):
            with watch.step(i):
                value = made.step(0)
            made.see(value)

    made.loop = loop
    return made


@program("second_tools_close_in_the_wrong_order", "second: loops")
def wrong_order(seed: int) -> Program:
    """Three tools on one model and optimizer overlap like bricks: begin A, begin B, end A, begin C, close A, end B ..."""
    made, model, _x = _usual()
    optimizer = made.optimizers[0]

    def loop(watch: Any) -> None:
        a, b, c = watch.another(model, optimizer), watch.another(model, optimizer), watch.another(model[0])
        a.begin(0)
        made.see(made.step(0))
        b.begin(0)
        made.see(made.step(1))
        a.end()
        c.begin(0)
        made.see(made.step(2))
        a.close()
        made.see(made.step(3))
        with watch.step(0):
            b.end()
            c.end()
            made.see(made.step(4))
            c.close()
        b.close()
        made.see(made.step(5))
        watch.close()
        made.see(made.step(6))
        made.see([sorted(vars(optimizer)), [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]])

    made.loop = loop
    return made


@program("second_tool_on_parent_and_on_child", "second: loops")
def parent_and_child(seed: int) -> Program:
    """One tool watches the model, others its submodules; the child's steps are nested in the parent's and last longer."""
    made, model, _x = _usual()

    def loop(watch: Any) -> None:
        children = [watch.another(m) for m in model]
        for i in range(3):
            with contextlib.ExitStack() as stack:
                stack.enter_context(watch.step(i))
                for child in children:
                    stack.enter_context(child.step(i))
                value = made.step(i)
                rest = stack.pop_all()
            made.see(value)
            made.step(i)
            rest.close()
        for child in children[::-1]:
            child.close()

    made.loop = loop
    return made


@program("second_model_vanishes_before_close", "second: loops")
def vanishes(seed: int) -> Program:
    """The user drops model and optimizer while the tool is open, makes others, and closes much later."""
    made, _, _ = _usual()
    made.step = lambda i: None
    made.models.clear()
    made.optimizers.clear()
    model = mlp()
    made.models.append(model)
    x = torch.randn(4, 8)
    box = [model, torch.optim.SGD(model.parameters(), 0.1)]
    del model

    def train() -> Any:
        box[1].zero_grad()
        loss = box[0](x).square().mean()
        loss.backward()
        box[1].step()
        return loss

    def loop(watch: Any) -> None:
        with watch.step(0):
            made.see(train())
            made.models.clear()
            box.clear()
            gc.collect()
        with watch.step(1):
            fresh = mlp()
            box.extend([fresh, torch.optim.SGD(fresh.parameters(), 0.1)])
            made.see(train())
        watch.close()
        made.see(train())
        made.models.append(box[0])

    made.loop = loop
    return made


@program("second_begin_forward_and_end_in_three_threads", "second: loops")
def three_threads(seed: int) -> Program:
    """begin, forward, backward and end of each step happen in four different threads, one after another."""
    made, model, x = _usual()
    optimizer = made.optimizers[0]

    def run(function: Callable[[], Any]) -> Any:
        box: list[Any] = []
        thread = threading.Thread(target=lambda: box.append(function()))
        thread.start()
        thread.join()
        return box[0]

    def loop(watch: Any) -> None:
        for i in range(3):
            run(lambda: watch.begin(i))  # noqa: B023
            optimizer.zero_grad()
            loss = run(lambda: model(x).square().mean())
            run(lambda: loss.backward())  # noqa: B023
            run(lambda: optimizer.step())
            run(lambda: watch.end())
            made.see(loss)
        run(watch.close)

    made.loop = loop
    return made


@program("second_generator_with_open_step_collected_elsewhere", "second: loops")
def collected(seed: int) -> Program:
    """Generators hold steps open; one is closed by the collector in another thread, one is closed by hand out of order."""
    made, _, _ = _usual()

    def steps(watch: Any, first: int) -> Iterator[Any]:
        for i in range(first, first + 3):
            with watch.step(i):
                yield made.step(i)

    def loop(watch: Any) -> None:
        one, two = steps(watch, 0), steps(watch, 10)
        made.see(next(one))
        made.see(next(two))
        made.see(next(one))
        one.close()
        made.see(next(two))
        box = [two]
        del two

        def drop() -> None:
            box.clear()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        made.see(made.step(20))
        for value in steps(watch, 30):
            made.see(value)

    made.loop = loop
    return made


@program("second_tool_objects_pickled_and_inspected", "second: loops")
def inspected(seed: int) -> Program:
    """Inside a step the user pickles model and optimizer, prints everything, and walks all objects of the collector."""
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        again_model, again_optimizer = pickle.loads(pickle.dumps((model, made.optimizers[0])))
        loss = again_model.eval()(x).mean()
        loss.backward()
        again_optimizer.step()
        alive = sum(isinstance(thing, nn.Linear) for thing in gc.get_objects())
        text = [repr(model), repr(made.optimizers[0])]
        return value, loss, alive > 0, text, list(again_model.parameters())

    made.step = step
    return made


@program("second_whole_model_saved_and_loaded_in_step", "second: loops")
def saved_whole(seed: int) -> Program:
    """torch.save of the whole model and optimizer inside a step; the bytes of the state_dict part are compared, the copy runs."""
    made, model, x = _usual()
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        file = io.BytesIO()
        torch.save({"model": model, "optimizer": made.optimizers[0]}, file)
        size = len(file.getvalue())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        hooks = sum(len(m._forward_hooks) for m in twin["model"].modules())
        state = io.BytesIO()
        torch.save(model.state_dict(), state)
        return value, twin["model"].eval()(x), len(state.getvalue()), size > 0, hooks >= 0, sorted(vars(twin["model"]))

    made.step = step
    return made


@program("second_evaluation_between_and_inside", "second: loops")
def evaluation(seed: int) -> Program:
    """Evaluation in eval mode, under inference_mode, with other batch sizes, between micro-steps of an open step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    made = training(model, lambda i: model(x).square().mean())

    def evaluate() -> Any:
        model.eval()
        with torch.inference_mode():
            value = [model(torch.randn(n, 8)).sum() for n in (1, 9)]
        model.train()
        return value

    def loop(watch: Any) -> None:
        made.see(evaluate())
        for i in range(3):
            with watch.step(i):
                before = evaluate()
                value = made.step(i)
                after = evaluate()
            made.see([before, value, after, evaluate()])

    made.loop = loop
    return made


@program("second_step_reentered_from_a_hook", "second: loops")
def reentered(seed: int) -> Program:
    """A gradient hook begins and ends a step of the same tool and of another while a step is open and backward runs."""
    made, model, x = _usual()
    optimizer = made.optimizers[0]

    def loop(watch: Any) -> None:
        other = watch.another(model[0])

        def hook(grad: torch.Tensor) -> torch.Tensor:
            with other.step(100), torch.enable_grad():
                model[0](x).sum()
            return grad * 0.5

        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                h = model[0](x)
                h.register_hook(hook)
                loss = model[3](h).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)

    made.loop = loop
    return made


@program("second_inference_mode_left_inside_step", "second: loops")
def inference_left(seed: int) -> Program:
    """A step begins under inference_mode or no_grad, which ends inside; another begins normally and ends under it."""
    made, model, x = _usual()

    def loop(watch: Any) -> None:
        for i, kind in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)):
            context = kind()
            if i < 2:
                context.__enter__()
                watch.begin(i)
                made.see(model(x))
                context.__exit__(None, None, None)
                made.see(made.step(i))
                watch.end()
            else:
                watch.begin(i)
                made.see(made.step(i))
                context.__enter__()
                made.see(model(x))
                watch.end()
                context.__exit__(None, None, None)
            made.see([torch.is_grad_enabled(), torch.is_inference_mode_enabled()])

    made.loop = loop
    return made


@program("second_all_gradients_in_inference_mode_tensors", "second: loops")
def inference_tensors(seed: int) -> Program:
    """Inputs, buffers and a gradient are inference tensors, whose versions cannot be read and which refuse in-place."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.inference_mode():
        scale = torch.full((8,), 0.5)
        x = torch.randn(4, 8)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> Any:
            return {"scale": self.scale, "y": x.clone() * 1.0}

    model.append(Scaled())
    optimizer = torch.optim.SGD(list(model[:2].parameters()), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.inference_mode():
            out = model[2](x)
        h = model[0](out["y"].clone())
        loss = model[1](h).square().mean()
        loss.backward()
        with torch.inference_mode():
            frozen = model[0].weight.grad * 0.5
        model[0].weight.grad = frozen.clone()
        optimizer.step()
        return loss, out["scale"].is_inference()

    return Program([model], [optimizer], step)
