"""How far one must read to follow a feature: `python -m benchmarks.walks`.

For each walk, by a profiler: the modules of nanny in which a function ran, the lines of these modules, and the pairs of modules
that call each other. What runs at import does not count.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import nanny

SOURCE = Path(nanny.__file__).parent


class Walk:
    """While open, notes which of nanny's modules run and which one calls which."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()

    def __enter__(self) -> Walk:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        here = frame.f_code.co_filename
        if event != "call" or not here.startswith(str(SOURCE)):
            return
        callers = [one.f_code for one in _with_callers(frame) if one.f_code.co_filename.startswith(str(SOURCE))]
        if any(code.co_name == "<module>" for code in callers):
            return  # classes are made and rules are entered at import
        self.modules.add(here)
        if len(callers) > 1 and callers[1].co_filename != here:
            self.pairs.add((callers[1].co_filename, here))

    def row(self) -> str:
        lines = sum(Path(m).read_text(encoding="utf-8").count("\n") for m in self.modules)
        return f"{len(self.modules):4d} modules {lines / 1000:5.1f}k lines {len(self.pairs):4d} calls between modules"


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def training(steps: int, walk_at: int, **settings: Any) -> Walk:
    net, walk = model(), Walk()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    watcher = nanny.MixedPrecisionNanny(net, optimizer, live=False, **settings)
    for i in range(steps):
        with walk if i == walk_at else nullcontext(), watcher.step(i):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.randn(4, 8)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watcher.close()
    return walk


def untraced(folder: Path) -> Walk:
    return training(8, 6, trace_interval=100, examine="off", output_dir=folder / "a")


def traced(folder: Path) -> Walk:
    return training(8, 6, trace_interval=6, examine="off", output_dir=folder / "b")


def examined(folder: Path) -> Walk:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with Walk() as walk:
        watcher = nanny.MixedPrecisionNanny(net, optimizer, live=False, examine="every", output_dir=folder / "c")
        for i in range(3):
            with watcher.step(i):
                with torch.autocast("cpu", torch.float16):
                    loss = (net(torch.randn(4, 8)) * 6e4).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        watcher.close()
        nanny.diagnose(watcher)
    return walk


def command(*argv: str) -> Callable[[Path], Walk]:
    def walk_of(folder: Path) -> Walk:
        from nanny.cli import main

        with redirect_stdout(StringIO()), Walk() as walk:
            main([word.replace("FOLDER", str(folder)) for word in argv])
        return walk

    return walk_of


def auto_diff(folder: Path) -> Walk:
    with Walk() as walk:
        str(nanny.auto_diff(model(), torch.randn(4, 8), torch.bfloat16, loss_fn=lambda y: y.float().square().mean()))
    return walk


def page(folder: Path) -> Walk:
    from nanny.web.data import page_data

    with Walk() as walk:
        page_data(folder / "c" / "metrics.db")
    return walk


SOURCE_FILE = """import torch
model = torch.nn.Linear(4, 4)
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cuda", torch.float16):
    loss = model(torch.randn(4, 4)).sum()
scaler.scale(loss).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
"""

WALKS: dict[str, Callable[[Path], Walk]] = {
    "untraced step": untraced,
    "traced step": traced,
    "examined step to diagnosis": examined,
    "nanny summary": command("summary", "--db", "FOLDER/c"),
    "one file through nanny check": command("check", "FOLDER/train.py"),
    "auto_diff": auto_diff,
    "data of a report page": page,
}


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SOURCE_FILE)
        for walk, run in WALKS.items():
            print(f"{walk:30s} {run(folder).row()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
