"""What is done to the graph: packed activations, functions and operators of one's own, derivatives of every order."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.autograd.forward_ad as fwad
from torch import nn
from torch.nn import functional as F

from ..program import NAN, Program, batch, mlp, program, sick, training


@program("activations_packed_in_four_bits_with_their_scales", "autograd")
def four_bits(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4))
    packed: list[int] = []

    def pack(x: torch.Tensor) -> Any:
        packed.append(x.numel())
        if x.dtype != torch.float32 or x.numel() < 17 or (x.requires_grad and x.is_leaf):
            return x
        scale = x.detach().abs().amax() / 7 + 1e-8
        noise = torch.rand_like(x)
        return (x.detach() / scale + noise).floor().to(torch.int8).numpy().tobytes(), scale, x.shape, x.stride()

    def unpack(held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        raw, scale, shape, _ = held
        return torch.frombuffer(bytearray(raw), dtype=torch.int8).reshape(shape).float() * scale

    def loss(i: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(sick(i)).square().mean()

    return training(model, loss, torch.optim.Adam(model.parameters()), steps=5, extra=lambda: packed)


class _Route(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(x: Any, how: Any, rest: Any, fn: Any, weight: Any) -> Any:  # type: ignore[override]
        if how is None:
            return x * weight, None, "text"
        return fn(x * weight), x.argmax(), {"how": how, "rest": rest}

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, how, _, _, weight = inputs
        ctx.set_materialize_grads(False)
        ctx.how = how
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        if isinstance(output[1], torch.Tensor):
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Any, *rest: Any) -> Any:
        _Route.seen.append((ctx.how, [one is None for one in rest], ctx.needs_input_grad))
        x, weight = ctx.saved_tensors
        if grad is None:
            return None, None, None, None, None
        return grad * weight, None, None, None, (grad * x).sum(0)


@program("function_with_texts_dictionaries_and_callables_between_its_tensors", "autograd")
def route(seed: int) -> Program:
    _Route.seen = []
    model = mlp()
    weight = nn.Parameter(torch.ones(8))
    model.register_parameter("gate", weight)

    def loss(i: int) -> torch.Tensor:
        first, none, text = _Route.apply(sick(i), None, {"a": [1, (2, weight)]}, print, weight)
        second, where, said = _Route.apply(first, "tanh", {weight: 1}, torch.tanh, weight)
        assert (none, text, said["how"], where.requires_grad) == (None, "text", "tanh", False)
        return model[2](model[1](model[0](second))).sum() + first.mean()

    return training(model, loss, steps=4, extra=lambda: _Route.seen)


@program("trained_by_directional_derivatives_alone", "autograd")
def forward_gradients(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        names, values = zip(*model.named_parameters())
        direction = tuple(torch.randn_like(value) for value in values)
        with fwad.dual_level(), torch.no_grad():
            duals = {name: fwad.make_dual(value, d) for name, value, d in zip(names, values, direction)}
            out = torch.func.functional_call(model, duals, (sick(i),)).square().mean()
            primal, slope = fwad.unpack_dual(out)
        for parameter, d in zip(values, direction):
            parameter.grad = d * slope
        optimizer.step()
        optimizer.zero_grad()
        return primal, slope

    return Program([model], [optimizer], step, steps=5)


@program("jvp_of_the_model_in_its_loss_and_backward_through_it", "autograd")
def jvp_in_loss(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(i: int) -> torch.Tensor:
        x = batch(i)
        with fwad.dual_level():
            dual = model(fwad.make_dual(x, torch.ones_like(x)))
            value, slope = fwad.unpack_dual(dual)
            assert slope is not None
            total = value.square().mean() + slope.square().mean()
        _, pushed = torch.func.jvp(model, (x,), (x,))
        return total + pushed.mean() * (NAN if i == 3 else 1)

    return training(model, loss, steps=5)


@program("stateless_training_whose_module_never_changes", "autograd")
def stateless(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    momentum = {name: torch.zeros_like(value) for name, value in parameters.items()}

    def compute(parameters: Any, buffers: Any, x: Any, y: Any) -> Any:
        out = torch.func.functional_call(model, (parameters, buffers), (x,))
        return F.cross_entropy(out, y), out

    def step(i: int) -> Any:
        nonlocal parameters
        x, y = batch(i), torch.arange(len(batch(i))) % 3
        gradients, (value, out) = torch.func.grad_and_value(compute, has_aux=True)(parameters, buffers, x, y)
        for name, gradient in gradients.items():
            momentum[name].mul_(0.9).add_(gradient)
        parameters = {name: value - 0.05 * momentum[name] for name, value in parameters.items()}
        return value, out

    return Program([model], [], step, steps=5, extra=lambda: [parameters, buffers, momentum])


@program("inner_loops_unrolled_through_a_differentiable_optimizer", "autograd")
def unrolled(seed: int) -> Program:
    model = nn.Linear(8, 2)
    rate = nn.Parameter(torch.tensor(-3.0))
    model.register_parameter("rate", rate)
    outer = torch.optim.Adam([rate, *model.parameters()][1:], lr=0.01)

    def step(i: int) -> Any:
        outer.zero_grad()
        fast = {"weight": model.weight, "bias": model.bias}
        for k in range(3):
            value = torch.func.functional_call(model, fast, (batch(i + k),), strict=False).square().mean()
            found = torch.autograd.grad(value, list(fast.values()), create_graph=True)
            fast = {name: old - rate.exp() * new for (name, old), new in zip(fast.items(), found)}
        total = torch.func.functional_call(model, fast, (sick(i),), strict=False).square().mean()
        total.backward(inputs=list(model.parameters()))
        outer.step()
        return total

    return Program([model], [outer], step, steps=4)


@program("second_derivatives_by_hessian_products_choose_the_update", "autograd")
def newton(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(i: int) -> Any:
        parameters = list(model.parameters())
        value = model(batch(i)).square().mean()
        first = torch.autograd.grad(value, parameters, create_graph=True)
        direction = [-g.detach() for g in first]
        for _ in range(3):
            slope = sum((g * d).sum() for g, d in zip(first, direction))
            product = torch.autograd.grad(slope, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            curvature = sum((p * d).sum() for p, d in zip(product, direction)).clamp(min=1e-3)
            direction = [0.5 * d / (1 + curvature) for d in direction]
        for parameter, d in zip(parameters, direction):
            parameter.grad = -d
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=4)


@program("backward_is_called_on_what_lists_of_tensors_and_numbers_give", "autograd")
def many_roots(seed: int) -> Program:
    model = mlp(out=3)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        out = model(sick(i))
        roots = [*out.unbind(1), out.square().sum(), out[0, 0].view(1, 1)]
        torch.autograd.backward(tuple(roots), tuple(torch.ones_like(r) / (k + 1) for k, r in enumerate(roots)), retain_graph=True)
        torch.autograd.backward([out.mean()], [None])
        optimizer.step()
        return out

    return Program([model], [optimizer], step, steps=4)


@program("storages_emptied_after_forward_and_filled_by_hooks_of_backward", "autograd")
def offloaded(seed: int) -> Program:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
    homes: dict[int, Any] = {}

    def out_of_memory(module: nn.Module, args: Any, output: Any) -> None:
        for p in module.parameters():
            homes[id(p)] = p.detach().clone()
            p.untyped_storage().resize_(0)

    def into_memory(module: nn.Module, *more: Any) -> None:
        for p in module.parameters():
            if p.untyped_storage().size() == 0:
                p.untyped_storage().resize_(p.numel() * 4)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
                    p.copy_(homes.pop(id(p)))

    for block in model:
        block.register_forward_hook(out_of_memory)
        block.register_forward_pre_hook(into_memory)
        block.register_full_backward_pre_hook(into_memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        value.backward()
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5)


@program("gradients_are_rescaled_between_layers_by_hooks_that_may_raise", "autograd")
def raising_hooks(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    raised: list[str] = []

    class Retry(Exception): ...

    def limit(gradient: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(gradient).all():
            raise Retry("not finite")
        return gradient / (1 + gradient.norm())

    def step(i: int) -> Any:
        for attempt in range(3):
            optimizer.zero_grad()
            hidden = model[1](model[0](sick(i) if attempt == 0 else batch(i)))
            hidden.register_hook(limit)
            value = model[2](hidden).square().mean()
            try:
                value.backward()
            except Retry as error:
                raised.append(f"{attempt} {error}")
                continue
            optimizer.step()
            return value
        return None

    return Program([model], [optimizer], step, steps=5, extra=lambda: raised)


@program("operator_writes_into_a_cache_and_returns_nothing", "operators")
def cache_operator(seed: int) -> Program:
    @torch.library.custom_op("harmless_cache::append", mutates_args=("cache", "count"))
    def append(cache: torch.Tensor, count: torch.Tensor, row: torch.Tensor, scale: float = 1.0) -> None:
        cache[int(count)] = row.detach() * scale
        count += 1

    @torch.library.custom_op("harmless_cache::read", mutates_args=())
    def read(cache: torch.Tensor, x: torch.Tensor, how: str, sizes: list[int], flag: bool | None = None) -> list[torch.Tensor]:
        return [x + cache.sum(0) if how == "sum" else x.clone(), torch.zeros(sizes)]

    read.register_fake(lambda cache, x, how, sizes, flag=None: [torch.empty_like(x), x.new_empty(sizes)])
    read.register_autograd(lambda ctx, grads: (None, grads[0], None, None, None))
    model = mlp()
    model.register_buffer("cache", torch.zeros(64, 8))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def loss(i: int) -> torch.Tensor:
        x = sick(i, 4)
        append(model.cache, model.count, x[0], scale=0.5)
        x, _ = read(model.cache, x, "sum", [2, 3], flag=None)
        return F.relu(model[0](x)).square().mean()

    return training(model, loss, steps=6)


@program("operator_without_a_schema_that_tells_what_it_changes", "operators")
def lying_operator(seed: int) -> Program:
    library = torch.library.Library("harmless_lie", "DEF")
    library.define("bump(Tensor x) -> Tensor")
    calls = [0]

    def bump(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        x.data.add_(1)  # the schema does not say so
        return x * calls[0]

    library.impl("bump", bump, "CompositeExplicitAutograd")
    model = mlp()
    run = torch.ops.harmless_lie.bump

    def loss(i: int) -> torch.Tensor:
        x = batch(i)
        factor = run(x)
        return (model(x) * factor[:, :4]).square().mean() * (NAN if i == 3 else 1)

    return training(model, loss, steps=5, extra=lambda: [calls, library is None])


@program("rows_written_in_place_through_views_of_views", "autograd")
def view_rows(seed: int) -> Program:
    model = mlp(out=8)

    def loss(i: int) -> torch.Tensor:
        out = model(sick(i, 3))
        first = out.view(-1, 2, 4)
        second = first.transpose(0, 1)[1]
        second.mul_(2).clamp_(min=-1)
        torch._foreach_add_([first[:, 0], out[:, -1]], 1.0)
        out.T[0].zero_()
        with torch.no_grad():
            model[2].bias.view(2, 4)[0].add_(0.01)
        return out.square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), lr=0.05, foreach=True), steps=5)
