"""What an examined step needs: the largest memory of a process that makes one, beside that of one that makes the same step alone.

    python -m benchmarks memory

Each in a process of its own, because memory that was freed may stay with a process; a second plain one is the control.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .timing import note

BAR = 1.6
WIDTH = 32
PROGRAMS = {  # blocks, rows, vocabulary
    "many small activations, bf16 autocast": (24, 4096, 256),
    "few large activations, bf16 autocast": (4, 16384, 256),
    "large logits, bf16 autocast": (2, 2048, 8192),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def one_step(name: str, how: str) -> None:
    """In this process, which ends after it: prints the largest memory in MiB."""
    from nanny import MixedPrecisionNanny

    blocks, rows, vocabulary = PROGRAMS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocabulary, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, wanted = torch.randint(0, vocabulary, (2, rows))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(ids), wanted)
        loss.backward()
        optimizer.step()

    if how == "plain":
        step()
    else:
        with tempfile.TemporaryDirectory() as folder:
            nanny = MixedPrecisionNanny(model, optimizer, output_dir=folder, live=False, strict=True, examine="every")
            with nanny.step(0):
                step()
            nanny.close()
    status = Path("/proc/self/status").read_text()
    print(int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) >> 10)


def peak(name: str, how: str) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_memory", name, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    if not Path("/proc/self/status").exists():
        print("  this system does not tell how much memory a process had at most")
        return
    for name in PROGRAMS:
        plain, examined, again = (peak(name, how) for how in ("plain", "examined", "plain"))
        ratio = 2 * examined / (plain + again)
        note(f"examined step, peak memory, {name}", ratio, bar=BAR, control=plain / again)
        print(
            f"  {name:42} {examined} MiB against {plain} MiB: {ratio:.2f} times (A/A control {plain / again:.2f})  "
            f"bar {BAR:g}: {'met' if ratio <= BAR else 'MISSED'}"
        )


if __name__ == "__main__":
    one_step(*sys.argv[1:])
