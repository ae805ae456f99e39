"""Fourth round: torch at its edges: subclasses that keep books, transforms over hooks, graphs compared, places that raise."""

from __future__ import annotations

import collections
import copy
import functools
import io
import itertools
import pickle
import random
import threading
import types
import weakref
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ..program import Program, mlp, program, training

NAN = float("nan")


def batch(i: int, rows: int = 4, width: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width) * (i + 1)


# tensor subclasses


class _Pair(torch.Tensor):
    """Two tensors that go the same way; counts what is asked of it."""

    asked: ClassVar[collections.Counter[str]] = collections.Counter()
    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, requires_grad=first.requires_grad
        )

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.first, self.second]

    def __tensor_flatten__(self) -> Any:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return _Pair(inner["first"], inner["second"])

    def __repr__(self, **more: Any) -> str:  # type: ignore[override]
        raise RuntimeError("a pair has no words")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked[str(func)] += 1
        from torch.utils import _pytree as pytree

        def side(name: str) -> Any:
            pick = lambda t: getattr(t, name) if isinstance(t, _Pair) else t  # noqa: E731
            return func(*pytree.tree_map(pick, args), **pytree.tree_map(pick, kwargs or {}))

        one, two = side("first"), side("second")
        if func._schema.is_mutable or (isinstance(one, torch.Tensor) and func.is_view and not one.is_floating_point()):
            return args[0]
        return pytree.tree_map(lambda a, b: _Pair(a, b) if isinstance(a, torch.Tensor) else a, one, two)


@program("fourth_parameters_are_pairs_that_count", "fourth tensors")
def pairs(seed: int) -> Program:
    _Pair.asked.clear()
    weight = nn.Parameter(_Pair(torch.ones(8, 8) / 8, torch.ones(8, 8) / 4))
    model = nn.Module()
    model.register_parameter("weight", weight)

    def step(i: int) -> Any:
        value = (batch(i) @ weight).square().mean()
        (grad,) = torch.autograd.grad(value, weight)
        with torch.no_grad():
            weight.first -= 0.1 * grad.first
            weight.second -= 0.1 * grad.second
        return value

    return Program([model], [], step, extra=lambda: sorted(_Pair.asked.items()))


@program("fourth_pairs_flow_through_modules", "fourth tensors")
def pairs_through(seed: int) -> Program:
    _Pair.asked.clear()
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        out = model(_Pair(batch(i), batch(i + 1)))
        return out.first.square().mean() + out.second.square().mean() if hasattr(out, "first") else out.sum()

    def step(i: int) -> Any:
        with torch.no_grad():
            return loss(i)

    return Program([model], [], step, extra=lambda: sorted(_Pair.asked.items()))


class _Diary(torch.Tensor):
    """Writes down every function and every property that anyone asks of it."""

    diary: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.diary.append(torch.overrides.resolve_name(func) or getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


@program("fourth_every_question_to_a_subclass_is_counted", "fourth tensors")
def diary(seed: int) -> Program:
    _Diary.diary.clear()
    model = mlp()

    def step(i: int) -> Any:
        x = batch(i).as_subclass(_Diary)
        x.requires_grad_()
        out = model(x)
        out.square().mean().backward()
        assert x.grad is not None
        return x.grad.sum()

    return Program([model], [], step, extra=lambda: _Diary.diary)


class _Metered(nn.Parameter):
    """A parameter whose class answers for its gradient."""

    reads: ClassVar[list[str]] = []

    @property
    def data(self) -> Any:
        _Metered.reads.append("data")
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        _Metered.reads.append("set data")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: Any) -> Any:
        _Metered.reads.append("eq")
        return torch.Tensor.__eq__(self, other)


@program("fourth_parameter_counts_reads_and_comparisons", "fourth tensors")
def metered(seed: int) -> Program:
    _Metered.reads.clear()
    model = nn.Linear(8, 4)
    model.weight = _Metered(model.weight.detach().clone())
    return training(model, lambda i: model(batch(i)).square().mean(), extra=lambda: _Metered.reads)


class _Finalised(torch.Tensor):
    ends: ClassVar[list[float]] = []

    def __del__(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            _Finalised.ends.append(float(torch.ones(2).sum()))


@program("fourth_tensor_that_computes_when_it_dies", "fourth tensors")
def dying_tensors(seed: int) -> Program:
    _Finalised.ends.clear()
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i).as_subclass(_Finalised))
        return out.as_subclass(torch.Tensor).square().mean()

    return training(model, loss, extra=lambda: set(_Finalised.ends))


@program("fourth_block_sparse_and_column_sparse_inside", "fourth tensors")
def block_sparse(seed: int) -> Program:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                blocks = self.weight.to_sparse_bsr((2, 2))
                columns = self.weight.to_sparse_csc()
            return x @ self.weight, blocks, columns

    model = Sparse()

    def loss(i: int) -> torch.Tensor:
        out, blocks, columns = model(batch(i))
        return out.square().mean() + blocks.values().sum() * 0 + columns.to_dense().sum() * 0

    return training(model, loss)


@program("fourth_jagged_rows", "fourth tensors")
def jagged(seed: int) -> Program:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)

        def forward(self, rows: Any) -> Any:
            q, k, v = self.qkv(rows).chunk(3, dim=-1)
            return self.out(torch.nn.functional.layer_norm(q * k.sigmoid() + v, (8,)))

    model = Gated()

    def loss(i: int) -> torch.Tensor:
        rows = torch.nested.nested_tensor([batch(i, 3), batch(i, 5)], layout=torch.jagged)
        return model(rows).values().square().mean()

    return training(model, loss)


# modes of the program


class _Census(TorchDispatchMode):
    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notes.append(str(func))
        return func(*args, **(kwargs or {}))


@program("fourth_census_from_hook_to_hook_of_the_optimizer", "fourth modes")
def census_of_step(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[str]]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    modes: list[Any] = []

    def enter(*args: Any) -> None:
        modes.append(_Census(notes).__enter__())

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(lambda *args: modes.pop().__exit__(None, None, None))
    return training(model, lambda i: model(batch(i)).square().mean(), optimizer, extra=lambda: notes)


@program("fourth_census_of_backward_only", "fourth modes")
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


@program("fourth_function_mode_refuses_looking", "fourth modes")
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


@program("fourth_dispatch_mode_replaces_backward_results", "fourth modes")
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


# transforms


@program("fourth_ensemble_by_functional_call_in_autocast", "fourth transforms")
def functional_ensemble(seed: int) -> Program:
    models = [mlp() for _ in range(3)]
    skeleton = mlp()
    parameters, buffers = torch.func.stack_module_state(models)
    optimizer = torch.optim.Adam(list(parameters.values()), 0.01)

    def one(weights: Any, state: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(skeleton, (weights, state), (x,)).square().mean()

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = torch.vmap(one, in_dims=(0, 0, None))(parameters, buffers, batch(i)).sum()
        value.backward()
        optimizer.step()
        return value

    return Program([skeleton], [optimizer], step, extra=lambda: list(parameters.values()))


@program("fourth_hessian_through_a_hooked_model", "fourth transforms")
def hessian(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    notes: list[str] = []
    model[1].register_forward_hook(lambda m, a, out: notes.append(type(out).__name__) or out * 2)

    def step(i: int) -> Any:
        x = torch.linspace(0, 1, 4) * (i + 1)
        second = torch.func.jacfwd(torch.func.jacrev(lambda v: model(v).sum()))(x)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * second.sum()
        return second

    return Program([model], [], step, extra=lambda: notes)


@program("fourth_grad_of_grad_of_grad", "fourth transforms")
def third_order(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))

    def loss(i: int) -> torch.Tensor:
        x = (torch.linspace(0, 1, 4) * (i + 1)).requires_grad_()
        value = model(x).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = value + g.square().sum()
        return value

    return training(model, loss)


class _Cube(torch.autograd.Function):
    generate_vmap_rule = True
    calls: ClassVar[list[str]] = []

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        _Cube.calls.append("forward")
        return x**3, x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any, unused: Any) -> Any:
        _Cube.calls.append(f"backward {unused is None}")
        return None if grad is None else grad * 3 * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        _Cube.calls.append("jvp")
        return tangent * 3 * ctx.saved_tensors[0] ** 2, None


@program("fourth_custom_function_under_vmap_of_grad", "fourth transforms")
def vmapped_function(seed: int) -> Program:
    _Cube.calls.clear()
    model = mlp()

    def per_row(x: torch.Tensor) -> torch.Tensor:
        return _Cube.apply(model(x))[0].sum()

    def step(i: int) -> Any:
        rows = torch.vmap(torch.func.grad(per_row))(batch(i))
        loss = _Cube.apply(model(batch(i)))[0].sum() + rows.sum() * 0
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.001 * p.grad
                p.grad = None
        return rows

    return Program([model], [], step, extra=lambda: _Cube.calls)


class _Remembers(torch.autograd.Function):
    """State on the class: a call too many is seen in the result."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        _Remembers.count += 1
        ctx.scale = scale / _Remembers.count
        return x * ctx.scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Remembers.count += 1
        return grad * ctx.scale / _Remembers.count, None


@program("fourth_custom_function_with_state_on_a_bad_step", "fourth transforms")
def remembering(seed: int) -> Program:
    _Remembers.count = 0
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        return _Remembers.apply(model(batch(i) * (NAN if i == 2 else 1)), 3.0).square().mean()

    return training(model, loss, steps=5, extra=lambda: _Remembers.count)


@program("fourth_backward_inside_a_forward", "fourth transforms")
def inner_backward(seed: int) -> Program:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (y**3).sum().backward()
                ctx.save_for_backward(y.grad)
            return y.detach() ** 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (saved,) = ctx.saved_tensors
            with torch.enable_grad():
                z = saved.detach().requires_grad_()
                z.square().sum().backward()
            return grad * z.grad

    model = mlp()
    return training(model, lambda i: Inner.apply(model(batch(i))).mean(), torch.optim.SGD(model.parameters(), 1e-4))


# modules and hooks


@program("fourth_backward_hooks_replace_in_both_directions", "fourth modules")
def backward_hooks(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    model[0].register_full_backward_pre_hook(lambda m, out: (out[0] * 2,))
    model[2].register_full_backward_hook(lambda m, gi, go: (gi[0].flip(0),))
    model[2].register_forward_hook(lambda m, a, k, out: out + k.get("more", 1), with_kwargs=True, always_call=True)
    model.register_full_backward_hook(lambda m, gi, go: notes.append([g is None for g in gi]))
    return training(model, lambda i: model(batch(i).requires_grad_(i == 1)).square().mean(), extra=lambda: notes)


@program("fourth_hook_that_is_called_always_and_raises", "fourth modules")
def always_raising(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def hook(m: Any, args: Any, out: Any) -> None:
        notes.append(out is None)
        if len(notes) in (2, 5):
            raise ArithmeticError(f"hook {len(notes)}")

    model[1].register_forward_hook(hook, always_call=True, prepend=True)

    def loss(i: int) -> torch.Tensor:
        for _ in range(3):
            try:
                return model(batch(i)).square().mean()
            except ArithmeticError as error:
                notes.append(str(error))
        raise AssertionError

    return training(model, loss, steps=4, extra=lambda: notes)


@program("fourth_parametrization_comes_and_goes", "fourth modules")
def parametrized(seed: int) -> Program:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

        def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu()

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    names: list[str] = []

    def step(i: int) -> Any:
        if i % 2:
            parametrize.register_parametrization(model[0], "weight", Symmetric())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with parametrize.cached():
            value = model(batch(i)).square().mean()
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 2:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=i == 1)
        names.extend(name for name, _ in model.named_parameters())
        names.append(type(model[0]).__name__)
        return value

    return Program([model], [], step, steps=5, extra=lambda: names)


@program("fourth_module_deletes_its_child_while_it_runs", "fourth modules")
def deletes_child(seed: int) -> Program:
    class Ladder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)
            self.once = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(x)
            if hasattr(self, "once"):
                x = self.once(x)
                del self.once
            return x

    model = Ladder()
    return training(model, lambda i: model(batch(i)).square().mean(), torch.optim.SGD(model.parameters(), 0.1), steps=4)


@program("fourth_module_list_grows_each_step", "fourth modules")
def growing(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(i: int) -> Any:
        layer = nn.Linear(8, 8)
        model.append(layer)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        optimizer.step()
        if i == 4:
            model.pop(1)
        return value

    return Program([model], [optimizer], step, steps=7)


@program("fourth_copies_take_over_between_backward_and_step", "fourth modules")
def copies_take_over(seed: int) -> Program:
    model = mlp()
    pair: list[Any] = [model, torch.optim.AdamW(model.parameters(), 0.01)]

    def step(i: int) -> Any:
        value = pair[0](batch(i)).square().mean()
        value.backward()
        if i % 2:
            copied, optimizer = copy.deepcopy((pair[0], pair[1]))
            for mine, theirs in zip(copied.parameters(), pair[0].parameters()):
                mine.grad = theirs.grad.clone()
            pair[:] = [copied, optimizer]
        pair[1].step()
        pair[1].zero_grad()
        return value

    return Program([model], [], step, steps=5, extra=lambda: list(pair[0].state_dict().values()))


@program("fourth_pickled_in_hooks_of_backward", "fourth modules")
def pickled_in_backward(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sizes: list[int] = []

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))

        def hook(grad: torch.Tensor) -> None:
            text = pickle.dumps({"weights": model.state_dict(), "state": optimizer.state_dict()})
            buffer = io.BytesIO()
            torch.save(model, buffer)
            sizes.append(len(text))
            again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            sizes.append(len(again._forward_hooks))

        out.register_hook(hook)
        return out.square().mean()

    return training(model, loss, optimizer, extra=lambda: sizes[1::2])


@program("fourth_model_calls_itself_with_less", "fourth modules")
def recursive_call(seed: int) -> Program:
    class Fractal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int = 12) -> torch.Tensor:
            x = self.inner(x).tanh()
            return self(x, depth - 1) + self(x.detach(), 0) if depth else x

    model = Fractal()
    return training(model, lambda i: model(batch(i)).square().mean())


@program("fourth_a_thousand_heads_in_a_dictionary", "fourth modules")
def dictionary(seed: int) -> Program:
    model = nn.ModuleDict({f"{n:x} ✓ {'x' * (n % 50)}": nn.Linear(2, 2) for n in range(1000)})

    def loss(i: int) -> torch.Tensor:
        total = torch.zeros(())
        for name in list(model)[i * 7 :: 50]:
            total = total + model[name](torch.ones(1, 2)).sum()
        return total

    return training(model, loss)


@program("fourth_classes_of_modules_patched_while_training", "fourth modules")
def class_patched(seed: int) -> Program:
    model = mlp()
    original = nn.Linear.forward
    notes: list[str] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        notes.append("mine")
        return original(self, x) * 2

    made = training(model, lambda i: model(batch(i)).square().mean())

    def loop(watch: Any) -> None:
        call = nn.Module.__call__
        try:
            for i in range(4):
                if i == 1:
                    nn.Linear.forward = forward  # type: ignore[method-assign]
                if i == 2:
                    nn.Module.__call__ = lambda self, *a, **k: (notes.append("call"), call(self, *a, **k))[1]  # type: ignore
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            nn.Linear.forward = original  # type: ignore[method-assign]
            nn.Module.__call__ = call  # type: ignore[method-assign]

    made.loop, made.extra = loop, lambda: notes
    return made


@program("fourth_forward_consumes_its_inputs", "fourth modules")
def consumes(seed: int) -> Program:
    """Each call takes rows off a list, an iterator and a dictionary that the caller keeps."""

    class Eats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, rows: list[Any], more: Any, table: dict[int, Any]) -> torch.Tensor:
            x = rows.pop() + next(more)
            table.popitem()
            rows[0].add_(1)
            return self.inner(x)

    model = Eats()
    rows = [batch(i) for i in range(12)]
    more = iter([batch(i) * (NAN if i == 2 else 1) for i in range(12)])
    table = dict.fromkeys(range(12))
    return training(
        model,
        lambda i: model(rows, more, table).square().mean(),
        steps=5,
        extra=lambda: [len(rows), rows, len(list(more)), table],
    )


@program("fourth_side_effects_on_bad_steps", "fourth modules")
def side_effects(seed: int) -> Program:
    """What a forward does besides computing happens once, also where the loss is no number."""
    calls: list[Any] = []

    class Effects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.drop = nn.Dropout(0.3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            calls.append(int(self.calls))
            with open("log.txt", "a") as out:
                out.write(f"{len(calls)}\n")
            return self.drop(self.norm(self.inner(x)))

    model = Effects().to(torch.bfloat16)

    def loss(i: int) -> torch.Tensor:
        scale = {2: NAN, 3: float("inf"), 5: 1e30}.get(i, 1.0)
        return model((batch(i) * scale).to(torch.bfloat16)).float().square().mean()

    return training(model, loss, torch.optim.AdamW(model.parameters(), 0.01), steps=8, extra=lambda: calls)


_calls = [0]  # of a variable of this file
_total = 0.0


def _count() -> float:
    global _total
    _total += 1.0
    _calls[0] += 1
    return _total + _calls[0]


class _Stateful(nn.Module):
    """Remembers in a place that no state_dict knows; a call too many is seen in every later result."""

    calls = 0

    def __init__(self, place: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.draw = getattr(self, f"from_{place}")
        self.numpy, self.python, self.torch = np.random.default_rng(3), random.Random(3), torch.Generator().manual_seed(3)
        self.holder = types.SimpleNamespace(n=0, deep=[[0], collections.deque([1, 2, 3])])
        self.cache = torch.ones(3)  # no buffer
        self.count = itertools.count()
        self.lock = threading.Lock()
        for name in {"count", "lock"} - {place}:  # what nobody can put back
            delattr(self, name)
        step = 0

        def closure() -> float:
            nonlocal step
            step += 1
            return float(step)

        self.closure = closure

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 0.01 * self.draw())

    def from_numpy(self) -> float:
        return float(self.numpy.random())

    def from_python(self) -> float:
        return self.python.random()

    def from_torch(self) -> float:
        return float(torch.rand((), generator=self.torch))

    def from_holder(self) -> float:
        self.holder.n += 1
        self.holder.deep[0][0] += 1
        self.holder.deep[1].rotate()
        return float(self.holder.n + self.holder.deep[0][0] * self.holder.deep[1][0])

    def from_cache(self) -> float:
        self.cache.add_(1)
        return float(self.cache.sum())

    def from_class(self) -> float:
        _Stateful.calls += 1
        return float(_Stateful.calls)

    def from_closure(self) -> float:
        return self.closure()

    def from_file(self) -> float:
        return _count()

    def from_count(self) -> float:
        return float(next(self.count))

    def from_lock(self) -> float:
        with self.lock:
            self.holder.n += 1
        return float(self.holder.n)


for _place in ("numpy", "python", "torch", "holder", "cache", "class", "closure", "file", "count", "lock"):

    @program(f"fourth_bad_step_with_state_in_{_place}", "fourth state")
    def state_in(seed: int, place: str = _place) -> Program:
        global _total
        _calls[0], _total, _Stateful.calls = 0, 0.0, 0
        model = _Stateful(place)

        def loss(i: int) -> torch.Tensor:
            out = model(batch(i) * (NAN if i in (2, 4) else 1))
            return out.nan_to_num().square().mean() + (NAN if i == 4 else 0)

        def step(i: int) -> Any:
            optimizer.zero_grad()
            value = loss(i)
            value.backward()
            if i not in (2, 4):
                optimizer.step()
            return value

        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return Program([model], [optimizer], step, steps=8)


@program("fourth_nothing_here_can_be_copied", "fourth modules")
def uncopyable(seed: int) -> Program:
    """No deepcopy, no pickle, on a run that goes bad in half precision with a scaler."""

    class Refuses(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("I am unique")

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise RuntimeError("I am unique")

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("I have no state")

    model = nn.Sequential(Refuses(8, 64), nn.ReLU(), Refuses(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = model(batch(i) * 1e3).square().mean()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    return Program([model], [optimizer], step, steps=8, scaler=scaler)


def _sick(name: str, dtype: torch.dtype, tensor: Any, optimizer: Any) -> None:
    @program(f"fourth_sick_{name}", "fourth sick")
    def sick(seed: int) -> Program:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4)).to(dtype)

        def loss(i: int) -> torch.Tensor:
            return tensor(model(batch(i).to(dtype)), i)

        return training(model, loss, optimizer(model.parameters()), steps=8)


_sick("half_overflow", torch.float16, lambda y, i: (y * 3e4).square().mean(), lambda p: torch.optim.SGD(p, 0.1))
_sick("half_adam_eps", torch.float16, lambda y, i: y.square().mean(), lambda p: torch.optim.Adam(p, 1e-3, eps=1e-9))
_sick("bfloat16_lost_updates", torch.bfloat16, lambda y, i: y.square().mean(), lambda p: torch.optim.SGD(p, 1e-7))
_sick("log_of_zero", torch.float32, lambda y, i: (y * 0).log().mean(), lambda p: torch.optim.SGD(p, 0.1))
_sick("explodes", torch.float32, lambda y, i: y.pow(4).mean() * 1e3, lambda p: torch.optim.SGD(p, 1e6))
_sick("root_at_zero", torch.bfloat16, lambda y, i: (y - y.detach()).sqrt().sum(), lambda p: torch.optim.AdamW(p, 0.1))


# places that raise


def _interrupt(place: str) -> None:
    @program(f"fourth_interrupted_in_{place}", "fourth interrupts")
    def interrupted(seed: int) -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        now = [-1]

        def strike(here: str) -> None:
            if here == place and now[0] in (1, 2):
                raise KeyboardInterrupt(f"{here} {now[0]}")

        model[1].register_forward_pre_hook(lambda *a: strike("forward_pre_hook"))
        model[1].register_forward_hook(lambda *a: strike("forward_hook"))
        model[1].register_full_backward_hook(lambda *a: strike("backward_hook"))
        model[0].weight.register_hook(lambda g: strike("tensor_hook"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: strike("accumulate_hook"))
        optimizer.register_step_pre_hook(lambda *a: strike("step_pre_hook"))
        optimizer.register_step_post_hook(lambda *a: strike("step_post_hook"))

        def pack(t: torch.Tensor) -> torch.Tensor:
            strike("pack")
            return t

        def unpack(t: torch.Tensor) -> torch.Tensor:
            strike("unpack")
            return t

        def step(i: int) -> Any:
            now[0] = i
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                value = model(batch(i)).square().mean()
            value.backward()
            strike("between")
            optimizer.step()
            strike("before_zero")
            optimizer.zero_grad()
            return value

        notes: list[Any] = []
        made = Program([model], [optimizer], step, extra=lambda: notes)

        def loop(watch: Any) -> None:
            for i in range(5):
                try:
                    with watch.step(i):
                        made.see(step(i))
                except KeyboardInterrupt as error:
                    notes.append([str(error), error.__context__ is None, torch.is_grad_enabled()])
                    optimizer.zero_grad()

        made.loop = loop
        return made


for _place in (
    *("forward_pre_hook", "forward_hook", "backward_hook", "tensor_hook", "accumulate_hook"),
    *("step_pre_hook", "step_post_hook", "pack", "unpack", "between"),
):
    _interrupt(_place)


# compile, export, checkpoint


@program("fourth_compiled_graphs_are_written_down", "fourth compiled")
def compiled_graphs(seed: int) -> Program:
    torch._dynamo.reset()
    model, codes = mlp(), []  # type: tuple[Any, list[str]]

    def backend(graph: Any, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    head = torch.compile(lambda x: F.gelu(x).square().mean(), backend=backend)
    body = torch.compile(model[0], backend=backend, fullgraph=True)

    def loss(i: int) -> torch.Tensor:
        return head(model[2](model[1](body(batch(i)))))

    return training(model, loss, extra=lambda: codes)


@program("fourth_exported_program_is_written_down", "fourth compiled")
def exported_code(seed: int) -> Program:
    model, codes = mlp(), []  # type: tuple[Any, list[str]]

    def loss(i: int) -> torch.Tensor:
        if i < 2:
            made = torch.export.export(model, (batch(0),), strict=i == 1)
            codes.append(made.graph_module.code)
            codes.append(str(made.graph_signature))
            codes.append(str([(k, str(n.target)) for n in made.graph.nodes for k in n.meta if k in ("stack_trace",)]))
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: codes)


@program("fourth_make_fx_with_symbols_of_a_whole_step", "fourth compiled")
def symbolic(seed: int) -> Program:
    from torch.fx.experimental.proxy_tensor import make_fx

    model, codes = mlp(), []  # type: tuple[Any, list[str]]
    weights = dict(model.named_parameters())

    def gradients(w: Any, x: torch.Tensor) -> Any:
        value = torch.func.functional_call(model, w, (x,)).square().mean()
        return torch.autograd.grad(value, list(w.values()))

    def loss(i: int) -> torch.Tensor:
        if i < 2:
            codes.append(make_fx(gradients, tracing_mode="symbolic" if i else "fake")(weights, batch(0)).code)
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: codes)


@program("fourth_checkpoints_of_both_kinds_in_each_other", "fourth compiled")
def checkpoints(seed: int) -> Program:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(4))
            self.calls = 0

        def pair(self, n: int, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = checkpoint.checkpoint(self.layers[n], x, use_reentrant=False, determinism_check="default")
            return checkpoint.checkpoint(self.layers[n + 1], x, use_reentrant=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            with checkpoint.set_checkpoint_early_stop(False):
                x = checkpoint.checkpoint(functools.partial(self.pair, 0), x, use_reentrant=False)
            return checkpoint.checkpoint(functools.partial(self.pair, 2), x, use_reentrant=True)

    model = Stack()

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            return model(batch(i) * (NAN if i == 3 else 1)).float().square().mean()

    return training(model, loss, steps=5, extra=lambda: model.calls)


# what is kept


@program("fourth_all_activations_die_by_counting_alone", "fourth lifetimes")
def counted_alone(seed: int) -> Program:
    """With the collector off, what a step made is gone when the step is: nothing in a cycle, nothing held."""
    import gc

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alive: list[Any] = []

    def step(i: int) -> Any:
        made: list[Any] = []
        handles = [m.register_forward_hook(lambda m, a, out: made.append(weakref.ref(out))) for m in model]
        value = model(batch(i)).square().mean()
        made.append(weakref.ref(value))
        value.backward()
        made += [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        number = float(value.detach())
        del value
        for handle in handles:
            handle.remove()
        alive.append([ref() is not None for ref in made])
        return number

    made = Program([model], [optimizer], step, extra=lambda: alive)

    def loop(watch: Any) -> None:
        gc.disable()
        try:
            for i in range(5):
                with watch.step(i):
                    made.see(step(i))
        finally:
            gc.enable()

    made.loop = loop
    return made


@program("fourth_weak_keys_for_every_tensor", "fourth lifetimes")
def weak_keys(seed: int) -> Program:
    from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

    model = mlp()
    known: Any = WeakTensorKeyDictionary()
    modules: Any = WeakIdKeyDictionary()
    sizes: list[int] = []

    def loss(i: int) -> torch.Tensor:
        x = model[0](batch(i))
        y = model[2](model[1](x))
        for tensor in (x, y, *model.parameters()):
            known[tensor] = i
        for module in model.modules():
            modules[module] = i
        sizes.append(len(known))
        return y.square().mean()

    def extra() -> Any:
        return sizes, len(known), len(modules)

    return training(model, loss, extra=extra)


@program("fourth_storage_is_taken_away_after_forward", "fourth lifetimes")
def storage_taken(seed: int) -> Program:
    """The input's memory is given back between forward and backward, as some offloaders do."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def loss(i: int) -> torch.Tensor:
        x = batch(i)
        out = model(x)
        kept = x.clone()
        x.untyped_storage().resize_(0)
        out.register_hook(lambda g: (x.untyped_storage().resize_(kept.untyped_storage().nbytes()), x.data.copy_(kept), None)[2])
        return out.square().mean()

    return training(model, loss)


@program("fourth_inputs_are_overwritten_after_forward", "fourth lifetimes")
def inputs_overwritten(seed: int) -> Program:
    """One buffer for every batch, filled anew while the step still runs; the bad step comes later."""
    model = mlp()
    buffer = torch.zeros(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            buffer.data.copy_(batch(i) * (NAN if i == 3 else 1))
        out = model(buffer.clone())
        buffer.data.fill_(1e30)
        return out.square().mean()

    return training(model, loss, steps=6, extra=lambda: buffer)
