"""A watched step inside something else of torch, or something of torch that stands between the step and its operations."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..program import Program, batch, bits, mlp, program, sick, training


def _around(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A program whose steps, each with its `watch.step(i)`, are functions that something else calls."""

    def register(call: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]) -> Callable[..., Any]:
        @program(f"step_opened_inside_{name}", "inside others")
        def inside(seed: int) -> Program:
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            made = Program([model], [optimizer], lambda i: None)

            def loop(watch: Any) -> None:
                def part_of(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
                    def part(x: torch.Tensor) -> torch.Tensor:
                        with watch.step(i):
                            value: torch.Tensor = model(x).square().mean()
                            return value

                    return part

                for i in range(5):
                    made.see(bits(call(part_of(i), sick(i, 3))))
                    optimizer.zero_grad()
                    model(batch(i)).square().mean().backward()
                    optimizer.step()

            made.loop = loop
            return made

        return call

    return register


@_around("a_vectorised_map")
def _vmapped(part: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(part)(x)


@_around("a_gradient_of_a_gradient")
def _grad_of_grad(part: Any, x: torch.Tensor) -> Any:
    return torch.func.hessian(part)(x[:1])


@_around("a_jacobian_made_forward")
def _jacobian(part: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(part(forward_ad.make_dual(x, torch.ones_like(x))))


@_around("a_functionalized_call")
def _functionalized(part: Any, x: torch.Tensor) -> Any:
    return torch.func.functionalize(part)(x)


@_around("a_traced_graph")
def _traced(part: Any, x: torch.Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(part)(x)
    return [str(graph.code), graph(x)]


@_around("a_trace_of_jit")
def _jitted(part: Any, x: torch.Tensor) -> Any:
    """Ends at the first weight, which a trace may not hold."""
    try:
        return torch.jit.trace(part, x, check_trace=False)(x)
    except RuntimeError as error:
        return str(error)[:60]


@_around("a_compiled_function")
def _compiled(part: Any, x: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(part, backend="aot_eager")(x)


@_around("a_recomputed_segment")
def _recomputed(part: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    value = checkpoint(lambda y: part(y) * 2, x, use_reentrant=False)
    value.backward()
    return [value, x.grad]


@_around("the_backward_of_a_function")
def _in_backward(part: Any, x: torch.Tensor) -> Any:
    class Learning(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(y)
            return y.sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (y,) = ctx.saved_tensors
            with torch.enable_grad():
                return torch.autograd.grad(part(y := y.detach().requires_grad_()), y)[0] * grad

    x = x.clone().requires_grad_()
    Learning.apply(x).backward()
    return x.grad


@_around("fake_tensors")
def _fake(part: Any, x: torch.Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = part(mode.from_tensor(x))
    return [str(out.dtype), list(out.shape), type(out).__name__]


@program("callbacks_of_the_engine_update_the_weights", "inside others")
def callbacks(seed: int) -> Program:
    """Queued in a hook, run by the engine when backward is over, which the program starts without torch.autograd."""
    model, told = mlp(), []  # type: tuple[Any, list[int]]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    engine = torch.autograd.Variable._execution_engine

    def update() -> None:
        told.append(len(told))
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()

    model[2].weight.register_hook(lambda _: engine.queue_callback(update))

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i, 3)).square().mean()
        if i % 2:
            engine.run_backward((value,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        else:
            value.backward()
        return value

    return Program([model], [optimizer], step, steps=6, extra=lambda: told)


@program("reference_implementations_and_prims", "inside others")
def references(seed: int) -> Program:
    """Forward in operations of `prims`, by the mode of torch that exchanges them and by hand."""
    import torch._refs
    from torch._prims.context import TorchRefsMode

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        x = sick(i, 3)
        with TorchRefsMode():
            x = torch.softmax(x * 2, -1) + torch.erf(x)
        x = torch._refs.nn.functional.gelu(x) + torch.ops.prims.cos(x.detach())
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    return training(model, loss, steps=5)


_runs: list[str] = []


@torch.library.custom_op("hostile::cast_itself", mutates_args=())
def _cast_itself(x: torch.Tensor) -> torch.Tensor:
    _runs.append(str(x.dtype))
    return (x * 3).clone()


_cast_itself.register_fake(torch.empty_like)
_cast_itself.register_autograd(lambda ctx, grad: grad * 3)
_cast_itself.register_autocast("cpu", torch.bfloat16)


@program("operator_with_a_rule_of_autocast_is_checked_inside_a_step", "inside others")
def checked(seed: int) -> Program:
    """Counts its runs, has its own autocast, and is examined by torch's own checks in the middle of a step."""
    model, told = mlp(), []  # type: tuple[Any, list[Any]]
    _runs.clear()

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = _cast_itself(model[0](sick(i, 3)))
            with torch.autocast("cpu", enabled=False):
                x = _cast_itself(x.float())
        told.append([str(x.dtype), len(_runs)])
        if i == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tests = ("test_schema", "test_autograd_registration", "test_faketensor")
                found = torch.library.opcheck(_cast_itself, (batch(i).requires_grad_(),), test_utils=tests)
            told.append(sorted(found.items()))
        return model[2](x).square().mean()  # type: ignore[no-any-return]

    return training(model, loss, steps=5, extra=lambda: [told, _runs])


@program("memory_is_counted_by_torch_inside_a_step", "inside others")
def counted(seed: int) -> Program:
    """`MemTracker` follows every storage and module of a step: what stays, and who was called. How long one lives may differ."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    told: list[Any] = []

    def step(i: int) -> Any:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            value = model(sick(i, 3)).square().mean()
            value.backward()
            if value.isfinite():
                optimizer.step()
            optimizer.zero_grad()
        stays = {str(kind): size for kind, size in tracker.get_tracker_snapshot()[torch.device("cpu")].items()}
        told.append([[stays[f"_MemRefType.{kind}"] for kind in ("PARAM", "BUFFER", "OPT", "GRAD")], len(tracker.memory_tracking)])
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: told)


@program("operations_below_autograd_and_without_dispatch", "inside others")
def below(seed: int) -> Program:
    """A part of forward runs below autograd with a gradient of its own; another with the modes of Python put aside."""

    class Below(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            with torch._C._AutoDispatchBelowAutograd():
                return torch.tanh(x @ w)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            x, w = ctx.saved_tensors
            with torch._C._DisableTorchDispatch():
                inner = grad * (1 - torch.tanh(x @ w) ** 2)
                return inner @ w.T, x.T @ inner

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def loss(i: int) -> torch.Tensor:
        x = Below.apply(sick(i, 3), model[0].weight)
        no_casts = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
        with no_casts, torch.autocast("cpu", torch.bfloat16):
            x = model[1](x)
        with torch._C._DisableTorchDispatch():
            return x.float().square().mean()  # type: ignore[no-any-return]

    return training(model, loss, steps=5)


@program("views_are_replayed_and_tracked", "inside others")
def replayed(seed: int) -> Program:
    """Chains of views written in place, with autograd told to keep the way each view was made."""
    model = nn.Linear(8, 8)
    told: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        with torch.autograd._force_original_view_tracking(bool(i % 2)):
            out = model(sick(i, 3))
            view = out.view(-1, 2, 4).transpose(1, 2)[:, 1:]
            view.mul_(2)
            out.view_as(out)[0].add_(1)
            told.append([view._is_view(), view._base is out, out._version, view.grad_fn is None or view.grad_fn.name()])
            parts = out.unbind(1)
            (parts[0] * 1).sum().detach_()
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.data.mul_(1)
            told.append(out._version)
            return view.square().mean() + parts[1].sum()

    return training(model, loss, steps=5, extra=lambda: told)


@program("checkpoints_that_draw_anew_on_bad_steps", "inside others")
def drawn_anew(seed: int) -> Program:
    """Without the random state kept and without a check, the second run of a segment has another dropout, as was asked for."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(i % 2)):
            out = checkpoint(model, sick(i, 2 + i % 2), use_reentrant=False, preserve_rng_state=False, determinism_check="none")
        value = out.float().square().mean()
        value.backward()
        if value.isfinite():
            optimizer.step()
        return [value, torch.rand(())]

    return Program([model], [optimizer], step, steps=6)


@contextlib.contextmanager
def _always_warned() -> Iterator[None]:
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


@program("warnings_of_torch_come_every_time_and_are_counted", "inside others")
def warned(seed: int) -> Program:
    model, told = mlp(), []  # type: tuple[Any, list[Any]]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        with warnings.catch_warnings(record=True) as caught, _always_warned():
            warnings.simplefilter("always")
            optimizer.zero_grad()
            out = model(sick(i, 3))
            rows = out.to_sparse_csr() if i != 3 else out
            kept = torch.nn.functional.mse_loss(out, batch(i)[:1, :4])
            value = out.square().mean() + kept + 0 * rows.sum() if i == 3 else out.square().mean() + kept
            value.backward(create_graph=bool(i % 2))
            if value.isfinite():
                optimizer.step()
        told.append(sorted(f"{one.category.__name__} {str(one.message)[:60]}" for one in caught))
        return value.detach()

    return Program([model], [optimizer], step, steps=5, extra=lambda: told)


@program("a_device_written_in_python", "inside others")
def device(seed: int) -> Program:
    """Tensors of a backend that is a few lines of Python, which knows only the operations that this program needs."""
    import torch.utils.backend_registration as registration

    with contextlib.suppress(RuntimeError, AttributeError):
        registration._setup_privateuseone_for_python_backend("hostile")
        backend: Any = torch.hostile  # type: ignore[attr-defined]
        backend.get_rng_state, backend.set_rng_state = lambda *_: torch.get_rng_state(), lambda *_: None

    class Array(torch.Tensor):
        @staticmethod
        def __new__(cls, plain: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, plain.shape, dtype=plain.dtype, device="hostile:0", requires_grad=plain.requires_grad
            )

        def __init__(self, plain: torch.Tensor) -> None:
            self.plain = plain

        def plain_tensors(self) -> Any:
            return [self.plain]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            known = ("aten.tanh", "aten.tanh_backward", "aten.mul", "aten.detach", "aten.sum", "aten.expand", "aten.t", "aten.mm",
                     "aten.ones_like", "aten.view", "aten.add", "aten.linalg", "aten.transpose")  # fmt: skip
            if not str(func).startswith(known):
                raise NotImplementedError(str(func))
            given = torch.utils._pytree.tree_map(lambda v: v.plain if isinstance(v, Array) else v, (args, kwargs or {}))
            with torch.no_grad():
                out = func(*given[0], **given[1])
            return torch.utils._pytree.tree_map(lambda v: Array(v) if isinstance(v, torch.Tensor) else v, out)

    class Home(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            away = Array(self.inner(x).detach())
            return self.inner(x) * (1 + (torch.tanh(away) * away).plain)  # type: ignore[attr-defined,no-any-return]

    model = Home()
    return training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5)


@program("group_of_an_optimizer_counts_who_reads_it", "inside others")
def group_counts(seed: int) -> Program:
    """The learning rate is made when it is read, and goes down with each reading."""
    reads = [0]

    class Group(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            if key == "lr":
                reads[0] += 1
                return 0.05 / (1 + reads[0] / 10)
            return super().__getitem__(key)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.param_groups[:] = [Group(group) for group in optimizer.param_groups]

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i, 3)).square().mean()
        value.backward()
        if value.isfinite():
            optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: reads)


@program("sums_over_ranks_that_wait_when_they_are_read", "inside others")
def waiting(seed: int) -> Program:
    """Functional collectives give tensors that are waited for at their first use; forward passes them on unread."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    told: list[Any] = []

    class Gathered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = collectives.all_gather_tensor(self.inner[0](x).detach(), 0, dist.group.WORLD)
            told.append([type(y).__name__, getattr(y, "completed", None)])
            z = collectives.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD)
            return self.inner(x) + F.tanh(y)[:, :4] + z[1][:, :4]

    whole = Gathered()
    made = training(whole, lambda i: whole(sick(i, 3)).square().mean(), steps=5, extra=lambda: told)

    def loop(watch: Any) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            for i in range(5):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)
        finally:
            dist.destroy_process_group()

    made.loop = loop
    return made
