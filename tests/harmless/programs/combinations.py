"""Features of torch and Python met together: one inside the other, two at once, one switched while the other runs. Most have a
step that goes bad, so that what looks at it afterwards meets them too."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import io
import os
import signal
import sys
import tempfile
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
import torch.utils.data
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..program import NAN, Program, batch, mlp, program, training

BAD = 3


def _given(i: int) -> torch.Tensor:
    return batch(i) / (i + 1) * (NAN if i == BAD else 1)


def _trained(model: nn.Module, loss: Callable[[int], torch.Tensor], **more: Any) -> Program:
    """Five steps; the optimizer does not move on the bad one."""
    optimizer = more.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        if value.isfinite():
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, **more)


# ---- one inside the other ----


@program("combined_checkpoint_in_compile_in_autocast", "combined nested")
def checkpoint_compile_autocast(seed: int) -> Program:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.drop = mlp(8, 8), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))

    model = nn.Sequential(Block(), Block())
    compiled = torch.compile(model, backend="aot_eager")

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=i % 2 == 0):
            return compiled(_given(i)).float().square().mean()

    return _trained(model, loss)


@program("combined_offload_hooks_around_checkpoint_and_inference", "combined nested")
def offload(seed: int) -> Program:
    """Saved tensors are packed as bytes while a teacher predicts in inference mode and a part is recomputed."""
    model, teacher = nn.Sequential(mlp(8, 8), mlp(8, 4)), mlp(8, 4)
    counts = [0, 0]

    def pack(tensor: torch.Tensor) -> Any:
        counts[0] += 1
        return tensor.dtype, tensor.shape, tensor.detach().contiguous().view(torch.uint8).clone()

    def unpack(packed: Any) -> torch.Tensor:
        counts[1] += 1
        dtype, shape, data = packed
        return data.view(dtype).view(shape)

    def loss(i: int) -> torch.Tensor:
        with torch.inference_mode():
            target = teacher(_given(i).nan_to_num())
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            hidden = torch.utils.checkpoint.checkpoint(model[0], _given(i), use_reentrant=False)
            return F.mse_loss(model[1](hidden), target.clone())

    return _trained(model, loss, extra=lambda: counts)


@program("combined_func_grad_of_a_part_in_the_loss", "combined nested")
def inner_gradient(seed: int) -> Program:
    """One step of a learner inside the loss, differentiated through, vmapped over tasks, beside an ordinary penalty."""
    model = mlp(8, 4)

    def loss(i: int) -> torch.Tensor:
        tasks = torch.stack([_given(i), _given(i).flip(0)])
        weights = dict(model.named_parameters())

        def adapted(x: torch.Tensor) -> torch.Tensor:
            def inner(w: Any) -> torch.Tensor:
                return torch.func.functional_call(model, w, (x,)).square().mean()

            gradients = torch.func.grad(inner)(weights)
            faster = {name: w - 0.1 * gradients[name] for name, w in weights.items()}
            return inner(faster)

        return torch.func.vmap(adapted)(tasks).mean() + model(_given(i)).abs().mean()

    return _trained(model, loss)


@program("combined_modes_of_the_programs_own_change_places", "combined nested")
def own_modes(seed: int) -> Program:
    """A dispatch mode and a function mode of its own, opened inside a step and left open over the next, in a generator."""
    names: dict[str, int] = {}

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names[str(func)] = names.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is F.relu else result

    model = mlp()

    def losses() -> Iterator[torch.Tensor]:
        i = 0
        while True:
            with Counts(), Doubles():
                yield model(_given(i)).square().mean()
                i += 1
                yield model(_given(i)).square().mean()
            i += 1

    made = losses()

    def loop(watch: Any) -> None:
        for i in range(5):
            with watch.step(i):
                program.see(program.step(i))
        made.close()

    program = _trained(model, lambda i: next(made), extra=lambda: {n: c for n, c in sorted(names.items()) if "relu" in n})
    program.loop = loop
    return program


@program("combined_fake_tensors_plan_memory_inside_a_step", "combined nested")
def fake(seed: int) -> Program:
    """A shape is planned with fake tensors of the model itself, deep-copied, before the real pass."""
    import copy

    from torch._subclasses.fake_tensor import FakeTensorMode

    model, shapes = mlp(), []

    def loss(i: int) -> torch.Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            ghost = copy.deepcopy(model) if i % 2 else None
            if ghost is not None:
                out = ghost(mode.from_tensor(torch.empty(4, 8)))
                out.sum().backward()
                shapes.append((tuple(out.shape), type(next(ghost.parameters()).grad).__name__))
            else:
                shapes.append(tuple((torch.empty(3, 8) @ torch.empty(8, 2)).shape))
        return model(_given(i)).square().mean()

    return _trained(model, loss, extra=lambda: shapes)


# ---- modules that are called in their own way ----


@program("combined_call_override_with_hooks_of_every_kind", "combined calls")
def every_hook(seed: int) -> Program:
    """`__call__` of its own, prepended and always called hooks, full backward hooks that scale, retained gradients."""
    order: list[str] = []

    class Called(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            order.append("call")
            return super().__call__(*args, **kwargs)

    model = nn.Sequential(Called(8, 8), nn.Tanh(), Called(8, 4))
    model[0].register_forward_hook(lambda m, a, out: order.append("late"), always_call=True)
    model[0].register_forward_hook(lambda m, a, out: out * 1.5, prepend=True)
    model[1].register_forward_pre_hook(lambda m, a, k: ((a[0] + 0.1,), k), with_kwargs=True, prepend=True)
    model[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
    model[2].register_full_backward_hook(lambda m, gi, go: order.append("full"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))

    def loss(i: int) -> torch.Tensor:
        hidden = model[1](model[0](_given(i)))
        hidden.retain_grad()
        hidden.register_hook(lambda g: g.clamp(-1, 1))
        value = model[2](hidden).square().mean()
        order.append(str(hidden.grad_fn is not None))
        return value

    return _trained(model, loss, extra=lambda: order)


@program("combined_getattr_traps_and_descriptors", "combined calls")
def traps(seed: int) -> Program:
    """Attributes that count who asks, a `__getattr__` that makes layers, a descriptor that gives another weight each time."""
    asked: list[str] = []

    class Turn:
        def __get__(self, thing: Any, kind: Any = None) -> Any:
            if thing is None:
                return self
            asked.append("turn")
            return thing.weights[len(asked) % 2]

    class Traps(nn.Module):
        turn: ClassVar[Any] = Turn()

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.full((8, 8), 0.1 * k)) for k in (1, 2)])
            self.out = nn.Linear(8, 4)

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                asked.append(name)
            if name == "lazy":
                self._modules["lazy"] = nn.Linear(8, 8)
            return super().__getattr__(name)

        def __dir__(self) -> Any:
            asked.append("dir")
            return super().__dir__()

        def __bool__(self) -> bool:
            asked.append("bool")
            raise TypeError("a model has no truth")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.lazy(x @ self.turn).relu())

    model = Traps()
    return _trained(
        model, lambda i: model(_given(i)).square().mean(), extra=lambda: [*sorted(set(asked) - {"weights"}), asked.count("turn")]
    )


@program("combined_locals_and_frames_of_the_loop", "combined calls")
def frames(seed: int) -> Program:
    """A forward that reads the variables of its caller and a loss that is made of `locals()`."""
    seen: list[Any] = []

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame: Any = sys._getframe(1)
            while "weight_of_loss" not in frame.f_locals:
                frame = frame.f_back
            seen.append(sorted(name for name in frame.f_locals if not name.startswith("_")))
            return super().forward(x) * frame.f_locals["weight_of_loss"]

    model = nn.Sequential(Reads(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def loss(i: int) -> torch.Tensor:
        weight_of_loss, out = 0.5 + i, None
        out = model(_given(i))
        terms = {name: value for name, value in locals().items() if isinstance(value, torch.Tensor)}
        seen.append(sorted(terms))
        return sum(term.square().mean() for term in terms.values()) * weight_of_loss  # type: ignore[return-value]

    return _trained(model, loss, extra=lambda: seen)


@program("combined_cache_by_tensor_draws_once", "combined calls")
def cache_by_tensor(seed: int) -> Program:
    """A noise drawn once for each batch is kept by the tensor itself; one that drops out is drawn anew."""
    batches = [_given(i) for i in range(5)]

    class Noisy(nn.Linear):
        @functools.lru_cache(maxsize=1)  # noqa: B019
        def noise(self, x: torch.Tensor, *, size: float = 0.1) -> torch.Tensor:
            return torch.randn_like(x) * size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x.detach() if x.requires_grad else x
            return super().forward(x + self.noise(hidden, size=0.2))

    model = nn.Sequential(nn.Linear(8, 8), Noisy(8, 8), Noisy(8, 4))

    def loss(i: int) -> torch.Tensor:
        model[1](batches[i].nan_to_num())
        return model(batches[i]).square().mean() + model[1](batches[i]).mean() + model[1](batches[i]).mean()

    return _trained(model, loss, extra=lambda: list(Noisy.noise.cache_info()))


# ---- autograd ----


@program("combined_functions_dirty_unmaterialized_non_differentiable", "combined autograd")
def custom_functions(seed: int) -> Program:
    """In-place with mark_dirty, gradients that may be None, outputs without a gradient, saved outputs, once_differentiable."""
    told: list[Any] = []

    class AddInPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.add_(y)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, grad

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.set_materialize_grads(False)
            first, second, places = x.exp(), x.sin(), x.argmax(-1)
            ctx.mark_non_differentiable(places)
            ctx.save_for_backward(x, first)
            return first, second, places

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, one: Any, two: Any, _: Any) -> Any:
            x, first = ctx.saved_tensors
            told.append((one is None, two is None))
            return (0 if one is None else one * first) + (0 if two is None else two * x.cos())

    model = mlp(8, 8)

    def loss(i: int) -> torch.Tensor:
        x = model(_given(i))
        x = AddInPlace.apply(x.clone(), x * 0.1)
        first, second, places = Two.apply(x)
        return (first if i % 2 else second).mean() + x[torch.arange(len(x)), places].mean()

    return _trained(model, loss, extra=lambda: told)


@program("combined_gradient_edges_and_inputs_of_backward", "combined autograd")
def edges(seed: int) -> Program:
    """backward(inputs=...), retain_graph, grad with allow_unused and a node's own prehook in one step."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    nodes: list[str] = []

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        out = model(_given(i))
        out.grad_fn.register_prehook(lambda g: nodes.append("pre"))
        out.grad_fn.register_hook(lambda gi, go: nodes.append("post"))
        loss = out.square().mean()
        edge = torch.autograd.graph.get_gradient_edge(out)
        (of_out,) = torch.autograd.grad(loss, edge, retain_graph=True)
        unused = torch.autograd.grad(
            loss, [model[0].weight, torch.ones(1, requires_grad=True)], retain_graph=True, allow_unused=True
        )
        loss.backward(inputs=[model[2].weight, model[2].bias], retain_graph=True)
        torch.autograd.backward([out], [of_out * 0.5], inputs=[model[0].weight])
        if loss.isfinite():
            optimizer.step()
        return [loss, of_out, unused[0], unused[1] is None]

    return Program([model], [optimizer], step, steps=5, extra=lambda: nodes)


@program("combined_multi_grad_hooks_and_in_place_views", "combined autograd")
def multi_hooks(seed: int) -> Program:
    """Hooks for several gradients, versions of views written in place, an anomaly mode that is switched by the step."""
    model, met = mlp(), []
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda gs: met.append(sum(g is not None for g in gs)))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda g: met.append(tuple(g.shape)), mode="any")

    def loss(i: int) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(i == 1, check_nan=False):
            out = model(_given(i)).clone()
            out[:, :2].mul_(2)
            out.unbind(1)  # views that nobody writes to
            out.view(-1)[::3].add_(1)
            return torch.where(out > 0, out, out.expm1()).square().mean() + out._version * 0.0

    return _trained(model, loss, extra=lambda: met)


# ---- tensors of other kinds ----


class _Tagged(torch.Tensor):
    """A parameter whose class carries a word through every operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, _Tagged) and not hasattr(result, "word"):
            result.word = func.__name__
        return result


@program("combined_subclass_parameters_channels_last_memory_mapped", "combined tensors")
def subclass_mapped(seed: int) -> Program:
    """Weights of a subclass, in channels_last, that lie in a file which is mapped."""
    folder = tempfile.mkdtemp()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 4))
    model = model.to(memory_format=torch.channels_last)
    torch.save(model.state_dict(), f"{folder}/w.pt")
    state = torch.load(f"{folder}/w.pt", mmap=True)
    model.load_state_dict(state, assign=True)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(_Tagged))
    os.unlink(f"{folder}/w.pt")
    os.rmdir(folder)
    words: list[str] = []

    def loss(i: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * 3 * 36).reshape(2, 3, 6, 6).to(memory_format=torch.channels_last)
        out = model(x * (NAN if i == BAD else 1))
        words.append(getattr(out, "word", type(out).__name__))
        return out.square().mean()

    return _trained(model, loss, extra=lambda: words)


@program("combined_float8_weights_with_scales", "combined tensors")
def float8(seed: int) -> Program:
    """Weights are kept as float8 with a scale and widened in a custom function; gradients go straight through."""

    class Widened(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            scale = weight.abs().amax() / 448
            return (weight / scale).to(torch.float8_e4m3fn).to(torch.bfloat16) * scale.bfloat16()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.to(torch.float8_e5m2).float()

    class Narrow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.weight.detach().to(torch.float8_e4m3fn)
            return F.linear(x.bfloat16(), Widened.apply(self.weight), self.bias.bfloat16()).float()

    model = nn.Sequential(Narrow(8, 8), nn.GELU(), Narrow(8, 4))
    return _trained(model, lambda i: model(_given(i)).square().mean(), extra=lambda: [m.kept.float() for m in model[::2]])


@program("combined_nested_jagged_with_autocast_and_checkpoint", "combined tensors")
def jagged(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def loss(i: int) -> torch.Tensor:
        rows = torch.nested.nested_tensor([_given(i)[:1], _given(i)[:3]], layout=torch.jagged)
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.utils.checkpoint.checkpoint(model, rows, use_reentrant=False)
        return torch.stack([part.float().square().mean() for part in out.unbind()]).sum()

    return _trained(model, loss)


@program("combined_deterministic_algorithms_switched_by_the_step", "combined tensors")
def deterministic(seed: int) -> Program:
    """index_add, scatter and cumsum with deterministic algorithms on, filled memory, and a warning only."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    before = torch.utils.deterministic.fill_uninitialized_memory

    def loss(i: int) -> torch.Tensor:
        torch.use_deterministic_algorithms(i % 2 == 1, warn_only=i == 3)
        torch.utils.deterministic.fill_uninitialized_memory = i != 1
        try:
            out = model(torch.arange(6) % 5)
            sums = torch.zeros(3, 4).index_add(0, torch.tensor([0, 1, 2, 0, 1, 2]), out)
            empty = torch.empty(4)
            value = sums.scatter_add(1, torch.zeros(3, 1, dtype=torch.long), sums[:, :1]).cumsum(0).square().mean()
            return value + (empty.isnan().float().sum() * 1e-3 if i % 2 else 0)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = before

    return training(model, loss, steps=5)


# ---- the process ----


@program("combined_signals_that_train", "combined process")
def signals(seed: int) -> Program:
    """A handler runs in the middle of forward and backward; it saves, asks for gradients and trains another model."""
    model, other = mlp(), mlp()
    saved: list[int] = []

    def handler(number: int, frame: Any) -> None:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        saved.append(sum(p.grad is not None for p in model.parameters()))
        with torch.enable_grad():
            other(batch(0)).square().mean().backward()
        with torch.no_grad():
            for p in other.parameters():
                p -= 0.01 * p.grad
                p.grad = None

    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGUSR1)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGUSR1)
            return grad

    def loop(watch: Any) -> None:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            for i in range(5):
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            signal.signal(signal.SIGUSR1, before)

    made = _trained(model, lambda i: Interrupted.apply(model(_given(i))).square().mean())
    made.loop, made.extra = loop, lambda: [saved, [p.detach().clone() for p in other.parameters()]]
    return made


@program("combined_asyncio_tasks_share_a_model", "combined process")
def tasks(seed: int) -> Program:
    """Two tasks take turns within steps: one trains, one evaluates between its forward and its backward."""
    model = mlp()
    made = _trained(model, lambda i: model(_given(i)).square().mean())
    optimizer, results = made.optimizers[0], []

    async def train(watch: Any, turn: asyncio.Event, back: asyncio.Event) -> None:
        for i in range(5):
            with watch.step(i):
                optimizer.zero_grad()
                loss = model(_given(i)).square().mean()
                turn.set()
                await back.wait()
                back.clear()
                loss.backward()
                await asyncio.sleep(0)
                if loss.isfinite():
                    optimizer.step()
            made.see(loss)

    async def evaluate(turn: asyncio.Event, back: asyncio.Event) -> None:
        for i in range(5):
            await turn.wait()
            turn.clear()
            with torch.no_grad():
                model.eval()
                results.append(float(model(batch(i)).mean()))
                model.train()
            back.set()

    async def both(watch: Any) -> None:
        turn, back = asyncio.Event(), asyncio.Event()
        await asyncio.gather(train(watch, turn, back), evaluate(turn, back))

    made.loop, made.extra = lambda watch: asyncio.run(both(watch)), lambda: results
    return made


@program("combined_threads_train_one_model_each_in_turns", "combined process")
def threads(seed: int) -> Program:
    """Three threads, each with a model and a tool of its own; one has a bad step while another is in its forward."""
    models = [mlp() for _ in range(3)]
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in models]
    made = Program([models[0]], [optimizers[0]], lambda i: None)
    losses: list[list[float]] = [[], [], []]

    def loop(watch: Any) -> None:
        watches = [watch, watch.another(models[1], optimizers[1]), watch.another(models[2], optimizers[2])]
        meet = threading.Barrier(3)

        def run(k: int) -> None:
            for i in range(4):
                with watches[k].step(i):
                    optimizers[k].zero_grad()
                    loss = models[k](batch(i) * (NAN if (i, k) == (2, 1) else 1)).square().mean()
                    meet.wait(60)
                    loss.backward()
                    if loss.isfinite():
                        optimizers[k].step()
                losses[k].append(loss.item())

        started = [threading.Thread(target=run, args=(k,)) for k in range(3)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    made.loop = loop
    made.extra = lambda: [losses, [p.detach().clone() for m in models for p in m.parameters()]]
    return made


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((8,), float(i)) + torch.rand(8) + torch.utils.data.get_worker_info().id


@program("combined_persistent_workers_started_inside_a_step", "combined process")
def persistent(seed: int) -> Program:
    """A loader with persistent workers is first asked inside a step, kept over epochs, and ended inside another."""
    model = mlp()
    loader = torch.utils.data.DataLoader(
        _Rows(), batch_size=4, num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(3), shuffle=True
    )
    running: list[Any] = [None]

    def loss(i: int) -> torch.Tensor:
        if i % 3 == 0:
            running[0] = iter(loader)
        x = next(running[0])
        if i == 4:
            running[0] = loader._iterator = None
        return model(x * (NAN if i == BAD else 1)).square().mean()

    return _trained(model, loss)


@program("combined_forks_with_handlers_inside_a_step", "combined process")
def forks(seed: int) -> Program:
    """`os.register_at_fork` handlers look at the model; the child computes a gradient and says what it is."""
    model, told = mlp(), []
    os.register_at_fork(before=lambda: told.append(len(list(model.parameters()))), after_in_child=torch.get_rng_state)

    def loss(i: int) -> torch.Tensor:
        value = model(_given(i)).square().mean()
        if i in (1, BAD):
            here, there = os.pipe()
            child = os.fork()
            if not child:
                gradient = torch.autograd.grad(model(batch(1)).square().mean(), model[0].bias)[0]
                os.write(there, gradient.numpy().tobytes())
                os._exit(0)
            os.waitpid(child, 0)
            told.append(os.read(here, 4096))
            os.close(here)
            os.close(there)
        return value

    return _trained(model, loss, extra=lambda: told)


@program("combined_finalizers_touch_the_model", "combined process")
def finalizers(seed: int) -> Program:
    """What is freed during a step calls the model, which is in it; reference cycles are collected in the middle."""
    model, calls = mlp(), []

    class Cycle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

    def collect(gradient: torch.Tensor) -> None:
        gc.collect()

    def gone(number: int) -> None:
        with torch.no_grad():
            calls.append((number, float(model(batch(number)).sum())))

    def loss(i: int) -> torch.Tensor:
        hidden = model[0](_given(i))
        weakref.finalize(Cycle(hidden.detach()), gone, i)
        value = model[2](model[1](hidden))
        gc.collect()
        hidden.register_hook(collect)
        weakref.finalize(value, calls.append, ("output", i))
        return value.square().mean()

    def extra() -> Any:
        return sorted(map(str, calls))

    return _trained(model, loss, extra=extra)


@program("combined_profile_trace_tracemalloc_faulthandler", "combined process")
def tracing(seed: int) -> Program:
    """settrace and setprofile of its own on some steps, tracemalloc on others, a watchdog of faulthandler, a frozen heap."""
    model, met = mlp(), {"forward": 0, "calls": 0}

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(x)

    def trace(frame: Any, event: str, about: Any) -> Any:
        if frame.f_code is Counted.forward.__code__:
            met["forward"] += 1
            return trace
        return None

    def profile(frame: Any, event: str, about: Any) -> None:
        met["calls"] += frame.f_code is Counted.forward.__code__ and event == "call"

    outer = Counted()

    @contextlib.contextmanager
    def switched(i: int) -> Iterator[None]:
        if i == 0:
            gc.freeze()
            tracemalloc.start(3)
        if i % 2:
            sys.settrace(trace)
        if i in (2, BAD):
            sys.setprofile(profile)
        try:
            yield
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            if i == 4:
                tracemalloc.stop()

    def loss(i: int) -> torch.Tensor:
        with switched(i):
            met["on"] = faulthandler.is_enabled()
            value = outer(_given(i)).square().mean()
            met["tracing"] = tracemalloc.is_tracing()
        return value

    return _trained(model, loss, extra=lambda: met)


@program("combined_models_swapped_by_a_generator_in_the_step", "combined process")
def swapped(seed: int) -> Program:
    """A generator gives another model for each micro-batch, changes children in between, and is thrown into."""
    model = nn.ModuleList([mlp(), mlp()])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def models() -> Any:
        k = 0
        while True:
            try:
                yield model[k % 2]
            except ValueError:
                model[0][0], model[1][0] = model[1][0], model[0][0]
            k += 1

    taken = models()

    def step(i: int) -> Any:
        optimizer.zero_grad()
        total = 0.0
        for part in _given(i).chunk(2):
            loss = next(taken)(part).square().mean()
            taken.throw(ValueError())
            loss.backward()
            total += loss.item()
        if total == total:
            optimizer.step()
        return total

    return Program([model], [optimizer], step, steps=5)


# ---- packages, exports, state ----


@program("combined_package_and_load_inside_a_step", "combined state")
def packaged(seed: int) -> Program:
    """The model is written with torch.package and read again inside a step, then trained on as the one it was read as."""
    from torch import package

    model, sums = mlp(), []

    def loss(i: int) -> torch.Tensor:
        if i in (1, BAD):
            buffer = io.BytesIO()
            with package.PackageExporter(buffer) as out:
                out.extern("**")
                out.save_pickle("m", "model.pkl", model)
            buffer.seek(0)
            again = package.PackageImporter(buffer).load_pickle("m", "model.pkl")
            sums.append(float(again(batch(i)).sum()))
            sums.append(sorted(vars(again[0])))
        return model(_given(i)).square().mean()

    return _trained(model, loss, extra=lambda: sums)


@program("combined_parametrized_weights_shared_and_pruned", "combined state")
def parametrized(seed: int) -> Program:
    """Weight norm on a shared layer, pruned by a mask, with a state dict that hooks rename, loaded back on the bad step."""
    from torch.nn.utils import parametrizations, prune

    shared = parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4))
    prune.random_unstructured(model[3], "weight", 0.3)
    model.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update({f"{prefix}extra": torch.ones(1)}))
    model.register_load_state_dict_pre_hook(lambda m, state, prefix, *rest: state.pop(f"{prefix}extra", None))
    kept: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            kept.append({k: v.clone() for k, v in model.state_dict().items()})
        if i == BAD:
            model.load_state_dict(kept[0])
        return model(_given(i)).square().mean()

    return _trained(model, loss, extra=lambda: sorted(kept[0]))


@program("combined_scaler_with_per_optimizer_skips_and_closures", "combined state")
def scaler(seed: int) -> Program:
    """fp16 with a scaler, two optimizers of which one overflows, gradients clipped for one, a scheduler inside the step."""
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    optimizers = [
        torch.optim.Adam(model["a"].parameters(), 1e-2),
        torch.optim.SGD(model["b"].parameters(), 0.05, nesterov=True, momentum=0.9),
    ]
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=10)

    def step(i: int) -> Any:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            first, second = model["a"](batch(i) / 8), model["b"](batch(i) / 8 * (1e30 if i == BAD else 1))
        losses = [first.float().square().mean(), second.float().square().mean()]
        grad_scaler.scale(losses[0]).backward()
        grad_scaler.scale(losses[1]).backward()
        grad_scaler.unscale_(optimizers[0])
        norm = torch.nn.utils.clip_grad_norm_(model["a"].parameters(), 0.1, error_if_nonfinite=False)
        for optimizer in optimizers:
            grad_scaler.step(optimizer)
        grad_scaler.update()
        scheduler.step()
        return [*losses, norm, grad_scaler.get_scale()]

    return Program([model], optimizers, step, steps=5, scaler=grad_scaler)


@program("combined_default_device_dtype_and_set_by_context", "combined state")
def defaults(seed: int) -> Program:
    """Default dtype float64 for a part of a step, meta as the device of a context, tensors made inside hooks."""
    model = mlp()
    model[1].register_forward_hook(lambda m, a, out: out + torch.zeros(1, dtype=out.dtype))

    def loss(i: int) -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)
        try:
            shift = torch.tensor([0.1] * 8)
            with torch.device("meta"):
                ghost = nn.Linear(8, 4)
            scale = torch.ones(()) * sum(p.numel() for p in ghost.parameters())
            return model(_given(i).float() + shift.float()).double().square().mean() * scale
        finally:
            torch.set_default_dtype(before)

    return _trained(model, loss)


@program("combined_lbfgs_with_compile_and_bad_closure", "combined state")
def lbfgs(seed: int) -> Program:
    """LBFGS whose closure is called often, compiled once, and gives NaN in the third of its calls on one step."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="eager")

    def step(i: int) -> Any:
        count = [0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            count[0] += 1
            loss = compiled(batch(i)) * (NAN if (i, count[0]) == (2, 3) else 1)
            loss.backward()
            return loss

        kept = {k: v.clone() for k, v in model.state_dict().items()}
        value = optimizer.step(closure)
        if i == 2:
            model.load_state_dict(kept)
            optimizer.state.clear()
        return [value, count[0]]

    return Program([model], [optimizer], step, steps=4)


@program("combined_stream_of_python_warnings_as_errors", "combined state")
def strict_warnings(seed: int) -> Program:
    """Warnings are errors inside the steps, so whatever warns in the name of the program would end it."""
    import warnings

    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 4))

    def loop(watch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            for i in range(5):
                with watch.step(i):
                    made.see(made.step(i))

    made = _trained(model, lambda i: model(_given(i)).square().mean())
    made.loop = loop
    return made
