"""The six pictures in docs/images: a small transformer in fp16 that breaks, as its report, a phone and its card show it, beside
one that does not.

For instance:

    python docs/screenshots.py        (needs the extras web and dev, and a Chromium)
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Browser, sync_playwright
from torch import Tensor, nn

from nanny.cli.card import main as card
from nanny.monitor.watch import MixedPrecisionNanny
from nanny.web.report import write_report

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, BLOCKS, TOKENS, STEPS = 32, 8, 64, 130


class SquaredReLU(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.relu().square()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), SquaredReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm1(h)
        h = h + self.attn(x, x, x, need_weights=False)[0]
        return h + self.mlp(self.norm2(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def train(folder: Path, growth: float) -> None:
    """The gain of one layer norm grows a little at each step, until what squares its output leaves the range of fp16."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with MixedPrecisionNanny(model, optimizer, scaler, trace_interval=10, output_dir=folder, live=False) as nanny:
        for step in range(STEPS):
            tokens = (torch.arange(17) * torch.randint(1, 5, (8, 1)) + torch.randint(TOKENS, (8, 1))) % TOKENS
            with torch.no_grad():
                model.blocks[5].norm2.weight.mul_(growth)
            with nanny.step(step):
                with torch.autocast("cpu", dtype=torch.float16):
                    logits = model(tokens[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


def photograph(browser: Browser, report: Path, name: str, scroll: str = "", width: int = 1440, **options: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 1000}, **options)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-drawn=yes]", timeout=300_000)
    if scroll == "#heat":
        page.click("#map")  # of many layers the map is drawn for who asks
        page.wait_for_function("() => heat !== null")
    if scroll:
        page.evaluate("(place) => document.querySelector(place).scrollIntoView()", scroll)
        page.wait_for_timeout(300)
    page.screenshot(path=IMAGES / name)
    context.close()


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no Chromium here; type `make browser`", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        os.chdir(folder)  # the page shows paths as they were given, and this file as the program that it watches
        shutil.copy(__file__, "train.py")
        sys.path.insert(0, folder)
        sys.argv = ["train.py"]
        train = importlib.import_module("train").train
        report, beside = Path(folder) / "report.html", Path(folder) / "compare.html"
        train(Path("nanny_logs"), growth=1.0)
        train(Path("nanny_logs"), growth=1.045)
        write_report(report, Path("nanny_logs"))
        write_report(beside, Path("nanny_logs"), compare="1")
        card(["-o", str(IMAGES / "card.png")])
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        photograph(browser, report, "report.png", locale="en-US")
        photograph(browser, report, "report-layers.png", "#heat", locale="en-US")
        photograph(browser, report, "report-zh-dark.png", locale="zh-CN", color_scheme="dark")
        photograph(browser, report, "report-phone.png", locale="en-US", width=390)
        photograph(browser, beside, "compare.png", "#comparison", locale="en-US")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
