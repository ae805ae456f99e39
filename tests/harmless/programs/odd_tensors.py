"""Tensors that keep books, know few operations, share memory or are no numbers at all."""

from __future__ import annotations

import collections
import ctypes
import ctypes.util
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

from ..program import NAN, Program, batch, bits, made_of, mlp, program, training
from .loops import _loop, _usual_but_one


class Knows(torch.Tensor):
    """Runs what is on its list, and nothing else: neither a copy nor a look."""

    inner: torch.Tensor
    known = ("mm", "addmm", "t", "relu", "threshold_backward", "sum", "detach", "add", "mul", "expand", "view", "_unsafe_view")

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.inner]

    def __repr__(self) -> str:  # type: ignore[override]
        raise RuntimeError("not to be shown")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in cls.known:
            raise RuntimeError(f"{func} is not known here")
        plain = tree_map(lambda t: t.inner if isinstance(t, Knows) else t, (args, kwargs or {}))
        return tree_map(lambda t: Knows(t) if isinstance(t, torch.Tensor) else t, func(*plain[0], **plain[1]))


@program("dispatch_subclass_knows_few_operations", "tensors")
def knows_few(seed: int) -> Program:
    """Activations refuse what the program itself does not do with them: looking, copying, comparing, measuring."""

    class Wraps(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Knows(x)

    class Unwraps(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            return x.inner

    first = nn.Linear(8, 4)
    model = nn.Sequential(Wraps(), nn.Identity(), Unwraps(), first)
    return training(model, lambda i: model(batch(i)).square().mean(), steps=4)


@program("modes_put_aside_by_the_program", "tensors")
def modes_aside(seed: int) -> Program:
    """Code of the program that switches every dispatch mode off for itself, as torch's own does, in forward and backward."""

    class Aside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            with _python_dispatch._disable_current_modes():
                ctx.save_for_backward(x.exp())
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                return grad * ctx.saved_tensors[0].log().cos()

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        with _python_dispatch._disable_current_modes():
            out = model(batch(i))
        return Aside.apply(out).square().mean()

    return training(model, loss, steps=4)


@program("functionalized_forward_writes_in_place", "tensors")
def functionalized(seed: int) -> Program:
    model = mlp()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, :2].add_(1.0)
        y.view(-1)[::3].mul_(0.5)
        return y.relu_()

    run = torch.func.functionalize(forward, remove="mutations_and_views")
    return training(model, lambda i: model(run(batch(i))).square().mean(), steps=4)


@program("children_deleted_between_the_passes", "tensors")
def deleted_children(seed: int) -> Program:
    """Modules leave the model after forward, with their gradients still to come, and others take their names."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    removed: list[nn.Module] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i) * (NAN if i == 3 else 1)).square().mean()
        if i == 1:
            removed.append(model[2])
            model[2] = nn.Identity()
        if i == 2:
            del model[0]
        value.backward()
        optimizer.step()
        return value.detach()

    return Program([model], [optimizer], step, steps=5)


@program("numpy_writes_behind_the_back", "tensors")
def behind_the_back(seed: int) -> Program:
    """Weights, buffers and inputs change through numpy, which no dispatcher sees, inside forward and between the passes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    rows = np.zeros((4, 8), np.float32)
    views = [model[0].weight.detach().numpy(), model[1].running_mean.numpy()]

    def loss(i: int) -> torch.Tensor:
        rows[:] = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8) * (i + 1)
        out = model(torch.from_numpy(rows))
        views[1] += 0.125
        np.clip(views[0], -0.3, 0.3, out=views[0])
        return out.square().mean()

    return training(model, loss, steps=5)


@program("bytes_resized_after_their_batch", "tensors")
def resized_bytes(seed: int) -> Program:
    """A batch lies in a bytearray that grows as soon as nobody looks into it: one that is still held makes that an error."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    store = bytearray(np.linspace(-1, 1, 32, dtype=np.float32).tobytes())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        rows = torch.from_numpy(np.frombuffer(store, np.float32, 32).reshape(4, 8))
        value = model(rows).square().mean()
        del rows
        value.backward()
        value = value.detach()
        try:
            store.extend(b"more")
            notes.append(len(store))
        except BufferError as error:
            notes.append(str(error))
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: notes)


@program("parameter_of_overlapping_memory", "tensors")
def overlapping(seed: int) -> Program:
    """A parameter whose rows lie over each other, updated by hand through its memory."""
    memory = torch.linspace(-1, 1, 11)

    class Overlaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(memory.as_strided((4, 8), (1, 1)))
            self.scale = nn.Parameter(torch.ones(()).expand(4))
            self.alias = nn.Buffer(memory[2:6])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) * self.scale + self.alias.mean()

    model = Overlaps()

    def step(i: int) -> Any:
        value = model(batch(i)).square().mean()
        value.backward()
        with torch.no_grad():
            memory[:8] -= 0.01 * model.weight.grad.sum(0)
        for p in model.parameters():
            p.grad = None
        return value

    return Program([model], [], step, steps=4, extra=lambda: memory)


@program("payloads_of_nan_and_signed_zeros", "tensors")
def payloads(seed: int) -> Program:
    """What is hidden in the bits of NaN, of minus zero and of subnormal numbers arrives as it was sent."""
    hidden = torch.tensor([0x7FC12345, -0x003EDCBB, -0x80000000, 1, 0x007FFFFF], dtype=torch.int32)
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    model.register_buffer("hidden", hidden.view(torch.float32).clone())

    class Passes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    passes = Passes()
    model.add_module("passes", passes)
    model.forward = lambda x: model[2](model[1](model[0](x)))

    def loss(i: int) -> torch.Tensor:
        out = passes(model.hidden)
        notes.append(bits(torch.cat([out, out.clone()])[::2].contiguous().view(torch.int32)))
        return model(batch(i)).square().mean()

    return training(model, loss, steps=4, extra=lambda: notes)


_LIBM = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")


_UPWARD, _NEAREST = 0x800, 0


@program("rounding_goes_upward", "tensors")
def upward(seed: int) -> Program:
    """Interval arithmetic: the float unit rounds up inside the steps, and is asked whether it still does."""
    made, notes = _usual_but_one(), []  # type: tuple[Program, list[int]]

    def loop(watch: Any) -> None:
        try:
            for i in range(5):
                _LIBM.fesetround(_UPWARD)
                with watch.step(i):
                    value = made.step(i)
                notes.append(_LIBM.fegetround())
                _LIBM.fesetround(_NEAREST)
                made.see(value)
        finally:
            _LIBM.fesetround(_NEAREST)

    made.extra = lambda: notes
    return _loop(made, loop)


@program("numbers_and_metadata_of_graph_nodes", "tensors")
def node_numbers(seed: int) -> Program:
    """Nodes of the graph have numbers in the order of forward, and a dictionary of the user's: neither shows a second run."""
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def loss(i: int) -> torch.Tensor:
        before = torch.zeros(1, requires_grad=True).exp().grad_fn._sequence_nr()
        out = model(batch(i))
        value = out.square().mean()
        node = value.grad_fn
        while node is not None:
            node.metadata["mine"] = len(notes)
            number = node._sequence_nr()
            notes.append([node.name(), number - before if number < 1 << 62 else -1, sorted(node.metadata)])
            node = next((one for one, _ in node.next_functions if one is not None), None)
        return value

    return training(model, loss, steps=3, extra=lambda: notes)


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

        def side(name: str) -> Any:
            pick = lambda t: getattr(t, name) if isinstance(t, _Pair) else t  # noqa: E731
            return func(*pytree.tree_map(pick, args), **pytree.tree_map(pick, kwargs or {}))

        one, two = side("first"), side("second")
        if func._schema.is_mutable or (isinstance(one, torch.Tensor) and func.is_view and not one.is_floating_point()):
            return args[0]
        return pytree.tree_map(lambda a, b: _Pair(a, b) if isinstance(a, torch.Tensor) else a, one, two)


@program("parameters_are_pairs_that_count", "tensors")
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


@program("pairs_flow_through_modules", "tensors")
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


@program("every_question_to_a_subclass_is_counted", "tensors")
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


@program("parameter_counts_reads_and_comparisons", "tensors")
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


@program("tensor_that_computes_when_it_dies", "tensors")
def dying_tensors(seed: int) -> Program:
    _Finalised.ends.clear()
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i).as_subclass(_Finalised))
        return out.as_subclass(torch.Tensor).square().mean()

    return training(model, loss, extra=lambda: set(_Finalised.ends))


@program("block_sparse_and_column_sparse_inside", "tensors")
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


@program("jagged_rows", "tensors")
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


@program("masked_tensors_in_the_model", "tensors")
def masked(seed: int) -> Program:
    from torch.masked import as_masked_tensor

    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        out = parts[0](x)
        rows = as_masked_tensor(out.detach(), out > -0.5)
        return out + torch.sum(rows * 2, 0).get_data().nan_to_num() + torch.amax(rows, 0).get_data().nan_to_num()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = made_of(forward)
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).sum())


@program("module_outputs_masked_tensor", "tensors")
def masked_output(seed: int) -> Program:
    from torch.masked import as_masked_tensor

    class Masks(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return as_masked_tensor(x.detach(), x > -0.5)

    model = made_of(lambda parts, x: parts[0](x) + parts[1](parts[0](x)).sum(0).get_data().nan_to_num(), nn.Linear(8, 8), Masks())
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).sum())


@program("dtypes_nobody_computes_with", "tensors")
def dtypes(seed: int) -> Program:
    kinds = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.bits16, torch.complex32]

    class Emits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for kind in kinds[:-1]:
                self.register_buffer(
                    f"b_{str(kind)[6:]}", torch.zeros(4, dtype=torch.uint8).repeat(8)[: 4 * kind.itemsize].view(kind)
                )
            self.packed = nn.Buffer(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            return x, *self.buffers(), torch.zeros(3, dtype=torch.complex32), torch.zeros(0, dtype=torch.uint64)

    model = made_of(lambda parts, x: parts[1](parts[0](x))[0], nn.Linear(8, 8), Emits())
    return training(model, lambda i: model(torch.ones(2, 8)).square().mean())


@program("parameters_integer_bool_empty_and_scalar", "tensors")
def odd_parameters(seed: int) -> Program:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
            self.eight = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2), requires_grad=False)

        def forward(self) -> torch.Tensor:
            self.whole.data += 1
            self.flags.data.logical_not_()
            return self.scalar * self.whole.sum() + self.empty.sum() + self.wave.abs().sum() + self.wide.sum().float()

    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, foreach=False)
    return training(model, lambda i: model(), optimizer)


@program("five_thousand_scalar_parameters", "tensors")
def many_parameters(seed: int) -> Program:
    model = nn.ParameterList([nn.Parameter(torch.tensor(i / 1000)) for i in range(5000)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    return training(model, lambda i: torch.stack(list(model)).square().mean(), optimizer)
