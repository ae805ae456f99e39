"""Classes and objects of Python that do as they like: without names, with traps, with calls and signatures of their own."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import operator
import os
import sys
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..program import NAN, Program, batch, mlp, program, sick, training
from .effects import BAD_GRADIENT, BAD_LOSS, _given, _loss_of, _with_bad_steps


@program("arguments_named_like_those_of_hooks", "signatures")
def hook_names(seed: int) -> Program:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(
            own, /, x: torch.Tensor, *rest: Any, self: Any = 1, module: Any = 2, input: Any = 3, output: Any = 4,
            args: Any = 5, kwargs: Any = 6, result: Any = 7, func: Any = 8, step: Any = 9, name: Any = 10, **more: Any,
        ) -> Any:  # fmt: skip
            total = own.inner(x) * (module + input + output + args + kwargs + result + func + step + name)
            return {"x": total + sum(more.values()), "rest": rest}

    class Mapping(collections.UserDict):  # type: ignore[type-arg]
        pass

    model = Named()
    inside = functools.partial(model.__call__, module=1)

    def loss(i: int) -> torch.Tensor:
        one = model(
            sick(i), None, ..., **Mapping(module=1, input=2, output=3, args=1, kwargs=2, result=1, func=1, step=i, name=1)
        )
        two = inside(batch(i), hook=1, fn=2, cls=3, tensor=4, forward=5, callback=torch.ones(()))
        return (one["x"] + two["x"]).square().mean()

    return training(model, loss, steps=4)


class _Counted:
    """A descriptor that gives another function each time it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __get__(self, thing: Any, kind: Any = None) -> Any:
        if thing is None:
            return self
        self.reads += 1
        sign = -1 if self.reads % 2 else 1
        return lambda x: thing.inner(x) * sign


@program("forward_differs_each_time_it_is_read", "signatures")
def read_forward(seed: int) -> Program:
    counted = _Counted()

    class Moody(nn.Module):
        forward = counted

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

    model = nn.Sequential(Moody(), nn.ReLU())
    return training(model, lambda i: model(sick(i)).sum(), steps=5, extra=lambda: counted.reads)


class _Jealous(type(nn.Module)):  # type: ignore[misc]
    asked = 0

    def __instancecheck__(cls, thing: Any) -> bool:
        _Jealous.asked += 1
        return super().__instancecheck__(thing)

    def __subclasscheck__(cls, kind: Any) -> bool:
        raise TypeError("nobody asks for my subclasses")


@program("classes_refuse_subclasses_and_questions", "classes")
def refuse_subclasses(seed: int) -> Program:
    _Jealous.asked = 0

    def final(cls: Any, **more: Any) -> None:
        raise TypeError(f"{cls.__name__} derives from a class that is final")

    class Layer(nn.Linear, metaclass=_Jealous):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise TypeError("my class is mine")
            super().__setattr__(name, value)

    class Step(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

        def __setattr__(self, name: str, value: Any) -> None:
            if vars(self).get("closed"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    class Scale(torch.amp.GradScaler):
        __hash__ = None  # type: ignore[assignment]

        def __setattr__(self, name: str, value: Any) -> None:
            if vars(self).get("closed") and not name.startswith("_"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    for kind in (Layer, Step, Scale):
        kind.__init_subclass__ = classmethod(final)  # type: ignore[method-assign, assignment]
    model = nn.Sequential(Layer(8, 8), nn.ReLU(), Layer(8, 2))
    optimizer, scaler = Step(model.parameters(), 0.05), Scale("cpu", init_scale=256.0)
    optimizer.closed = scaler.closed = True

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    return Program([model], [optimizer], step, steps=5, scaler=scaler, extra=lambda: _Jealous.asked)


@program("modules_that_are_also_dictionaries_errors_and_threads", "classes")
def two_things(seed: int) -> Program:
    class Cache(nn.Linear, dict):  # type: ignore[misc]
        __hash__ = object.__hash__

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self[len(self)] = float(x.detach().sum())
            return super().forward(x)

    class Failing(nn.Linear, ValueError):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.args:
                self.args = (1,)
                raise self
            return super().forward(x)

    class Around(nn.Module, contextlib.ContextDecorator):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.depth = 0

        def __enter__(self) -> Around:
            self.depth += 1
            return self

        def __exit__(self, *error: Any) -> bool:
            self.depth -= 1
            return isinstance(error[1], ValueError)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.depth

    cache, failing, around = Cache(8, 8), Failing(8, 8), Around()
    model = nn.ModuleList([cache, failing, around])

    def loss(i: int) -> torch.Tensor:
        out = cache(sick(i))
        with around:
            out = failing(out)
        with around:
            return around(out).mean()

    return training(model, loss, torch.optim.Adam(model.parameters()), steps=5, extra=lambda: [dict(cache), len(failing.args)])


@program("call_is_made_of_other_callables", "classes")
def odd_calls(seed: int) -> Program:
    class Twice(nn.Linear):
        def _run(self, times: int, x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                x = nn.Module.__call__(self, x).tanh()
            return x

        __call__ = functools.partialmethod(_run, 2)  # type: ignore[assignment]

    class Chosen(nn.Linear):
        @functools.singledispatchmethod
        def forward(self, x: Any) -> Any:
            raise TypeError(type(x).__name__)

        @forward.register
        def _(self, x: torch.Tensor) -> Any:
            return F.linear(x, self.weight, self.bias)

        @forward.register
        def _(self, x: list) -> Any:  # type: ignore[type-arg]
            return [self(one) for one in x]

    class Called(nn.Linear):
        __call__ = property(lambda self: operator.methodcaller("forward", batch(1)).__call__)  # type: ignore[assignment]

    model = nn.Sequential(Twice(8, 8), Chosen(8, 8), Called(8, 8))

    def loss(i: int) -> torch.Tensor:
        x = model[0](sick(i))
        one, (two, three) = model[1](x), model[1]([x, x + 1])
        with contextlib.suppress(TypeError):
            model[1]("x")
        return (one + two + three).mean() + model[2].forward(x).mean()

    return training(model, loss, steps=4)


@program("modules_type_is_replaced_under_a_name", "objects")
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


@program("callbacks_of_weak_references_run_torch", "objects")
def callbacks(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[float]]

    def loss(i: int) -> torch.Tensor:
        out = model[0](batch(i))
        loss.refs.append(weakref.ref(out, lambda r: notes.append(float(torch.rand(())))))  # type: ignore[attr-defined]
        return model[2](model[1](out)).square().mean()

    loss.refs = []  # type: ignore[attr-defined]
    return training(model, loss, steps=4, extra=lambda: notes)


@program("model_is_made_by_types", "objects")
def made_by_types(seed: int) -> Program:
    """Classes without a module, a file or a qualified name, and methods bound to somebody else."""
    made_class = types.new_class("", (nn.Linear,), {}, lambda ns: ns.update(__module__=None, __qualname__="", __doc__=7))
    model = nn.Sequential(made_class(8, 8), nn.ReLU(), made_class(8, 4))
    other = nn.Linear(8, 8)
    model[0].forward = types.MethodType(nn.Linear.forward, other)
    return training(model, lambda i: model(batch(i) * (NAN if i == 2 else 1)).square().mean(), steps=4)


@program("generators_of_steps_left_open_everywhere", "objects")
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


@program("profilers_of_python_and_torch_around_a_step", "python")
def profilers(seed: int) -> Program:
    """cProfile-like counting of the program's own functions, and torch's profiler with stacks, schedules and callbacks."""
    model, calls = mlp(), []  # type: tuple[Any, collections.Counter[str]]
    calls = collections.Counter()
    here = (__file__, _with_bad_steps.__code__.co_filename)

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename in here:
            calls[frame.f_code.co_name] += 1

    made = _with_bad_steps(model, lambda: dict(calls))

    def loop(watch: Any) -> None:
        ready: list[int] = []
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
        with torch.profiler.profile(schedule=schedule, with_stack=True, on_trace_ready=lambda p: ready.append(p.step_num)) as one:
            for i in range(8):
                sys.setprofile(count)
                try:
                    with watch.step(i):
                        value = made.step(i)
                finally:
                    sys.setprofile(None)
                made.see(value)
                one.step()
        made.seen.append(ready)

    made.loop = loop
    return made


@program("functions_handled_by_a_mode_on_bad_steps", "python")
def function_mode(seed: int) -> Program:
    """A mode of the program's own, on only inside forward, counts functions and replaces one of them."""
    calls: collections.Counter[str] = collections.Counter()

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[getattr(func, "__name__", "")] += 1
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is F.linear else out

    class Moded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with Mode():
                return self.inner(x)

    return _with_bad_steps(Moded(), lambda: dict(calls))


class Tagged(nn.Parameter):
    """A parameter of a class of its own, with a memory of how often it was used."""

    used: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is F.linear:
            for one in args:
                if isinstance(one, Tagged):
                    one.used = getattr(one, "used", 0) + 1
        return out


@program("parameters_remember_their_uses", "python")
def tagged(seed: int) -> Program:
    model = mlp()
    for part in (model[0], model[2]):
        part.weight = Tagged(part.weight.detach())
    return _with_bad_steps(model, lambda: [getattr(p, "used", 0) for p in model.parameters()])


@program("step_inside_an_executor_and_its_context", "python")
def in_executor(seed: int) -> Program:
    """Forward runs in a pool's thread under a copied context, backward in the main one; futures carry the loss."""

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for i in range(8):
                with watch.step(i):
                    optimizer.zero_grad()
                    context = contextvars.copy_context()
                    value = pool.submit(context.run, lambda i=i: _loss_of(model(_given(i)), i)).result()
                    if i % 2:
                        value.backward()
                    else:
                        pool.submit(value.backward).result()
                    if i not in (*BAD_LOSS, BAD_GRADIENT):
                        optimizer.step()
                made.see(value)

    made.loop = loop
    return made


@program("named_and_lazy_parts_that_settle_on_a_bad_step", "python")
def lazy(seed: int) -> Program:
    """A part is made when it is first called, at a step that goes wrong; hooks of lazy modules take themselves away."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 4))

    def loss(i: int) -> torch.Tensor:
        if i == BAD_LOSS[0]:
            torch.manual_seed(5)
            model[1] = nn.LazyLinear(8)
        value = _loss_of(model(_given(i)), i)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        return value

    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=8)


@program("bad_steps_in_channels_last_and_autocast", "python")
def channels_last(seed: int) -> Program:
    """Strides of weights, gradients and outputs are those of the program, on bad steps too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 4, 3, stride=2))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    strides: list[Any] = []

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x * (NAN if i in BAD_LOSS else 1))
        strides.append([out.stride()])
        value = _loss_of(out.float(), i)
        value.backward()
        strides[-1] += [p.grad.stride() for p in model.parameters()]
        if i not in (*BAD_LOSS, BAD_GRADIENT):
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=8, extra=lambda: strides)


class _Nameless(type):
    training = False

    def __getattribute__(cls, name: str) -> Any:
        if _Nameless.training and name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("a class without a name")
        return super().__getattribute__(name)

    def __repr__(cls) -> str:
        raise RuntimeError("a class without words")


class _NamelessModule(nn.Module, metaclass=_Nameless):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def __repr__(self) -> str:
        raise RuntimeError("a module without words")

    def extra_repr(self) -> str:
        raise RuntimeError("a module without words")


@program("classes_without_names", "objects")
def nameless(seed: int) -> Program:
    model = nn.Sequential(_NamelessModule(), nn.ReLU(), _NamelessModule())
    made = training(model, lambda i: model(torch.full((2, 8), float("nan") if i == 2 else 1.0)).sum())

    def loop(watch: Any) -> None:
        _Nameless.training = True
        try:
            for i in range(4):
                with watch.step(i):
                    made.step(i)
        finally:
            _Nameless.training = False

    made.loop = loop
    return made


@dataclasses.dataclass(eq=False)
class _DataModule(nn.Module):
    width: int = 8
    rows: Any = None

    def __post_init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(self.width, self.width)
        self.rows = torch.randn(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.rows.sum()


class _Slotted(nn.Module):
    __slots__ = ("factor", "never_set")

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.inner = _DataModule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


@program("dataclass_and_slotted_modules", "objects")
def slotted(seed: int) -> Program:
    model = _Slotted()
    return training(model, lambda i: model(torch.ones(2, 8)).sum())


@program("module_counts_each_write_and_delete", "objects")
def counted_writes(seed: int) -> Program:
    counted: list[str] = []

    class Counts(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            counted.append(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            counted.append(f"-{name}")
            super().__delattr__(name)

        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            counted.append("hook")
            raise RuntimeError("no hooks here")

    model = nn.Sequential(Counts(8, 8), nn.ReLU())
    return training(model, lambda i: model(torch.ones(2, 8)).sum(), extra=lambda: [c for c in counted if "hook" not in c])


@program("children_made_anew_in_each_forward", "objects")
def children_anew(seed: int) -> Program:
    class Anew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = nn.Linear(8, 8, bias=False, device="meta")
            inner.weight = self.weight
            self.child = inner
            x = self.child(x)
            del self.child
            return x

    model = Anew()
    return training(model, lambda i: model(torch.ones(2, 8)).sum())


@program("computed_weights_are_not_leaves", "objects")
def computed(seed: int) -> Program:
    class Computed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.source = nn.Parameter(self.weight.detach().clone())
            del self.weight
            self.register_buffer("weight", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight = self.source * 2
            self.weight.retain_grad()
            return super().forward(x)

    model = Computed()
    optimizer = torch.optim.SGD([model.source, model.bias], 0.1)
    return training(model, lambda i: model(torch.ones(2, 8)).sum(), optimizer)


@program("registration_hooks_of_everything", "objects")
def registrations(seed: int) -> Program:
    seen: list[str] = []
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        from torch.nn.modules import module as inside

        handles = [
            inside.register_module_parameter_registration_hook(lambda m, n, p: seen.append(n)),
            inside.register_module_buffer_registration_hook(lambda m, n, b: seen.append(n)),
            inside.register_module_module_registration_hook(lambda m, n, c: seen.append(n)),
            inside.register_module_full_backward_hook(lambda m, gi, go: seen.append(type(m).__name__)),
        ]
        model.add_module("more", nn.Linear(4, 4))
        value = model(torch.ones(2, 8)).sum()
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        for handle in handles:
            handle.remove()
        return value

    return training(model, loss, extra=lambda: seen)


@program("state_dict_hooks_and_metadata", "objects")
def state_hooks(seed: int) -> Program:
    notes: list[Any] = []
    model = mlp()
    model[0].register_state_dict_post_hook(lambda m, state, prefix, meta: notes.append(sorted(state)))
    model[0].register_state_dict_pre_hook(lambda m, prefix, keep: notes.append(prefix))
    model[0].register_load_state_dict_post_hook(lambda m, keys: notes.append(str(keys)))

    def loss(i: int) -> torch.Tensor:
        state = model.state_dict()
        notes.append({k: dict(v) for k, v in state._metadata.items()})  # type: ignore[attr-defined]
        model.load_state_dict(state, assign=i == 1)
        return model(torch.ones(2, 8)).sum()

    return training(model, loss, extra=lambda: notes)


@program("conversion_by_swapping_and_overwriting", "objects")
def conversions(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        try:
            torch.__future__.set_swap_module_params_on_conversion(i == 1)
            torch.__future__.set_overwrite_module_params_on_conversion(i == 2)
            model.to(torch.float64 if i % 2 else torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        x = torch.ones(2, 8, dtype=model[0].weight.dtype)
        return model(x).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.1), steps=3)


@program("shared_memory_from_the_second_step_on", "objects")
def shared_memory(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            model.share_memory()
        return model(torch.ones(2, 8)).square().mean()

    return training(model, loss, steps=4, extra=lambda: [p.is_shared() for p in model.parameters()])


@program("module_imported_from_a_package", "objects")
def packaged(seed: int) -> Program:
    from torch import package

    with package.PackageExporter("model.pt") as out:
        out.save_source_string(
            "inner",
            "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x).relu()\n",
        )
        out.extern("torch.**")
    kind = package.PackageImporter("model.pt").import_module("inner").Net
    os.unlink("model.pt")
    model = nn.Sequential(kind(8, 8), kind(8, 4))
    return training(model, lambda i: model(torch.full((2, 8), float("nan") if i == 2 else 1.0)).sum(), steps=4)
