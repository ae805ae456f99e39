"""autocast in odd places, GradScaler in every order, operations whose kernels are picky about dtype."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..program import Program, batch, made_of, mlp, program, training


def _cast(model: nn.Module, loss: Any, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Program:
    def whole(i: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return loss(i)

    return training(model, whole, torch.optim.SGD(model.parameters(), 0.01), **more)


for _dtype in (torch.bfloat16, torch.float16):

    @program(f"autocast_{str(_dtype)[6:]}", "autocast")
    def autocast_plain(seed: int, dtype: Any = _dtype) -> Program:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1))
        x = torch.randn(4, 8)
        return _cast(model, lambda i: model(x).float().square().mean(), dtype)


@program("autocast_as_decorator", "autocast")
def decorated(seed: int) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Model()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).float().square().mean())


@program("autocast_nested_and_disabled_inside", "autocast")
def nested(seed: int) -> Program:
    class Safe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.inner(x.float())
                with torch.autocast("cpu", torch.float16):
                    return y + self.inner(y)

    model = nn.Sequential(nn.Linear(8, 8), Safe(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return _cast(model, lambda i: model(x).float().square().mean())


@program("autocast_without_cache", "autocast")
def no_cache(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return (model(x) + model(x * 2)).float().square().mean()

    return training(model, loss)


@program("autocast_cache_shared_by_two_forwards", "autocast")
def cache_shared(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def whole(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).detach()
            torch.clear_autocast_cache()
            return (model(x) + y).float().square().mean()

    return training(model, whole)


@program("autocast_around_the_whole_loop", "autocast")
def around_loop(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).float().square().mean())

    def loop(watch: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for i in range(3):
                with watch.step(i):
                    value = made.step(i)
                made.see(value)

    made.loop = loop
    return made


@program("autocast_entered_and_left_by_hand", "autocast")
def by_hand(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        context = torch.autocast("cpu", torch.bfloat16)
        context.__enter__()
        y = model(x)
        context.__exit__(None, None, None)
        torch.set_autocast_enabled("cpu", True)
        y = y + model(x)
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
        return y.float().square().mean()

    return training(model, loss)


@program("model_in_pure_bf16", "autocast")
def pure_bf16(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).bfloat16()
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    return training(model, lambda i: model(x).square().mean(), torch.optim.Adam(model.parameters(), 0.01))


@program("model_in_pure_fp16_overflows", "autocast")
def pure_fp16(seed: int) -> Program:
    model = mlp().half()
    x = (torch.randn(4, 8) * 3000).half()
    return training(model, lambda i: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.01))


def _scaled(order: str) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        if order == "overflow" and i == 1:
            loss = loss * float("inf")
        if order == "list":
            for part in scaler.scale([loss * 0.5, loss * 0.5]):
                part.backward(retain_graph=True)
        else:
            scaler.scale(loss).backward()
        norm = None
        if order in ("unscale", "overflow"):
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        out = None
        if order == "twice":
            scaler.unscale_(optimizer)
            try:
                scaler.unscale_(optimizer)
            except RuntimeError as error:
                out = str(error)
        if order == "step_twice":
            scaler.step(optimizer)
            try:
                scaler.step(optimizer)
            except RuntimeError as error:
                out = str(error)
        elif order == "skip_step":
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)
        if order != "no_update":
            scaler.update(128.0 if order == "new_scale" else None)
        return loss, norm, out, scaler.get_scale()

    steps = 1 if order == "no_update" else 4
    return Program([model], [optimizer], step, steps=steps, scaler=scaler if order != "unseen" else None)


for _order in ("plain", "unscale", "overflow", "list", "twice", "step_twice", "skip_step", "new_scale", "no_update", "unseen"):

    @program(f"grad_scaler_{_order}", "scaler")
    def scaled(seed: int, order: str = _order) -> Program:
        return _scaled(order)


@program("grad_scaler_update_before_step_raises", "scaler")
def scaler_wrong_order(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        texts = []
        optimizer.zero_grad()
        for act in (scaler.update, lambda: scaler.scale(model(x).square().mean()).backward(), scaler.update):
            try:
                texts.append(str(act()))
            except (RuntimeError, AssertionError) as error:
                texts.append(f"{type(error).__name__} {error}")
        scaler.step(optimizer)
        scaler.update()
        return texts

    return Program([model], [optimizer], step, scaler=scaler)


@program("grad_scaler_two_optimizers_and_closure_free_return", "scaler")
def scaler_two(seed: int) -> Program:
    model = mlp()
    one, two = torch.optim.SGD(model[0].parameters(), 0.01), torch.optim.Adam(model[2].parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        one.zero_grad()
        two.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(one)
        results = [scaler.step(one), scaler.step(two)]
        scaler.update()
        return results, scaler.state_dict()

    return Program([model], [one, two], step, scaler=scaler)


@program("grad_scaler_disabled", "scaler")
def scaler_disabled(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        out = scaler.step(optimizer)
        scaler.update()
        return out

    return Program([model], [optimizer], step, scaler=scaler)


@program("grad_scaler_subclass_and_deepcopy", "scaler")
def scaler_subclass(seed: int) -> Program:

    class Own(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return super().scale(outputs) * 1.0

        def _unscale_grads_(self, *args: Any) -> Any:
            return super()._unscale_grads_(*args)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = Own("cpu", init_scale=256.0)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return copy.deepcopy(scaler.state_dict())

    return Program([model], [optimizer], step, scaler=scaler)


@program("bilinear_autocast", "picky kernels")
def bilinear(seed: int) -> Program:
    model = nn.Bilinear(4, 4, 3)
    x = torch.randn(5, 4)
    return _cast(model, lambda i: model(x, x).float().square().mean())


@program("lstsq_and_solve_autocast", "picky kernels")
def lstsq(seed: int) -> Program:
    model = nn.Linear(4, 4)
    x, b = torch.randn(6, 4), torch.randn(6, 2)

    def loss(i: int) -> torch.Tensor:
        a = model(x).float()
        solved = torch.linalg.lstsq(a, b).solution * 0  # LAPACK's last bits depend on where a tensor happens to lie
        return solved.square().mean() + torch.linalg.solve(a[:4] + 5 * torch.eye(4), b[:4]).square().mean()

    return _cast(model, loss)


@program("prod_and_masked_fill_learnable_bf16", "picky kernels")
def prod(seed: int) -> Program:
    model = nn.Linear(8, 8).bfloat16()
    fill = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
    model.register_parameter("fill", fill)
    x = torch.randn(4, 8, dtype=torch.bfloat16)

    def loss(i: int) -> torch.Tensor:
        y = model(x).masked_fill(x > 0, fill)
        return y.prod(-1).sum() + y.cumprod(-1).mean() + torch.prod(y[0])

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.001))


@program("sgn_and_complex_backward", "picky kernels")
def sgn(seed: int) -> Program:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        z = torch.complex(y, y * 2)
        return torch.view_as_real(torch.sgn(z)).sum() + torch.sgn(y).sum() * 0 + z.angle().sum() + torch.sgn(y.bfloat16()).sum()

    return training(model, loss)


@program("ctc_loss", "picky kernels")
def ctc(seed: int) -> Program:
    model = nn.Linear(8, 5)
    x = torch.randn(10, 2, 8)
    targets = torch.tensor([[1, 2, 3], [2, 4, 0]])

    def loss(i: int) -> torch.Tensor:
        logits = model(x).log_softmax(-1)
        return nn.functional.ctc_loss(logits, targets, torch.tensor([10, 8]), torch.tensor([3, 2]), zero_infinity=True)

    return _cast(model, loss)


@program("eig_svd_cholesky_qr", "picky kernels")
def linalg(seed: int) -> Program:
    model = nn.Linear(4, 4)
    x = torch.randn(4, 4)

    def loss(i: int) -> torch.Tensor:
        a = model(x)
        values = torch.linalg.svdvals(a).sum() + torch.linalg.eigvalsh(a + a.t()).sum() + torch.linalg.qr(a).R.sum()
        return (
            values
            + torch.linalg.eigvals(a).abs().sum()
            + torch.linalg.cholesky(a @ a.t() + torch.eye(4)).sum()
            + torch.logdet(a @ a.t())
        )

    return training(model, loss)


for _kind in (nn.RNN, nn.LSTM, nn.GRU):

    @program(f"{_kind.__name__.lower()}_bf16_autocast", "picky kernels")
    def recurrent(seed: int, kind: Any = _kind) -> Program:
        model = kind(4, 8, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        x = torch.randn(2, 3, 4)
        return _cast(model, lambda i: model(x)[0].float().square().mean())


@program("lstm_packed_sequence", "picky kernels")
def packed(seed: int) -> Program:
    model = nn.LSTM(4, 8, proj_size=3)
    x = nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in (5, 3, 1)])
    return training(model, lambda i: model(x)[0].data.square().mean() + model(x)[1][0].sum())


@program("attention_bf16", "picky kernels")
def attention(seed: int) -> Program:
    model = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = torch.randn(2, 4, 8)
    mask = torch.full((4, 4), float("-inf")).triu(1)

    def loss(i: int) -> torch.Tensor:
        out, weights = model(x, x, x, attn_mask=mask, need_weights=i % 2 == 0)
        return out.float().square().mean() + (weights.float().sum() if weights is not None else 0)

    return _cast(model, loss)


@program("softmax_of_all_minus_inf", "picky kernels")
def minus_inf(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        scores = model(x).masked_fill(torch.tensor([True, True, True, i != 1]), float("-inf"))
        return scores.softmax(-1).nan_to_num().square().sum()

    return _cast(model, loss)


@program("losses_of_every_kind", "picky kernels")
def losses(seed: int) -> Program:
    model = mlp(8, 4)
    x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))

    def loss(i: int) -> torch.Tensor:
        out = model(x)
        functional = nn.functional
        return (
            functional.cross_entropy(out, y, label_smoothing=0.1, ignore_index=2)
            + functional.binary_cross_entropy_with_logits(out.float(), torch.rand(4, 4))
            + functional.kl_div(out.log_softmax(-1), torch.full((4, 4), 0.25), reduction="batchmean")
            + functional.huber_loss(out.float(), torch.zeros(4, 4))
            + functional.triplet_margin_loss(out.float(), x[:, :4], x[:, 4:])
            + functional.gaussian_nll_loss(out.float(), torch.zeros(4, 4), torch.ones(4, 4))
            + functional.multi_margin_loss(out.float(), y)
        )

    return _cast(model, loss)


@program("convolutions_and_pools_bf16", "picky kernels")
def convolutions(seed: int) -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.MaxPool2d(2, return_indices=False),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Flatten(),
    )
    x = torch.randn(2, 3, 8, 8)
    return _cast(model, lambda i: model(x).float().square().mean(), steps=2)


@program("scatter_index_sort_unique", "picky kernels")
def scatter(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        index = torch.randint(0, 4, (4, 4))
        board = torch.zeros(4, 4).scatter_add_(1, index, y).index_add_(0, index[0], y).scatter_reduce(1, index, y, "amax")
        board = board.index_put((index[0], index[1]), y[0], accumulate=True)
        values, order = y.sort(-1, descending=True)
        return (
            board.sum()
            + (values * order).sum()
            + y.topk(2).values.sum()
            + y.detach().unique().sum()
            + y[y > 0].sum()
            + y.cummax(0).values.sum()
        )

    return training(model, loss)


@program("fft_stft_grid_sample", "picky kernels")
def fft(seed: int) -> Program:
    model = nn.Linear(16, 16)
    x = torch.randn(2, 16)

    def loss(i: int) -> torch.Tensor:
        y = model(x)
        spectrum = torch.stft(y, 8, window=torch.hann_window(8), return_complex=True)
        grid = torch.tanh(y[:, :8].reshape(2, 2, 2, 2))
        return (
            spectrum.abs().sum()
            + torch.fft.irfft(torch.fft.rfft(y)).square().sum()
            + nn.functional.grid_sample(y.reshape(2, 1, 4, 4), grid, align_corners=False).sum()
        )

    return training(model, loss)


@program("einsum_and_tensordot_float64", "picky kernels")
def einsum(seed: int) -> Program:
    model = nn.Linear(8, 8).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    return training(
        model, lambda i: torch.einsum("bi,bj,ij->b", model(x), x, model.weight).sum() + torch.tensordot(x, model(x), 2)
    )


@program("foreach_and_fused_private_operations", "picky kernels")
def foreach(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_mul_(weights, 0.99)
        torch._foreach_addcdiv_(weights, torch._foreach_abs(weights), [w.exp() for w in weights], 0.01)
        norms = torch._foreach_norm(weights)
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in model.parameters()], torch.zeros(1), torch.ones(1))
        return value.detach(), norms

    made.step = step
    return made


def _sick_training(name: str, dtype: torch.dtype, tensor: Any, optimizer: Any) -> None:
    @program(f"sick_{name}", "sick")
    def sick(seed: int) -> Program:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4)).to(dtype)

        def loss(i: int) -> torch.Tensor:
            return tensor(model(batch(i).to(dtype)), i)

        return training(model, loss, optimizer(model.parameters()), steps=8)


_sick_training("half_overflow", torch.float16, lambda y, i: (y * 3e4).square().mean(), lambda p: torch.optim.SGD(p, 0.1))


_sick_training("half_adam_eps", torch.float16, lambda y, i: y.square().mean(), lambda p: torch.optim.Adam(p, 1e-3, eps=1e-9))


_sick_training("bfloat16_lost_updates", torch.bfloat16, lambda y, i: y.square().mean(), lambda p: torch.optim.SGD(p, 1e-7))


_sick_training("log_of_zero", torch.float32, lambda y, i: (y * 0).log().mean(), lambda p: torch.optim.SGD(p, 0.1))


_sick_training("explodes", torch.float32, lambda y, i: y.pow(4).mean() * 1e3, lambda p: torch.optim.SGD(p, 1e6))


_sick_training("root_at_zero", torch.bfloat16, lambda y, i: (y - y.detach()).sqrt().sum(), lambda p: torch.optim.AdamW(p, 0.1))


@program("stale_autocast_cache", "precision")
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


@program("autocast_cache_filled_without_gradients", "precision")
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


@program("autocast_by_low_level_switches", "precision")
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


@program("custom_fwd_and_bwd", "precision")
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


@program("autocast_inside_gradient_hooks", "precision")
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


@program("stochastic_rounding_of_weights", "precision")
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


@program("every_random_stream_in_every_hook", "precision")
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


@program("default_generator_state_shared", "precision")
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


@program("quantisation_aware_training", "precision")
def qat(seed: int) -> Program:
    """prepare_qat before, observers switched off in mid-run, and a converted copy made inside a step."""

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


@program("straight_through_and_binary_weights", "precision")
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


@program("everything_overflows_and_recovers", "precision")
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


@program("dtypes_change_from_module_to_module", "precision")
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


@program("adapters_merged_and_unmerged", "precision")
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


@program("hypernetwork_makes_the_weights", "precision")
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


@program("experts_chosen_by_data", "precision")
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


@program("fixed_point_with_implicit_gradient", "precision")
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


def _steps_under(make: Any, model: nn.Module | None = None, **more: Any) -> Program:
    model = model or mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with make():
            value = model(x)
        return value.float().square().mean()

    return training(model, loss, **more)


@program("autocast_functions_inspected", "autocast")
def inspected(seed: int) -> Program:
    notes: list[Any] = []

    def look() -> Any:
        depth = torch.autocast_increment_nesting()
        notes.append((depth, torch.autocast_decrement_nesting()))
        for function in (torch.autocast_increment_nesting, torch.autocast_decrement_nesting, torch.clear_autocast_cache):
            notes.append((function.__name__, callable(function)))
            notes.append(pickle.loads(pickle.dumps(function)).__name__)
        return torch.autocast("cpu", torch.bfloat16)

    return _steps_under(look, extra=lambda: notes)


@program("autocast_inside_script_export_and_compile", "autocast")
def captured(seed: int) -> Program:
    model = mlp()
    notes: list[Any] = []

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    casts = Casts()

    def loss(i: int) -> torch.Tensor:
        x = torch.ones(2, 8) * (i + 1)
        compiled = torch.compile(casts, backend="aot_eager", fullgraph=True)
        total = compiled(x).float().sum() + model(x).sum()
        exported = torch.export.export(casts, (x,), strict=False)
        notes.append([str(n.target) for n in exported.graph.nodes])
        exported = torch.export.export(casts, (x,), strict=True)
        notes.append([str(n.target) for n in exported.graph.nodes])
        scripted = torch.jit.script(casts)
        notes.append(scripted(x))
        return total

    return training(model, loss, steps=2, extra=lambda: notes)


class _Own(torch.autocast):
    entered = 0

    def __enter__(self) -> Any:
        _Own.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _Own.entered -= 100
        return super().__exit__(*error)


@program("autocast_subclass_entered_twice", "autocast")
def own_autocast(seed: int) -> Program:
    _Own.entered = 0
    cast = _Own("cpu", torch.bfloat16)

    @contextlib.contextmanager
    def twice() -> Iterator[None]:
        with cast, torch.autocast("cpu", enabled=False), _Own("cpu", torch.float16):
            yield

    return _steps_under(twice, extra=lambda: (_Own.entered, torch.is_autocast_enabled("cpu")))


@program("autocast_left_open_in_generators", "autocast")
def open_casts(seed: int) -> Program:
    model = mlp()
    held: list[Any] = []
    notes: list[Any] = []

    def casting() -> Iterator[int]:
        with torch.autocast("cpu", torch.bfloat16):
            yield 1
            yield 2

    def loss(i: int) -> torch.Tensor:
        held.append(casting())
        next(held[-1])
        value = model(torch.ones(2, 8) * i)
        notes.append((str(value.dtype), torch.is_autocast_enabled("cpu")))
        if i % 2:
            held.pop(0).close()
            held.pop().close()
        if i == 3:  # closed in the wrong order, autocast stays on
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_dtype("cpu", torch.bfloat16)
        return value.float().sum()

    return training(model, loss, steps=4, extra=lambda: (notes, torch.is_autocast_enabled("cpu")))


@program("autocast_replaced_by_the_user", "autocast")
def replaced_nesting(seed: int) -> Program:
    counted: list[int] = []
    original = torch.autocast_increment_nesting
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        if i == 0:
            before = torch.autocast_increment_nesting

            def counting() -> int:
                counted.append(1)
                return before()

            torch.autocast_increment_nesting = counting  # type: ignore[assignment]
        with torch.autocast("cpu", torch.bfloat16):
            value = model(torch.ones(2, 8))
        return value.float().sum()

    made = training(model, loss)

    def loop(watch: Any) -> None:
        for i in range(3):
            with watch.step(i):
                made.step(i)
        watch.close()
        with torch.autocast("cpu", torch.bfloat16):
            counted.append(10)
        torch.autocast_increment_nesting = original  # type: ignore[assignment]

    made.loop, made.extra = loop, lambda: counted
    return made


@program("autocast_of_refused_dtypes_warns_and_raises", "autocast")
def refused(seed: int) -> Program:
    notes: list[Any] = []

    def odd() -> Any:
        for make in (
            lambda: torch.autocast("cpu", torch.float64),
            lambda: torch.autocast("nothing"),
            lambda: torch.autocast("cpu", dtype=3),
        ):
            try:
                with make():
                    notes.append(torch.is_autocast_enabled("cpu"))
            except Exception as error:  # noqa: BLE001
                notes.append(f"{type(error).__name__} {str(error)[:60]}")
        return torch.cpu.amp.autocast(dtype=torch.bfloat16)

    return _steps_under(odd, extra=lambda: notes)


@program("autocast_exit_raises_and_enter_raises", "autocast")
def raising_casts(seed: int) -> Program:
    notes: list[Any] = []

    class Bad(torch.autocast):
        def __exit__(self, *error: Any) -> Any:
            super().__exit__(*error)
            raise OSError("exit")

    @contextlib.contextmanager
    def bad() -> Iterator[None]:
        try:
            with Bad("cpu", torch.bfloat16):
                yield
        except OSError as error:
            notes.append(str(error))

    return _steps_under(bad, extra=lambda: (notes, torch.is_autocast_enabled("cpu")))


@program("deprecated_cuda_amp_on_a_cpu", "autocast")
def deprecated(seed: int) -> Program:
    model = mlp()
    scaler = torch.cuda.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = model(torch.ones(2, 8)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program([model], [optimizer], step, scaler=scaler)


@program("flex_attention_with_learnt_bias_and_mask", "attention")
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


@program("causal_bias_subclass_and_chosen_kernels", "attention")
def causal_bias(seed: int) -> Program:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        q = parts[0](x).view(2, 6, 2, 4).transpose(1, 2)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            one = F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(6, 6))
        return one + F.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(6, 6), enable_gqa=True)

    model = made_of(forward)
    x = torch.randn(2, 6, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            return model(x).float().square().mean()

    return training(model, loss, steps=4)


@program("precision_switches_of_the_new_kind", "switches")
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


@program("matmul_precision_and_reduced_reductions", "switches")
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


@program("debug_mode_and_module_tracker_of_torch", "switches")
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


@program("registered_tree_node_counts_its_flattening", "switches")
def tree_node(seed: int) -> Program:
    class Pairs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return _Pair(x, x * 2)

    model = made_of(lambda parts, x: parts[1](parts[0](x)).two, nn.Linear(8, 8), Pairs())
    return training(model, lambda i: model(torch.ones(2, 8)).sum())


@program("lstm_projected_under_parametrization_bf16", "switches")
def lstm(seed: int) -> Program:
    model = nn.LSTM(8, 8, 2, proj_size=4, batch_first=True, bidirectional=True)
    nn.utils.parametrizations.weight_norm(model, "weight_hh_l0")

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return model(torch.ones(2, 3, 8))[0].float().square().mean()

    return training(model, loss)
