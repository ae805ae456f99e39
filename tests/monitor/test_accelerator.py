"""The path of an accelerator, on a CPU: `reads_freely` says no, so nothing may be read before the step is over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nanny import MixedPrecisionNanny
from nanny.core.finding import Finding
from nanny.measure import transfer


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Shrink(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-8


class Between(nn.Module):
    """The bad operation stands in the container's own code, not in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.log(self.first(x)))


def overflowing() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 1))
    nn.init.constant_(model[1].weight, 4e4)
    return model


def poisoned() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    return model


def train(model: nn.Module, dtype: torch.dtype | None = None, factor: float = 1.0) -> list[Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    nanny = MixedPrecisionNanny(model, output_dir=None, live=False, strict=True)
    with nanny.step(0):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(torch.randn(4, 8) * factor).float().mean()
        loss.backward()
    optimizer.step()
    nanny.close()
    return nanny.findings


CASES = {
    "log of a negative": (lambda: nn.Sequential(nn.Linear(8, 8), Log(), nn.Linear(8, 1)), None, 1.0, ("NAN", "1")),
    "an operation between modules": (Between, None, 1.0, ("NAN", "Between")),
    "overflow of a layer": (overflowing, torch.float16, 1.0, ("OVERFLOW", "1")),
    "a bad batch": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), None, torch.nan, ("INPUT_NONFINITE", "input")),
    "a poisoned weight": (poisoned, None, 1.0, ("WEIGHT_NONFINITE", "2")),
    "all flushed to zero": (
        lambda: nn.Sequential(nn.Linear(8, 8), Shrink(), nn.Linear(8, 1)), torch.float16, 1.0, ("UNDERFLOW", "1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_culprit_is_the_same_whether_numbers_are_read_at_once_or_later(monkeypatch, name):
    make, dtype, factor, expected = CASES[name]
    torch.manual_seed(0)
    at_once = train(make(), dtype, factor)
    monkeypatch.setattr(transfer, "reads_freely", lambda device: False)
    torch.manual_seed(0)
    later = train(make(), dtype, factor)
    assert (at_once[0].code, at_once[0].site) == expected
    assert (later[0].code, later[0].site) == expected
    assert later[0].evidence.get("passed_on") == at_once[0].evidence.get("passed_on")
