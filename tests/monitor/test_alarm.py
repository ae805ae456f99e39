"""The alarm: a command or a URL hears of findings, and of a trend before it ends, and never holds up a training."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from nanny import Finding, MixedPrecisionNanny, NannyError, Severity
from nanny.monitor.alarm import alarm

BAD = Finding("OVERFLOW", Severity.ERROR, "65,520 and more", site="head", step=3, value=float("inf"))


def wait_for(seen, seconds: float = 10.0):
    until = time.monotonic() + seconds
    while not seen() and time.monotonic() < until:
        time.sleep(0.01)
    return seen()


def test_a_command_gets_the_line_and_the_finding(tmp_path: Path) -> None:
    out = tmp_path / "heard.json"
    script = tmp_path / "bell.py"
    script.write_text(f"import sys\ntext = sys.argv[1] + '\\n' + sys.stdin.read()\nopen({str(out)!r}, 'w').write(text)\n")
    tell = alarm(f"{sys.executable} {script}")
    tell(Finding("STEP_SKIPPED", Severity.INFO, "a note"))  # nobody is woken for one
    tell(BAD)
    assert wait_for(lambda: out.exists() and out.read_text().count("\n"))
    line, _, body = out.read_text().partition("\n")
    assert line == "nanny: step 3 ERROR OVERFLOW head: 65,520 and more"
    assert (json.loads(body)["code"], json.loads(body)["value"]) == ("OVERFLOW", "Infinity")


def test_a_url_gets_the_finding_and_one_that_is_gone_is_told_once(capsys) -> None:
    heard: list[dict[str, object]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        tell = alarm(f"http://127.0.0.1:{server.server_port}/hook")
        tell(BAD)
        assert wait_for(lambda: heard)
    assert (heard[0]["code"], heard[0]["text"]) == ("OVERFLOW", "nanny: step 3 ERROR OVERFLOW head: 65,520 and more")
    tell(BAD)
    tell(BAD)
    said = []
    assert wait_for(lambda: said.append(capsys.readouterr().err) or any("failed" in text for text in said))
    time.sleep(0.05)
    assert "".join([*said, capsys.readouterr().err]).count("the run goes on") == 1


def test_a_command_that_is_not_there_is_refused_before_the_run() -> None:
    with pytest.raises(NannyError, match="no such command"):
        alarm("no-such-bell --loud")


@pytest.mark.slow
def test_growth_towards_the_end_of_fp16_is_told_before_it_arrives() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    heard: list[Finding] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(2, 4)
    with MixedPrecisionNanny(model, optimizer, trace_interval=2, output_dir=None, live=False, on_finding=heard.append) as nanny:
        for step in range(41):
            with torch.no_grad():
                model[0].weight.mul_(1.3)
            with nanny.step(step), torch.autocast("cpu", dtype=torch.float16):
                model(x).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    early = [finding for finding in heard if finding.code == "activation_overflow_fp16"]
    assert len(early) == 1, heard
    assert "nothing is lost yet" in early[0].message
    assert early[0].step is not None
    assert not any(finding.severity is Severity.ERROR and (finding.step or 0) <= early[0].step for finding in heard)


class Louder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bits = nn.Linear(8, 16), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2**self.bits


def grown(scaled: float, steps: int = 165) -> list[Finding]:
    """What the model gives doubles every ten steps, or stands still, at the default settings."""
    torch.manual_seed(0)
    model = Louder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=4096.0)
    heard: list[Finding] = []
    with MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, on_finding=heard.append) as nanny:
        for i in range(steps):
            x, model.bits = torch.randn(32, 8), scaled * i
            with nanny.step(i):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = nn.functional.layer_norm(model(x).float(), (16,))
                scaler.scale(out[:, 0].square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
    return heard


def test_between_two_traced_steps_growth_is_told_before_it_arrives():
    """The examined steps saw it: 16 bits in 150 steps, of which the default traces two."""
    heard = grown(scaled=0.1)
    early = [finding for finding in heard if finding.code == "activation_overflow_fp16"]
    assert len(early) == 1, heard
    assert "nothing is lost yet" in early[0].message
    broken = min(finding.step for finding in heard if finding.severity is Severity.ERROR and finding.step is not None)
    assert 10 <= broken - early[0].step < 40, (early, broken)


def test_what_stands_still_is_not_foretold():
    assert grown(scaled=0.0) == []
