"""Diagnoses at the sizes of real models: a large tensor holds everything at once, flushed zeros and overflowed peaks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nanny import MixedPrecisionNanny, diagnose


class Squares(nn.Module):
    """The square of an activation, times a constant: its peaks leave fp16 while its smallest numbers flush to zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden * hidden * 1e5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(8))
def test_an_overflow_beside_flushed_zeros_is_an_overflow(seed):
    torch.manual_seed(seed)
    model = Squares(128)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    nanny = MixedPrecisionNanny(model, optimizer, scaler, output_dir=None, live=False, strict=True)
    for step in range(4):
        with nanny.step(step):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(64, 64)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    nanny.close()
    assert [d.cause for d in diagnose(nanny)] == ["product_overflow_fp16"]
