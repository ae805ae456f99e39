"""The first bad step is explained in a model of real depth and width too, whatever an examination costs there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanny import MixedPrecisionNanny

WIDTH, DEPTH, BAD_AT, CULPRIT = 512, 24, 7, 17


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.loud = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q * self.loud) @ (k * self.loud).transpose(1, 2) / math.sqrt(WIDTH)
        x = x + self.out(scores.softmax(-1) @ v)
        gate = self.wide(x)
        gate = gate.log() if self.loud < 0 else gate.relu()
        return x + self.narrow(gate)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "loud"), [(torch.float16, 100.0), (torch.bfloat16, -1.0)], ids=["fp16", "bf16"])
def test_the_first_bad_step_of_a_large_model_has_its_layer_and_its_line(dtype: Any, loud: float) -> None:
    torch.manual_seed(0)
    net = Model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    nanny = MixedPrecisionNanny(net, optimizer, output_dir=None, live=False, strict=True)
    for step in range(BAD_AT + 1):
        net.blocks[CULPRIT].loud = loud if step == BAD_AT else 1.0
        with nanny.step(step):
            with torch.autocast("cpu", dtype):
                loss = net(torch.randn(1, 4, WIDTH)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    nanny.close()
    (found,) = nanny.diagnoses()
    cause, line = ("attention_logit_overflow_fp16", 3) if dtype is torch.float16 else ("undefined_operation", 6)
    assert (found.cause, found.culprit, found.step) == (cause, f"blocks.{CULPRIT}", BAD_AT)
    assert found.where.endswith(f"test_large.py:{Block.forward.__code__.co_firstlineno + line - 1}")
