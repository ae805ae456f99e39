"""Gradients that are cached, compressed, made orthogonal, taken in hooks or kept from function to function."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.utils.benchmark
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..program import Program, batch, mlp, program, sick, training
from .effects import BAD_GRADIENT, BAD_LOSS, _given, _loss_of, _with_bad_steps


@program("gradients_of_tasks_made_orthogonal", "gradients")
def surgery(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=True)

    def step(i: int) -> Any:
        out = model(sick(i, 3))
        losses = [out[:, k].square().mean() for k in range(3)]
        parameters = list(model.parameters())
        per_task = [list(torch.autograd.grad(one, parameters, retain_graph=k < 2)) for k, one in enumerate(losses)]
        flat = [torch.cat([g.flatten() for g in grads]) for grads in per_task]
        for k, one in enumerate(flat):
            for other in flat[:k] + flat[k + 1 :]:
                dot = torch.dot(one, other)
                if dot < 0:
                    one.sub_(other * dot / other.square().sum().clamp_min(1e-12))
        total = torch.stack(flat).sum(0)
        at = 0
        for parameter in parameters:
            parameter.grad = total[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        optimizer.step()
        return losses

    return Program([model], [optimizer], step, steps=5)


@program("several_roots_with_given_gradients", "gradients")
def several_roots(seed: int) -> Program:
    model = mlp()
    doubts = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), doubts], 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        out = model(sick(i, 3))
        one, two = out[:, :2] * torch.exp(-doubts[0]), out[:, 2:].square() * torch.exp(-doubts[1])
        weights = [m.weight for m in model if isinstance(m, nn.Linear)]
        torch.autograd.backward([one, two], [torch.ones_like(one), two.detach()], inputs=[*weights, doubts])
        optimizer.step()
        return [one, two]

    return Program([model], [optimizer], step, steps=5, extra=lambda: doubts)


class _Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> Any:
        ctx.set_materialize_grads(False)
        top = x.argmax(-1)
        ctx.mark_non_differentiable(top)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale, top, x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: Any, _: Any, third: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert third is None or first is None
        return (first * ctx.scale if first is not None else third * x.cos() if third is not None else None), None


@program("function_that_is_given_no_gradients", "gradients")
def no_gradients(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        first, top, third = _Odd.apply(model(sick(i, 3)), 0.5)
        return (first if i % 2 else third).square().mean() + 0 * top.float().mean()

    return training(model, loss, steps=5)


class _FusedLoss(torch.autograd.Function):
    """Computes its gradient chunk by chunk while it runs forward, as memory-saving losses do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total, grads, of_weight = torch.zeros(()), [], torch.zeros_like(weight)
        for rows, wanted in zip(hidden.chunk(2), labels.chunk(2)):
            with torch.enable_grad():
                rows, local = rows.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = F.cross_entropy((rows @ local.T).float(), wanted, reduction="sum")
            gradient = torch.autograd.grad(loss, [rows, local])
            grads.append(gradient[0])
            of_weight += gradient[1]
            total += loss.detach()
        ctx.save_for_backward(torch.cat(grads), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        first, second = ctx.saved_tensors
        return first.mul_(given), second.mul_(given), None


@program("loss_differentiates_itself_in_forward", "gradients")
def fused_loss(seed: int) -> Program:
    body, head = mlp(8, 8), nn.Linear(8, 5, bias=False)
    model = nn.ModuleDict({"body": body, "head": head})
    labels = torch.tensor([0, 4, 2, 1])
    return training(model, lambda i: _FusedLoss.apply(body(sick(i, 3)), head.weight, labels), steps=5)


class _Reversible(torch.autograd.Function):
    """The input is freed after forward and computed again from the output."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, two: torch.Tensor, f: Any, g: Any, *weights: Any) -> Any:
        ctx.f, ctx.g, ctx.weights = f, g, weights
        with torch.no_grad():
            first = one + f(two)
            second = two + g(first)
        ctx.save_for_backward(first.detach(), second.detach())
        return first, second

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:  # type: ignore[override]
        first, second = ctx.saved_tensors
        with torch.no_grad():
            two = second - ctx.g(first)
            one = first - ctx.f(two)
        with torch.enable_grad():
            one, two = one.requires_grad_(), two.requires_grad_()
            a = one + ctx.f(two)
            b = two + ctx.g(a)
        grads = torch.autograd.grad([a, b], [one, two, *ctx.weights], given)
        return (*grads[:2], None, None, *grads[2:])


@program("reversible_blocks_compute_their_input_again", "gradients")
def reversible(seed: int) -> Program:
    f, g, head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(8, 2)
    model = nn.ModuleList([f, g, head])

    def loss(i: int) -> torch.Tensor:
        one, two = (half.clone().requires_grad_() for half in sick(i, 3).chunk(2, 1))
        for _ in range(3):
            one, two = _Reversible.apply(one, two, f, g, *f.parameters(), *g.parameters())
        return head(torch.cat([one, two], 1)).square().mean()

    return training(model, loss, steps=5)


@program("updates_without_a_backward_pass", "gradients")
def zeroth_order(seed: int) -> Program:
    """The weights are disturbed by the numbers of a seed, forward runs twice, and the same numbers make the update."""
    model = mlp()

    def disturb(number: int, by: float) -> None:
        source = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=source), alpha=by)

    @torch.inference_mode()
    def step(i: int) -> Any:
        number = int(np.random.randint(1 << 20))
        disturb(number, 1e-3)
        up = model(sick(i, 3)).square().mean()
        disturb(number, -2e-3)
        down = model(sick(i, 3)).square().mean()
        disturb(number, 1e-3)
        slope = float((up - down) / 2e-3)
        if math.isfinite(slope):
            disturb(number, -1e-2 * slope)
        return [up, down]

    return Program([model], [], step, steps=5)


@program("each_layer_has_a_loss_of_its_own", "gradients")
def layer_by_layer(seed: int) -> Program:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    optimizers = [torch.optim.Adam(layer.parameters(), 1e-2) for layer in layers]

    def step(i: int) -> Any:
        good, bad, told = sick(i, 3), batch(i).flip(1), []
        for layer, optimizer in zip(layers, optimizers):
            one, two = (F.relu(layer(F.normalize(x))) for x in (good, bad))
            loss = torch.log1p(torch.exp(torch.cat([2 - one.square().mean(1), two.square().mean(1) - 2]))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            good, bad = one.detach(), two.detach()
            told.append(loss)
        return told

    return Program([layers], optimizers, step, steps=5)


@program("largest_gradients_are_sent_and_the_rest_remembered", "gradients")
def compressed(seed: int) -> Program:
    """A gradient is replaced by a sparse one of its largest entries; what was left out is added the next time."""
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    left = torch.zeros(32)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(sick(i, 3)).square().mean()
        loss.backward()
        weight = model.weight
        assert weight.grad is not None
        flat = weight.grad.flatten() + left
        places = flat.abs().nan_to_num(0).topk(6).indices
        sent = torch.zeros(32).index_copy(0, places, flat[places])
        left.copy_((flat - sent).nan_to_num(0))
        weight.grad = sent.view(4, 8).to_sparse()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=5, extra=lambda: left)


@program("hooks_on_accumulating_nodes", "hooks")
def accumulating(seed: int) -> Program:
    """The way of old wrappers: hooks on the node that adds up the gradient of a parameter, and hooks over several of them."""
    model, calls = mlp(), []  # type: tuple[Any, list[Any]]
    parameters = list(model.parameters())
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in parameters]  # type: ignore[union-attr]
    for number, node in enumerate(nodes):
        node.register_hook(lambda *given, number=number: calls.append(number))
    register_multi_grad_hook(parameters, lambda gradients: calls.append(len(gradients)))
    return _with_bad_steps(model, lambda: [calls, len(nodes)])


@program("hooks_of_all_modules", "hooks")
def of_all_modules(seed: int) -> Program:
    model, calls = mlp(), []  # type: tuple[Any, list[Any]]
    made = _with_bad_steps(model, lambda: calls)

    def loop(watch: Any) -> None:
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_hook(lambda m, *rest: calls.append(type(m).__name__)),
            hooks.register_module_full_backward_hook(lambda m, *rest: calls.append("back " + type(m).__name__)),
        ]
        try:
            for i in range(8):
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            for handle in handles:
                handle.remove()

    made.loop = loop
    return made


@program("saved_tensors_packed_and_counted", "hooks")
def packed(seed: int) -> Program:
    """What is saved for backward goes through the program's hands, with a default around the whole step."""
    model, calls = mlp(), [0, 0]

    def pack(t: torch.Tensor) -> Any:
        calls[0] += 1
        return t.numpy(force=True).copy() if not isinstance(t, nn.Parameter) else t

    def unpack(packed: Any) -> torch.Tensor:
        calls[1] += 1
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

    made = _with_bad_steps(model, lambda: calls)
    usual = made.step

    def step(i: int) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return usual(i)

    made.step = step
    return made


@program("checkpoint_with_draws_on_bad_steps", "hooks")
def draws(seed: int) -> Program:
    drop, model = nn.Dropout(0.5), mlp()
    whole = nn.ModuleList([drop, model])

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = whole

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda x: drop(torch.tanh(x)) + torch.rand_like(x), x, use_reentrant=False)
            return checkpoint(lambda x: model(drop(x)), x.requires_grad_(), use_reentrant=True)

    return _with_bad_steps(Parts())


@program("optimizer_runs_in_hooks_of_accumulation", "hooks")
def in_accumulation(seed: int) -> Program:
    """Each weight is updated as soon as its gradient is there, and the gradient let go."""
    model = mlp()
    optimizers = {id(p): torch.optim.Adam([p], 0.01) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        if p.grad is not None and bool(p.grad.isfinite().all()):
            optimizers[id(p)].step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]

    def step(i: int) -> Any:
        value = _loss_of(model(_given(i)), i)
        value.backward()
        return value

    return Program([model], list(optimizers.values()), step, steps=8, extra=lambda: len(handles))


@program("states_with_hooks_and_steps_taken_back", "hooks")
def taken_back(seed: int) -> Program:
    """A step that went wrong is undone from the state of one before, whose loading and saving is heard by hooks."""
    model, calls = mlp(), []  # type: tuple[Any, list[Any]]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("loaded"))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("step"))
    kept: list[Any] = []

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = _loss_of(model(_given(i)), i)
        value.backward()
        optimizer.step()
        if i in (*BAD_LOSS, BAD_GRADIENT):
            weights, state = pickle.loads(kept[-1])
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        kept.append(pickle.dumps((model.state_dict(), optimizer.state_dict())))
        return value

    return Program([model], [optimizer], step, steps=8, extra=lambda: calls)
