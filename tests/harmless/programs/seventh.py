"""Seventh round: ways to train that people really use and that look like nothing before: rollouts, two-pass losses, updates
without a backward pass, losses that differentiate themselves, scales and sums kept by hand. Most have a bad step in them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator
from multiprocessing import shared_memory
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed
import torch.utils.benchmark
from torch import nn
from torch.nn import functional as F

from ..program import Program, mlp, program, training
from .fourth_process import batch

NAN = float("nan")


def _sick(i: int, at: int = 3) -> torch.Tensor:
    return batch(i) * (NAN if i == at else 1)


# ---- loops of reinforcement learning, diffusion, retrieval ----


@program("seventh_ppo_epochs_over_one_rollout", "seventh loops")
def ppo(seed: int) -> Program:
    policy, value = mlp(8, 3), mlp(8, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 1e-2)
    made = Program([policy, value], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        count = 0
        for rollout in range(2):
            with torch.no_grad():
                states = batch(rollout)
                known = torch.distributions.Categorical(logits=policy(states))
                actions = known.sample()
                before, rewards = known.log_prob(actions), torch.randn(len(states))
            advantage = rewards - value(states).squeeze(1).detach()
            for epoch in range(3):
                with watch.step(count):
                    now = torch.distributions.Categorical(logits=policy(states))
                    ratio = (now.log_prob(actions) - before).exp()
                    clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    loss = -clipped.mean() - 0.01 * now.entropy().mean() + F.mse_loss(value(states).squeeze(1), rewards)
                    if rollout == epoch == 1:
                        loss = loss * NAN
                    optimizer.zero_grad(set_to_none=False)
                    loss.backward()
                    if loss.isfinite():
                        optimizer.step()
                made.see([loss, ratio])
                count += 1

    made.loop = loop
    return made


@program("seventh_diffusion_with_a_generator_of_its_own", "seventh loops")
def diffusion(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    source = torch.Generator().manual_seed(5)
    stands: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        clean = torch.rand(4, 8, generator=source)
        time = torch.rand(4, 1, generator=source)
        noise = torch.empty(4, 8).normal_(generator=source)
        label = (torch.rand(4, 1, generator=source) > 0.1) * time
        with torch.autocast("cpu", torch.bfloat16):
            guess = model(torch.cat([clean * (1 - time) + noise * time, label], 1))
        stands.append(int(source.get_state().sum()))
        if i:
            average.update_parameters(model)
        return F.mse_loss(guess.float(), noise) / (0.0 if i == 3 else 1.0)

    return training(model, loss, steps=5, extra=lambda: [stands, average.state_dict()])


@program("seventh_gradients_cached_between_two_passes", "seventh loops")
def gradient_cache(seed: int) -> Program:
    """A contrastive loss over more rows than fit: without gradients first, then again chunk by chunk from the cached gradient."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        chunks, stands = list(torch.randn(8, 8).chunk(4)), []
        with torch.no_grad():
            firsts = []
            for chunk in chunks:
                stands.append(torch.get_rng_state())
                firsts.append(model(chunk))
        found = torch.cat(firsts).requires_grad_()
        scores = found @ found.T / (0.0 if i == 2 else 0.1)
        loss = F.cross_entropy(scores, torch.arange(8).roll(1))
        loss.backward()
        assert found.grad is not None
        for chunk, stand, cached in zip(chunks, stands, found.grad.chunk(4)):
            with torch.random.fork_rng():
                torch.set_rng_state(stand)
                (model(chunk) * cached).sum().backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4)


@program("seventh_state_of_an_lstm_lives_over_steps", "seventh loops")
def truncated(seed: int) -> Program:
    model = nn.LSTM(8, 8, 2, batch_first=True)
    states: list[Any] = [None]

    def loss(i: int) -> torch.Tensor:
        rows = torch.sin(torch.arange(96.0) + i).reshape(3, 4, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            out, state = model(rows, states[0])
        states[0] = tuple(part.detach().float() for part in state)
        return out.float().square().mean() * (math.inf if i == 3 else 1.0)

    return training(model, loss, steps=6, extra=lambda: states)


@program("seventh_forward_is_sent_its_parts", "seventh loops")
def sent(seed: int) -> Program:
    """The model is a generator that asks for the next layer's input and is answered from outside; one is never finished."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
            for layer in self.layers:
                x = yield torch.tanh(layer(x))
            return x

    model, left = Asking(), []

    def loss(i: int) -> torch.Tensor:
        running = model(_sick(i))
        left.append(model(batch(i)))
        next(left[-1])
        value = next(running)
        while True:
            try:
                value = running.send(value * 0.5 + 0.1)
            except StopIteration as end:
                return end.value.square().mean()

    return training(model, loss, steps=5, extra=lambda: [gen.gi_frame is None for gen in left])


@program("seventh_loader_asks_the_model_what_is_hard", "seventh loops")
def active(seed: int) -> Program:
    model = mlp()
    rows = torch.linspace(-2, 2, 128).reshape(16, 8)

    class Hardest(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while True:
                model.eval()
                with torch.inference_mode():
                    scores = model(rows).square().sum(1) + torch.rand(16) * 1e-3
                model.train()
                yield from rows[scores.topk(2).indices]

    source = iter(torch.utils.data.DataLoader(Hardest(), batch_size=4))
    return training(model, lambda i: model(next(source)).square().mean() * (NAN if i == 4 else 1), steps=6)


class _Enough(Exception):
    pass


@program("seventh_stopped_from_a_hook_and_taken_up_again", "seventh loops")
def taken_up(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    made = Program([model], [optimizer], lambda i: None)
    calls = [0]

    def watchdog(grad: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] in (3, 6):
            raise _Enough(f"at {calls[0]}")

    def loop(watch: Any) -> None:
        kept: Any = None
        i = 0
        while i < 8:
            try:
                with watch.step(i):
                    value = model(_sick(i)).square().mean()
                    value.register_hook(watchdog)
                    value.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                made.see(value)
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                i += 1
            except _Enough as stop:
                made.see(str(stop))
                if kept is not None:
                    model.load_state_dict(kept[0])
                    optimizer.load_state_dict(kept[1])
                optimizer.zero_grad()

    made.loop = loop
    return made


@program("seventh_samples_drawn_by_their_loss", "seventh loops")
def prioritised(seed: int) -> Program:
    """The random numbers of numpy are drawn with weights from the loss of each sample."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    priorities, drawn = np.ones(16), []  # type: tuple[Any, list[Any]]
    rows = torch.linspace(-1, 1, 128).reshape(16, 8)

    def step(i: int) -> Any:
        chosen = np.random.choice(16, 4, replace=False, p=priorities / priorities.sum())
        drawn.append(chosen.tolist())
        each = model(rows[chosen]).square().mean(1)
        if i == 2:
            each = each * torch.tensor([1.0, NAN, 1.0, 1.0])
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step() if i != 2 else None
        priorities[chosen] = np.nan_to_num(each.detach().numpy(), nan=1.0) + 1e-3
        return each

    return Program([model], [optimizer], step, steps=6, extra=lambda: [drawn, priorities])


# ---- gradients made in another way ----


@program("seventh_gradients_of_tasks_made_orthogonal", "seventh gradients")
def surgery(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=True)

    def step(i: int) -> Any:
        out = model(_sick(i))
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


@program("seventh_several_roots_with_given_gradients", "seventh gradients")
def several_roots(seed: int) -> Program:
    model = mlp()
    doubts = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), doubts], 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        out = model(_sick(i))
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


@program("seventh_function_that_is_given_no_gradients", "seventh gradients")
def no_gradients(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        first, top, third = _Odd.apply(model(_sick(i)), 0.5)
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


@program("seventh_loss_differentiates_itself_in_forward", "seventh gradients")
def fused_loss(seed: int) -> Program:
    body, head = mlp(8, 8), nn.Linear(8, 5, bias=False)
    model = nn.ModuleDict({"body": body, "head": head})
    labels = torch.tensor([0, 4, 2, 1])
    return training(model, lambda i: _FusedLoss.apply(body(_sick(i)), head.weight, labels), steps=5)


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


@program("seventh_reversible_blocks_compute_their_input_again", "seventh gradients")
def reversible(seed: int) -> Program:
    f, g, head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(8, 2)
    model = nn.ModuleList([f, g, head])

    def loss(i: int) -> torch.Tensor:
        one, two = (half.clone().requires_grad_() for half in _sick(i).chunk(2, 1))
        for _ in range(3):
            one, two = _Reversible.apply(one, two, f, g, *f.parameters(), *g.parameters())
        return head(torch.cat([one, two], 1)).square().mean()

    return training(model, loss, steps=5)


@program("seventh_updates_without_a_backward_pass", "seventh gradients")
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
        up = model(_sick(i)).square().mean()
        disturb(number, -2e-3)
        down = model(_sick(i)).square().mean()
        disturb(number, 1e-3)
        slope = float((up - down) / 2e-3)
        if math.isfinite(slope):
            disturb(number, -1e-2 * slope)
        return [up, down]

    return Program([model], [], step, steps=5)


@program("seventh_each_layer_has_a_loss_of_its_own", "seventh gradients")
def layer_by_layer(seed: int) -> Program:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    optimizers = [torch.optim.Adam(layer.parameters(), 1e-2) for layer in layers]

    def step(i: int) -> Any:
        good, bad, told = _sick(i), batch(i).flip(1), []
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


@program("seventh_largest_gradients_are_sent_and_the_rest_remembered", "seventh gradients")
def compressed(seed: int) -> Program:
    """A gradient is replaced by a sparse one of its largest entries; what was left out is added the next time."""
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    left = torch.zeros(32)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(_sick(i)).square().mean()
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


# ---- optimizers and scales kept by hand ----


class _Lookahead(torch.optim.Optimizer):
    """Takes over the groups and states of another and steps it itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow):
                torch._foreach_lerp_(slow, group["params"], 0.5)
                torch._foreach_copy_(group["params"], slow)
        return found


@program("seventh_optimizer_that_was_never_made_looks_ahead", "seventh updates")
def lookahead(seed: int) -> Program:
    model = mlp()
    optimizer = _Lookahead(torch.optim.AdamW(model.parameters(), 1e-2))
    made = training(model, lambda i: model(_sick(i, 4)).square().mean(), optimizer, steps=6)
    made.optimizers, made.extra = [optimizer.inner], lambda: optimizer.slow
    return made


@program("seventh_best_of_three_copies_is_taken", "seventh updates")
def line_search(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step(i: int) -> Any:
        found = []
        for rate in (0.5, 0.05, 0.005):
            tried = copy.deepcopy(model)
            other = torch.optim.SGD(tried.parameters(), rate, momentum=0.9)
            other.load_state_dict(optimizer.state_dict())
            other.param_groups[0]["lr"] = rate
            tried(_sick(i)).square().mean().backward()
            other.step()
            with torch.no_grad():
                found.append((float(tried(batch(i)).square().mean().nan_to_num(1e9)), rate, tried, other))
        _, rate, best, other = min(found, key=lambda one: one[:2])
        if i != 3:
            model.load_state_dict(best.state_dict())
            optimizer.load_state_dict(other.state_dict())
        return [one[:2] for one in found]

    return Program([model], [optimizer], step, steps=5)


@program("seventh_scale_of_the_loss_kept_by_hand", "seventh updates")
def by_hand(seed: int) -> Program:
    model = mlp().half()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(master, 1e-2)
    scale, skipped = [2.0**15], []  # type: tuple[list[float], list[int]]

    def step(i: int) -> Any:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model((batch(i) * (100 if i == 2 else 1)).half()).float().square().mean()
        (loss * scale[0]).backward()
        grads = [p.grad.float() / scale[0] for p in model.parameters() if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in grads):
            scale[0] /= 2
            skipped.append(i)
            return loss
        for weight, grad in zip(master, grads):
            weight.grad = grad
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), master)
        return loss

    return Program([model], [optimizer], step, steps=6, extra=lambda: [scale, skipped, master])


@program("seventh_what_rounding_took_is_added_later", "seventh updates")
def kahan(seed: int) -> Program:
    model = mlp().bfloat16()
    lost = [torch.zeros_like(p) for p in model.parameters()]

    def step(i: int) -> Any:
        loss = model(_sick(i).bfloat16()).float().square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad, rest in zip(model.parameters(), grads, lost):
                change = -0.01 * grad.nan_to_num(0) + rest
                before = parameter.clone()
                parameter.add_(change)
                rest.copy_(change - (parameter - before))
        return loss

    return Program([model], [], step, steps=5, extra=lambda: lost)


class _Eight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return (grad * scale).to(torch.float8_e5m2).to(grad.dtype) / scale, None, None


@program("seventh_scales_of_eight_bits_follow_a_history", "seventh updates")
def delayed_scaling(seed: int) -> Program:
    class Scaled(nn.Linear):
        def __init__(self, *size: int) -> None:
            super().__init__(*size)
            self.register_buffer("history", torch.ones(4))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.history.copy_(torch.roll(self.history, 1))
                self.history[0] = x.detach().abs().max()
                self.scale.fill_(448.0).div_(self.history.nan_to_num(1.0).max().clamp_min(1e-4))
            given = _Eight.apply(x, self.scale.clone(), torch.tensor(64.0))
            return F.linear(given, _Eight.apply(self.weight, self.scale.clone(), torch.tensor(64.0)), self.bias)

    model = nn.Sequential(Scaled(8, 8), nn.GELU(), Scaled(8, 4))
    return training(model, lambda i: model(_sick(i)).square().mean(), steps=5)


# ---- what stands around the tensors ----


class Quantity:
    """No tensor and no subclass of one; torch asks it all the same."""

    asked: ClassVar[dict[str, int]] = {}

    def __init__(self, value: torch.Tensor, unit: str) -> None:
        self.value, self.unit = value, unit

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked[func.__name__] = cls.asked.get(func.__name__, 0) + 1
        plain = [a.value if isinstance(a, Quantity) else a for a in args]
        unit = next(a.unit for a in args if isinstance(a, Quantity))
        out = func(*plain, **(kwargs or {}))
        return cls(out, unit) if isinstance(out, torch.Tensor) else out


@program("seventh_quantities_with_units_flow", "seventh surroundings")
def quantities(seed: int) -> Program:
    Quantity.asked = {}

    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Quantity) -> Quantity:
            out: Any = torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)  # type: ignore[arg-type]
            return torch.tanh(out)

    model = Metric()
    return training(
        model, lambda i: torch.mean(model(Quantity(_sick(i), "m"))).value, steps=5, extra=lambda: dict(Quantity.asked)
    )


@program("seventh_forward_chosen_by_the_type_of_its_input", "seventh surroundings")
def dispatching(seed: int) -> Program:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        @functools.singledispatchmethod
        def forward(self, x: Any) -> torch.Tensor:
            raise TypeError(type(x).__name__)

        @forward.register
        def _(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

        @forward.register
        def _(self, x: dict) -> torch.Tensor:  # type: ignore[type-arg]
            return self.inner(x["rows"]) * x["by"]  # type: ignore[no-any-return]

        @forward.register
        def _(self, x: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
            return self.inner(torch.from_numpy(x))  # type: ignore[no-any-return]

    model: Any = Choosing()
    kinds: list[Callable[[int], Any]] = [_sick, lambda i: {"rows": _sick(i), "by": 2.0}, lambda i: _sick(i).numpy()]
    return training(model, lambda i: model(kinds[i % 3](i)).square().mean(), steps=6)


@program("seventh_numpy_in_the_middle_and_rows_that_cannot_be_written", "seventh surroundings")
def numpy_inside(seed: int) -> Program:
    np.linspace(-1, 1, 64, dtype=np.float32).tofile("rows.bin")
    rows = np.memmap("rows.bin", np.float32, "r", shape=(8, 8))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            factor = np.float32(np.median(x.detach().numpy()))
            mask = torch.from_numpy((np.random.rand(*x.shape) > 0.3).astype(np.float32))
            return self.last(x * mask + factor)  # type: ignore[no-any-return]

    model = Mixed()

    def loss(i: int) -> torch.Tensor:
        given = torch.as_tensor(rows[i % 4 : i % 4 + 4])
        return model(given).square().mean() * (NAN if i == 3 else 1)

    return training(model, loss, steps=5)


@program("seventh_handlers_of_logs_compute", "seventh surroundings")
def computing_handler(seed: int) -> Program:
    model = mlp()
    norms: list[Any] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with torch.no_grad():
                parts = [p.grad.norm() if p.grad is not None else p.norm() for p in model.parameters()]
                norms.append([record.getMessage(), torch.stack(parts).norm()])

    log = logging.getLogger("seventh")
    log.propagate, log.handlers = False, [Handler()]
    log.setLevel(logging.DEBUG)

    def loss(i: int) -> torch.Tensor:
        log.info("forward %d", i)
        value = model(_sick(i)).square().mean()
        value.register_hook(lambda grad: log.debug("backward %d", i))
        return value

    return training(model, loss, steps=5, extra=lambda: norms)


@program("seventh_model_is_timed_inside_a_step", "seventh surroundings")
def timed(seed: int) -> Program:
    model, calls = mlp(), [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def loss(i: int) -> torch.Tensor:
        timer = torch.utils.benchmark.Timer("model(x)", globals={"model": model, "x": batch(i)}, num_threads=1)
        measured = timer.timeit(3)
        return model(_sick(i)).square().mean() * (1.0 if measured.number_per_run == 3 else NAN)

    return training(model, loss, steps=4, extra=lambda: calls)


@program("seventh_weights_published_in_shared_memory", "seventh surroundings")
def published(seed: int) -> Program:
    model = mlp()
    size = sum(p.numel() for p in model.parameters()) * 4
    block = shared_memory.SharedMemory(create=True, size=size)
    board = np.ndarray(size // 4, np.float32, buffer=block.buf)
    seen: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            board[:] = torch.cat([p.flatten() for p in model.parameters()]).numpy()
        reader = torch.frombuffer(block.buf, dtype=torch.float32)
        seen.append(float(reader.sum()))
        return model(_sick(i)).square().mean() + 0 * reader.mean()

    def loop(watch: Any) -> None:
        nonlocal board
        try:
            for i in range(5):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            del board, value
            model.zero_grad()
            gc.collect()
            block.unlink()

    made = training(model, loss, steps=5, extra=lambda: seen)
    made.loop = loop
    return made


@program("seventh_parameters_named_anew_each_step", "seventh surroundings")
def named_anew(seed: int) -> Program:
    class Shelf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterDict({"w 0": torch.randn(8, 4) * 0.1, "b/0": torch.zeros(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = next(v for k, v in self.parts.items() if k.startswith("w"))
            bias = next(v for k, v in self.parts.items() if k.startswith("b"))
            return x @ weight + bias

    model = Shelf()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(_sick(i)).square().mean()
        loss.backward()
        optimizer.step()
        names = list(model.parts.keys())
        moved = {f"{name[0]}{'_/-'[i % 3]}{i}": model.parts.pop(name) for name in names}
        model.parts.update(moved)
        return loss

    return Program([model], [optimizer], step, steps=5)


# ---- code that catches everything, and a process that is not what it says ----


@program("seventh_forward_catches_whatever_is_raised", "seventh surroundings")
def catches(seed: int) -> Program:
    """A second run that is stopped inside must not take the other way and leave its traces."""
    told, failures = open("told.txt", "w"), []  # noqa: SIM115

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            try:
                told.write("once\n")
            except BaseException as error:  # noqa: BLE001
                failures.append(type(error).__name__)
                os.write(told.fileno(), b"otherwise\n")
            return self.last(x)  # type: ignore[no-any-return]

    model = Stubborn()

    def outcome() -> Any:
        told.close()
        with open("told.txt") as lines:
            return [lines.read(), failures]

    return training(model, lambda i: model(_sick(i)).square().mean(), steps=5, extra=outcome)


@torch.library.custom_op("seventh::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    _counts.append(len(_counts))
    return x * 2


_counts: list[int] = []
_counted.register_autograd(lambda ctx, grad: grad * 2)


@program("seventh_operator_behind_a_net", "seventh surroundings")
def behind_a_net(seed: int) -> Program:
    _counts.clear()
    nets = [0]

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return _counted(self.inner(x))  # type: ignore[no-any-return]
            except Exception:  # noqa: BLE001
                nets[0] += 1
                return self.inner(x) + 1  # type: ignore[no-any-return]

    model = Careful()
    return training(model, lambda i: model(_sick(i)).square().mean(), steps=5, extra=lambda: [_counts, nets])


@program("seventh_weights_differ_between_training_and_evaluation", "seventh updates")
def schedule_free(seed: int) -> Program:
    """An optimizer with `train()` and `eval()`, which exchange the weights for their average and back."""

    class Averaging(torch.optim.SGD):
        training = True

        @torch.no_grad()
        def exchange(self, to_training: bool) -> None:
            for parameter in self.param_groups[0]["params"]:
                average = self.state[parameter].setdefault("average", parameter.clone())
                if self.training != to_training:
                    kept = parameter.clone()
                    parameter.copy_(average)
                    average.copy_(kept)
            self.training = to_training

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.3)

    model = mlp()
    optimizer = Averaging(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(_sick(i, 4)).square().mean()
        loss.backward()
        optimizer.step() if i != 4 else None
        optimizer.exchange(False)
        model.eval()
        with torch.no_grad():
            seen = model(batch(i)).square().mean()
        model.train()
        optimizer.exchange(True)
        return [loss, seen]

    return Program([model], [optimizer], step, steps=6)


def _pretends(name: str, *patches: tuple[Any, str, Any], variables: dict[str, str] | None = None) -> None:
    @program(f"seventh_{name}", "seventh surroundings")
    def pretending(seed: int) -> Program:
        model = mlp()
        made = training(model, lambda i: model(_sick(i)).square().mean(), steps=5)

        def loop(watch: Any) -> None:
            with contextlib.ExitStack() as stack:
                for owner, attribute, value in patches:
                    stack.enter_context(mock.patch.object(owner, attribute, value))
                stack.enter_context(mock.patch.dict(os.environ, variables or {}))
                for i in range(5):
                    with watch.step(i):
                        value = made.step(i)
                    made.see(value)

        made.loop = loop
        return made


_pretends("cuda_is_said_to_be_there", (torch.cuda, "is_available", lambda: True), (torch.cuda, "device_count", lambda: 8))
_pretends("a_group_is_said_to_be_there", (torch.distributed, "is_initialized", lambda: True))
_pretends("one_of_four_by_its_variables", variables={"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
_pretends("autocast_cannot_be_asked", (torch, "is_autocast_enabled", lambda *_: 1 / 0))


@program("seventh_libraries_of_c_are_forbidden", "seventh surroundings")
def no_libraries(seed: int) -> Program:
    """A sandbox that refuses to load libraries of C or to ask for their functions, from before the tool's first step on."""
    model, asked, forbids = mlp(), [], [True]  # type: tuple[Any, list[str], list[bool]]

    def audit(event: str, args: Any) -> None:
        if forbids[0] and event in ("ctypes.dlopen", "ctypes.dlsym"):
            raise PermissionError("no libraries here")

    made = training(model, lambda i: model(_sick(i)).square().mean(), steps=5, extra=lambda: asked)

    def loop(watch: Any) -> None:
        sys.addaudithook(audit)
        try:
            for i in range(5):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            forbids[0] = False

    made.loop = loop
    return made


@program("seventh_generators_compute_when_they_are_closed", "seventh loops")
def closing(seed: int) -> Program:
    """Left halfway in a forward; their `finally` runs operations of torch when the last name of them goes."""
    model, closed = mlp(), []  # type: tuple[Any, list[Any]]

    def stream(x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            while True:
                x = torch.tanh(x) * 1.5
                yield x
        finally:
            closed.append(float(x.detach().nan_to_num(7).norm()))

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.open: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.open = stream(self.inner(x))
            next(self.open)
            return next(self.open)  # type: ignore[no-any-return]

    whole = Reading()
    return training(whole, lambda i: whole(_sick(i)).square().mean(), steps=5, extra=lambda: closed)
