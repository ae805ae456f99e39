"""`nanny demo`: small real training runs go wrong in low precision, and the tool says why.

Every chapter is a function that prints what it does and what came out. All numbers are computed on the spot, in about ten
seconds; what is recorded goes into `demo/` (another folder with --out).
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..check.command import main as check
from ..core.command_line import Parser
from ..core.finding import NannyError
from ..runs.card import card_svg
from ..runs.diagnose import main as diagnose
from ..runs.opening import open_job
from ..runs.summary import summarize
from ..runs.text.summary import summary_answer
from ..show.findings import render_text
from ..show.tables import render_answer
from ..show.term import wants_colour, width_of
from ..web.report import write_report

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 400
POINTS = 512
METRES_AHEAD = 1000.0


# Chapter 1: two coordinates of very different size


def road_points(scale: tuple[float, float] = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
    """Points on a road, up to 1000 m ahead or behind and up to 1 m to the side, and how hard to steer at each."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ahead = (2 * torch.rand(POINTS, 1, generator=generator) - 1) * METRES_AHEAD
    side = 2 * torch.rand(POINTS, 1, generator=generator) - 1
    steering = side + 0.3 * torch.sin(ahead / 400)
    return torch.cat([ahead, side], dim=1) * torch.tensor(scale), steering


@dataclass(frozen=True)
class Trained:
    first_layer: Tensor  # its weight
    points: Tensor
    loss: float


def train(points: Tensor, target: Tensor, *, bf16: bool) -> Trained:
    import torch
    from torch import nn

    torch.manual_seed(0)
    first = nn.Linear(2, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = nn.functional.mse_loss(model(points), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Trained(first.weight.detach(), points, loss.item())


def lose_an_axis() -> Trained:
    chapter("1. A run that trains, but not as well as it should")
    print("A small network learns to steer from points (x, y): x is up to 1000 m, y up to 1 m. Same run, two formats:\n")
    points, target = road_points()
    exact, low = train(points, target, bf16=False), train(points, target, bf16=True)
    print(f"  final loss in fp32: {exact.loss:.4f}")
    print(f"  final loss in bf16: {low.loss:.4f}, {low.loss / exact.loss:.1f} times as high, and nothing was reported")
    return exact


def examine_the_axis(trained: Trained, folder: Path) -> None:
    import torch

    from ..tensor.run import analyze_tensor
    from ..tensor.text import verdict

    chapter("2. What bf16 does to the first layer")
    print("Each hidden unit adds up weight * x and weight * y. analyze_tensor looks at these products of the fp32 run:\n")
    products = trained.first_layer[None] * trained.points[:, None]
    report = analyze_tensor(products, torch.bfloat16, dims=2)
    print(f"  float32 {' x '.join(map(str, report.shape))}, {verdict(report.findings, report.target)}\n")
    text = render_text(report.findings, colour=wants_colour(sys.stdout), width=width_of(sys.stdout) - 2)
    print("\n".join(f"  {line}".rstrip() for line in text.splitlines()))
    path = folder / "products.pt"
    torch.save(products, path)
    print(f"\nAll numbers behind it: {nanny()} tensor {path} --dtype bf16 --dim 2")


def follow_the_hint(trained: Trained) -> None:
    chapter("3. The hint, followed: one scale for both axes")
    points, target = road_points(scale=(1 / METRES_AHEAD, 1.0))
    low = train(points, target, bf16=True)
    print(f"  final loss in bf16 with x in kilometres: {low.loss:.4f} (fp32 with x in metres: {trained.loss:.4f})")


# Chapter 4: an fp16 run that breaks while the nanny is watching


def watch_it_break(folder: Path, steps: int = 120) -> Path:
    import torch
    from torch import nn

    from ..monitor.watch import MixedPrecisionNanny

    class Square(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h * h

    chapter("4. An fp16 run that breaks, with the nanny watching")
    print("Step by step the points lie further ahead. The monitor traces every 20th step, and more once something is wrong:\n")
    torch.manual_seed(0)
    layers = OrderedDict(inlet=nn.Linear(2, 32), energy=Square(), norm=nn.LayerNorm(32), head=nn.Linear(32, 1))
    model = nn.Sequential(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    generator = torch.Generator().manual_seed(1)
    logs = folder / "nanny_logs"
    with MixedPrecisionNanny(model, optimizer, scaler, trace_interval=20, output_dir=logs, live=False) as nanny:
        for step in range(steps):
            ahead = (2 * torch.rand(256, 1, generator=generator) - 1) * (100 + 5 * step)
            side = 2 * torch.rand(256, 1, generator=generator) - 1
            with nanny.step(step):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.mse_loss(model(torch.cat([ahead, side], dim=1)), (ahead / 100).abs() + side)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            if step % 20 == 19:
                print(f"  step {step:3d}  loss {loss.item():.4g}  loss scale {scaler.get_scale():g}")
    return logs


def explain_it(logs: Path) -> None:
    chapter(f"5. What happened: {nanny()} summary --db {logs}")
    with open_job(str(logs), None) as (sources, notes):
        print(render_answer(summary_answer(summarize(sources, notes)), "text", width_of(sys.stdout), wants_colour(sys.stdout)))
    print("\n(The cost looks high because a step of this network takes only milliseconds; make bench measures it on a GPT.)")


def name_the_cause(logs: Path) -> None:
    chapter(f"6. Why, and what to change: {nanny()} diagnose --db {logs}")
    diagnose(["--db", str(logs)])


def draw_it(folder: Path, logs: Path) -> None:
    page = folder / "report.html"
    chapter(f"7. The same to look at: {page}")
    try:
        size = write_report(page, logs)
        print(f"{page} ({size / 1e6:.1f} MB) opens in any browser, without a network.")
    except NannyError as error:  # plotly was removed
        print(f"Not drawn: {error}")
    with open_job(str(logs), None) as (sources, notes):
        (folder / "card.svg").write_text(card_svg(summarize(sources, notes)), encoding="utf-8")
    print(f"{folder / 'card.svg'} is one picture of it, to paste into an issue.")
    print(f"In the browser, and live while a run trains: {nanny()} ui --db {logs}")


def nanny() -> str:
    """What to type here: the command may lie in an environment that is not switched on."""
    if shutil.which("nanny"):
        return "nanny"
    program = Path(sys.argv[0])
    return shlex.quote(str(program)) if program.name == "nanny" and program.is_file() else "python -m nanny"


CLIPPED_TOO_EARLY = """\
import torch

def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def mend_it(folder: Path) -> None:
    script = folder / "train.py"
    chapter(f"8. A mistake that no run needs to make: {nanny()} check {script} --diff")
    script.write_text(CLIPPED_TOO_EARLY, encoding="utf-8")
    try:
        check([str(script), "--diff"])
        print(f"\nTo have it written: {nanny()} check {script} --fix")
    except NannyError as error:  # libcst is an extra
        print(f"Not shown: {error}")


def forget_to_clear(steps: int = 12) -> None:
    import torch
    from torch import nn

    from ..monitor.watch import MixedPrecisionNanny

    chapter("9. A mistake of the loop, in FP32: zero_grad was forgotten")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, examine="off") as nanny:
        for step in range(steps):
            with nanny.step(step):
                x = torch.randn(32, 2)
                loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
            if step % 4 == 3:
                print(f"  step {step:3d}  loss {loss.item():.4g}")
    print(f"\n{render_text(nanny.findings)}")


def chapter(title: str) -> None:
    print(f"\n=== {title}\n", flush=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small run faster on one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NannyError(f"cannot write to {path} ({error.strerror}); name another folder with --out DIR") from None
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="nanny demo", description="See the tool work on small real training runs (seconds).")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where to record (default: demo)")
    folder = make_folder(parser.parse_args(argv).out)
    print("Two small networks are trained in low precision (about ten seconds); both go wrong, and the nanny says why.")
    with one_thread():
        trained = lose_an_axis()
        examine_the_axis(trained, folder)
        follow_the_hint(trained)
        logs = watch_it_break(folder)
    explain_it(logs)
    name_the_cause(logs)
    draw_it(folder, logs)
    mend_it(folder)
    with one_thread():
        forget_to_clear()
    print(f"\nYour own run, without changing it: {nanny()} run train.py")
    return 0
