"""What low precision did before a step began, and behind it: targets stored rounded, counters and averages that stand still."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nanny
from nanny.examine.run import sanitize


def kinds(model: nn.Module, x: Tensor, target: Tensor) -> set[tuple[str, str]]:
    with sanitize(model, strict=True) as seen:
        nn.functional.mse_loss(model(x).squeeze(-1), target.float() - float(target.float().median())).backward()
    return {(h.cause, h.place.site) for h in seen.examination.hazards}


@pytest.mark.parametrize(("around", "is_lost"), [(1013.0, True), (10.0, False), (0.0, False)])
def test_targets_that_were_stored_with_less_than_they_say(around: float, is_lost: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    told = kinds(nn.Linear(4, 1), x, (around + x[:, 0] + x[:, 1]).bfloat16())
    assert (("target_in_low_precision", "data:target") in told) == is_lost


class Counts(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.full((2,), start, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for k in (0, 1, 0, 1, 0, 1):
            self.seen[k] += 1
        return self.layer(x)


@pytest.mark.parametrize(("start", "stands"), [(256.0, True), (8.0, False)])
def test_a_counter_that_no_longer_counts(start: float, stands: bool) -> None:
    with sanitize(model := Counts(start), strict=True) as seen:
        model(torch.randn(8, 4)).sum().backward()
    told = {(h.cause, h.place.site) for h in seen.examination.hazards}
    assert (("absorption_in_accumulator", "seen") in told) == stands


STANDS = [("ema_stagnation", "loop:ema")]


@pytest.mark.parametrize(
    ("dtype", "weight", "told"),
    [(torch.bfloat16, 1e-3, STANDS), (torch.bfloat16, 0.2, []), (torch.float16, 1e-4, STANDS), (torch.float32, 1e-3, [])],
)
def test_an_average_behind_the_optimizer_is_told_where_it_cannot_follow(
    dtype: torch.dtype, weight: float, told: list[tuple[str, str]]
) -> None:
    """Taken over five steps it is never more than a few roundings behind; over a thousand it does not move at all."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    average = [p.detach().to(dtype, copy=True) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    watcher.steps_by_themselves(find_models=False)
    for _ in range(4):
        model.train()
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        for one, p in zip(average, model.parameters()):
            one.lerp_(p.detach().to(dtype), weight)
        model.eval()
        with torch.inference_mode():  # where an examination cannot be closed
            model(torch.ones(1, 64))
    watcher.close()
    assert [(one.cause, one.culprit) for one in watcher.diagnoses()] == told


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, None), (torch.float32, False)])
def test_what_was_rounded_to_the_edge_before_is_not_said_of_fp32(dtype: torch.dtype, precision: bool | None) -> None:
    """1 - x is 0 in the table. Stored in bf16 it may have been 0.9999; stored in FP32 it is 1, whatever the precision."""
    torch.manual_seed(0)
    table = torch.cat([torch.ones(1), torch.linspace(0.9, 0.1, 15)]).to(dtype)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    for i in range(4):
        with watcher.step(i):
            at = torch.arange(16)
            weight = table[at] / (1 - table[at])
            loss = (weight.float() * model(torch.randn(16, 4)).squeeze(-1).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watcher.close()
    (told,) = watcher.diagnoses()
    assert told.precision_caused is precision
    assert precision is False or (told.cause, told.culprit, told.confidence) == ("undefined_operation", "op:div", 0.8)


@pytest.mark.parametrize(("dtype", "told"), [(torch.bfloat16, "catastrophic_cancellation"), (torch.float32, "")])
def test_a_table_that_was_rounded_to_what_it_is_taken_from(dtype: torch.dtype, told: str) -> None:
    """Shares that survive so many days: 1 - x is what dies, and in bf16 nothing dies on the first ones."""
    torch.manual_seed(0)
    alive = torch.exp(-0.0005 * (1 + torch.arange(2000.0)) ** 1.1).to(dtype)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watcher = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    for i in range(4):
        with watcher.step(i):
            day = torch.arange(16) * 100
            odds = alive[day] / (1 - alive[day])
            share = (odds / (1 + odds)).float()
            loss = (share * model(torch.randn(16, 4)).squeeze(-1).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watcher.close()
    assert [one.cause for one in watcher.diagnoses()] == [told] * bool(told)
    assert all(one.precision_caused for one in watcher.diagnoses())


@pytest.mark.parametrize(("dtype", "told"), [(torch.bfloat16, ["catastrophic_cancellation"]), (torch.float32, [])])
def test_series_that_lose_their_mean_between_two_steps(dtype: torch.dtype, told: list[str]) -> None:
    torch.manual_seed(0)
    series = (101325 + 300 * torch.randn(200, 1) + 100 * torch.sin(torch.arange(40) * 0.4 + torch.randn(200, 1))).to(dtype)
    model = nn.Linear(39, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    watcher.steps_by_themselves(find_models=False)
    for i in range(6):
        x = torch.stack([series[k] for k in range(16 * i, 16 * i + 16)]).float()
        x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x[:, :-1])
        optimizer.zero_grad()
        nn.functional.mse_loss(out.float(), x[:, -1:]).backward()
        optimizer.step()
    watcher.close()
    assert [one.cause for one in watcher.diagnoses()] == told
