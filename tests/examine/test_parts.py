"""A loop that calls the parts of a model, and never the model: its bad step is explained all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nanny import MixedPrecisionNanny


class Parts(nn.Module):
    """Never called itself: the loop calls what it holds, as a LightningModule's does."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), Square())
        self.decoder = nn.ModuleList([nn.Linear(8, 1)])


class Square(nn.Module):
    def forward(self, x):
        return (x * 4.0) * (x * 4.0)


@pytest.mark.parametrize("joined", [False, True])
def test_a_bad_step_is_made_again_where_the_loop_calls_the_parts_of_a_model(joined):
    torch.manual_seed(0)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True) as nanny:
        for step in range(12):
            x = torch.randn(16, 8) * (1.0 if step < 11 else 300.0)
            with nanny.step(step):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    hidden = model.encoder(x)
                    out = model.decoder[0](hidden + x if joined else hidden)
                loss = (out - out.mean()).float().square().mean()
                loss.backward()
                optimizer.step()
    first = nanny.diagnoses()[0]
    assert (first.cause, first.culprit) == ("product_overflow_fp16", "encoder.1")
    assert first.step == 11
    assert first.where.endswith(f"{Path(__file__).name}:{Square.forward.__code__.co_firstlineno + 1}")
