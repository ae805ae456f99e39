"""Autocast, its cache, casts by hand, quantisation-aware training, random streams."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

from ..program import Program, mlp, program, training


@program("second_stale_autocast_cache", "second: precision")
def stale_cache(seed: int) -> Program:
    """Weights change inside one autocast region, whose cache keeps the old casts: clearing it would change the bits."""
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(i: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            one = model(x).float().square().mean()
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
            two = model(x).float().square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            three = model(x).float().square().mean()
        return one, two, three

    return Program([model], [optimizer], step)


@program("second_autocast_cache_filled_without_gradients", "second: precision")
def poisoned_cache(seed: int) -> Program:
    """Inside one autocast region the model runs with gradients, then without, then with: who casts first decides the graph."""
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if i % 2:
                with torch.no_grad():
                    model[0](x)
            first = model(x).float()
            with torch.no_grad():
                model(x)
            second = model(x).float()
        loss = first.square().mean() + second.mean()
        loss.backward()
        optimizer.step()
        return loss, [p.grad for p in model.parameters()]

    return Program([model], [optimizer], step)


@program("second_autocast_by_low_level_switches", "second: precision")
def low_level(seed: int) -> Program:
    """set_autocast_enabled, nesting counters and clear_autocast_cache are used directly, across the borders of steps."""
    model, x = mlp(), torch.randn(4, 8)
    made = training(model, lambda i: model(x).float().square().mean())

    def loop(watch: Any) -> None:
        for i in range(4):
            if i == 1:
                torch.set_autocast_enabled("cpu", True)
                torch.set_autocast_dtype("cpu", torch.float16)
                torch.autocast_increment_nesting()
            with watch.step(i):
                made.see([made.step(i), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()])
                if i == 1:
                    torch.set_autocast_cache_enabled(False)
                if i == 2:
                    torch.set_autocast_dtype("cpu", torch.bfloat16)
                    torch.set_autocast_cache_enabled(True)
                    torch.set_autocast_enabled("cpu", False)
                    torch.clear_autocast_cache()
                    made.see(torch.autocast_decrement_nesting())
            made.see(str(torch.get_autocast_dtype("cpu")))

    made.loop = loop
    return made


@program("second_custom_fwd_and_bwd", "second: precision")
def custom_casts(seed: int) -> Program:
    """custom_fwd with and without cast_inputs and custom_bwd; what dtype and autocast state each saw is noted."""
    notes: list[Any] = []

    class Cast(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            notes.append(["forward", str(x.dtype), torch.is_autocast_enabled("cpu")])
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            notes.append(["backward", str(g.dtype), torch.is_autocast_enabled("cpu")])
            return g * ctx.saved_tensors[0].exp() + (g.float() @ g.float().t()).sum() * 0

    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Cast.apply(x)

    model = nn.Sequential(nn.Linear(8, 8), Exp(), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    return training(model, loss, extra=lambda: notes)


@program("second_autocast_inside_gradient_hooks", "second: precision")
def autocast_hooks(seed: int) -> Program:
    """Gradient hooks and module backward hooks enter autocast of their own and run matmuls; backward runs inside autocast."""
    model, x = mlp(), torch.randn(4, 8)

    def hook(m: nn.Module, grads_in: Any, grads_out: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            m.seen = (grads_out[0].float() @ torch.ones(grads_out[0].shape[1], 2)).float().sum().item()

    for m in model:
        m.register_full_backward_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        return loss, [m.seen for m in model]

    return Program([model], [optimizer], step)


@program("second_stochastic_rounding_of_weights", "second: precision")
def stochastic(seed: int) -> Program:
    """bf16 weights are rounded stochastically with numbers of the global generator, drawn in hooks after accumulation."""
    model = mlp().to(torch.bfloat16)
    x = torch.randn(4, 8).to(torch.bfloat16)

    def apply(p: torch.Tensor) -> None:
        with torch.no_grad():
            exact = p.float() - 0.1 * p.grad.float()
            noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
            p.copy_(((exact.view(torch.int32) + noise) & -65536).view(torch.float32))
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)

    def step(i: int) -> Any:
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    return Program([model], [], step)


@program("second_every_random_stream_in_every_hook", "second: precision")
def random_hooks(seed: int) -> Program:
    """Hooks of the user draw from torch, numpy, random and own generators; one reseeds everything in mid-forward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.RReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    own = torch.Generator().manual_seed(3)

    def before(m: nn.Module, args: Any) -> Any:
        return (args[0] + 1e-3 * torch.rand(args[0].shape, generator=own) + random.random() * 1e-3,)

    def after(m: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + 1e-3 * float(np.random.rand()))

    def backward(m: nn.Module, grads: Any, out: Any) -> Any:
        return tuple(g if g is None else g * (1 + 1e-3 * torch.rand(())) for g in grads)

    for m in model:
        m.register_forward_pre_hook(before)
        m.register_forward_hook(after)
        m.register_full_backward_hook(backward)

    def loss(i: int) -> torch.Tensor:
        h = model[1](model[0](x))
        if i == 1:
            torch.manual_seed(5)
            np.random.seed(5)
            random.seed(5)
        with torch.random.fork_rng():
            torch.rand(3)
        return model[3](model[2](h)).square().mean()

    return training(model, loss, extra=lambda: own.get_state())


@program("second_default_generator_state_shared", "second: precision")
def generator_state(seed: int) -> Program:
    """The state of the default generator is read before and after each part of the step and compared."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def mark() -> Any:
        return torch.get_rng_state()[:64].clone(), random.getstate()[1][-1], np.random.get_state()[2], torch.initial_seed()

    def step(i: int) -> Any:
        marks = [mark()]
        loss = model(x).square().mean()
        marks.append(mark())
        loss.backward()
        marks.append(mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark())
        return loss, marks

    return Program([model], [optimizer], step)


@program("second_quantisation_aware_training", "second: precision")
def qat(seed: int) -> Program:
    """prepare_qat before, observers switched off in mid-run, and a converted copy made inside a step."""
    import copy

    from torch.ao import quantization as q

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = q.QuantStub(), q.DeQuantStub()
            self.conv, self.relu, self.fc = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dequant(self.fc(self.relu(self.conv(self.quant(x))).flatten(1)))

    model = Net().train()
    model.qconfig = q.get_default_qat_qconfig("fbgemm" if "fbgemm" in torch.backends.quantized.supported_engines else "qnnpack")
    q.prepare_qat(model, inplace=True)
    x = torch.randn(2, 1, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        if i == 2:
            model.apply(q.disable_observer)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        kinds = None
        if i == 1:
            twin = q.convert(copy.deepcopy(model).eval(), inplace=False)
            kinds = [type(m).__name__ for m in twin.modules()]
        return loss, kinds

    return Program([model], [optimizer], step)


@program("second_straight_through_and_binary_weights", "second: precision")
def binary(seed: int) -> Program:
    """Weights are replaced by their signs for forward through .data and put back before the optimizer steps."""
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        real = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.sign_()
        loss = model(x).square().mean()
        loss.backward()
        for p, value in zip(model.parameters(), real):
            p.data.copy_(value)
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("second_everything_overflows_and_recovers", "second: precision")
def overflows(seed: int) -> Program:
    """Weights, activations and gradients become infinite and NaN, are repaired by hand from a copy, and training goes on."""
    model, x = mlp().half(), torch.randn(4, 8).half()
    copy = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = (model(x * (6e4 if i == 1 else 1)) * (1e4 if i == 1 else 1)).square().mean()
        loss.backward()
        optimizer.step()
        bad = not all(bool(p.isfinite().all()) for p in model.parameters())
        if bad:
            with torch.no_grad():
                for p, good in zip(model.parameters(), copy):
                    p.copy_(good)
        return loss, bad

    return Program([model], [optimizer], step, steps=4)


@program("second_dtypes_change_from_module_to_module", "second: precision")
def dtype_zoo(seed: int) -> Program:
    """Each submodule has a dtype of its own (half, bf16, double, complex) with casts in pre-hooks, under nested autocasts."""
    model = nn.ModuleList([
        nn.Linear(8, 8).half(), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).double(), nn.Linear(8, 8).to(torch.complex64),
    ])  # fmt: skip
    for m in model:
        m.register_forward_pre_hook(lambda m, args: (args[0].to(m.weight.dtype),))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y: Any = x
        for number, m in enumerate(model):
            context = torch.autocast("cpu", torch.bfloat16) if i % 2 and number < 2 else contextlib.nullcontext()
            with context, torch.autocast("cpu", enabled=False):
                y = m(y)
        return y.abs().float().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.01, foreach=False))


@program("second_adapters_merged_and_unmerged", "second: precision")
def adapters(seed: int) -> Program:
    """Low-rank adapters: base weights frozen, merged into the base for evaluation inside a step and taken out again."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 8) * 0.1), nn.Parameter(torch.zeros(8, 2))

        def merge(self, sign: float) -> None:
            self.base.weight.data += sign * (self.up.data @ self.down.data)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.down.t() @ self.up.t()

    model = nn.Sequential(Lora(nn.Linear(8, 8)), nn.ReLU(), Lora(nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        for m in (model[0], model[2]):
            m.merge(1.0)
        with torch.inference_mode():
            merged = model[2].base(model[1](model[0].base(x)))
        for m in (model[0], model[2]):
            m.merge(-1.0)
        return loss, merged

    return Program([model], [optimizer], step)


@program("second_hypernetwork_makes_the_weights", "second: precision")
def hypernetwork(seed: int) -> Program:
    """A network computes the weights of another, which are set as plain tensors with a graph on its linear layers."""
    target = nn.Linear(8, 4)
    del target.weight
    target.weight = torch.zeros(4, 8)
    model = nn.ModuleDict({"hyper": nn.Linear(3, 32), "target": target})
    z, x = torch.randn(3), torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        target.weight = model["hyper"](z).view(4, 8)
        value = target(x).square().mean()
        target.weight = torch.zeros(4, 8)
        return value

    return training(model, loss)


@program("second_experts_chosen_by_data", "second: precision")
def experts(seed: int) -> Program:
    """A mixture of experts: some get no rows, some empty batches, and the dispatch loop writes with index_add_."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList([mlp(8, 8) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, place = torch.where(chosen == number)
                if number < 2 or len(rows):
                    out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
            return out

    model = nn.Sequential(Mixture(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    return training(model, lambda i: model(x * (i - 1)).square().mean())


@program("second_fixed_point_with_implicit_gradient", "second: precision")
def equilibrium(seed: int) -> Program:
    """A deep equilibrium layer: hundreds of calls under no_grad, then a hook on its output solves for the gradient."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(100):
                    z = torch.tanh(0.3 * self.cell(z) + x)
            z = torch.tanh(0.3 * self.cell(z) + x)
            z0 = z.detach().requires_grad_()
            f0 = torch.tanh(0.3 * self.cell(z0) + x)

            def solve(grad: torch.Tensor) -> torch.Tensor:
                g = grad
                for _ in range(20):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            if z.requires_grad:
                z.register_hook(solve)
            return z

    model = nn.Sequential(Equilibrium(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())
