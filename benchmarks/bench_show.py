"""The page on a run: how large, how fast to write, to open, to click and to follow; in Debian's Chromium, headless.

run: python -m benchmarks show

Three runs as the monitor records them. `usual` has 300 layers and 2000 steps, all of them sampled. `wide` has 5,000 layers and 40
steps: a tree that nobody unfolds whole. `long` has 1000 layers and 100,000 steps with the monitor's own thinning: gradients of
every step up to 10,000 and of every tenth after, the rest at every hundredth. Commands are whole processes, and their processor
time is all of theirs, Python's start included. `first paint` is the browser's own first-contentful-paint, `readable` is when the
verdict stands, `drawn` when the last plot does; `click` is from a click on a finding to the end of the last frame in which it
changed anything, and the processor time of the page's thread meanwhile, which no neighbour falsifies. Both have the same bar.

On a busy machine all times grow. How much is measured beside them, by a loop that needs a known share of the processor, and the
bars are held against the times divided by that; what the clock showed is printed too.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanny.core.finding import Finding, Severity
from nanny.core.formats import FIRST_BIN, HISTOGRAM_BINS, LOWEST_EXPONENT
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.monitor.recording import EVERY_STEP_UNTIL, THIN
from nanny.store.writer import RunWriter

from .timing import note

FINDINGS = 60
SPIN_SECONDS = 0.25  # of processor time
BUSY = 1.2
CLICKS = 7
OPENINGS = 3
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run")  # fmt: skip
MEASURED = """
import resource, sys, time
start = time.perf_counter()
from nanny.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""
CLICK = """
async (number) => {
  let last = 0;
  const note = () => requestAnimationFrame(() => setTimeout(() => (last = performance.now())));
  const seen = new MutationObserver(note);
  seen.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  const items = [...document.querySelectorAll("#findings li button")];
  const start = performance.now();
  items[number % items.length].click();
  await new Promise((done) => setTimeout(done, 1500));
  seen.disconnect();
  return last - start;
}
"""
# When the words and the plots stand, by the page's own clock: asking from outside waits for a busy page.
STAMPS = """
new MutationObserver(() => {
  const marks = document.body ? document.body.dataset : {};
  for (const name of ["words", "drawn"]) if (marks[name] && !marks[`${name}At`]) marks[`${name}At`] = performance.now();
}).observe(document, { subtree: true, childList: true, attributes: true });
"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0]"


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    steps: int
    trace_every: int


USUAL, WIDE, LONG = Shape("usual", 300, 2000, 1), Shape("wide", 5000, 40, 10), Shape("long", 1000, 100_000, 100)
PAGE_MB = 5.0


def slowdown() -> float:
    """How many times longer work takes here and now than on a quiet machine."""
    start, done = time.perf_counter(), time.process_time() + SPIN_SECONDS
    while time.process_time() < done:
        pass
    return max((time.perf_counter() - start) / SPIN_SECONDS, 1.0)


@dataclass
class Board:
    """Numbers beside their bars."""

    missed: int = 0

    def say(self, what: str, value: float, unit: str, bar: float | None = None) -> None:
        verdict = ""
        if bar is not None:
            self.missed += value > bar
            verdict = f"   bar {bar:g} {unit}: {'met' if value <= bar else 'MISSED'}"
        print(f"  {what:<44}{value:9.2f} {unit}{verdict}", flush=True)

    def say_time(self, what: str, seen: list[tuple[float, float]], unit: str, bar: float | None = None) -> None:
        """Median of times, each with the slowdown that was measured beside it."""
        clock, busy = (statistics.median(column) for column in zip(*seen))
        if busy > BUSY:
            self.say(f"{what}, by the clock ({busy:.1f} x busy)", clock, unit)
            self.say(f"{what}, on a quiet machine", statistics.median(t / b for t, b in seen), unit, bar)
        else:
            self.say(what, clock, unit, bar)


class Numbers:
    """Plausible numbers of all layers, new ones for each step: repeated ones would pool and compress too well."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.rng = np.random.default_rng(0)
        self.size = np.exp2(self.rng.uniform(-6, 10, layers)).astype("<f4")

    def _values(self, rows: int) -> np.ndarray:
        return np.abs(self.rng.standard_normal((rows, self.layers), np.float32)) * self.size

    def sample(self) -> bytes:
        values = np.zeros((len(SAMPLE_STATS), self.layers), "<f4")
        values[1:5] = self._values(4)
        values[0], values[1] = 4096, -values[1]
        return values.tobytes()

    def gradient(self) -> bytes:
        values = np.full((len(GRADIENT_STATS), self.layers), 4096, "<f4")
        values[1:] = self._values(3) * 2**-12
        return values.tobytes()

    def histogram(self) -> bytes:
        counts = np.zeros((self.layers, HISTOGRAM_BINS), "<u2")
        middle = np.log2(self.size).astype(int) - LOWEST_EXPONENT + FIRST_BIN
        for offset in range(-10, 3):
            counts[np.arange(self.layers), middle + offset] = self.rng.integers(1, 2000, self.layers)
        return counts.tobytes()


def record(folder: Path, shape: Shape) -> tuple[RunWriter, Numbers]:
    """The run, still open: a live one can be followed."""
    writer = RunWriter(folder, RunInfo(time.time(), argv=("train.py",), amp_dtype="float16"), queue_bytes=1 << 28)
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    names = [f"model.layers.{i // len(parts)}.{parts[i % len(parts)]}" for i in range(shape.layers)]
    for kind in ("output", "output_grad"):
        writer.add_sites([Site(kind, name, "float16", (64, 64)) for name in names])
    for kind in ("weight", "grad"):
        writer.add_sites([Site(kind, f"{name}.weight", "float32", (64, 64)) for name in names])
    numbers = Numbers(shape.layers)
    for i in range(FINDINGS):
        step = (i + 1) * shape.steps // (FINDINGS + 2)
        severity = Severity.ERROR if i % 10 == 9 else Severity.WARNING
        site = names[i * len(names) // FINDINGS]
        writer.add_finding(Finding("GRAD_EXPLOSION", severity, "12 times its median", "clip", site=site, step=step))
    for step in range(shape.steps):
        add_step(writer, numbers, shape, step)
        if step % 200 == 0:
            writer.flush(timeout=60)
    writer.flush(timeout=60)
    return writer, numbers


def add_step(writer: RunWriter, numbers: Numbers, shape: Shape, step: int) -> None:
    traced = step % shape.trace_every == 0
    taken = numbers.histogram() if step % max(10, shape.trace_every) == 0 else b""
    if traced or step < EVERY_STEP_UNTIL or step % THIN == 0:
        writer.add_sample(Sample("grad", step, GRADIENT_STATS, numbers.gradient(), taken))
    if traced:
        for kind in ("output", "output_grad", "weight"):
            writer.add_sample(Sample(kind, step, SAMPLE_STATS, numbers.sample(), taken))
    wobble = 1 + 0.1 * np.sin(step / 7)
    values = {"loss": 2.0 * 0.999**step + 0.3 * wobble, "grad_norm": wobble, "lr": 1e-3, "scale": 65536.0, "step_ms": 12.5}
    writer.add_scalars(step, {**values, "skipped": float(step % 500 == 499)})


def write_report(board: Board, store: Path, page: Path, bars: tuple[float | None, float | None]) -> None:
    """As a process of its own: size, time, processor time and memory."""
    command = [sys.executable, "-c", MEASURED, "report", "--db", str(store), "-o", str(page)]
    before = slowdown()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    code, seconds, cpu, megabytes = done.stdout.split("\n")[-2].split()
    assert code == "0", done.stdout
    most_cpu, most_memory = bars
    board.say("report, size", page.stat().st_size / 1e6, "MB", PAGE_MB)
    board.say_time("nanny report", [(float(seconds), (before + slowdown()) / 2)], "s")
    board.say("nanny report, processor time", float(cpu), "s", most_cpu)
    if most_cpu is not None:
        note("nanny report, 1000 layers x 100,000 steps, CPU", float(cpu), "s", most_cpu)
    board.say("nanny report, memory", float(megabytes), "MB", most_memory)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """None where there is no Chromium."""
    path = shutil.which("chromium")
    if path is None:
        print("  NO CHROMIUM: first paint and clicks were not measured; type make browser")
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield found
        found.close()


def processor_ms(devtools: Any) -> float:
    """What the page's thread has worked so far, by its own clock: it stands still while others have the processor."""
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return 1000 * next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def click(page: Any, devtools: Any, number: int) -> tuple[float, float, float]:
    """Milliseconds by the clock, how busy the machine was, and milliseconds of processor time."""
    before = processor_ms(devtools)
    clock = page.evaluate(CLICK, number)
    return clock, slowdown(), processor_ms(devtools) - before


def open_page(board: Board, chromium: Any, address: str, bars: tuple[float | None, float | None]) -> None:
    paints, readable, drawn, clicks = [], [], [], []
    for number in range(OPENINGS):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.add_init_script(STAMPS)
        busy = slowdown()
        page.goto(address, wait_until="commit")
        page.wait_for_selector("body[data-drawn-at]", timeout=120_000)
        paints.append((page.evaluate(PAINT) / 1000, busy))
        readable.append((float(page.get_attribute("body", "data-words-at")) / 1000, busy))
        drawn.append((float(page.get_attribute("body", "data-drawn-at")) / 1000, busy))
        if number == OPENINGS - 1:
            page.wait_for_timeout(1000)
            devtools = context.new_cdp_session(page)
            devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
            clicks = [click(page, devtools, 5 * i + 1) for i in range(CLICKS)]
        context.close()
    paint_bar, click_bar = bars
    board.say_time("first paint", paints, "s", paint_bar)
    board.say_time("readable", readable, "s")
    board.say_time("drawn", drawn, "s")
    board.say_time("click to redraw", [(clock, busy) for clock, busy, _ in clicks], "ms", click_bar)
    board.say("click, processor time of the page", statistics.median(worked for *_, worked in clicks), "ms", click_bar)


def follow(board: Board, writer: RunWriter, numbers: Numbers, shape: Shape, folder: Path) -> None:
    """The live page's requests while the run grows."""
    from nanny.web.server import ServedRuns, Server

    server = Server("127.0.0.1", 0, ServedRuns(folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.port}/run/metrics.db/1/api"
    start = time.perf_counter()
    whole = urllib.request.urlopen(f"{address}/page").read()
    board.say("live page, data", len(whole) / 1e6, "MB")
    board.say("live page, time", time.perf_counter() - start, "s")
    last = shape.steps - 1
    for fresh in (1, 20, 200):
        for step in range(last + 1, last + 1 + fresh):
            add_step(writer, numbers, shape, step)
        writer.flush(timeout=60)
        start = time.perf_counter()
        body = urllib.request.urlopen(f"{address}/changes?since={last}").read()
        seconds = time.perf_counter() - start
        assert "reload" not in json.loads(body), "the change did not fit"
        board.say(f"live update of {fresh} steps, size", len(body) / 1e3, "kB", 100)
        board.say(f"live update of {fresh} steps, time", seconds * 1e3, "ms")
        last += fresh
    server.shutdown()
    server.server_close()


def main() -> int:
    board = Board()
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        for shape, report_bars, page_bars in (
            (USUAL, (None, None), (1.0, 100.0)),
            (WIDE, (None, None), (None, 200.0)),
            (LONG, (4.0, 500.0), (None, None)),
        ):
            place = Path(folder) / shape.name
            start = time.perf_counter()
            writer, numbers = record(place, shape)
            size = sum(file.stat().st_size for file in place.iterdir()) / 1e6
            print(f"{shape.name}: {shape.layers} layers x {shape.steps} steps, {size:.0f} MB on disk")
            print(f"  (recorded in {time.perf_counter() - start:.0f} s)", flush=True)
            page = Path(folder) / f"{shape.name}.html"
            write_report(board, writer.path, page, report_bars)
            if chromium is not None:
                open_page(board, chromium, page.as_uri(), page_bars)
            if shape is not WIDE:  # of so many layers the page asks for everything again when many steps are new
                follow(board, writer, numbers, shape, place)
            writer.close(timeout=60)
    print(f"{board.missed} missed" if board.missed else "all bars met")
    return 1 if board.missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
