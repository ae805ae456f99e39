"""Autograd in all its ways: twice, through functions, with hooks, with checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..program import Program, mlp, program, training


@program("double_backward_create_graph", "double backward")
def create_graph(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        first = model(x).square().mean()
        grads = torch.autograd.grad(first, list(model.parameters()), create_graph=True)
        return first + sum(g.square().sum() for g in grads)

    return training(model, loss)


@program("gradient_penalty", "double backward")
def gradient_penalty(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def loss(i: int) -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True)
        score = model(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True, retain_graph=True)
        return score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()

    return training(model, loss)


@program("backward_with_create_graph_twice", "double backward")
def backward_create_graph(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 4)

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        penalty.backward()
        optimizer.step()
        values = [loss.detach().clone(), penalty.detach().clone()]
        for p in model.parameters():
            p.grad = p.grad.detach()
        return values

    return Program([model], [optimizer], step)


@program("hessian_vector_product", "double backward")
def hessian_vector(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    weights = list(model.parameters())[:3]
    x, v = torch.randn(3, 4), [torch.randn_like(p) for p in weights]

    def loss(i: int) -> torch.Tensor:
        value = model(x).mean()
        grads = torch.autograd.grad(value, weights, create_graph=True)
        products = torch.autograd.grad(grads, weights, grad_outputs=v, retain_graph=True)
        return value + 0 * sum(p.sum() for p in products) + sum((g * p).sum() for g, p in zip(grads, products))

    return training(model, loss)


@program("retain_graph_two_backwards", "double backward")
def retain_graph(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        y = model(x)
        y.mean().backward(retain_graph=True)
        y.square().mean().backward(retain_graph=True)
        y.backward(torch.ones_like(y))
        optimizer.step()
        return y

    return Program([model], [optimizer], step)


@program("backward_with_inputs_argument", "double backward")
def backward_inputs(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        y = model(x)
        loss = y.square().mean()
        torch.autograd.backward([loss, y], [None, torch.ones_like(y)], inputs=list(model[2].parameters()), retain_graph=True)
        loss.backward(gradient=torch.tensor(2.0), inputs=list(model[0].parameters()))
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("autograd_functional_jacobian", "double backward")
def functional_jacobian(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def loss(i: int) -> torch.Tensor:
        x = torch.randn(4)
        jac = torch.autograd.functional.jacobian(model, x, create_graph=True, vectorize=bool(i % 2))
        return jac.square().sum() + model(x).sum()

    return training(model, loss)


@program("forward_mode_ad", "double backward")
def forward_mode(seed: int) -> Program:
    import torch.autograd.forward_ad as fwad

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, v = torch.randn(3, 4), torch.randn(3, 4)

    def loss(i: int) -> torch.Tensor:
        with fwad.dual_level():
            out = model(fwad.make_dual(x, v))
            primal, tangent = fwad.unpack_dual(out)
            return primal.square().mean() + tangent.square().mean()

    return training(model, loss)


@program("func_grad_and_functional_call", "torch.func")
def func_grad(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        weights = dict(model.named_parameters())

        def loss(ws: Any) -> torch.Tensor:
            return torch.func.functional_call(model, ws, (x,)).square().mean()

        grads, value = torch.func.grad_and_value(loss)({k: v.detach() for k, v in weights.items()})
        with torch.no_grad():
            for name, p in weights.items():
                p -= 0.1 * grads[name]
        return value, grads

    return Program([model], [], step)


@program("func_vmap_over_model", "torch.func")
def func_vmap(seed: int) -> Program:
    model = mlp()
    x = torch.randn(5, 4, 8)
    return training(model, lambda i: torch.vmap(model)(x).square().mean())


@program("func_per_sample_gradients", "torch.func")
def per_sample(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        weights = {k: v.detach() for k, v in model.named_parameters()}

        def loss(ws: Any, sample: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, ws, (sample[None],)).square().mean()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(grads[name].mean(0))
        return grads

    return Program([model], [], step)


@program("func_vmap_with_randomness", "torch.func")
def vmap_random(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    x = torch.randn(3, 4, 8)
    return training(model, lambda i: torch.vmap(model, randomness="different")(x).square().mean())


@program("func_jvp_vjp_jacrev_hessian", "torch.func")
def func_jvp(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, v = torch.randn(4), torch.randn(4)

    def loss(i: int) -> torch.Tensor:
        y, t = torch.func.jvp(model, (x,), (v,))
        _, pull = torch.func.vjp(model, x)
        jac = torch.func.jacrev(model)(x)
        hess = torch.func.hessian(lambda z: model(z).sum())(x)
        return y.sum() + t.sum() + pull(v)[0].sum() + jac.square().sum() + hess.square().sum()

    return training(model, loss)


@program("func_ensemble_stack_module_state", "torch.func")
def ensemble(seed: int) -> Program:
    models = [mlp() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    base = models[0]
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(list(params.values()), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        call = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))
        loss = call(params, buffers).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(models, [optimizer], step, extra=lambda: params)


def _checkpointed(reentrant: bool, dropout: float, autocast: bool) -> Program:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            return y.float().square().mean()

    return training(blocks, loss)


for _reentrant in (True, False):
    for _autocast in (True, False):

        @program(f"checkpoint_{'reentrant' if _reentrant else 'plain'}_{'bf16' if _autocast else 'fp32'}", "checkpoint")
        def checkpointed(seed: int, reentrant: bool = _reentrant, autocast: bool = _autocast) -> Program:
            return _checkpointed(reentrant, 0.3, autocast)


@program("checkpoint_sequential_nested", "checkpoint")
def nested_checkpoint(seed: int) -> Program:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(6)])
    x = torch.randn(4, 8)

    def inner(y: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(model, 3, y, use_reentrant=False)

    return training(model, lambda i: checkpoint(inner, x, use_reentrant=False).square().mean())


@program("checkpoint_selective_policy", "checkpoint")
def selective_checkpoint(seed: int) -> Program:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model = mlp()
    x = torch.randn(4, 8)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return training(model, lambda i: checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean())


@program("checkpoint_early_stop_and_debug", "checkpoint")
def checkpoint_debug(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            y = checkpoint(model, x, use_reentrant=False, determinism_check="default", preserve_rng_state=True)
        return y.square().mean()

    return training(model, loss)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit), None


class InPlaceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class TwoOutputs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return x * 2, (x > 0), x.argmax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any, *rest: Any) -> Any:
        return None if grad is None else grad * 2


class RandomBackward(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad) * 0.01


class ReversibleCall(torch.autograd.Function):
    """Runs the module again inside backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            y.backward(grad)
        return x.grad, None


@program("custom_function", "custom functions")
def custom_function(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    return training(model, lambda i: Clamp.apply(model(x), 0.5).square().mean())


@program("custom_function_in_place", "custom functions")
def custom_in_place(seed: int) -> Program:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return InPlaceDouble.apply(x)

    model = nn.Sequential(nn.Linear(8, 8), Double(), nn.Linear(8, 4), Double())
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("custom_function_several_outputs", "custom functions")
def custom_several(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y, mask, _ = TwoOutputs.apply(model(x))
        return (y * mask).square().mean() + torch.vmap(lambda t: TwoOutputs.apply(t)[0])(y).mean()

    return training(model, loss)


@program("custom_function_random_backward_autocast", "custom functions")
def custom_random(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return RandomBackward.apply(model(x)).square().mean()

    return training(model, loss)


@program("custom_function_runs_module_in_backward", "custom functions")
def reversible(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    return training(model, lambda i: model[2](ReversibleCall.apply(model[0](x), model[1])).square().mean())


@program("custom_function_nan_in_backward", "custom functions")
def nan_backward(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        y = model(torch.randn(4, 8))
        return (y * 0).sqrt().sum() + y.mean()

    return training(model, loss)


@program("tensor_hooks_replace_gradients", "hooks")
def tensor_hooks(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    model[0].weight.register_hook(lambda g: g * 0.5)
    seen: list[Any] = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        y.register_hook(lambda g: g.clamp(-0.1, 0.1))
        y.grad_fn.register_hook(lambda gi, go: tuple(g * 2 if g is not None else None for g in gi))
        y.grad_fn.register_prehook(lambda go: tuple(g + 0.01 for g in go))
        y.retain_grad()
        return y.square().mean()

    made = training(model, loss)
    made.extra = lambda: seen
    return made


@program("module_hooks_replace_everything", "hooks")
def module_hooks(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    order: list[str] = []

    def note(text: str, out: Any = None) -> Any:
        order.append(text)
        return out

    model[0].register_forward_pre_hook(lambda m, a: note("pre", (a[0] * 2,)))
    model[0].register_forward_hook(lambda m, a, out: note("post", out + 1))
    model[1].register_forward_pre_hook(lambda m, a, k: note("pre kw", (a, k)), with_kwargs=True, prepend=True)
    model[1].register_forward_hook(lambda m, a, k, out: note("post kw", out * 3), with_kwargs=True, always_call=True)
    model[2].register_full_backward_pre_hook(lambda m, go: note("back pre", tuple(g * 0.5 for g in go)))
    model[2].register_full_backward_hook(lambda m, gi, go: note("back", tuple(g * 2 for g in gi)))
    made = training(model, lambda i: model(x).square().mean())
    made.extra = lambda: order
    return made


@program("hooks_added_and_removed_while_training", "hooks")
def hooks_come_and_go(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    handles: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        for handle in handles:
            handle.remove()
        handles[:] = [m.register_forward_hook(lambda m, a, out: out * 0.9) for m in model]
        handles.append(nn.modules.module.register_module_forward_hook(lambda m, a, out: None))
        y = model(x)
        handles.pop().remove()
        return y.square().mean()

    return training(model, loss)


@program("user_clears_all_hooks", "hooks")
def clear_hooks(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
            module._backward_hooks.clear()
            module._backward_pre_hooks.clear()
        return model(x).square().mean()

    return training(model, loss)


@program("hook_that_raises_is_caught", "hooks")
def raising_hook(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def boom(m: Any, a: Any, out: Any) -> None:
        raise ValueError("hook")

    def loss(i: int) -> torch.Tensor:
        handle = model[1].register_forward_hook(boom)
        try:
            model(x)
        except ValueError:
            handle.remove()
        return model(x).square().mean()

    return training(model, loss)


@program("grad_fn_walked_and_counted", "hooks")
def graph_walk(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def nodes(node: Any) -> list[str]:
        return [type(node).__name__, *(n for child, _ in node.next_functions if child is not None for n in nodes(child))]

    def step(i: int) -> Any:
        model.zero_grad()
        y = model(x).square().mean()
        names = nodes(y.grad_fn)
        y.backward()
        return names

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)


@program("saved_tensors_hooks_and_save_on_cpu", "saved tensors")
def saved_tensors(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    counts = [0, 0]

    def pack(t: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return t.clone()

    def unpack(t: torch.Tensor) -> torch.Tensor:
        counts[1] += 1
        return t

    def loss(i: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(x).square().mean()

    made = training(model, loss)
    made.extra = lambda: counts
    return made


@program("saved_tensors_hooks_disabled", "saved tensors")
def saved_tensors_disabled(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return model(x).square().mean()

    return training(model, loss)


@program("allow_mutation_on_saved_tensors", "saved tensors")
def mutation_on_saved(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def step(i: int) -> Any:
        model.zero_grad()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.ones(2, 4)
            y = model(x)
            z = (y * y).sum()
            x.mul_(3)
            y.detach().zero_()
            z.backward()
        return z

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)
