"""Long runs: trends are told with the step at which they end, before it; healthy ones of 2,000 steps say nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

import nanny

pytestmark = pytest.mark.slow


def watched(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[int], None], steps: int, **how: object) -> list:
    watcher = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, **how)  # type: ignore[arg-type]
    with watcher:
        for i in range(steps):
            with watcher.step(i):
                step(i)
    return nanny.diagnose(watcher)


def test_a_layer_that_grows_towards_the_end_of_fp16_is_told_before_it_is_there():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def step(i: int) -> None:
        with torch.no_grad():
            model[0].weight.mul_(1.013)
            model[1].weight.div_(1.013)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 0.01 * model(20 * torch.ones(4, 8)).float().mean()
        loss.backward()
        optimizer.step()

    found = watched(model, optimizer, step, 530, trace_interval=40)
    assert [(one.cause, one.culprit, one.early) for one in found] == [("activation_overflow_fp16", "0", True)]
    largest = float(model[0](20 * torch.ones(4, 8)).detach().abs().max())
    left = torch.log(torch.tensor(65504 / largest)) / torch.log(torch.tensor(1.013))
    assert found[0].expected_step == pytest.approx(530 + float(left), abs=30)


def test_a_scale_that_sinks_is_told_with_the_step_at_which_it_is_one():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=10**6)

    def step(i: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.ones(4, 8))
        loss = out.float().mean() * 2.0 ** (i / 40)  # gradients double every 40 steps
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    found = watched(model, optimizer, step, 440)
    assert [(one.cause, one.culprit, one.early) for one in found] == [("loss_scale_too_low", "scaler.scale", True)]
    assert found[0].expected_step == pytest.approx(40 * 16, abs=80)


def test_updates_that_fall_below_half_a_spacing_are_told_before_most_are_lost():
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(32, 64)

    def step(i: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.6 * 0.985 ** (i / 4)
        optimizer.zero_grad()
        loss = (model(x.bfloat16()).float() * torch.randn(32, 64, generator=torch.Generator().manual_seed(i))).mean()
        loss.backward()
        optimizer.step()

    found = watched(model, optimizer, step, 400, trace_interval=25)
    assert [(one.cause, one.early) for one in found] == [("update_lost", True)]
    assert 400 < (found[0].expected_step or 0) < 800


def _healthy(seed: int) -> list:
    torch.manual_seed(seed)
    width, depth = 4 + seed % 5, 1 + seed % 3
    act = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU)[seed % 4]
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), act()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    dtype = torch.float16 if seed % 2 else torch.bfloat16
    optimizer = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)[seed % 3](model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", growth_interval=200, enabled=dtype == torch.float16)
    want = torch.randn(width, 1)

    def step(i: int) -> None:
        x = torch.randn(16, width)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        loss: Tensor = F.mse_loss(out.float(), torch.sin(x @ want))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return watched(model, optimizer, step, 2000)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_of_two_thousand_steps_says_nothing(seed: int):
    assert _healthy(seed) == []
