"""Trainings that look odd and are healthy. The nanny must not bother anybody about them: nothing above INFO."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam
from training import above_info, autocast, mlp, regression, train, watch

pytestmark = pytest.mark.representative(10)

FP16, BF16 = torch.float16, torch.bfloat16
STEPS = 80


def assert_quiet(findings) -> None:
    assert above_info(findings) == []


def loop(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[int], Tensor],
    *,
    steps: int = STEPS,
    amp: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    schedule: Callable[[int], float] | None = None,
    between: Callable[[int], None] | None = None,
) -> list[float]:
    """A watched training of `loss_of(step)`; asserts that it was quiet and returns the losses."""
    scaler = scaler or GradScaler("cpu", enabled=False)
    base = [g["lr"] for g in optimizer.param_groups]
    losses = []
    with watch(model, optimizer, scaler, interval=10) as nanny:
        for step in range(steps):
            if schedule is not None:
                for group, lr in zip(optimizer.param_groups, base):
                    group["lr"] = lr * schedule(step)
            optimizer.zero_grad()
            with nanny.step(step):
                with autocast(amp):
                    loss = loss_of(step)
                scaler.scale(loss).backward()
                if clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
            losses.append(float(loss.detach()))
            if between is not None:
                between(step)
    assert_quiet(nanny.findings)
    return losses


def learned(losses: list[float]) -> bool:
    """The test would mean little if the training did not work."""
    n = max(len(losses) // 8, 1)
    return sum(losses[-n:]) < sum(losses[:n])


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_loss_that_is_summed_has_gradient_norms_of_100000():
    model = mlp()
    batches = regression(rows=256)

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        return 300 * F.mse_loss(model(x), y, reduction="sum")

    assert learned(loop(model, SGD(model.parameters(), lr=1e-7), loss_of))


def test_a_loss_that_converges_to_almost_nothing():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    true = torch.randn(8, 1, generator=draws(3))

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 8, generator=draws(step))
        return F.mse_loss(model(x), x @ true)

    losses = loop(model, SGD(model.parameters(), lr=0.2), loss_of, steps=200)
    assert losses[-1] < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_full_batch_training_until_nothing_moves_any_more(kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(32, 4, generator=draws(1))
    y = x @ torch.randn(4, 1, generator=draws(2)) + 0.3
    optimizer: Optimizer = {
        "sgd": SGD(model.parameters(), lr=0.3),
        "momentum": SGD(model.parameters(), lr=0.1, momentum=0.8),
        "adam": Adam(model.parameters(), lr=0.05),
    }[kind]
    losses = loop(model, optimizer, lambda step: F.mse_loss(model(x), y), steps=400)
    assert losses[-1] < 1e-4 * losses[0]


def test_full_batch_training_that_stops_at_a_loss_above_zero():
    """Noisy labels: the gradient goes to zero, the loss to a floor; both stay there for good."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x, y = torch.randn(64, 4, generator=draws(1)), torch.randn(64, 1, generator=draws(2))
    losses = loop(model, SGD(model.parameters(), lr=0.3), lambda step: F.mse_loss(model(x), y), steps=300)
    assert losses[-1] > 0.1


def test_an_lstm_with_clipping():
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(12, 16), "lstm": nn.LSTM(16, 16, batch_first=True), "head": nn.Linear(16, 12)})
    tokens = torch.randint(0, 12, (8, 21), generator=draws(1))

    def loss_of(step: int) -> Tensor:
        out, _ = model["lstm"](model["embed"](tokens[:, :-1]))
        return F.cross_entropy(model["head"](out).flatten(0, 1), tokens[:, 1:].flatten())

    assert learned(loop(model, Adam(model.parameters(), lr=1e-2), loss_of, clip=0.5))


def test_a_gan_with_two_optimizers_in_one_step():
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": mlp(4, 16, 2, seed=1), "d": mlp(2, 16, 1, seed=2)})
    g, d = Adam(model["g"].parameters(), lr=2e-3), Adam(model["d"].parameters(), lr=2e-3)
    with watch(model, interval=10) as nanny:
        for step in range(STEPS):
            real = torch.randn(32, 2, generator=draws(step)) * 0.5 + 1
            noise = torch.randn(32, 4, generator=draws(step + 1000))
            with nanny.step(step):
                d.zero_grad()
                fake = model["g"](noise)
                lines = model["d"](real), model["d"](fake.detach())
                (F.softplus(-lines[0]).mean() + F.softplus(lines[1]).mean()).backward()
                d.step()
                g.zero_grad()
                F.softplus(-model["d"](fake)).mean().backward()
                g.step()
    assert_quiet(nanny.findings)


def test_a_gan_framed_as_two_steps_with_one_optimizer_each():
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": mlp(4, 16, 2, seed=1), "d": mlp(2, 16, 1, seed=2)})
    g, d = Adam(model["g"].parameters(), lr=2e-3), Adam(model["d"].parameters(), lr=2e-3)
    with watch(model, interval=5) as nanny:
        for step in range(STEPS):
            noise = torch.randn(32, 4, generator=draws(step + 1000))
            with nanny.step(step):
                if step % 2:
                    g.zero_grad()
                    F.softplus(-model["d"](model["g"](noise))).mean().backward()
                    g.step()
                else:
                    d.zero_grad()
                    real = torch.randn(32, 2, generator=draws(step)) * 0.5 + 1
                    fake = model["g"](noise).detach()
                    (F.softplus(-model["d"](real)).mean() + F.softplus(model["d"](fake)).mean()).backward()
                    d.step()
    assert_quiet(nanny.findings)


def test_a_variational_autoencoder():
    torch.manual_seed(0)
    model = nn.ModuleDict({"encode": mlp(16, 24, 8, seed=1), "decode": mlp(4, 24, 16, seed=2)})

    def loss_of(step: int) -> Tensor:
        x = torch.rand(32, 16, generator=draws(step)).round()
        mean, logvar = model["encode"](x).chunk(2, -1)
        z = mean + torch.randn(32, 4, generator=draws(step + 5000)) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(model["decode"](z), x, reduction="sum") / 32 + kl

    assert learned(loop(model, Adam(model.parameters(), lr=3e-3), loss_of))


class Mixture(nn.Module):
    """Top-1 routing; experts that receive no token in a batch take no part in it."""

    def __init__(self, experts: int = 8, *, unrouted: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.head = nn.Linear(8, 1)
        if unrouted:
            with torch.no_grad():
                self.router.bias[experts // 2 :] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        parts = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().flatten()
            parts = parts.index_add(0, mine, (expert(x[mine]) * weight[mine, None]).to(parts.dtype))
        return self.head(x + parts)


def test_a_mixture_of_experts_half_of_which_never_get_a_token():
    torch.manual_seed(0)
    model = Mixture()
    batches = regression()
    assert learned(loop(model, AdamW(model.parameters(), lr=3e-3), lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1])))


class ZeroInit(nn.Module):
    """Residual branches that begin as zero: the first gradients of everything before the zero layer are exactly 0."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(blocks))
        self.gate = nn.Parameter(torch.zeros(blocks))
        for block in self.blocks:
            nn.init.zeros_(block[2].weight)
            nn.init.zeros_(block[2].bias)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.landing
@pytest.mark.parametrize("amp", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["branches", "lora"])
def test_zero_initialised_branches_and_lora(kind, amp):
    torch.manual_seed(0)
    base = mlp()
    model = ZeroInit() if kind == "branches" else nn.Sequential(Lora(base[0]), base[1], Lora(base[2]))
    batches = regression()
    trained = [p for p in model.parameters() if p.requires_grad]
    scaler = GradScaler("cpu", enabled=amp is FP16)
    loop(
        model, AdamW(trained, lr=3e-3), lambda s: F.mse_loss(model(batches(s)[0]).float(), batches(s)[1]), amp=amp, scaler=scaler
    )


def test_a_gate_that_opens_from_zero_during_a_long_warm_up():
    torch.manual_seed(0)

    class ReZero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.gate = nn.Linear(8, 8), nn.Linear(8, 1), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.gate * torch.tanh(self.inner(x)))

    model, batches = ReZero(), regression()
    loop(
        model, AdamW(model.parameters(), lr=1e-3), lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1]),
        schedule=lambda step: (step / STEPS) ** 2,
    )  # fmt: skip


def test_frozen_layers_and_parameters_that_nobody_uses():
    torch.manual_seed(0)
    model = nn.ModuleDict({"frozen": nn.Linear(8, 8).requires_grad_(False), "net": mlp(), "spare": nn.Linear(8, 8)})
    batches = regression()
    optimizer = Adam(model.parameters(), lr=3e-3)
    assert learned(loop(model, optimizer, lambda s: F.mse_loss(model["net"](model["frozen"](batches(s)[0])), batches(s)[1])))


def test_layers_that_are_unfrozen_later():
    torch.manual_seed(0)
    model, batches = mlp(depth=2), regression()
    model[0].requires_grad_(False)

    def unfreeze(step: int) -> None:
        if step == 30:
            model[0].requires_grad_(True)

    loop(model, Adam(model.parameters(), lr=3e-3), lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1]), between=unfreeze)


def test_sparse_embedding_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200, 8, sparse=True), nn.Linear(8, 1))
    sparse, dense = SparseAdam(model[0].parameters(), lr=1e-2), Adam(model[1].parameters(), lr=1e-2)
    with watch(model, interval=10) as nanny:
        for step in range(STEPS):
            ids = torch.randint(0, 200, (16,), generator=draws(step))
            sparse.zero_grad()
            dense.zero_grad()
            with nanny.step(step):
                F.mse_loss(model(ids), (ids % 7)[:, None].float()).backward()
            sparse.step()
            dense.step()
    assert_quiet(nanny.findings)


def test_rows_of_a_dense_embedding_that_are_hardly_ever_used():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 1))

    def loss_of(step: int) -> Tensor:
        ids = torch.randint(0, 500, (8,), generator=draws(step))
        return F.mse_loss(model(ids), (ids % 3)[:, None].float())

    loop(model, AdamW(model.parameters(), lr=1e-2), loss_of)


class TinyLM(nn.Module):
    """Causal attention with a mask of -inf, weight tying, layer norm, dropout."""

    def __init__(self, width: int = 16, words: int = 20, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        self.register_buffer("mask", torch.full((16, 16), -math.inf).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask
        x = x + self.out(scores.softmax(-1) @ v)
        return self.head(x + self.ff(self.norm2(x)))


@pytest.mark.parametrize("amp", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_a_causal_language_model_with_tied_weights_and_a_mask_of_minus_infinity(amp):
    torch.manual_seed(0)
    model = TinyLM()

    def loss_of(step: int) -> Tensor:
        ids = (torch.arange(17) + torch.randint(0, 20, (8, 1), generator=draws(step))) % 20
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)

    def warm_up_and_cosine(step: int) -> float:
        return step / 10 if step < 10 else 0.5 * (1 + math.cos(math.pi * (step - 10) / (STEPS - 10)))

    scaler = GradScaler("cpu", enabled=amp is FP16)
    losses = loop(
        model, AdamW(model.parameters(), lr=1e-2), loss_of, amp=amp, scaler=scaler, clip=1.0, schedule=warm_up_and_cosine
    )
    assert learned(losses)


@pytest.mark.parametrize("amp", [None, BF16], ids=["fp32", "bf16"])
def test_batch_norm_dropout_and_relu_with_dead_units(amp):
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)]
    model = nn.Sequential(*stem, nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 3))
    with torch.no_grad():
        model[5].bias[:16] = -50.0  # half of the units never fire

    def loss_of(step: int) -> Tensor:
        x = torch.randn(16, 1, 8, 8, generator=draws(step))
        return F.cross_entropy(model(x).float(), (x.mean((1, 2, 3)) * 8).round().long().clamp(-1, 1) + 1)

    loop(model, SGD(model.parameters(), lr=0.05, momentum=0.9), loss_of, amp=amp)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_warm_up_that_begins_at_a_learning_rate_of_zero(kind):
    model, batches = mlp(), regression()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.05) if kind == "sgd" else AdamW(model.parameters(), lr=1e-2)
    loss_of = lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1])  # noqa: E731
    assert learned(loop(model, optimizer, loss_of, schedule=lambda step: min(step / 30, 1.0) ** 3))


def test_a_cosine_schedule_with_warm_restarts():
    model, batches = mlp(), regression()

    def restarts(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * (step % 30) / 30))

    loop(
        model,
        AdamW(model.parameters(), lr=3e-2),
        lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1]),
        steps=150,
        schedule=restarts,
    )


def test_a_policy_gradient_whose_loss_has_both_signs():
    torch.manual_seed(0)
    model = mlp(4, 16, 3)

    def loss_of(step: int) -> Tensor:
        state = torch.randn(32, 4, generator=draws(step))
        policy = model(state).log_softmax(-1)
        action = torch.multinomial(policy.detach().exp(), 1, generator=draws(step + 999))
        reward = (action.squeeze(1) == state[:, :3].argmax(-1)).float() + 2 * torch.randn(32, generator=draws(step + 7))
        return -(policy.gather(1, action).squeeze(1) * (reward - reward.mean())).mean()

    losses = loop(model, Adam(model.parameters(), lr=1e-2), loss_of, steps=200)
    assert min(losses) < 0 < max(losses)


def test_contrastive_learning_with_a_low_temperature():
    model = mlp(8, 16, 8)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(16, 8, generator=draws(step))
        a, b = (F.normalize(model(x + 0.1 * torch.randn(16, 8, generator=draws(step + n))), dim=-1) for n in (100, 200))
        return F.cross_entropy(a @ b.T / 0.05, torch.arange(16))

    assert learned(loop(model, Adam(model.parameters(), lr=3e-3), loss_of))


def test_fp16_with_a_scaler_that_starts_at_two_to_the_24():
    model, batches = mlp(), regression()
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=15)
    loop(
        model,
        Adam(model.parameters(), lr=3e-3),
        lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1]),
        amp=FP16,
        scaler=scaler,
    )
    assert scaler.get_scale() < 2.0**24


def test_bf16_autocast_with_an_fp32_head():
    torch.manual_seed(0)
    body, head = mlp(8, 16, 16), nn.Linear(16, 1)
    model, batches = nn.ModuleDict({"body": body, "head": head}), regression()

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        hidden = body(x)
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(head(hidden.float()), y)

    assert learned(loop(model, AdamW(model.parameters(), lr=5e-3), loss_of, amp=BF16))


def test_gradient_accumulation_framed_by_micro_batch():
    model, batches = mlp(), regression()
    optimizer = AdamW(model.parameters(), lr=5e-3)
    with watch(model, optimizer, interval=10) as nanny:
        for step in range(STEPS):
            x, y = batches(step)
            with nanny.step(step):
                (F.mse_loss(model(x), y) / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert_quiet(nanny.findings)


def test_lbfgs_with_a_closure():
    torch.manual_seed(0)
    model = mlp()
    x, y = regression(rows=64)(0)
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with watch(model, optimizer, interval=5) as nanny:
        first = float(closure().detach())
        for step in range(40):
            with nanny.step(step):
                loss = optimizer.step(closure)
    assert float(loss) < 0.1 * first
    assert_quiet(nanny.findings)


def test_evaluation_passes_in_between_and_inside_the_step():
    torch.manual_seed(0)
    model, batches = (
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)),
        regression(),
    )
    optimizer = Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer, interval=10) as nanny:
        for step in range(STEPS):
            x, y = batches(step)
            optimizer.zero_grad()
            with nanny.step(step):
                F.mse_loss(model(x), y).backward()
                model.eval()
                with torch.no_grad():
                    model(x * 100)
                model.train()
            optimizer.step()
            if step % 7 == 0:
                with torch.inference_mode():
                    model.eval()
                    model(x)
                    model.train()
    assert_quiet(nanny.findings)


def test_q_learning_with_a_detached_target_network():
    torch.manual_seed(0)
    online = mlp(4, 16, 2)
    target = copy.deepcopy(online).requires_grad_(False)
    model = nn.ModuleDict({"online": online, "target": target})

    def loss_of(step: int) -> Tensor:
        state, following = torch.randn(2, 32, 4, generator=draws(step))
        value = online(state)[:, 0]
        return F.smooth_l1_loss(value, state.sum(-1).sign() + 0.9 * target(following).max(-1).values)

    def sync(step: int) -> None:
        if step % 20 == 19:
            target.load_state_dict(online.state_dict())

    loop(model, Adam(online.parameters(), lr=3e-3), loss_of, steps=120, between=sync)


def test_several_losses_with_a_backward_each():
    torch.manual_seed(0)
    model = nn.ModuleDict({"trunk": mlp(8, 16, 16), "one": nn.Linear(16, 1), "two": nn.Linear(16, 3)})
    optimizer, batches = Adam(model.parameters(), lr=3e-3), regression()
    with watch(model, interval=10) as nanny:
        for step in range(STEPS):
            x, y = batches(step)
            optimizer.zero_grad()
            with nanny.step(step):
                hidden = model["trunk"](x)
                F.mse_loss(model["one"](hidden), y).backward(retain_graph=True)
                (100 * F.cross_entropy(model["two"](hidden), (y.flatten() > 0).long())).backward()
            optimizer.step()
    assert_quiet(nanny.findings)


def test_one_outlier_batch():
    model, batches = mlp(), regression()

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        return F.mse_loss(model(x), y + (5.0 if step == 50 else 0.0))

    loop(model, SGD(model.parameters(), lr=0.01), loss_of)


def test_a_heavy_tailed_regression():
    model = mlp()

    def loss_of(step: int) -> Tensor:
        x = torch.randn(16, 8, generator=draws(step))
        noise = torch.randn(16, 1, generator=draws(step + 77))
        return F.mse_loss(model(x), x[:, :1] + noise / torch.rand(16, 1, generator=draws(step + 55)).clamp(0.02))

    loop(model, SGD(model.parameters(), lr=1e-3), loss_of, steps=200, clip=1.0)


def test_classification_until_every_example_is_learned_by_heart():
    """The gradient falls by orders of magnitude while the loss goes to zero: success."""
    torch.manual_seed(0)
    model = mlp(8, 32, 4)
    x, y = torch.randn(32, 8, generator=draws(1)), torch.randint(0, 4, (32,), generator=draws(2))
    losses = loop(model, Adam(model.parameters(), lr=2e-2), lambda step: F.cross_entropy(model(x), y), steps=300)
    assert losses[-1] < 1e-2


@pytest.mark.parametrize("amp", [FP16, BF16], ids=["fp16", "bf16"])
def test_autocast_classification_that_is_learned_by_heart(amp):
    torch.manual_seed(0)
    model = mlp(8, 32, 4)
    x, y = torch.randn(32, 8, generator=draws(1)), torch.randint(0, 4, (32,), generator=draws(2))
    scaler = GradScaler("cpu", enabled=amp is FP16, growth_interval=25)
    losses = loop(
        model, Adam(model.parameters(), lr=2e-2), lambda step: F.cross_entropy(model(x), y), steps=150, amp=amp, scaler=scaler
    )
    assert losses[-1] < 5e-2


def test_a_hinge_loss_that_is_exactly_zero_at_the_end():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(16, 4, generator=draws(1))
    sign = torch.sign(x[:, :1])
    losses = loop(model, SGD(model.parameters(), lr=0.3), lambda step: F.relu(0.2 - sign * model(x)).mean(), steps=200)
    assert losses[-1] == 0.0


def test_a_triplet_loss_with_steps_on_which_nothing_violates_the_margin():
    model = mlp(8, 16, 8)

    def loss_of(step: int) -> Tensor:
        a = torch.randn(8, 8, generator=draws(step))
        return F.triplet_margin_loss(model(a), model(a + 0.05), model(-a), margin=0.4)

    loop(model, Adam(model.parameters(), lr=5e-3), loss_of, steps=150)


def test_deep_plain_relu_network_whose_first_layers_get_small_gradients():
    model, batches = mlp(8, 16, 1, depth=8), regression()
    loop(model, Adam(model.parameters(), lr=1e-3), lambda s: F.mse_loss(model(batches(s)[0]), batches(s)[1]))


def test_stochastic_depth_that_drops_whole_blocks():
    torch.manual_seed(0)

    class Stochastic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 1)
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                keep = torch.rand((), generator=draws(self.step * 10 + i)) < 0.6
                x = x + torch.tanh(block(x)) * keep  # dropped by a factor of zero: the module runs, its gradient is exactly 0
            return self.head(x)

    model, batches = Stochastic(), regression()

    def loss_of(step: int) -> Tensor:
        model.step = step
        return F.mse_loss(model(batches(step)[0]), batches(step)[1])

    loop(model, AdamW(model.parameters(), lr=3e-3), loss_of)


def test_auxiliary_head_that_is_used_every_other_step():
    torch.manual_seed(0)
    model, batches = nn.ModuleDict({"net": mlp(8, 16, 8), "main": nn.Linear(8, 1), "side": nn.Linear(8, 1)}), regression()

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        hidden = model["net"](x)
        loss = F.mse_loss(model["main"](hidden), y)
        return loss + 0.1 * F.mse_loss(model["side"](hidden), x[:, :1]) if step % 2 else loss

    loop(model, AdamW(model.parameters(), lr=3e-3), loss_of)


def test_pure_bf16_weights_with_a_learning_rate_that_moves_them():
    model, batches = mlp().to(BF16), regression()
    optimizer = SGD(model.parameters(), lr=0.5)
    found = train(model, batches=lambda s: tuple(t.to(BF16) for t in batches(s)), optimizer=optimizer, steps=60, interval=10)
    assert_quiet(found)


def test_float64_training():
    model, batches = mlp().double(), regression()
    found = train(model, batches=lambda s: tuple(t.double() for t in batches(s)), lr=0.05, steps=60, interval=10)
    assert_quiet(found)


def test_huge_but_harmless_activations_in_bf16():
    """300000 is far beyond fp16 and nothing at all to bf16."""
    model, batches = mlp(), regression()

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        return F.mse_loss(model(x * 3e5).float() / 3e5, y)

    loop(model, AdamW(model.parameters(), lr=1e-3), loss_of, amp=BF16)


def test_inputs_of_ten_thousands_in_fp32():
    """Unnormalised features: large outputs and gradients from the first step on, and Adam does not care."""
    model, batches = mlp(), regression()

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        return F.l1_loss(model(x * 1e4) / 1e4, y)

    loop(model, Adam(model.parameters(), lr=1e-3), loss_of)


def test_infinite_distances_that_a_minimum_removes():
    """Nearest neighbours: the diagonal is put to infinity so that nobody is his own neighbour. Loss and gradients are finite."""
    torch.manual_seed(0)

    class Distances(nn.Module):
        def forward(self, e: Tensor) -> Tensor:
            return torch.cdist(e, e).masked_fill(torch.eye(len(e), dtype=torch.bool), math.inf)

    model = nn.Sequential(nn.Linear(8, 8), Distances())
    batches = regression()

    def loss_of(step: int) -> Tensor:
        return -model(batches(step)[0]).min(-1).values.clamp(max=2.0).mean()

    loop(model, Adam(model.parameters(), lr=1e-3), loss_of)


def test_missing_values_in_the_data_that_the_model_handles_itself():
    torch.manual_seed(0)

    class Imputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fill, self.net = nn.Parameter(torch.zeros(8)), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.where(x.isnan(), self.fill, torch.nan_to_num(x)))

    model, batches = Imputes(), regression()

    def loss_of(step: int) -> Tensor:
        x, y = batches(step)
        return F.mse_loss(model(torch.where(x > 1.2, math.nan, x)), y)

    loop(model, Adam(model.parameters(), lr=3e-3), loss_of)
