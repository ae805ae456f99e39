"""autocast in odd places, GradScaler in every order, operations whose kernels are picky about dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..program import Program, mlp, program, training


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
    import copy

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
