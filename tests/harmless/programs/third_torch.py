"""Third round: corners of torch that the first two did not reach."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..program import Program, mlp, program, training


def _model(forward: Any, *parts: nn.Module) -> nn.Module:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts or [nn.Linear(8, 8)])

        def forward(self, *args: Any) -> Any:
            return forward(self.parts, *args)

    return Made()


@program("third_linearize_and_jacfwd_chunks", "third func")
def linearize(seed: int) -> Program:
    model = mlp()
    x = torch.randn(3, 8)

    def loss(i: int) -> torch.Tensor:
        weights = {k: v.detach() for k, v in model.named_parameters()}
        out, push = torch.func.linearize(lambda x: torch.func.functional_call(model, weights, (x,)), x)
        jacobian = torch.func.jacrev(lambda x: model(x).sum(0), chunk_size=2)(x)
        moved = torch.vmap(model, in_dims=1, out_dims=1, chunk_size=2)(x.unsqueeze(0))
        return model(x).sum() + push(torch.ones_like(x)).sum() + jacobian.square().sum() + out.sum() + moved.sum()

    return training(model, loss)


class _Cube(torch.autograd.Function):
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


@program("third_function_with_setup_context_vmap_rule_and_jvp", "third func")
def setup_context(seed: int) -> Program:
    model = _model(lambda parts, x: _Cube.apply(parts[0](x))[0])
    x = torch.randn(3, 8)

    def loss(i: int) -> torch.Tensor:
        per_sample = torch.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
            value = tangent.square().mean()
        return model(x).square().mean() + per_sample.detach().sum() + value

    return training(model, loss)


@program("third_dual_numbers_of_parameters", "third func")
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


@program("third_meta_learning_by_functional_inner_loop", "third func")
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


@program("third_flex_attention_with_learnt_bias_and_mask", "third attention")
def flex(seed: int) -> Program:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.slope = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(2, 6, 2, 12).transpose(1, 2).chunk(3, -1)
            mask = create_block_mask(lambda b, h, i, j: i >= j, 2, 2, 6, 6, device="cpu", BLOCK_SIZE=2)
            slope = self.slope.detach()
            with torch.no_grad():  # no backward on a CPU
                out = flex_attention(
                    q.detach(), k.detach(), v.detach(), score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i), block_mask=mask
                )
            return v * out

    model = Flex()
    x = torch.randn(2, 6, 8)
    return training(model, lambda i: model(x).square().mean() + model.slope.sum())


@program("third_causal_bias_subclass_and_chosen_kernels", "third attention")
def causal_bias(seed: int) -> Program:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        q = parts[0](x).view(2, 6, 2, 4).transpose(1, 2)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            one = F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(6, 6))
        return one + F.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(6, 6), enable_gqa=True)

    model = _model(forward)
    x = torch.randn(2, 6, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            return model(x).float().square().mean()

    return training(model, loss, steps=4)


@program("third_masked_tensors_in_the_model", "third tensors")
def masked(seed: int) -> Program:
    from torch.masked import as_masked_tensor

    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        out = parts[0](x)
        rows = as_masked_tensor(out.detach(), out > -0.5)
        return out + torch.sum(rows * 2, 0).get_data().nan_to_num() + torch.amax(rows, 0).get_data().nan_to_num()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model(forward)
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).sum())


@program("third_module_outputs_masked_tensor", "third tensors")
def masked_output(seed: int) -> Program:
    from torch.masked import as_masked_tensor

    class Masks(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return as_masked_tensor(x.detach(), x > -0.5)

    model = _model(lambda parts, x: parts[0](x) + parts[1](parts[0](x)).sum(0).get_data().nan_to_num(), nn.Linear(8, 8), Masks())
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).sum())


@program("third_dtypes_nobody_computes_with", "third tensors")
def dtypes(seed: int) -> Program:
    kinds = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.bits16, torch.complex32]

    class Emits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for kind in kinds[:-1]:
                self.register_buffer(
                    f"b_{str(kind)[6:]}", torch.zeros(4, dtype=torch.uint8).repeat(8)[: 4 * kind.itemsize].view(kind)
                )
            self.packed = nn.Buffer(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            return x, *self.buffers(), torch.zeros(3, dtype=torch.complex32), torch.zeros(0, dtype=torch.uint64)

    model = _model(lambda parts, x: parts[1](parts[0](x))[0], nn.Linear(8, 8), Emits())
    return training(model, lambda i: model(torch.ones(2, 8)).square().mean())


@program("third_parameters_integer_bool_empty_and_scalar", "third tensors")
def odd_parameters(seed: int) -> Program:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
            self.eight = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2), requires_grad=False)

        def forward(self) -> torch.Tensor:
            self.whole.data += 1
            self.flags.data.logical_not_()
            return self.scalar * self.whole.sum() + self.empty.sum() + self.wave.abs().sum() + self.wide.sum().float()

    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, foreach=False)
    return training(model, lambda i: model(), optimizer)


@program("third_five_thousand_scalar_parameters", "third tensors")
def many_parameters(seed: int) -> Program:
    model = nn.ParameterList([nn.Parameter(torch.tensor(i / 1000)) for i in range(5000)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    return training(model, lambda i: torch.stack(list(model)).square().mean(), optimizer)


@program("third_graph_of_twenty_thousand_nodes", "third graph")
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


@program("third_context_holds_itself_and_the_module", "third graph")
def context_tricks(seed: int) -> Program:
    notes: list[Any] = []
    model = _model(lambda parts, x: _Tricks.apply(parts[0](x) + 0, parts[0], notes))
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


@program("third_gradient_stolen_or_copied", "third graph")
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


@program("third_saved_tensors_packed_to_numpy_and_failing", "third graph")
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


@program("third_backward_fails_halfway_then_again", "third graph")
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


@program("third_retry_with_half_the_batch", "third graph")
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


@program("third_optimizer_in_backward_fused_per_parameter", "third optim")
def fused_in_backward(seed: int) -> Program:
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p], 1e-2, fused=True) for p in model.parameters()}
    order: list[Any] = []

    def hook(p: torch.Tensor) -> None:
        order.append(tuple(p.shape))
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none=True)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(i: int) -> Any:
        loss = model(torch.ones(2, 8) * (i + 1)).square().mean()
        loss.backward()
        return loss

    return Program([model], list(optimizers.values()), step, extra=lambda: order)


@program("third_optimizer_wrapped_by_delegation", "third optim")
def delegated(seed: int) -> Program:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self._inner, name)

        def step(self, closure: Any = None) -> Any:
            for group in self._inner.param_groups:
                group["lr"] *= 0.9
            return self._inner.step(closure)

    model = mlp()
    optimizer = Wrapper(torch.optim.Adafactor(model.parameters(), 1e-2))
    return training(model, lambda i: model(torch.ones(2, 8)).square().mean(), optimizer)


@program("third_optimizer_copied_and_state_set_inside_step", "third optim")
def optimizer_copied(seed: int) -> Program:
    import copy
    import pickle

    model = mlp()
    first = torch.optim.NAdam(model.parameters(), 1e-2, foreach=True)
    notes: list[Any] = []
    first.register_load_state_dict_pre_hook(lambda optimizer, state: notes.append(sorted(state)) and None)

    def step(i: int) -> Any:
        first.zero_grad()
        loss = model(torch.ones(2, 8) * i).square().mean()
        loss.backward()
        with torch.no_grad():
            twin = copy.deepcopy(first)
            twin.step()
            notes.append(sorted(vars(pickle.loads(pickle.dumps(first)))))
        first.load_state_dict(first.state_dict())
        first.step()
        return loss

    return Program([model], [first], step, extra=lambda: notes)


@program("third_averaged_model_update_bn_and_swalr", "third optim")
def averaged(seed: int) -> Program:
    from torch.optim import swa_utils

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = swa_utils.SWALR(optimizer, 0.01, anneal_epochs=2)
    rows = torch.utils.data.DataLoader(torch.randn(8, 8), 4)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(next(iter(rows))).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        scheduler.step()
        swa_utils.update_bn(rows, average)
        return loss

    return Program([model, average], [optimizer], step)


@program("third_amp_optimizer_takes_scale_and_found_inf", "third optim")
def amp_optimizer(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8) * (float("inf") if i == 1 else 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program([model], [optimizer], step, steps=4, scaler=scaler)


@program("third_compile_graph_breaks_in_nested_modules", "third compile")
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


@program("third_compile_stances_and_explain_inside_step", "third compile")
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


@program("third_compile_regions_and_higher_order_scan", "third compile")
def regions(seed: int) -> Program:
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as torch_map

    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        y = associative_scan(lambda a, b: a + b, parts[0](x), 0, combine_mode="generic")
        return torch_map(lambda row, bias: row + bias, y, x[0])

    model = _model(forward)
    block = torch.compiler.nested_compile_region(lambda x: torch.tanh(x) * 2)
    whole = torch.compile(lambda x: block(block(x)), backend="aot_eager", fullgraph=True)
    return training(model, lambda i: whole(model(torch.ones(4, 8))).square().mean())


@program("third_compile_checkpoint_inside", "third compile")
def compile_checkpoint(seed: int) -> Program:
    from torch.utils.checkpoint import checkpoint

    model = _model(lambda parts, x: checkpoint(parts[0], x, use_reentrant=False), mlp(8, 8))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    return training(model, lambda i: compiled(torch.ones(2, 8)).square().mean())


@program("third_exported_program_trained", "third compile")
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


@program("third_fx_interpreter_and_tracer_with_leaves", "third compile")
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


@program("third_precision_switches_of_the_new_kind", "third switches")
def switches(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        matmul: Any = torch.backends.mkldnn.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = ["bf16", "ieee", "tf32"][i]
        try:
            return model(torch.randn(4, 8)).square().mean()
        finally:
            notes.append(matmul.fp32_precision)
            if i == 2:
                matmul.fp32_precision = before

    return training(model, loss, extra=lambda: notes)


@program("third_matmul_precision_and_reduced_reductions", "third switches")
def legacy_switches(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(["medium", "high", "highest"][i])
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = i == 1
        notes.append((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        try:
            return model(torch.randn(4, 8)).square().mean()
        finally:
            torch.set_float32_matmul_precision(before)
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True

    return training(model, loss, extra=lambda: notes)


@program("third_debug_mode_and_module_tracker_of_torch", "third switches")
def debug_mode(seed: int) -> Program:
    from torch.utils._debug_mode import DebugMode
    from torch.utils.module_tracker import ModuleTracker

    model = mlp()
    notes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        tracker = ModuleTracker()

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                notes.append((str(func), sorted(tracker.parents)))
                return func(*args, **(kwargs or {}))

        with tracker, Names():
            value = model(torch.ones(2, 8)).square().mean()
        with DebugMode() as debug:
            model(torch.ones(2, 8))
        notes.append(debug.debug_string().count("addmm"))
        return value

    return training(model, loss, extra=lambda: notes)


class _Pair:
    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two


_flattened: list[int] = []
pytree.register_pytree_node(
    _Pair,
    lambda pair: (_flattened.append(1), ([pair.one, pair.two], None))[1],  # type: ignore[func-returns-value]
    lambda values, _: _Pair(*values),
)


@program("third_registered_tree_node_counts_its_flattening", "third switches")
def tree_node(seed: int) -> Program:
    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return _Pair(x, x * 2)

    model = _model(lambda parts, x: parts[1](parts[0](x)).two, nn.Linear(8, 8), Pairs())
    return training(model, lambda i: model(torch.ones(2, 8)).sum())


@program("third_lstm_projected_under_parametrization_bf16", "third switches")
def lstm(seed: int) -> Program:
    model = nn.LSTM(8, 8, 2, proj_size=4, batch_first=True, bidirectional=True)
    nn.utils.parametrizations.weight_norm(model, "weight_hh_l0")

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(torch.ones(2, 3, 8))[0].float().square().mean()

    return training(model, loss)
