"""torch.func, tracing and operators of one's own: hooks that run under someone else's interpreter."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..program import Program, mlp, program, training

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp  # warns when it is first imported, whoever does it
from torch.autograd import forward_ad

from ..program import NAN, batch, made_of


@program("ensemble_by_functional_call_in_autocast", "transforms")
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


@program("hessian_through_a_hooked_model", "transforms")
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


@program("grad_of_grad_of_grad", "transforms")
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


@program("custom_function_under_vmap_of_grad", "transforms")
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


@program("custom_function_with_state_on_a_bad_step", "transforms")
def remembering(seed: int) -> Program:
    _Remembers.count = 0
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        return _Remembers.apply(model(batch(i) * (NAN if i == 2 else 1)), 3.0).square().mean()

    return training(model, loss, steps=5, extra=lambda: _Remembers.count)


@program("backward_inside_a_forward", "transforms")
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


@program("vmap_over_batch_norm_and_dropout", "functional")
def vmap_norm(seed: int) -> Program:
    """vmap of a functional_call through BatchNorm with buffers given per member, and dropout with both kinds of randomness."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    x = torch.randn(3, 5, 8)

    def loss(i: int) -> torch.Tensor:
        params = dict(model.named_parameters())
        buffers = {k: v.expand(3, *v.shape).clone() for k, v in model.named_buffers()}

        def one(buffers: Any, x: torch.Tensor) -> torch.Tensor:
            return functional_call(model, (params, buffers), (x,))

        kind = "different" if i % 2 else "same"
        y = vmap(one, randomness=kind)(buffers, x)
        return y.square().mean()

    return training(model, loss)


@program("transforms_nested_inside_forward", "functional")
def nested_transforms(seed: int) -> Program:
    """forward itself uses grad, vmap of jacrev, jacfwd, jvp and linearize over its submodules."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def energy(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            force = vmap(grad(self.energy))(x)
            hess = vmap(jacfwd(jacrev(self.energy)))(x)
            _, tangent = jvp(self.net, (x,), (torch.ones_like(x),))
            value, linear = linearize(self.energy, x[0])
            return force.square().sum() + hess.diagonal(dim1=1, dim2=2).sum() + tangent.sum() + linear(x[1]) + value

    model = Field()
    x = torch.randn(4, 3)
    return training(model, lambda i: model(x))


@program("functional_call_with_tied_weights", "functional")
def tied_call(seed: int) -> Program:
    """functional_call swaps one of two tied weights, with tie_weights on and off, then strict errors are caught."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        fresh = {"0.weight": model[0].weight * 2}
        one = functional_call(model, fresh, x)
        two = functional_call(model, fresh, x, tie_weights=False)
        try:
            functional_call(model, {"nothing": x}, x, strict=True)
            error = None
        except RuntimeError as caught:
            error = str(caught)[:60]
        (one.mean() + two.square().mean()).backward()
        optimizer.step()
        return one, two, error

    return Program([model], [optimizer], step)


@program("vjp_function_kept_over_steps", "functional")
def kept_vjp(seed: int) -> Program:
    """A vjp function made in one step is called in the next and after close."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        back = None
        for i in range(3):
            with watch.step(i):
                optimizer.zero_grad()
                if back is not None:
                    made.see(back(torch.ones(4, 4)))
                y, back = vjp(model, x)
                model(x).square().mean().backward()
                optimizer.step()
            made.see(y)
        watch.close()
        made.see(back(torch.ones(4, 4)))

    made.loop = loop
    return made


@program("make_fx_of_the_whole_step", "functional")
def traced_step(seed: int) -> Program:
    """make_fx traces forward and gradient inside a step; the operations in the graph are noted, and the graph trains."""
    model = mlp()
    x = torch.randn(4, 8)
    notes: list[Any] = []

    def compute(params: Any, x: torch.Tensor) -> Any:
        loss = functional_call(model, params, (x,)).square().mean()
        return torch.autograd.grad(loss, list(params.values()))

    def step(i: int) -> Any:
        params = {k: v.detach().requires_grad_() for k, v in model.named_parameters()}
        graph = make_fx(compute, tracing_mode=("real", "fake")[i])(params, x)
        notes.append([str(n.target) for n in graph.graph.nodes])
        grads = graph(params, x)
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p.sub_(g, alpha=0.1)
        return grads

    return Program([model], [], step, steps=2, extra=lambda: notes)


@program("compiled_fails_on_recompile", "functional")
def fail_on_recompile(seed: int) -> Program:
    """After two watched steps the stance is fail_on_recompile: hooks that change from step to step would raise."""
    model = mlp()
    x = torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        for i in range(4):
            with watch.step(i):
                optimizer.zero_grad()
                if i >= 2:
                    with torch.compiler.set_stance("fail_on_recompile"):
                        loss = compiled(x).square().mean()
                else:
                    loss = compiled(x).square().mean()
                loss.backward()
                optimizer.step()
            made.see(loss)

    made.loop = loop
    return made


@program("compiled_inner_function_error_on_recompile", "functional")
def error_on_recompile(seed: int) -> Program:
    """A module's compiled part runs under error_on_recompile from before the tool until after it has closed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    part = torch.compile(
        lambda x: torch.nn.functional.linear(x, model[0].weight, model[0].bias).relu(), backend="eager", fullgraph=True
    )
    part(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        with torch._dynamo.config.patch(error_on_recompile=True):
            for i in range(3):
                with watch.step(i):
                    optimizer.zero_grad()
                    loss = model[2](part(x)).square().mean()
                    loss.backward()
                    optimizer.step()
                made.see(loss)
            watch.close()
            made.see(part(x))

    made.loop = loop
    return made


@program("compiled_with_dynamic_shapes_and_reset", "functional")
def dynamic_shapes(seed: int) -> Program:
    """Compiled module, dynamic shapes by mark_dynamic, a reset of dynamo inside a step, and force_eager in between."""
    model = mlp()
    compiled = torch.compile(model, backend="eager", dynamic=None)

    def loss(i: int) -> torch.Tensor:
        x = torch.randn(3 + i, 8)
        torch._dynamo.mark_dynamic(x, 0)
        if i == 2:
            torch._dynamo.reset()
        if i == 3:
            with torch.compiler.set_stance("force_eager"):
                return compiled(x).square().mean()
        return compiled(x).square().mean()

    return training(model, loss, steps=4)


@program("compiled_autograd", "functional")
def compiled_autograd(seed: int) -> Program:
    """Backward goes through compiled autograd with a compiler that leaves the graph as it is."""
    from torch._dynamo import compiled_autograd as ca

    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if i:
            with ca._enable(lambda graph: graph):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("custom_op_with_autograd_and_vmap", "functional")
def library_op(seed: int) -> Program:
    """A torch.library operator with fake, autograd and vmap rules, made inside the first step, used below vmap and compile."""
    library = torch.library.Library("nanny_programs", "FRAGMENT")
    calls: list[str] = []
    model = mlp(8, 8)
    x = torch.randn(4, 8)

    def define() -> None:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: (calls.append("cpu"), x * x * x)[1], "CPU")
        torch.library.register_fake("nanny_programs::cube", torch.empty_like, lib=library)

        def back(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            calls.append("backward")
            return 3 * ctx.saved_tensors[0] ** 2 * g

        torch.library.register_autograd(
            "nanny_programs::cube", back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs), lib=library
        )

        def batched(info: Any, dims: Any, x: torch.Tensor) -> Any:
            calls.append("vmap")
            return torch.ops.nanny_programs.cube(x), dims[0]

        torch.library.register_vmap("nanny_programs::cube", batched, lib=library)

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            define()
        op = torch.ops.nanny_programs.cube
        return op(model(x)).mean() + vmap(op)(model[0](x)).mean()

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                value = made.step(i)
            made.see(value)
        library._destroy()

    made = training(model, loss, extra=lambda: calls)
    made.loop = loop
    return made


@program("kernel_of_aten_replaced_in_python", "functional")
def replaced_kernel(seed: int) -> Program:
    """A Python kernel replaces that of aten::relu on the CPU inside each step and is taken away at its end."""
    model = mlp()
    x = torch.randn(4, 8)
    calls: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def relu(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.numel())
        return x.clamp(min=0)

    def step(i: int) -> Any:
        library = torch.library.Library("aten", "IMPL")
        library.impl("relu", relu, "CPU", allow_override=True)
        try:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        finally:
            library._destroy()
        return loss

    return Program([model], [optimizer], step, extra=lambda: calls)


@program("reductions_of_aten_raise_inside_step", "functional")
def raising_kernels(seed: int) -> Program:
    """Kernels that only an onlooker would call (amax, aminmax, isinf, histc, _local_scalar_dense) raise below autograd."""
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[str] = []

    def forbidden(name: str) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            raise RuntimeError(f"{name} is forbidden here")

        return kernel

    def step(i: int) -> Any:
        library = torch.library.Library("aten", "IMPL")
        for name in ("amax", "amin", "aminmax", "isinf", "isnan", "histc", "linalg_vector_norm", "_local_scalar_dense"):
            key = (
                "CPU"
                if name in ("amax", "amin", "aminmax", "isnan", "histc", "linalg_vector_norm", "_local_scalar_dense")
                else "CompositeExplicitAutograd"
            )
            library.impl(name, forbidden(name), key, allow_override=True)
        try:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        finally:
            library._destroy()
        return loss

    return Program([model], [optimizer], step)


@program("jit_fork_and_freeze", "functional")
def jit_fork(seed: int) -> Program:
    """torch.jit.fork runs submodules of the watched model; a frozen scripted copy is made in the middle of a step."""

    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            future = torch.jit.fork(self.a, x)
            return torch.jit.wait(future) + self.b(x)

    model = nn.Sequential(Forks(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        frozen = torch.jit.freeze(torch.jit.script(model[1]).eval())
        return loss, frozen(x[:, :8])

    return Program([model], [optimizer], step)


@program("functionalized_and_aot_function", "functional")
def functionalized(seed: int) -> Program:
    """In-place code inside a module, functionalize and fake tensors beside it in the same step."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functionalize

    class Messy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            y = self.inner(x)
            y[0].mul_(2)
            return y.relu_()

    model = nn.Sequential(Messy(), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            nn.Linear(8, 4)(mode.from_tensor(x))
        extra = functionalize(lambda t: t.clone().mul_(2).relu_())(x).sum()
        return model(x).square().mean() + 0 * extra

    return training(model, loss)


@program("mode_entered_in_one_module_left_in_another", "functional")
def mode_across_modules(seed: int) -> Program:
    """One submodule's forward enters a dispatch and a function mode, the next one's leaves them; both count."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", "?"))
            return func(*args, **(kwargs or {}))

    stack: list[Any] = []

    class Enter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for mode in (Dispatch(), Function()):
                stack.append(mode)
                mode.__enter__()
            return x + 1

    class Leave(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            while stack:
                stack.pop().__exit__(None, None, None)
            return x

    model = nn.Sequential(nn.Linear(8, 8), Enter(), nn.Linear(8, 8), Leave(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), extra=lambda: len(stack))


@program("guard_mode_forbids_host_reads", "functional")
def guard_mode(seed: int) -> Program:
    """A guard of the user around forward and backward raises at any operation that reads a value to the host or copies."""

    forbidden = {
        "_local_scalar_dense",
        "isnan",
        "isinf",
        "aminmax",
        "nonzero",
        "equal",
        "is_nonzero",
        "amax",
        "linalg_vector_norm",
    }

    class Guard(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in forbidden:
                raise AssertionError(f"{func} reads on the host")
            return func(*args, **(kwargs or {}))

    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        with Guard():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("linearize_and_jacfwd_chunks", "func")
def linearize_in_chunks(seed: int) -> Program:
    model = mlp()
    x = torch.randn(3, 8)

    def loss(i: int) -> torch.Tensor:
        weights = {k: v.detach() for k, v in model.named_parameters()}
        out, push = torch.func.linearize(lambda x: torch.func.functional_call(model, weights, (x,)), x)
        jacobian = torch.func.jacrev(lambda x: model(x).sum(0), chunk_size=2)(x)
        moved = torch.vmap(model, in_dims=1, out_dims=1, chunk_size=2)(x.unsqueeze(0))
        return model(x).sum() + push(torch.ones_like(x)).sum() + jacobian.square().sum() + out.sum() + moved.sum()

    return training(model, loss)


class _CubeWithRules(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, one: Any, two: Any) -> Any:
        return None if one is None else one * ctx.saved_tensors[1]

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return tangent * ctx.saved_tensors[1], None


@program("function_with_setup_context_vmap_rule_and_jvp", "func")
def setup_context(seed: int) -> Program:
    model = made_of(lambda parts, x: _CubeWithRules.apply(parts[0](x))[0])
    x = torch.randn(3, 8)

    def loss(i: int) -> torch.Tensor:
        per_sample = torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
            value = tangent.square().mean()
        return model(x).square().mean() + per_sample.detach().sum() + value

    return training(model, loss)


@program("dual_numbers_of_parameters", "func")
def dual(seed: int) -> Program:
    model = mlp()
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:  # the forward gradient: no backward pass at all
        with forward_ad.dual_level(), torch.no_grad():
            weights = {name: forward_ad.make_dual(p, direction[name]) for name, p in model.named_parameters()}
            out = torch.func.functional_call(model, weights, (torch.ones(2, 8) * (i + 1),), strict=True).square().mean()
            slope = forward_ad.unpack_dual(out).tangent
        for name, p in model.named_parameters():
            p.grad = direction[name] * slope
        optimizer.step()
        return out

    return Program([model], [optimizer], step)


@program("meta_learning_by_functional_inner_loop", "func")
def maml(seed: int) -> Program:
    model = mlp()
    x = torch.randn(3, 4, 8)

    def task(x: torch.Tensor) -> torch.Tensor:
        weights = dict(model.named_parameters())
        for _ in range(2):
            grads = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).square().mean())(weights)
            weights = {name: w - 0.1 * grads[name] for name, w in weights.items()}
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    return training(model, lambda i: torch.vmap(task)(x).sum())
