"""The graph of autograd used in ways that a hook, a walk over it or a held reference could disturb."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..program import Program, batch, made_of, mlp, program, sick, training


@program("backward_inside_backward_a_hundred_deep", "backward")
def reentrant(seed: int) -> Program:
    model = mlp(8, 8)

    class Deeper(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.depth:
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    inner = x.detach().requires_grad_()
                    Deeper.apply(model[2](inner), ctx.depth - 1).sum().backward()
                grad = grad + 1e-3 * inner.grad.nan_to_num()
            return grad, None

    return training(model, lambda i: Deeper.apply(model(sick(i)), 40 if i else 3).mean(), steps=4)


@program("saving_a_tensor_trains_another_model", "backward")
def pack_trains(seed: int) -> Program:
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.05)
    busy = [False]
    counts = [0, 0]

    def train(which: int, x: torch.Tensor) -> torch.Tensor:
        counts[which] += 1
        if not busy[0]:
            busy[0] = True
            with torch.enable_grad():
                other(batch(1)).mean().backward()
            busy[0] = False
        return x

    def loss(i: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(train, 0), functools.partial(train, 1)):
            return model(sick(i)).square().mean()

    made = training(model, loss, optimizer, steps=4, extra=lambda: counts)
    made.models.append(other)
    return made


class _Loss(torch.Tensor):
    backwards: ClassVar[list[Any]] = []

    def backward(self, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        _Loss.backwards.append([tuple(args), sorted(kwargs)])
        return super().backward(gradient if gradient is not None else torch.full((), 0.5), *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Loss.backwards.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@program("loss_with_a_backward_of_its_own_notes_every_call", "backward")
def own_backward(seed: int) -> Program:
    _Loss.backwards = []
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        return F.mse_loss(model(sick(i)), torch.zeros(4, 4)).as_subclass(_Loss)  # type: ignore[arg-type]

    return training(model, loss, steps=4, extra=lambda: _Loss.backwards)


@program("complex_half_and_complex_gradients_given", "backward")
def complex_half(seed: int) -> Program:
    model = nn.Linear(8, 4, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        x = torch.complex(sick(i), batch(i + 1))
        out = model(x)
        half = out.to(torch.complex32)
        value = half.to(torch.complex64).sum() + torch.view_as_real(out).prod(-1).sum() + out.conj().mH.sum()
        value.backward(gradient=torch.tensor(1 - 1j))
        optimizer.step()
        return [value, half.detach().to(torch.complex64)]

    return Program([model], [optimizer], step, steps=4)


class _Exit(BaseException):
    def __init__(self, code: int, *, why: str) -> None:
        self.code, self.why = code, why


@program("exits_thrown_in_hooks_and_tried_again", "backward")
def exits(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen: list[str] = []
    made = Program([model], [optimizer], lambda i: None, extra=lambda: seen)
    errors = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), _Exit(1, why="x"), StopIteration(4)]

    def loop(watch: Any) -> None:
        for i, error in enumerate(errors):
            for again in (False, True):
                try:
                    with watch.step(2 * i + again):
                        optimizer.zero_grad()
                        out = model[0](sick(i, 3))

                        def raises(grad: Any, error: BaseException = error, again: bool = again) -> None:
                            if not again:
                                raise error

                        out.register_hook(raises)
                        value = model[2](model[1](out)).mean()
                        value.backward()
                        optimizer.step()
                        made.see(value)
                except BaseException as raised:  # noqa: BLE001
                    seen.append(f"{type(raised).__name__} {raised.args} {raised is error}")

    made.loop = loop
    return made


@program("node_hooks_and_prehooks", "graph")
def node_hooks(seed: int) -> Program:
    """Hooks and prehooks on the nodes of the graph itself change gradients, and one removes itself while it runs."""
    model = mlp()
    x = torch.randn(4, 8)
    calls: list[str] = []

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        node = y.grad_fn
        node.register_prehook(lambda grads: tuple(g * 2 if g is not None else None for g in grads))

        def once(inputs: Any, outputs: Any) -> Any:
            calls.append(f"{i} {len(inputs)} {len(outputs)}")
            handle.remove()
            return tuple(g if g is None else g * 0.5 for g in inputs)

        handle = node.register_hook(once)
        return y.square().mean()

    return training(model, loss, extra=lambda: calls)


@program("multi_grad_hooks_any_and_all", "graph")
def multi_grad(seed: int) -> Program:
    """register_multi_grad_hook over all parameters and over activations, in both modes, counted."""
    model = mlp()
    x = torch.randn(4, 8)
    seen: list[Any] = []
    params = list(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(params, lambda grads: seen.append([float(g.sum()) for g in grads]))
    torch.autograd.graph.register_multi_grad_hook(params, lambda grad: seen.append(float(grad.sum())), mode="any")

    def loss(i: int) -> torch.Tensor:
        h = model[0](x)
        y = model[2](model[1](h))
        torch.autograd.graph.register_multi_grad_hook([h, y], lambda grads: seen.append(len(grads)))
        return y.square().mean()

    return training(model, loss, extra=lambda: seen)


@program("batched_and_unused_autograd_grad", "graph")
def batched_grad(seed: int) -> Program:
    """autograd.grad with is_grads_batched, allow_unused and materialize_grads through watched modules."""
    model = mlp()
    never = nn.Linear(3, 3)
    model.add_module("never", never)
    x = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        y = nn.Sequential(*list(model)[:3])(x)
        (rows,) = torch.autograd.grad(y[0], x, torch.eye(4), retain_graph=True, is_grads_batched=True)
        unused = torch.autograd.grad(y.sum(), [never.weight, model[0].weight], retain_graph=True, allow_unused=True)
        zeros = torch.autograd.grad(y.sum(), [never.weight, model[0].weight], retain_graph=True, materialize_grads=True)
        y.square().mean().backward()
        optimizer.step()
        return rows, unused[0] is None, zeros

    return Program([model], [optimizer], step)


@program("version_counters_and_node_names", "graph")
def versions(seed: int) -> Program:
    """Notes version counters, node names, leafness and view relations of weights, activations and gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.ReLU(), nn.Identity(), nn.Linear(8, 4), nn.Unflatten(1, (2, 2)))
    x = torch.randn(4, 8)
    notes: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        h = x
        for child in model:
            before = h
            h = child(h)
            name = h.grad_fn.name() if h.grad_fn is not None else None
            follow = [n[0].name() if n[0] is not None else None for n in h.grad_fn.next_functions]
            notes.append([name, follow, h._version, h._is_view(), h is before, h.is_leaf, h._base is before, h.output_nr])
        loss = h.square().mean()
        loss.backward()
        notes.append([[p._version, p.grad._version, p.grad.is_leaf, p.grad.grad_fn is None] for p in model.parameters()])
        optimizer.step()
        notes.append([p._version for p in model.parameters()])
        return loss

    return Program([model], [optimizer], step, extra=lambda: notes)


@program("backward_from_gradient_edges", "graph")
def gradient_edges(seed: int) -> Program:
    """Backward starts and ends at GradientEdges, after the tensors themselves are gone."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        h = model[0](x)
        middle = torch.autograd.graph.get_gradient_edge(h)
        y = model[2](model[1](h))
        end = torch.autograd.graph.get_gradient_edge(y)
        seed_grad = 2 * y.detach()
        del h, y
        (at_middle,) = torch.autograd.grad([end], [middle], [seed_grad], retain_graph=True)
        torch.autograd.backward([end], [seed_grad])
        optimizer.step()
        return at_middle

    return Program([model], [optimizer], step)


@program("needs_input_grad_noted", "graph")
def needs_input_grad(seed: int) -> Program:
    """A function that computes only what ctx.needs_input_grad asks, gets None as gradients, and notes both."""
    notes: list[Any] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, w: torch.Tensor, flag: bool) -> Any:
            return x * w, x.argmax(), x + w

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(inputs[0], inputs[1])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, one: Any, two: Any, three: Any) -> Any:
            notes.append([ctx.needs_input_grad, one is None, two is None, three is None])
            x, w = ctx.saved_tensors
            return (one * w if ctx.needs_input_grad[0] else None), (one * x).sum(0), None

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> Any:
            return Scale.apply(x, self.w, True)

    model = nn.ModuleList([Scaled(), nn.Linear(8, 8), Scaled()])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y, _best, _unused = model[0](x)
        y, _best, _unused = model[2](model[1](y))
        return y.square().mean()

    return training(model, loss, extra=lambda: notes)


@program("backward_inside_forward", "graph")
def greedy(seed: int) -> Program:
    """Each block has a loss and a backward of its own inside its forward, and hands on a detached leaf (greedy training)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x).tanh()
            self.head(h).square().mean().backward()
            return h.detach().requires_grad_()

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("model_called_inside_tensor_hook", "graph")
def forward_in_backward(seed: int) -> Program:
    """A hook on an activation runs the model forward and backward again while the outer backward is under way."""
    model = mlp()
    x = torch.randn(4, 8)
    inner: list[float] = []

    def loss(i: int) -> torch.Tensor:
        h = model[0](x)

        def again(grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                other = model(x * 0.5).mean()
                other.backward()
            inner.append(float(other))
            return grad * 0.9

        h.register_hook(again)
        return model[2](model[1](h)).square().mean()

    return training(model, loss, extra=lambda: inner)


@program("gradients_are_views_of_one_bucket", "graph")
def bucket(seed: int) -> Program:
    """All .grad are views of one flat buffer that is zeroed, scaled and noted as a whole."""
    model = mlp()
    x = torch.randn(4, 8)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        flat.zero_()
        model(x).square().mean().backward()
        flat.mul_(0.5)
        optimizer.step()
        pointers = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return flat, pointers == {flat.untyped_storage().data_ptr()}

    return Program([model], [optimizer], step)


@program("two_parameters_share_one_gradient", "graph")
def shared_gradient(seed: int) -> Program:
    """Two parameters have the very same tensor as their gradient; others have expanded and float64 gradients."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        shared = torch.randn(4, 4)
        model[0].weight.grad = shared
        model[1].weight.grad = shared
        model[2].weight.grad = torch.tensor(0.5).expand(4, 4)
        model[0].bias.grad = None
        model[1].bias.grad = torch.zeros(4).index_fill(0, torch.tensor(1), float("inf"))
        optimizer.step()
        return model[0].weight.grad is model[1].weight.grad

    return Program([model], [optimizer], step)


@program("activation_dies_at_once", "graph")
def dies_at_once(seed: int) -> Program:
    """Under no_grad an activation must die when the user deletes it: notes weakrefs inside the step."""
    model = mlp()
    x = torch.randn(4, 8)
    alive: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        with torch.no_grad():
            h = model[0](x)
            ref = weakref.ref(h)
            del h
            alive.append(ref() is None)
            y = model(x)
            ref = weakref.ref(y)
            del y
            alive.append(ref() is None)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program([model], [optimizer], step, extra=lambda: alive)


@program("gradient_dies_when_set_to_none", "graph")
def gradient_dies(seed: int) -> Program:
    """Optimizer in the hook after accumulation: every gradient must be dead before the next one is made."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    x = torch.randn(4, 8)
    refs: list[Any] = []
    alive: list[int] = []

    def apply(p: torch.Tensor) -> None:
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(p.grad))
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Program([model], [], step, extra=lambda: alive)


@program("reuses_a_buffer_nobody_else_holds", "graph")
def arena(seed: int) -> Program:
    """An arena hands out an old buffer again when its reference count says that it is free; notes how many it made."""

    class Arena(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool: list[torch.Tensor] = []
            self.made = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(len(self.pool)):
                if sys.getrefcount(self.pool[number]) == 2:
                    return self.pool[number].copy_(x)
            self.made += 1
            self.pool.append(x.clone())
            return self.pool[-1]

    arena = Arena()
    model = nn.ModuleList([nn.Linear(8, 8), arena, nn.Linear(8, 4)])
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            for scale in (1.0, 2.0, 3.0):
                kept = model[2](model[1](model[0](x * scale)))
        return (model[2](model[0](x)) + kept).square().mean()

    return training(model, loss, extra=lambda: arena.made)


@program("flat_storage_freed_between_forward_and_backward", "graph")
def zero_three(seed: int) -> Program:
    """Hooks of the user resize the storage of weights to 0 after forward and fill it again before backward."""
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    x = torch.randn(4, 8)
    shards = {m: m.weight.detach().clone() for m in model}

    def gather(m: nn.Linear) -> None:
        storage = m.weight.untyped_storage()
        if storage.size() == 0:
            storage.resize_(8 * 8 * 4)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(m.weight):
                m.weight.copy_(shards[m])

    def free(m: nn.Linear) -> None:
        m.weight.untyped_storage().resize_(0)

    for m in model:
        m.register_forward_pre_hook(lambda m, args: gather(m))
        m.register_forward_hook(lambda m, args, out: free(m))
        m.register_full_backward_pre_hook(lambda m, grads: gather(m))
        m.weight.register_post_accumulate_grad_hook(lambda p: [p.untyped_storage().resize_(0), None][1])
        free(m)
    made = Program([model], [], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                loss = model(x).square().mean()
                loss.backward()
                for m in model:
                    shards[m].sub_(m.weight.grad, alpha=0.1)
                    m.weight.grad = None
            made.see(loss)
        watch.close()
        for m in model:
            gather(m)

    made.loop = loop
    return made


@program("parameter_data_is_an_empty_placeholder", "graph")
def placeholder(seed: int) -> Program:
    """Outside its own forward and backward every parameter's .data is an empty placeholder (as a partitioner does)."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    full = {p: p.data.clone() for p in model.parameters()}
    empty = torch.empty(0)

    def give(m: nn.Module, *_: Any) -> None:
        for p in m.parameters(recurse=False):
            p.data = full[p]

    def take(m: nn.Module, *_: Any) -> None:
        for p in m.parameters(recurse=False):
            p.data = empty

    for m in model:
        m.register_forward_pre_hook(give)
        m.register_forward_hook(take)
        m.register_full_backward_pre_hook(give)
        take(m)
    made = Program([model], [], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                loss = model(x).square().mean()
                for m in model:
                    give(m)
                loss.backward()
                for m in model:
                    give(m)
                for p in model.parameters():
                    full[p].sub_(p.grad, alpha=0.1)
                    p.grad = None
                for m in model:
                    take(m)
            made.see(loss)
            made.see(full)

    made.loop = loop
    return made


@program("checkpoint_context_fn_counts", "graph")
def checkpoint_contexts(seed: int) -> Program:
    """Checkpoint with a context_fn of one's own, and a determinism check that sees every recomputed tensor."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    events: list[str] = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            events.append(f"in {self.name}")

        def __exit__(self, *error: object) -> None:
            events.append(f"out {self.name}")

    def loss(i: int) -> torch.Tensor:
        y = checkpoint(model, x, use_reentrant=False, context_fn=lambda: (Note("forward"), Note("again")))
        return y.square().mean()

    return training(model, loss, extra=lambda: events)


@program("checkpoint_recomputed_by_autograd_grad_twice", "graph")
def checkpoint_grad(seed: int) -> Program:
    """A checkpointed block is recomputed by two autograd.grad calls with create_graph, nested in another checkpoint."""
    inner, outer = mlp(8, 8), nn.Linear(8, 8)
    model = nn.ModuleList([inner, outer])

    def block(x: torch.Tensor) -> torch.Tensor:
        return outer(checkpoint(inner, x, use_reentrant=False)).tanh()

    x = torch.randn(3, 8, requires_grad=True)

    def loss(i: int) -> torch.Tensor:
        y = checkpoint(block, x, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return h.square().mean() + y.mean()

    return training(model, loss)


@program("backward_in_thread_with_multithreading_off", "graph")
def single_thread(seed: int) -> Program:
    """Backward with set_multithreading_enabled(False), then two backwards over one graph from two threads in turn."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward(retain_graph=True)
        for _ in range(2):
            thread = threading.Thread(target=loss.backward, kwargs={"retain_graph": True})
            thread.start()
            thread.join()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("retained_gradients_of_activations", "graph")
def retained(seed: int) -> Program:
    """retain_grad on activations inside forward and outside; their .grad is part of the loss of the next step."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            extra = 0.0 if self.last is None else self.last.grad.mean()
            h = self.inner(x)
            h.retain_grad()
            self.last = h
            return h.relu() + extra

    model = nn.Sequential(Keeps(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: model[0].last.grad)


@program("graph_kept_over_steps", "graph")
def over_steps(seed: int) -> Program:
    """Truncated backpropagation through time: the graph of one step is walked again by the backward of the next."""
    model = nn.GRUCell(4, 4)
    x = torch.randn(3, 4)
    states: list[torch.Tensor] = [torch.zeros(3, 4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        states.append(model(x, states[-1]))
        loss = states[-1].square().mean()
        loss.backward(retain_graph=True)
        with torch.autograd._unsafe_preserve_version_counter(tuple(model.parameters())):
            optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4)


@program("graph_of_twenty_thousand_nodes", "graph")
def long_graph(seed: int) -> Program:
    model = nn.Linear(4, 4)

    def loss(i: int) -> torch.Tensor:
        x = model(torch.ones(1, 4))
        for _ in range(20000):
            x = x + 1e-5
        return x.sum()

    return training(model, loss, steps=2)


class _Tricks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any, note: list[Any]) -> torch.Tensor:
        ctx.self_reference = ctx
        ctx.module, ctx.note, ctx.x = module, note, x.detach()
        ctx.save_for_backward(x)
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        try:
            ctx.saved_tensors  # noqa: B018 - changed in place since it was saved: raises
        except RuntimeError as error:
            ctx.note.append(str(error)[:50])
        ctx.note.append((len(ctx.needs_input_grad), grad.requires_grad, ctx.module.training))
        ctx.self_reference = None
        return grad * 2, None, None


@program("context_holds_itself_and_the_module", "graph")
def context_tricks(seed: int) -> Program:
    notes: list[Any] = []
    model = made_of(lambda parts, x: _Tricks.apply(parts[0](x) + 0, parts[0], notes))
    return training(model, lambda i: model(torch.ones(2, 8)).square().mean(), extra=lambda: notes)


_kept: dict[str, Any] = {}


class _Buffered(torch.autograd.Function):
    """Returns a gradient that it also keeps, or gives away: AccumulateGrad copies or steals accordingly."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, keep: bool) -> torch.Tensor:
        ctx.shape, ctx.keep = weight.shape, keep
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = torch.ones(ctx.shape) * grad
        _kept["address"] = made.data_ptr()
        _kept["tensor"] = made if ctx.keep else None
        return made, None


@program("gradient_stolen_or_copied", "graph")
def stolen(seed: int) -> Program:
    model = nn.Linear(8, 8, bias=False)
    notes: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        model.weight.grad = None
        loss = _Buffered.apply(model.weight, i % 2 == 0) + 0 * model(torch.zeros(1, 8)).detach().sum()
        loss.backward()
        assert model.weight.grad is not None
        notes.append((model.weight.grad.data_ptr() == _kept["address"], model.weight.grad._version))
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4, extra=lambda: notes)


@program("saved_tensors_packed_to_numpy_and_failing", "graph")
def packed(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        def unpack(held: Any) -> torch.Tensor:
            notes.append(1)
            if i == 1 and len(notes) == 5:
                raise OSError("the disk is gone")
            return torch.from_numpy(held.copy())

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), unpack):
            value = model(torch.ones(2, 8) * (i + 1)).square().mean()
        try:
            torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        except OSError as error:
            notes.append(str(error))
            return model(torch.ones(2, 8)).sum()
        return value

    return training(model, loss, extra=lambda: notes)


@program("backward_fails_halfway_then_again", "graph")
def halfway(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fails = [False]

    def hook(grad: torch.Tensor) -> None:
        if fails[0]:
            raise ArithmeticError("not now")

    def step(i: int) -> Any:
        optimizer.zero_grad()
        hidden = model[0](torch.ones(2, 8) * i)
        hidden.register_hook(hook)
        loss = model[2](model[1](hidden)).square().mean()
        fails[0] = True
        try:
            loss.backward(retain_graph=True)
        except ArithmeticError:
            fails[0] = False
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("retry_with_half_the_batch", "graph")
def retry(seed: int) -> Program:
    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if len(x) > 2:
                raise torch.OutOfMemoryError(f"tried to allocate {len(x)} rows")
            return x

    model = Fussy()

    def loss(i: int) -> torch.Tensor:
        x = torch.ones(8, 8)
        while True:
            try:
                return model(x).square().mean()
            except torch.OutOfMemoryError:
                x = x[: len(x) // 2]

    return training(model, loss)
