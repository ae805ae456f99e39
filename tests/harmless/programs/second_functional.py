"""torch.func, compile, tracing, custom operators: places where hooks run under someone else's interpreter."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from ..program import Program, mlp, program, training

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp  # warns when it is first imported, whoever does it


@program("second_vmap_over_batch_norm_and_dropout", "second: functional")
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


@program("second_transforms_nested_inside_forward", "second: functional")
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


@program("second_functional_call_with_tied_weights", "second: functional")
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


@program("second_vjp_function_kept_over_steps", "second: functional")
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


@program("second_make_fx_of_the_whole_step", "second: functional")
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


@program("second_compiled_fails_on_recompile", "second: functional")
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


@program("second_compiled_inner_function_error_on_recompile", "second: functional")
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


@program("second_compiled_with_dynamic_shapes_and_reset", "second: functional")
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


@program("second_compiled_autograd", "second: functional")
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


@program("second_custom_op_with_autograd_and_vmap", "second: functional")
def library_op(seed: int) -> Program:
    """A torch.library operator with fake, autograd and vmap rules, made inside the first step, used below vmap and compile."""
    library = torch.library.Library("second_programs", "FRAGMENT")
    calls: list[str] = []
    model = mlp(8, 8)
    x = torch.randn(4, 8)

    def define() -> None:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: (calls.append("cpu"), x * x * x)[1], "CPU")
        torch.library.register_fake("second_programs::cube", torch.empty_like, lib=library)

        def back(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            calls.append("backward")
            return 3 * ctx.saved_tensors[0] ** 2 * g

        torch.library.register_autograd(
            "second_programs::cube", back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs), lib=library
        )

        def batched(info: Any, dims: Any, x: torch.Tensor) -> Any:
            calls.append("vmap")
            return torch.ops.second_programs.cube(x), dims[0]

        torch.library.register_vmap("second_programs::cube", batched, lib=library)

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            define()
        op = torch.ops.second_programs.cube
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


@program("second_kernel_of_aten_replaced_in_python", "second: functional")
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


@program("second_reductions_of_aten_raise_inside_step", "second: functional")
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


@program("second_jit_fork_and_freeze", "second: functional")
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


@program("second_functionalized_and_aot_function", "second: functional")
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


@program("second_mode_entered_in_one_module_left_in_another", "second: functional")
def mode_across_modules(seed: int) -> Program:
    """One submodule's forward enters a dispatch and a function mode, the next one's leaves them; both count."""
    from torch.overrides import TorchFunctionMode
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


@program("second_guard_mode_forbids_host_reads", "second: functional")
def guard_mode(seed: int) -> Program:
    """A guard of the user around forward and backward raises at any operation that reads a value to the host or copies."""
    from torch.utils._python_dispatch import TorchDispatchMode

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
