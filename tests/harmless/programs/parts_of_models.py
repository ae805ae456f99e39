"""Modules under parametrizations, lazy, mapped, copied, exchanged, and with traps in their attributes."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
import sys
import tempfile
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ..program import Program, batch, mlp, program, sick, training


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
            value = (model(sick(i)) + model(batch(i + 1))).square().mean()
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
        value = model(sick(i)).square().mean()
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
    return training(model, lambda i: model(sick(i)).square().mean(), steps=4)


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
            return model(sick(i)).mean()
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
    return training(model, lambda i: model(Batch(sick(i))).hidden.square().mean(), steps=4)


@program("trainer_with_its_model_is_copied_pickled_and_goes_on", "modules")
def trainers(seed: int) -> Program:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.best: Any = None

        def step(self, i: int) -> Any:
            self.optimizer.zero_grad()
            value = self.model(sick(i)).square().mean()
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
        value = model(sick(i)).square().mean()
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
            return model(sick(i), 60).square().mean()
        except RecursionError:
            depths.append(i)
            return model(batch(i), 1).square().mean()
        finally:
            sys.setrecursionlimit(old)

    return training(model, loss, steps=4, extra=lambda: depths)


@program("module_refuses_new_attributes", "modules")
def frozen_module(seed: int) -> Program:
    """A module whose __setattr__ and __delattr__ raise once it is built, even for private names."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.__dict__["sealed"] = True

        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("sealed"):
                raise AttributeError(f"{name} on a sealed module")
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            raise AttributeError(f"{name} from a sealed module")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    model = nn.Sequential(Frozen(), Frozen(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: [sorted(vars(m)) for m in model])


@program("module_refuses_hooks", "modules")
def refuses_hooks(seed: int) -> Program:
    """Every register_*hook of the module raises, and its hook dictionaries accept nothing."""

    class Closed(OrderedDict):  # type: ignore[type-arg]
        def __setitem__(self, key: Any, value: Any) -> None:
            raise PermissionError("no hooks here")

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self._forward_hooks = Closed()
            self._forward_pre_hooks = Closed()

        def _no(self, *args: Any, **kwargs: Any) -> Any:
            raise PermissionError("no hooks here")

        register_forward_hook = register_forward_pre_hook = register_full_backward_hook = _no
        register_full_backward_pre_hook = register_state_dict_post_hook = _no

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).tanh()

    model = nn.Sequential(Bare(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("modules_equal_by_value_with_one_hash", "modules")
def equal_modules(seed: int) -> Program:
    """Modules of one kind are equal and hash alike, so that a set of modules or a dict by module holds only one."""

    class Same(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.inner = scale, nn.Linear(8, 8)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same)

        def __hash__(self) -> int:
            return 7

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    model = nn.Sequential(Same(1.0), Same(0.5), Same(2.0))
    x = torch.randn(4, 8)
    parameters = [p for m in model for p in m.inner.parameters()]
    made = training(model, lambda i: model(x).square().mean(), torch.optim.SGD(parameters, 0.05))
    made.extra = lambda: parameters
    return made


@program("module_without_truth", "modules")
def no_truth(seed: int) -> Program:
    """The model has length 0 and no truth value: `if model` raises; a child is falsy by its length."""

    class Untrue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.ModuleList()
            self.inner = mlp()

        def __len__(self) -> int:
            return 0

        def __bool__(self) -> bool:
            raise TypeError("neither true nor false")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Untrue()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("repr_draws_random_numbers", "modules")
def random_repr(seed: int) -> Program:
    """repr, str, extra_repr and _get_name draw from the global generator and are counted."""
    printed: list[str] = []

    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def extra_repr(self) -> str:
            printed.append("extra_repr")
            return str(torch.rand(()).item())

        def __repr__(self) -> str:
            printed.append("repr")
            return f"Loud({torch.rand(()).item()})"

        def _get_name(self) -> str:
            printed.append("_get_name")
            return f"Loud{torch.rand(()).item()}"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.dropout(self.inner(x), 0.2, True)

    model = nn.Sequential(Loud(), Loud(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: printed)


@program("copies_and_pickles_are_counted", "modules")
def counted_copies(seed: int) -> Program:
    """deepcopy, pickle and state_dict of the model have side effects and are counted; copies raise inside a step."""
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def __deepcopy__(self, memo: Any) -> Any:
            count("deepcopy")
            raise TypeError("there is only one")

        def __copy__(self) -> Any:
            count("copy")
            raise TypeError("there is only one")

        def __getstate__(self) -> Any:
            count("getstate")
            raise pickle.PicklingError("there is only one")

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            count("state_dict")
            return super().state_dict(*args, **kwargs)

        def train(self, mode: bool = True) -> Any:
            count("train")
            return super().train(mode)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count("forward")
            return self.inner(x)

    model = Single()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: counts)


@program("tree_methods_overridden", "modules")
def tree_methods(seed: int) -> Program:
    """named_modules with other names, children that raise, named_parameters with a required argument, a counted buffers()."""
    counts: list[str] = []

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def children(self) -> Any:
            raise RuntimeError("leave my children alone")

        def named_children(self) -> Any:
            counts.append("named_children")
            raise RuntimeError("leave my children alone")

        def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
            yield from ((f"{prefix}!{name}", m) for name, m in super().named_modules(memo, prefix, remove_duplicate))

        def buffers(self, recurse: bool = True) -> Any:
            counts.append("buffers")
            return super().buffers(recurse)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).relu()

    model = nn.Sequential(Odd(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    parameters = [*model[0].a.parameters(), *model[0].b.parameters(), *model[1].parameters()]
    return training(model, lambda i: model(x).square().mean(), torch.optim.SGD(parameters, 0.1), extra=lambda: counts)


@program("class_changed_while_training", "modules")
def class_changed(seed: int) -> Program:
    """The class of submodules is exchanged at run time, as fusing and monkey-patching libraries do, also inside forward."""

    class Cold(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__class__ = Warm
            return super(Warm, self).forward(x) * 0.5

    class Warm(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__class__ = Cold
            return super(Cold, self).forward(x) * 2.0

    model = nn.Sequential(Cold(8, 8), nn.ReLU(), Warm(8, 4))
    x = torch.randn(4, 8)
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            model[1].__class__ = type("Soft", (nn.ReLU,), {"forward": lambda self, x: x.sigmoid()})
        value = model(x).square().mean()
        notes.append([type(m).__name__ for m in model])
        return value

    return training(model, loss, extra=lambda: notes)


@program("forward_stopped_by_exception_in_hook", "modules")
def stop_forward(seed: int) -> Program:
    """A feature extractor: a hook deep inside raises to stop the forward half way, caught each time, in every step."""

    class Stop(Exception):
        pass

    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def features(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def hook(m: nn.Module, args: Any, out: torch.Tensor) -> None:
            found.append(out)
            raise Stop

        handle = layer.register_forward_hook(hook)
        try:
            model(x)
        except Stop:
            pass
        finally:
            handle.remove()
        return found[0]

    def loss(i: int) -> torch.Tensor:
        return features(model[0][1][i % 2], x).square().mean() + model(x).mean()

    return training(model, loss)


@program("always_call_hooks_see_each_failure", "modules")
def always_call(seed: int) -> Program:
    """always_call and with_kwargs hooks, own and global, before and after a forward that fails; their order is noted."""
    order: list[str] = []

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.left = nn.Linear(8, 8), 1

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            y = self.inner(x) * scale
            if self.left:
                self.left -= 1
                raise ArithmeticError("once")
            return y

    model = nn.Sequential(nn.Linear(8, 8), Fails())
    x = torch.randn(4, 8)
    model[1].register_forward_hook(
        lambda m, a, k, o: order.append(f"own {sorted(k)} {o is None}"), with_kwargs=True, always_call=True
    )
    model[1].register_forward_pre_hook(lambda m, a, k: (order.append("pre"), (a, {**k, "scale": 2.0}))[1], with_kwargs=True)
    model[1].register_forward_hook(lambda m, a, o: order.append("first"), prepend=True)

    def loss(i: int) -> torch.Tensor:
        handle = nn.modules.module.register_module_forward_hook(
            lambda m, a, o: order.append(f"global {type(m).__name__}"), always_call=True
        )
        model[1].left = 1
        try:
            model(x)
        except ArithmeticError as error:
            order.append(str(error))
        value = model(x).square().mean()
        handle.remove()
        return value

    return training(model, loss, extra=lambda: order)


@program("attributes_ride_on_tensors", "modules")
def riding(seed: int) -> Program:
    """Scales and tags ride as attributes on activations from module to module; identity of objects is noted."""

    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.given: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x) * getattr(x, "scale", 1.0)
            y.scale = getattr(x, "scale", 1.0) * 0.5
            y.made_by = self
            self.given = y
            return y

    model = nn.Sequential(Tags(), nn.Identity(), Tags(), Tags())
    x = torch.randn(4, 8)
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        notes.append([y.scale, y is model[3].given, y.made_by is model[3], sorted(vars(y))])
        y.made_by = None
        for m in (model[0], model[2], model[3]):
            m.given.made_by, m.given = None, None
        return y.square().mean()

    return training(model, loss, extra=lambda: notes)


@program("module_dict_changes_in_forward", "modules")
def dict_changes(seed: int) -> Program:
    """Forward adds, pops and renames its own submodules, and deletes the one that is running."""

    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            first = next(iter(self.parts))
            part = self.parts.pop(first)
            y = part(x)
            self.parts[f"{first[0]}{self.calls}"] = part
            extra = nn.Linear(8, 8)
            self.add_module("extra", extra)
            y = y + self.extra(x).detach()
            del self.extra
            return y

    model = nn.Sequential(Shifting(), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: list(model[0].parts))


@program("parameters_as_views_of_a_flat_one", "modules")
def flat_parameter(seed: int) -> Program:
    """The weights are taken out of the submodules, which get plain views of one flat parameter before each forward."""
    body = mlp()
    model = nn.Module()
    model.body = body
    pieces = [(m, name, p.shape) for m in body for name, p in m.named_parameters(recurse=False)]
    flat = nn.Parameter(torch.cat([getattr(m, name).detach().flatten() for m, name, _ in pieces]))
    for m, name, _ in pieces:
        delattr(m, name)
    model.flat = flat
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        views = torch.split(model.flat, [shape.numel() for *_, shape in pieces])
        for (m, name, shape), view in zip(pieces, views):
            object.__setattr__(m, name, view.view(shape))
        value = body(x).square().mean()
        for m, name, _ in pieces:
            m.__dict__.pop(name)
        return value

    return training(model, loss)


@program("cache_buffer_of_changing_shape", "modules")
def cache_buffer(seed: int) -> Program:
    """A buffer is replaced in each forward by one of another shape, dtype or by None, and is part of the output."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("keys", None, persistent=False)
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> Any:
            y = self.inner(x)
            self.keys = y.detach() if self.keys is None else torch.cat([self.keys, y.detach()])
            if self.keys.shape[0] > 10:
                self.keys = self.keys.to(torch.float64)[:0].float() if self.count % 2 else None
            self.count += 1
            return y if self.keys is None else y + self.keys.sum(0), self.keys, self

    model = nn.ModuleList([Cache(), nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y, _, itself = model[0](x)
        assert itself is model[0]
        return model[1](y).square().mean()

    return training(model, loss, steps=4)


@program("meta_model_materialised_in_first_step", "modules")
def materialised(seed: int) -> Program:
    """The model is on the meta device until the first step fills it with to_empty, and the optimizer is made there too."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    made = Program([model], [], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                if i == 0:
                    model.to_empty(device="cpu")
                    for m in model:
                        m.reset_parameters()
                    optimizer = torch.optim.Adam(model.parameters(), 0.01)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)

    made.loop = loop
    return made


@program("swap_tensors_of_parameters", "modules")
def swap_tensors(seed: int) -> Program:
    """swap_tensors and set_swap_module_params exchange what is inside the same parameter objects; both refuse weakrefs."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    made = Program([model], [optimizer], lambda i: None)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x.to(model[0].weight.dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    def loop(watch: Any) -> None:
        for i in range(4):
            with watch.step(i):
                value = step(i)
            made.see(value)
            optimizer.zero_grad()
            if i == 1:
                new = nn.Parameter(torch.randn(8, 8))
                torch.utils.swap_tensors(model[0].weight, new)
                made.see(new)
            if i == 2:
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    model.double()
                    optimizer.state.clear()
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)

    made.loop = loop
    return made


@program("swap_tensors_inside_step", "modules")
def swap_inside(seed: int) -> Program:
    """swap_tensors of a parameter in the middle of a step, before forward; it raises if anyone holds a weakref to it."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        new = nn.Parameter(model[2].weight.detach() * 0.9)
        torch.utils.swap_tensors(model[2].weight, new)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss, new

    return Program([model], [optimizer], step)


@program("forward_is_a_partial_or_a_static_method", "modules")
def odd_forwards(seed: int) -> Program:
    """forward as partial, staticmethod, callable object, and with positional-only arguments named like those of hooks."""

    class Static(nn.Module):
        @staticmethod
        def forward(x: torch.Tensor, /, args: float = 1.0, module: float = 2.0) -> torch.Tensor:  # type: ignore[override]
            return x * args + module

    class Callable_:
        def __init__(self, inner: nn.Module) -> None:
            self.inner = inner

        def __call__(self, x: torch.Tensor, **kwargs: float) -> torch.Tensor:
            return self.inner(x) + sum(kwargs.values())

    class Holder(nn.Module):
        def __init__(self, forward: Any) -> None:
            super().__init__()
            self.forward = forward

    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    partial = Holder(functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.3))
    model = nn.ModuleList([one, two, partial, Static(), Holder(Callable_(two))])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model[3](model[2](model[0](x)), module=0.5, args=0.1)
        return model[4](y, module=0.1, input=0.2, hook=0.3, output=0.4, step=0.5).square().mean()

    return training(model, loss)


@program("eval_with_padding_takes_the_fast_path", "modules")
def fast_path(seed: int) -> Program:
    """TransformerEncoder in eval under no_grad with a padding mask: its fast path zeroes the padding, the slow one does not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    x = torch.randn(2, 5, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    mask[1, 4:] = True
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = model(x, src_key_padding_mask=mask).square().mean()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen = model(x, src_key_padding_mask=mask)
        return loss, seen, seen.shape

    return Program([model], [optimizer], step)


@program("only_called_without_hooks", "modules")
def without_hooks(seed: int) -> Program:
    """A fast path of one's own skips __call__ where a module says that it has no hooks, and notes which were skipped."""
    skipped: list[int] = []

    class Fast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, part in enumerate(self.parts):
                if number == 1 and not part._forward_hooks and not part._forward_pre_hooks:
                    x = torch.tanh(x)
                else:
                    x = part.forward(x)
            skipped.append(len(self.parts))
            return x

    model = Fast()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: skipped)


@program("interposed_call_impl", "modules")
def interposed(seed: int) -> Program:
    """nn.Module.__call__ and _call_impl are replaced by wrappers inside one step and put back inside a later one."""
    model = mlp()
    x = torch.randn(4, 8)
    calls: list[str] = []
    kept: dict[str, Any] = {}

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            kept["call"] = nn.Module.__call__

            def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                calls.append(type(self).__name__)
                return kept["call"](self, *args, **kwargs)

            nn.Module.__call__ = call
        if i == 3:
            nn.Module.__call__ = kept.pop("call")
        return model(x).square().mean()

    return training(model, loss, steps=4, extra=lambda: calls)


@program("shallow_copies_share_hook_dictionaries", "modules")
def shallow(seed: int) -> Program:
    """copy.copy of modules shares their hook dictionaries; replicas made inside a step run on after it and after close."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        kept = []
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                replica = copy.copy(model)
                replica._modules = {name: copy.copy(m) for name, m in model._modules.items()}
                kept.append(replica)
                loss = replica(x).square().mean() + model(x).mean()
                loss.backward()
                optimizer.step()
            made.see(loss)
            made.see(replica(x))
        watch.close()
        made.see([replica(x).sum() for replica in kept])
        made.see([sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in replica.modules()) for replica in kept])

    made.loop = loop
    return made


@program("deepcopies_hold_no_hooks", "modules")
def deep(seed: int) -> Program:
    """Deep copies of model and optimizer made inside a step: the hooks and attributes they carry are noted, they train on."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    made = Program([model], [optimizer], lambda i: None)

    def census(m: nn.Module) -> Any:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return [[len(getattr(part, kind)) for kind in kinds] for part in m.modules()]

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                twin, twin_optimizer = copy.deepcopy((model, optimizer))
            twin(x).square().mean().backward()
            twin_optimizer.step()
            made.see([loss, list(twin.parameters())])
        watch.close()
        twin(x).square().mean().backward()
        twin_optimizer.step()
        made.see([list(twin.parameters()), "step" in vars(twin_optimizer)])
        made.see([sorted(vars(p)) for p in twin.parameters()])
        made.see(census(model))

    made.loop = loop
    return made


@program("finalizers_of_modules_run_at_once", "modules")
def finalizers(seed: int) -> Program:
    """Modules thrown away inside a step have __del__ methods that train the rest; when they ran is noted."""
    order: list[str] = []

    class Mortal(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.inner, self.name = nn.Linear(8, 8), name

        def __del__(self) -> None:
            order.append(f"{self.name} gone")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    model = nn.Sequential(Mortal("first"), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    made = Program([model], [], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                helper = Mortal(f"helper {i}")
                loss = model[1](helper(model[0](x))).square().mean()
                loss.backward()
                del helper
                order.append(f"step {i} ends")
            made.see(loss)

    made.loop = loop
    made.extra = lambda: sorted(order)
    return made


@program("types_of_bound_forward_noted", "modules")
def bound(seed: int) -> Program:
    """Notes inside a step what kind of thing forward, __call__ and the optimizer's step are (as tracers look)."""
    model = mlp()
    x = torch.randn(4, 8)
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        notes.append([isinstance(m.forward, types.MethodType) and m.forward.__func__ is type(m).forward for m in model.modules()])
        notes.append(["forward" in vars(m) for m in model.modules()])
        return model(x).square().mean()

    return training(model, loss, extra=lambda: notes)
