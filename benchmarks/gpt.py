"""A GPT of about 7M parameters in FP32: the step whose cost every tool is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanny import MixedPrecisionNanny

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 1024, 256, 4, 8, 128, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.dropout(self.project(attended))
        return x + self.dropout(self.down(self.act(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """One model with its optimizer and data; `step()` is one plain training step."""

    def __init__(self, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        self.model = Gpt(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1))

    def forward_backward(self) -> Tensor:
        self.optimizer.zero_grad()
        logits = self.model(self.ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), self.ids[:, 1:].reshape(-1))
        loss.backward()
        return loss

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()


@contextmanager
def watched(training: Training, folder: str, interval: int = 10**9, examine: str = "off") -> Iterator[Callable[[], None]]:
    """Its step under a monitor that traces every `interval` steps, records on disk and judges."""
    model, optimizer, count = training.model, training.optimizer, 0
    nanny = MixedPrecisionNanny(
        model, optimizer, trace_interval=interval, output_dir=folder, examine=examine, live=False, strict=True
    )

    def step() -> None:
        nonlocal count
        with nanny.step(count):
            training.forward_backward()
        optimizer.step()
        count += 1

    step()  # the first step is always traced
    yield step
    nanny.close()
    if nanny.findings:
        print(f"  unexpected findings: {[f.code for f in nanny.findings]}")
