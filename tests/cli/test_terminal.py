"""The commands on a real terminal of 80 columns: nothing is wrapped by it, colour is there, and long work tells how far it is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from runs.query_recordings import SICK, record

from nanny.core import terminal
from nanny.show.term import columns_of

COLUMNS = 80
COLOUR = re.compile(r"\x1b\[[\d;]*m")
COMMANDS = (
    "summary",
    "diagnose",
    "alerts",
    "stats --step 20",
    "layer head.softmax",
    "runs",
    "whatif --dtype bf16",
    "compare 1 2",
)


def on_terminal(folder: Path, *words: str) -> str:
    """What a person sees who types this."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "nanny.cli", *words]
    with subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm"}) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            said += part
        process.wait()
    os.close(ours)
    return said.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("terminal")
    long = {f"transformer.encoder.layer.{i}.attention.output.dense_projection": (0.0, -8.0) for i in range(20)}
    layers = {**SICK.layers, **long}
    record(top / "nanny_logs", replace(SICK, layers=layers))
    record(top / "nanny_logs", replace(SICK, layers=layers, seed=1, final_loss=0.9))
    return top


@pytest.mark.parametrize("lang", ["en", pytest.param("zh", marks=pytest.mark.slow)])
def test_at_80_columns_no_line_is_wider_and_the_verdict_has_colour(lang, folder):
    for command in COMMANDS:
        said = on_terminal(folder, *command.split(), "--lang", lang)
        lines = COLOUR.sub("", said).split("\n")
        assert len(lines) > 4, command
        assert [line for line in lines if columns_of(line) > COLUMNS] == [], command
        if command in ("summary", "diagnose"):
            assert "\x1b[31;1m" in said, command


class Screen(list):
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.append(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("report -o r.html", "output: "),
        ("export --format csv -o out", "scalars.csv: "),
        ("check --no-cache --jobs 1 code", "/30 "),
    ],
)
def test_long_work_tells_how_far_it_is_on_a_terminal_and_leaves_nothing_behind(command, told, folder, monkeypatch):
    from nanny.cli import main

    (folder / "code").mkdir(exist_ok=True)
    for i in range(30):
        (folder / "code" / f"m{i}.py").write_text("import torch\nx = torch.zeros(3).half()\n" * 20)
    record(folder / "nanny_logs", replace(SICK, steps=600))
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "PROGRESS_SECONDS", 0.0)
    monkeypatch.chdir(folder)
    assert main(command.split()) in (0, 1)
    lines = [text for text in screen if text.startswith("\r\x1b[K")]
    assert any(told in line for line in lines)
    assert lines[-1] == "\r\x1b[K"


def test_no_progress_is_told_to_a_file(capsys):
    with terminal.progress_shown():
        terminal.progress("1/2 layers")
    terminal.progress("2/2 layers")
    assert capsys.readouterr().err == ""
