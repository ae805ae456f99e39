"""What every program here trains: a tiny net, rows that can be learned, and one planted fault by its name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

INPUTS, WIDTH, ROWS, MICRO, ACCUMULATE, STEPS = 16, 32, 8, 2, 2, 24
FAULTS = ("overflow", "clip", "lost", "lr", "data")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of several processes each draws its own rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, amp: torch.dtype | None = None) -> None:
        super().__init__()
        self.encode = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)
        self.amp = amp

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        with torch.autocast("cpu", self.amp) if self.amp else contextlib.nullcontext():
            out = self.head(self.blocks(self.encode(x)))
        if labels is None:
            return {"logits": out}
        return {"loss": nn.functional.mse_loss(out.float(), labels.float()), "logits": out}


@dataclass
class Task:
    """`fault` is one of FAULTS, or its healthy twin with `no-` before it."""

    fault: str

    @property
    def planted(self) -> str:
        return "" if self.fault.startswith("no-") else self.fault

    @property
    def kind(self) -> str:
        return self.fault.removeprefix("no-")

    @property
    def scales(self) -> bool:
        return self.kind in ("overflow", "clip", "skip")

    @property
    def amp(self) -> torch.dtype | None:
        return torch.float16 if self.scales else None if self.planted == "lost" else torch.bfloat16

    @property
    def lr(self) -> float:
        return {"lr": 0.6, "lost": 1e-5}.get(self.planted, 0.02)

    def model(self, amp: bool = True) -> Net:
        """`amp=False`: autocast is the framework's."""
        torch.manual_seed(0)
        net = Net(self.amp if amp else None)
        if self.planted == "overflow":
            with torch.no_grad():  # the same function in FP32
                net.blocks[1].up.weight.mul_(1e6)
                net.blocks[1].up.bias.mul_(1e6)
                net.blocks[1].down.weight.div_(1e6)
        return net.bfloat16() if self.planted == "lost" else net

    def scaler(self) -> torch.amp.GradScaler | None:
        first = 2.0 ** (20 if self.kind == "skip" else 12)  # the higher one is lowered in the first steps, as everywhere
        return torch.amp.GradScaler("cpu", init_scale=first) if self.scales else None

    def rows(self, steps: int = STEPS, accumulate: int = ACCUMULATE) -> list[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(1)
        relation = torch.randn(INPUTS, 1, generator=draw) / INPUTS**0.5
        x = torch.randn(steps * accumulate * ROWS * WORLD, INPUTS, generator=draw)
        y = torch.tanh(x @ relation)
        if self.planted == "data":
            x[10 * accumulate * ROWS * WORLD + ROWS * (WORLD - 1) + 3, 5] = float("nan")  # in step 10 of the last process
        if self.planted == "lost":
            x, y = x.bfloat16(), y.bfloat16()
        return [{"x": a, "labels": b} for a, b in zip(x, y)]

    def batches(self, steps: int = STEPS, accumulate: int = ACCUMULATE) -> list[dict[str, Tensor]]:
        """Those of this process."""
        rows = self.rows(steps, accumulate)
        groups = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
        return [{name: torch.stack([row[name] for row in group]) for name in group[0]} for group in groups[RANK::WORLD]]


def fingerprint(model: nn.Module) -> str:
    """Of the weights, bit by bit."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def set_up_fp16(accelerator: object, scaler: torch.amp.GradScaler | None) -> None:
    """What Accelerate does for mixed_precision="fp16" on an accelerator, and refuses to do on a CPU."""
    if scaler is not None:
        accelerator.native_amp, accelerator.scaler = True, scaler
        accelerator.state._mixed_precision = "fp16"
