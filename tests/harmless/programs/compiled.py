"""torch.compile, torch.jit, torch.export, torch.cond and operators of one's own."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..program import NAN, Program, batch, made_of, mlp, program, sick, training


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


_LIBRARY = torch.library.Library("nanny_lists", "DEF")


_LIBRARY.define("move(Tensor(a!)[] xs, Tensor[] by, *, float alpha=1.0, str? how=None) -> ()")


_LIBRARY.define("parts(Tensor x, int[] sizes, bool[2] which, ScalarType? dtype=None) -> (Tensor[], int, float, bool, str)")


_LIBRARY.define("view(Tensor(a) x) -> Tensor(a)")


_MOVES: list[float] = []


def _move(xs: list[torch.Tensor], by: list[torch.Tensor], *, alpha: float = 1.0, how: str | None = None) -> None:
    _MOVES.append(alpha)
    for x, y in zip(xs, by):
        x.add_(y, alpha=-alpha)


def _parts(x: torch.Tensor, sizes: list[int], which: list[bool], dtype: Any = None) -> Any:
    _MOVES.append(len(sizes))
    parts = list(x.to(dtype or x.dtype).split(sizes, 1))
    return [p.clone() for p in parts], len(sizes), float(len(_MOVES)), which[0], "text"


_LIBRARY.impl("move", _move, "CompositeExplicitAutograd")


_LIBRARY.impl("parts", _parts, "CompositeExplicitAutograd")


_LIBRARY.impl("view", lambda x: x.view(-1), "CompositeExplicitAutograd")


@program("operators_of_lists_texts_and_numbers", "operators")
def odd_operators(seed: int) -> Program:
    _MOVES.clear()
    model = mlp()

    def step(i: int) -> Any:
        model.zero_grad()
        value = model(sick(i)).mean()
        value.backward()
        with torch.no_grad():
            parts, count, moves, flag, text = torch.ops.nanny_lists.parts(batch(i), [3, 5], [True, False], torch.bfloat16)
            weights = list(model.parameters())
            torch.ops.nanny_lists.move(weights, [p.grad for p in weights], alpha=0.05, how=text)
            torch.ops.nanny_lists.view(model[0].weight).mul_(0.999)
        return [value, parts, count, moves, flag, text]

    return Program([model], [], step, steps=5, extra=lambda: _MOVES)


@program("packed_weights_of_a_quantised_teacher", "operators")
def packed_weights(seed: int) -> Program:
    from torch.ao.nn.quantized import dynamic

    warnings.simplefilter("ignore")
    teacher = nn.Sequential(dynamic.Linear(8, 8), nn.ReLU(), dynamic.Linear(8, 4))
    for layer in (teacher[0], teacher[2]):  # made of memory that nobody has filled
        weight = torch.quantize_per_tensor(torch.randn(layer.out_features, 8), 0.02, 0, torch.qint8)
        layer.set_weight_bias(weight, torch.zeros(layer.out_features))
    model = nn.ModuleDict({"student": mlp(), "teacher": teacher})

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            target = model["teacher"](batch(i))
        return F.mse_loss(model["student"](sick(i)), target)

    return training(model, loss, torch.optim.SGD(model["student"].parameters(), 0.05), steps=5)


@program("hybrid_sparse_and_block_sparse_losses", "operators")
def hybrid(seed: int) -> Program:
    warnings.simplefilter("ignore")
    model = nn.ParameterDict({"sparse": nn.Parameter(torch.randn(3, 2)), "dense": nn.Parameter(torch.randn(4, 4))})

    def loss(i: int) -> torch.Tensor:
        indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
        scale = NAN if i == 2 else 1.0
        mixed = torch.sparse_coo_tensor(indices, model["sparse"] * scale, (2, 3, 2))
        soft = torch.sparse.softmax(torch.sparse_coo_tensor(indices, model["sparse"][:, 0], (2, 3)), 1)
        blocks = model["dense"].detach().to_sparse_bsr((2, 2))
        product = torch.sparse.mm(torch.sparse_coo_tensor([[0, 1], [1, 3]], model["dense"][0, :2], (4, 4)), model["dense"])
        summed = torch.sparse.sum(mixed, dim=0).to_dense().square().sum() + soft.to_dense().sum()
        return summed + (blocks @ model["dense"].detach()).sum() + product.mean()

    return training(model, loss, steps=4)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.calls = 0

    @torch.jit.ignore
    def python(self, x):  # type: ignore[no-untyped-def]
        return (F.silu(x).double() * 2).float()

    @torch.jit.export
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.python(self.other(x)) + self.one(x)


@program("scripted_model_calls_ignored_python", "operators")
def ignored(seed: int) -> Program:
    warnings.simplefilter("ignore")

    inner = torch.jit.script(_Mixed())
    model = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 2))

    def loss(i: int) -> torch.Tensor:
        traced = torch.jit.trace_module(nn.Linear(8, 8), {"forward": batch(0)}) if i == 1 else None
        value = model(sick(i)).mean() + inner.other(batch(i)).mean()
        return value if traced is None else value + traced(batch(i)).mean()

    return training(model, loss, steps=4)


@program("regions_marked_for_compilation_and_graphs_split", "operators")
def regions(seed: int) -> Program:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append([sum(1 for _ in graph.graph.nodes), len(examples)])
        return graph.forward

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        @torch.compiler.nested_compile_region
        def region(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.region(x)
            if x.detach().abs().sum() > 1e6:
                x = x / 2
            return self.region(x)

    model = nn.Sequential(Block(), Block())
    model.compile(backend=backend)

    def loss(i: int) -> torch.Tensor:
        x = sick(i, 3)[: 4 - i % 2]
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return model(x).square().mean()

    return training(model, loss, steps=5, extra=lambda: graphs)


@program("compiled_graphs_are_written_down", "compiled")
def compiled_graphs(seed: int) -> Program:
    torch._dynamo.reset()
    model, codes = mlp(), []  # type: tuple[Any, list[str]]

    def backend(graph: Any, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    head = torch.compile(lambda x: F.gelu(x).square().mean(), backend=backend)
    body = torch.compile(model[0], backend=backend, fullgraph=True)

    def loss(i: int) -> torch.Tensor:
        return head(model[2](model[1](body(batch(i)))))

    return training(model, loss, extra=lambda: codes)


@program("exported_program_is_written_down", "compiled")
def exported_code(seed: int) -> Program:
    model, codes = mlp(), []  # type: tuple[Any, list[str]]

    def loss(i: int) -> torch.Tensor:
        if i < 2:
            made = torch.export.export(model, (batch(0),), strict=i == 1)
            codes.append(made.graph_module.code)
            codes.append(str(made.graph_signature))
            codes.append(str([(k, str(n.target)) for n in made.graph.nodes for k in n.meta if k in ("stack_trace",)]))
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: codes)


@program("make_fx_with_symbols_of_a_whole_step", "compiled")
def symbolic(seed: int) -> Program:
    from torch.fx.experimental.proxy_tensor import make_fx

    model, codes = mlp(), []  # type: tuple[Any, list[str]]
    weights = dict(model.named_parameters())

    def gradients(w: Any, x: torch.Tensor) -> Any:
        value = torch.func.functional_call(model, w, (x,)).square().mean()
        return torch.autograd.grad(value, list(w.values()))

    def loss(i: int) -> torch.Tensor:
        if i < 2:
            codes.append(make_fx(gradients, tracing_mode="symbolic" if i else "fake")(weights, batch(0)).code)
        return model(batch(i)).square().mean()

    return training(model, loss, extra=lambda: codes)


@program("checkpoints_of_both_kinds_in_each_other", "compiled")
def checkpoints(seed: int) -> Program:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(4))
            self.calls = 0

        def pair(self, n: int, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = checkpoint(self.layers[n], x, use_reentrant=False, determinism_check="default")
            return checkpoint(self.layers[n + 1], x, use_reentrant=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            with set_checkpoint_early_stop(False):
                x = checkpoint(functools.partial(self.pair, 0), x, use_reentrant=False)
            return checkpoint(functools.partial(self.pair, 2), x, use_reentrant=True)

    model = Stack()

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            return model(batch(i) * (NAN if i == 3 else 1)).float().square().mean()

    return training(model, loss, steps=5, extra=lambda: model.calls)


@program("compile_graph_breaks_in_nested_modules", "compile")
def breaks(seed: int) -> Program:
    seen: list[Any] = []

    class Breaks(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Breaks(depth - 1) if depth else nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float() + 1

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append([node.op for node in graph.graph.nodes])
        return graph.forward

    model = Breaks(3)
    compiled = torch.compile(model, backend=backend)
    return training(model, lambda i: compiled(torch.ones(2, 8)).square().mean(), extra=lambda: seen)


@program("compile_stances_and_explain_inside_step", "compile")
def stances(seed: int) -> Program:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        with torch.compiler.set_stance(["default", "force_eager", "eager_on_recompile"][i % 3]):
            value = compiled(torch.ones(2 + i, 8)).square().mean()
        notes.append(torch._dynamo.explain(model)(torch.ones(2, 8)).graph_break_count)
        return value

    return training(model, loss, extra=lambda: notes)


@program("compile_regions_and_higher_order_scan", "compile")
def regions_and_scans(seed: int) -> Program:
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as torch_map

    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        y = associative_scan(lambda a, b: a + b, parts[0](x), 0, combine_mode="generic")
        return torch_map(lambda row, bias: row + bias, y, x[0])

    model = made_of(forward)
    block = torch.compiler.nested_compile_region(lambda x: torch.tanh(x) * 2)
    whole = torch.compile(lambda x: block(block(x)), backend="aot_eager", fullgraph=True)
    return training(model, lambda i: whole(model(torch.ones(4, 8))).square().mean())


@program("compile_checkpoint_inside", "compile")
def compile_checkpoint(seed: int) -> Program:
    from torch.utils.checkpoint import checkpoint

    model = made_of(lambda parts, x: checkpoint(parts[0], x, use_reentrant=False), mlp(8, 8))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    return training(model, lambda i: compiled(torch.ones(2, 8)).square().mean())


@program("exported_program_trained", "compile")
def exported(seed: int) -> Program:
    source = mlp()
    model = torch.export.export(source, (torch.ones(2, 8),)).module()
    return training(
        model,
        lambda i: (
            model(torch.ones(2, 8)).square().mean()
            + torch.export.unflatten(torch.export.export(source, (torch.ones(2, 8),)))(torch.ones(2, 8)).sum().detach()
        ),
    )


@program("fx_interpreter_and_tracer_with_leaves", "compile")
def interpreter(seed: int) -> Program:
    notes: list[Any] = []
    model = nn.Sequential(mlp(), nn.Linear(4, 4))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            notes.append(name)
            return super().is_leaf_module(m, name)

    class Interpreter(torch.fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            notes.append(str(target))
            return super().call_module(target, args, kwargs)

    def loss(i: int) -> torch.Tensor:
        graph = torch.fx.GraphModule(model, Tracer().trace(model))
        return Interpreter(graph).run(torch.ones(2, 8)).square().mean()

    return training(model, loss, extra=lambda: notes)
