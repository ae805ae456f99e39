"""Numbers that were rounded before the step: told where the program needs more of them, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from nanny.examine.run import sanitize

LOW = torch.bfloat16


class Waves(nn.Module):
    """Of positions, as encodings have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2 * math.pi * 2.0 ** torch.arange(7))
        self.out = nn.Linear(14, 1)

    def forward(self, at: Tensor) -> Tensor:
        angles = at.float()[:, None] * self.frequencies
        return self.out(torch.cat([angles.sin(), angles.cos()], -1)).squeeze(-1)


def height(at: Tensor) -> Tensor:
    return torch.sin(2 * math.pi * 57 * at.double()).float()


LINE = torch.linspace(0, 1, 1500)
GRID = torch.arange(256) / 256  # bf16 holds it


@pytest.mark.parametrize(
    ("stored", "heights", "is_told"),
    [
        (LINE.to(LOW), height(LINE), True),
        (LINE.to(LOW).float(), height(LINE), True),  # it is wide again, and as coarse
        (LINE, height(LINE), False),
        (LINE.to(LOW), height(LINE.to(LOW)), False),  # the task is about the rounded ones
        (GRID.to(LOW), height(GRID), False),
    ],
    ids=["bf16", "bf16 in float32", "float32", "targets of the rounded", "an exact grid"],
)
def test_positions_that_are_too_coarse_for_their_angles(stored: Tensor, heights: Tensor, is_told: bool) -> None:
    torch.manual_seed(0)
    model, chosen = Waves(), torch.randint(0, len(stored), (256,))
    with sanitize(model, strict=True) as seen:
        with torch.autocast("cpu", dtype=LOW):
            out = model(stored[chosen])
        nn.functional.mse_loss(out.float(), heights[chosen]).backward()
    causes = {h.cause for h in seen.examination.hazards}
    assert causes == ({"position_precision_loss"} if is_told else set())


ROWS = 200
DAY = torch.arange(ROWS) % 31
WEATHER = torch.stack([1013 + 2.5 * torch.sin(torch.arange(ROWS) * 0.7), 15 + 4 * torch.cos(torch.arange(ROWS) * 1.3)], 1)


@pytest.mark.parametrize(
    ("table", "is_told"),
    [
        (WEATHER.to(LOW), True),  # 1013 hPa lie between multiples of 4
        (WEATHER.to(LOW).float(), True),
        (WEATHER, False),
        (WEATHER - torch.tensor([1013.0, 15.0]), False),
        ((WEATHER - WEATHER.mean(0)).to(LOW), False),
        (nn.functional.one_hot(DAY).to(LOW), False),
        (torch.stack([DAY + 200, DAY % 7], 1).to(LOW), False),  # whole numbers that it counts
        (torch.stack([torch.full((ROWS,), 5000.0), WEATHER[:, 1]], 1).to(LOW), False),  # a constant column says nothing
    ],
    ids=["bf16", "bf16 in float32", "float32", "shifted", "shifted bf16", "one-hot", "whole numbers", "constant"],
)
def test_columns_of_which_the_mean_leaves_no_more_than_their_spacing(table: Tensor, is_told: bool) -> None:
    torch.manual_seed(0)
    mean, std = table.float().mean(0), table.float().std(0) + 1e-6
    model = nn.Linear(table.shape[1], 1)
    with sanitize(model, strict=True) as seen:
        rows = (table[torch.randperm(ROWS)[:64]].float() - mean) / std
        with torch.autocast("cpu", dtype=LOW):
            out = model(rows)
        nn.functional.mse_loss(out.float().squeeze(-1), torch.randn(64)).backward()
    told = {(h.cause, h.place.site) for h in seen.examination.hazards}
    assert told == ({("catastrophic_cancellation", "data:input")} if is_told else set())


@pytest.mark.parametrize("is_stored", [True, False])
def test_series_that_are_stacked_and_taken_from_their_own_means(is_stored: bool) -> None:
    torch.manual_seed(0)
    time = torch.arange(40)
    series = 101325 + 300 * torch.randn(20, 1) + 100 * torch.sin(time * 0.4 + torch.randn(20, 1))
    series = series.to(LOW) if is_stored else series
    model = nn.Linear(40, 1)
    with sanitize(model, strict=True) as seen:
        rows = torch.stack([series[i] for i in range(16)]).float()
        with torch.autocast("cpu", dtype=LOW):
            out = model((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1))
        nn.functional.mse_loss(out.float().squeeze(-1), torch.randn(16)).backward()
    told = {(h.cause, h.place.site) for h in seen.examination.hazards}
    assert told == ({("catastrophic_cancellation", "data:input")} if is_stored else set())
