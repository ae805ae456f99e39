"""torch.compile, torch.jit, torch.export, torch.cond and operators of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..program import Program, mlp, program, training


def _compiled(backend: str, autocast: bool, **options: Any) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4))
    compiled = torch.compile(model, backend=backend, **options)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compiled(x).float().square().mean()

    return training(model, loss)


for _backend in ("eager", "aot_eager"):
    for _full in (False, True):

        @program(f"compile_{_backend}_{'fullgraph' if _full else 'graphs'}", "compile")
        def compiled_model(seed: int, backend: str = _backend, full: bool = _full) -> Program:
            return _compiled(backend, False, fullgraph=full)


@program("compile_aot_eager_bf16", "compile")
def compiled_autocast(seed: int) -> Program:
    return _compiled("aot_eager", True)


@program("compile_given_compiled_model", "compile")
def compiled_given(seed: int) -> Program:
    made = _compiled("eager", False)
    model = torch.compile(made.models[0], backend="eager", dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(3 + i, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("compile_in_place_method", "compile")
def compile_method(seed: int) -> Program:
    model = mlp()
    model.compile(backend="eager")
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("compile_one_function", "compile")
def compile_function(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def gate(y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(y) * y + y.sin()

    return training(model, lambda i: gate(model(x)).square().mean())


@program("compile_loss_with_graph_break", "compile")
def compile_break(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    seen: list[float] = []

    @torch.compile(backend="eager")
    def loss(i: int) -> torch.Tensor:
        y = model(x)
        value = y.square().mean()
        torch._dynamo.graph_break()
        seen.append(float(value))
        return value + y.abs().mean()

    made = training(model, loss)
    made.extra = lambda: seen
    return made


@program("compile_counts_graphs_and_recompiles", "compile")
def compile_counts(seed: int) -> Program:
    model = mlp()
    graphs: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(4, 8)
    made = training(model, lambda i: compiled(x).square().mean())
    made.extra = lambda: graphs
    return made


@program("compile_whole_step", "compile")
def compile_step(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)

    @torch.compile(backend="eager")
    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("compile_disable_and_allow_in_graph", "compile")
def compile_disable(seed: int) -> Program:
    class Odd(nn.Module):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.detach().mean())

    model = nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 4))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 8)
    return training(model, lambda i: compiled(x).square().mean())


@program("flex_and_sdpa", "compile")
def flex(seed: int) -> Program:
    from torch.nn.attention.flex_attention import flex_attention

    model = nn.Linear(8, 24)
    x = torch.randn(1, 16, 8)

    def loss(i: int) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (1, 8)).transpose(1, 2) for part in model(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.no_grad():
            flexed = flex_attention(q.detach(), k.detach(), v.detach())
        return mixed.square().mean() + flexed.mean() * 0

    return training(model, loss)


@program("jit_trace_and_script_inside_step", "jit")
def jit_inside(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        traced = torch.jit.trace(model, x)
        scripted = torch.jit.script(model)
        return traced(x).square().mean() + scripted(x).mean()

    return training(model, loss)


@program("jit_scripted_submodule", "jit")
def jit_submodule(seed: int) -> Program:
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.ReLU(), torch.jit.trace(nn.Linear(8, 4), torch.randn(4, 8)))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("jit_scripted_whole_model", "jit")
def jit_whole(seed: int) -> Program:
    model = torch.jit.script(mlp())
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("fx_symbolic_trace_inside_step", "jit")
def fx_inside(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        graph = torch.fx.symbolic_trace(model)
        return graph(x).square().mean()

    made = training(model, loss)
    made.extra = lambda: torch.fx.symbolic_trace(model).code
    return made


@program("fx_code_of_step", "jit")
def fx_code(seed: int) -> Program:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        code = make_fx(lambda y: model(y).square().mean())(x).code
        return torch.fx.symbolic_trace(model).code, code

    return Program([model], [], step)


@program("export_inside_step", "export")
def export_inside(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        exported = torch.export.export(model, (x,))
        loss = exported.module()(x).square().mean() + model(x).mean()
        loss.backward()
        return loss, str(exported.graph)

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step, steps=2)


@program("cond_and_while_loop", "export")
def cond(seed: int) -> Program:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: self.a(y).sin(), lambda y: self.b(y).cos(), (x,))

    model = Branch()
    return training(model, lambda i: model(torch.randn(4, 8)).square().mean(), steps=2)


_COUNT = {"calls": 0}
_OWN = torch.Generator()


@torch.library.custom_op("harmless::pure", mutates_args=())
def pure(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@pure.register_fake
def _pure_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


pure.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("harmless::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    _COUNT["calls"] += 1
    return x * (1.0 + _COUNT["calls"])


counting.register_autograd(lambda ctx, grad: grad * 3)


@torch.library.custom_op("harmless::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=_OWN).to(x.dtype)


noisy.register_autograd(lambda ctx, grad: grad.clone())


@torch.library.custom_op("harmless::only_bf16", mutates_args=())
def only_bf16(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"bf16 only, not {x.dtype}")
    return x * 2


only_bf16.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("harmless::write_", mutates_args=("x",))
def write_(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("harmless::files", mutates_args=())
def files(x: torch.Tensor) -> torch.Tensor:
    with open("calls.txt", "a") as out:
        out.write("x\n")
    with open("calls.txt") as read:
        return x * len(read.readlines())


files.register_autograd(lambda ctx, grad: grad.clone())


def _operator(op: Any, dtype: torch.dtype = torch.float32, extra: Any = None) -> Program:
    class Call(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x)

    model = nn.Sequential(nn.Linear(8, 8), Call(), nn.Linear(8, 4)).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    return training(model, lambda i: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.001), extra=extra)


@program("custom_op_pure", "operators")
def op_pure(seed: int) -> Program:
    return _operator(pure)


@program("custom_op_with_state", "operators")
def op_state(seed: int) -> Program:
    _COUNT["calls"] = 0
    return _operator(counting, extra=lambda: _COUNT)


@program("custom_op_with_own_generator", "operators")
def op_noisy(seed: int) -> Program:
    _OWN.manual_seed(seed)
    return _operator(noisy, extra=_OWN.get_state)


@program("custom_op_only_bf16", "operators")
def op_bf16(seed: int) -> Program:
    return _operator(only_bf16, torch.bfloat16)


@program("custom_op_writes_a_file", "operators")
def op_files(seed: int) -> Program:
    return _operator(files)


@program("custom_op_only_bf16_autocast", "operators")
def op_bf16_autocast(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model[1](only_bf16(model[0](x))).float().square().mean()

    return training(model, loss)


@program("custom_op_mutates_argument", "operators")
def op_mutates(seed: int) -> Program:
    model = mlp()
    board = torch.zeros(4)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        write_(board, 1.0)
        return (model(x) + board).square().mean()

    return training(model, loss, extra=lambda: board)


@program("operators_with_own_generators", "operators")
def own_generators(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.RReLU(), nn.AlphaDropout(0.2))
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        noise = torch.randn(4, 8, generator=own)
        keep = torch.bernoulli(torch.full((4, 8), 0.5), generator=own)
        perm = torch.randperm(4, generator=own)
        return model((x + noise)[perm] * keep).square().mean() + torch.rand(()) + torch.empty(2).exponential_().sum()

    return training(model, loss, extra=own.get_state)
