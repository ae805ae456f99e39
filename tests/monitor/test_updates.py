"""What the optimizer and the forward pass do to state: lost updates, eps, moving averages, buffers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, RMSprop
from training import Apply, above_info, autocast, mlp, recorded, regression, said, scalar, the, train, watch

from nanny import Severity

FP16, BF16 = torch.float16, torch.bfloat16


def in_dtype(dtype: torch.dtype):
    batches = regression()
    return lambda step: tuple(t.to(dtype) for t in batches(step))


# updates that round away


def test_bf16_weights_that_a_small_learning_rate_cannot_move_are_lost_updates():
    model = mlp().to(BF16)
    found = train(model, batches=in_dtype(BF16), optimizer=AdamW(model.parameters(), lr=1e-6, weight_decay=0.0), steps=3)
    lost = the(found, "LOST_UPDATE")
    assert lost.severity is Severity.ERROR
    assert lost.site in dict(model.named_parameters())
    assert lost.evidence["dtype"] == "bfloat16"
    assert lost.value > 0.9


def test_the_share_of_lost_updates_is_the_one_that_can_be_counted(tmp_path):
    model = nn.Linear(32, 32).to(BF16)
    optimizer = SGD(model.parameters(), lr=2e-3)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(BF16)
    with watch(model, optimizer, output_dir=tmp_path) as nanny, nanny.step(0):
        model(x).square().mean().backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        moving = {n: p.grad != 0 for n, p in model.named_parameters()}
        optimizer.step()
    same = sum(int(((p == before[n]) & moving[n]).sum()) for n, p in model.named_parameters())
    total = sum(int(m.sum()) for m in moving.values())
    assert 0 < same < total
    assert scalar(tmp_path, "unchanged_share")[0] == pytest.approx(same / total, rel=1e-6)


@pytest.mark.landing
@pytest.mark.parametrize("lr", [1e-6, 1e-9, 0.0])
def test_fp32_weights_are_silent_at_any_learning_rate(lr):
    model = mlp()
    found = train(model, amp=BF16, optimizer=AdamW(model.parameters(), lr=lr), steps=5)
    assert above_info(found) == []


def test_bf16_weights_with_a_fitting_learning_rate_are_silent():
    model = mlp().to(BF16)
    assert not said(train(model, batches=in_dtype(BF16), optimizer=SGD(model.parameters(), lr=0.5), steps=5), "LOST_UPDATE")


def test_an_optimizer_that_is_not_torch_s_own_may_keep_master_weights_and_is_information_only():
    class WithMaster(torch.optim.Optimizer):
        """Keeps FP32 copies; the bf16 weights move once in a while, and nothing is lost."""

        def __init__(self, parameters, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})
            self.master = {p: p.detach().float() for g in self.param_groups for p in g["params"]}

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.master[p] -= group["lr"] * p.grad.float()
                    p.copy_(self.master[p])

    model = mlp().to(BF16)
    found = train(model, batches=in_dtype(BF16), optimizer=WithMaster(model.parameters(), lr=1e-5), steps=4)
    assert above_info(found) == []


def test_a_skipped_step_is_no_lost_update():
    model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: x * 1e30))
    found = train(model, criterion=lambda out, y: out.mean(), scaler=GradScaler("cpu"), steps=2)
    assert not said(found, "LOST_UPDATE")


# eps


def test_adam_on_fp16_parameters_has_an_eps_of_zero():
    model = mlp().to(FP16)
    found = train(model, batches=in_dtype(FP16), optimizer=Adam(model.parameters(), lr=1e-3, foreach=False), steps=1)
    eps = the(found, "EPS_UNDERFLOW")
    assert (eps.severity, eps.value) == (Severity.ERROR, 1e-8)
    assert eps.limit == 2.0**-25


@pytest.mark.landing
@pytest.mark.parametrize("way", ["larger_eps", "fused", "autocast", "bf16"])
def test_adam_is_fine_with_a_larger_eps_or_fused_or_under_autocast_or_in_bf16(way):
    dtype = {"autocast": torch.float32, "bf16": BF16}.get(way, FP16)
    model = mlp().to(dtype)
    options = {"larger_eps": {"eps": 1e-4}, "fused": {"fused": True}}.get(way, {})
    optimizer = Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95), **options)
    found = train(model, batches=in_dtype(dtype), amp=FP16 if way == "autocast" else None, optimizer=optimizer, steps=2)
    assert not said(found, "EPS_UNDERFLOW")


def test_an_eps_larger_than_the_gradients_dominates():
    model, batches = mlp(), regression()
    optimizer = Adam(model.parameters(), lr=1e-3, eps=1e-3)
    found = train(
        model, batches=batches, criterion=lambda out, y: 1e-4 * F.mse_loss(out, y), optimizer=optimizer, steps=32, interval=10
    )
    dominates = the(found, "EPS_DOMINATES")
    assert dominates.severity >= Severity.WARNING
    assert dominates.value < 1


@pytest.mark.landing
def test_the_default_eps_does_not_dominate_an_ordinary_training():
    model = mlp()
    assert not said(train(model, optimizer=Adam(model.parameters(), lr=1e-3), steps=32, interval=10), "EPS_DOMINATES")


# moving averages


def test_adam_averages_in_bf16_with_beta2_of_0_999_cannot_fall():
    model = mlp().to(BF16)
    found = train(model, batches=in_dtype(BF16), optimizer=AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999)), steps=2)
    stuck = the(found, "STATE_STAGNATION")
    assert (stuck.severity, stuck.evidence["dtype"]) == (Severity.WARNING, "bfloat16")


@pytest.mark.parametrize("way", ["beta2", "fp32"])
def test_averages_that_can_fall_are_silent(way):
    dtype = BF16 if way == "beta2" else torch.float32
    model = mlp().to(dtype)
    betas = (0.9, 0.95) if way == "beta2" else (0.9, 0.999)
    found = train(model, batches=in_dtype(dtype), optimizer=AdamW(model.parameters(), lr=1e-2, betas=betas), steps=2)
    assert not said(found, "STATE_STAGNATION")


def test_the_rule_is_true_of_torch_itself():
    """In bf16 v * 0.999 is v; in fp32 it is not: what the finding claims, measured."""
    for dtype, stuck in ((BF16, True), (torch.float32, False)):
        p = nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = Adam([p], lr=0.0, betas=(0.9, 0.999), foreach=False)
        p.grad = torch.ones_like(p)
        optimizer.step()
        before = optimizer.state[p]["exp_avg_sq"].clone()
        p.grad = torch.zeros_like(p)
        for _ in range(50):
            optimizer.step()
        assert torch.equal(before, optimizer.state[p]["exp_avg_sq"]) is stuck


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: RMSprop(p, lr=1e-3), lambda p: torch.optim.Adafactor(p)])
def test_optimizers_without_betas_are_no_trouble(make):
    model = mlp()
    assert above_info(train(model, optimizer=make(model.parameters()), steps=3)) == []


# buffers


def poisoned_batch_norm(steps: int, interval: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), GradScaler("cpu", init_scale=64.0)
    nanny = watch(model, optimizer, scaler, interval=interval)
    for step in range(steps):
        x, y = regression()(step)
        optimizer.zero_grad()
        with nanny.step(step):
            with autocast(FP16):
                hidden = model[0](x * (1e5 if step == 3 else 1.0))  # one batch overflows fp16
                loss = F.mse_loss(model[2](model[1](hidden)), y)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    nanny.close()
    return model, nanny.findings


@pytest.mark.parametrize("interval", [1, 100])
def test_batch_norm_statistics_poisoned_by_a_skipped_step_are_found_though_training_goes_on(interval):
    model, found = poisoned_batch_norm(8, interval)
    assert not model[1].running_mean.isfinite().all(), "the batch did not poison anything"
    assert all(p.isfinite().all() for p in model.parameters())
    buffers = said(found, "BUFFER_NONFINITE")
    assert {f.site for f in buffers} == {"1.running_mean", "1.running_var"}
    assert {(f.severity, f.step) for f in buffers} == {(Severity.ERROR, 3)}


def test_buffers_that_were_infinite_from_the_start_are_masks():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.lin(x)[:8] + self.mask).softmax(-1).sum(-1, keepdim=True) + x[:8, :1] * 0

    found = train(
        Masked(), batches=lambda s: (torch.randn(8, 8, generator=torch.Generator().manual_seed(s)), torch.zeros(8, 1)), steps=4
    )
    assert above_info(found) == []


# numbers that other tools lose


def test_gradients_below_a_millionth_are_recorded_as_they_are(tmp_path):
    model = mlp()
    train(model, criterion=lambda out, y: 1e-12 * F.mse_loss(out, y), steps=1, output_dir=tmp_path)
    norms = recorded(tmp_path, "grad", 0)
    for name, p in model.named_parameters():
        assert norms[name] == pytest.approx(float(p.grad.double().norm()), rel=1e-4)
        assert 0 < norms[name] < 1e-9


def test_the_norm_of_fp16_gradients_is_finite_though_fp16_could_not_hold_it(tmp_path):
    model = nn.Linear(64, 64, bias=False).to(FP16)
    x = torch.full((4, 64), 100.0, dtype=FP16)
    with watch(model, output_dir=tmp_path) as nanny, nanny.step(0):
        (model(x).float().sum() * 40).backward()
    norm = float(model.weight.grad.double().norm())
    assert norm > 65504
    assert model.weight.grad.isfinite().all()
    assert recorded(tmp_path, "grad", 0)["weight"] == pytest.approx(norm, rel=1e-3)
    assert above_info(nanny.findings) == []
