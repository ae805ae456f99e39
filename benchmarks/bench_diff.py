"""What `auto_diff` costs beside one FP32 and one low-precision run, how much memory it takes, and whom it blames.

The models of the accuracy table are the programs of `tests/corpus` about which `auto_diff` can be asked. bf16 and fp16 are
slow on CPUs without those types, which hides cost: the ratio on a GPU is another one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from nanny import Severity, auto_diff

from .timing import note, ratio

REPEATS = 5
PLAIN_BAR, OWN_BAR = 1.3, 2.5
LAYERS, WIDTH, TOKENS, BATCH = 48, 128, 512, 2
MEMORY = """
import gc, torch
from benchmarks.bench_diff import Deep
from nanny import auto_diff

def peak(work):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    work()
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

def plain():
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            model(x)

torch.manual_seed(0)
model, x = Deep({layers}), torch.randn({batch}, {tokens}, {width})
work = lambda: auto_diff(model, x, "bf16", backward=False, own={own})
plain(), auto_diff(Deep(1), x[:1, :8], "bf16", backward=False)
print(peak(work) - peak(plain))
"""


class DeepBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(DeepBlock() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def cost() -> bool:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other, and nothing can be told any more
    model, x = Deep(8), torch.randn(BATCH, TOKENS, WIDTH)

    def both() -> None:
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = _loss(model(x))
            loss.backward()
        model.zero_grad()

    ok = True
    for title, own, bar in (("without own errors", False, PLAIN_BAR), ("with own errors", True, OWN_BAR)):

        def diff(own: bool = own) -> None:
            auto_diff(model, x, "bf16", loss_fn=_loss, own=own)

        told = ratio(diff, both, REPEATS)
        ok &= told.meets(bar)
        note(f"auto_diff {title}", told.median, bar=bar, control=told.control)
        print(f"  {title}: {told}; {told.verdict(bar)}")
    return ok


def memory() -> bool:
    largest = BATCH * TOKENS * 4 * WIDTH * 4 / 2**20
    bar = 3 * largest + 10
    ok = True
    for own in (False, True):
        script = MEMORY.format(layers=LAYERS, batch=BATCH, tokens=TOKENS, width=WIDTH, own=own)
        root = Path(__file__).parent.parent
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
        extra = float(done.stdout)
        ok &= extra <= bar
        verdict = "met" if extra <= bar else "MISSED"
        print(f"  {'with' if own else 'without'} own errors, {LAYERS} layers, forward: {extra:.1f} MB more than two plain runs "
              f"(largest layer output {largest:.1f} MB in fp32); bar {bar:.1f} MB: {verdict}")  # fmt: skip
    return ok


def verdicts() -> bool:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from corpus import asked
    from corpus.asking import SHORT, built, compared

    ok = True
    for program in asked("diff", "healthy", "repaired"):
        for dtype in program.dtypes:
            report = compared(built(program, dtype), dtype, program.policies[0])
            loud = [f.code for f in report.findings if f.severity > Severity.INFO]
            ok &= not loud
            off = f"output {report.outputs[0].error.rel_l2:.2%}, gradient {report.total.rel_l2:.2%} off"
            print(f"  healthy {program.name:<28} {SHORT[dtype]}: {off}: {loud or 'silent'}")
    for program in asked("diff", "planted"):
        for dtype in program.dtypes:
            blamed = (*compared(built(program, dtype), dtype, program.policies[0]).culprits, "nobody")[0]
            ok &= blamed in program.culprits
            print(f"  planted {program.name:<32} {SHORT[dtype]}: blamed {blamed}, planted in {' or '.join(program.culprits)}")
    return ok


def main() -> int:
    return 0 if all([cost(), memory(), verdicts()]) else 1


if __name__ == "__main__":
    sys.exit(main())
