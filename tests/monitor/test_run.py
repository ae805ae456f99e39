"""`nanny run`: an unmodified script keeps its arguments, output, exceptions and exit code, and its run is on record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanny.core.finding import Finding, Severity
from nanny.store import reader

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.act, self.head = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.act(self.encode(x)))

def main(amp, steps, blow_up):
    torch.manual_seed(0)
    model, loss_of = Net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=amp)
    for step in range(steps):
        if blow_up and step == 6:
            with torch.no_grad():
                model.head.weight.fill_(1e4)
        x = torch.randn(4, 8) * (50.0 if blow_up and step >= 6 else 1.0)
        with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
            loss = loss_of(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 8))
        model.train()
    print("weights", model.encode.weight.double().sum().item())

if __name__ == "__main__":
    print("argv", sys.argv[1:])
    main("--amp" in sys.argv, 12, "--blow-up" in sys.argv)
    if "--raise" in sys.argv:
        raise ValueError("of the script")
    sys.exit(7 if "--exit" in sys.argv else 0)
"""


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SCRIPT)
    return tmp_path


def findings(folder: Path) -> list[Finding]:
    with reader.reading(folder / "nanny_logs" / "metrics.db") as db:
        return reader.findings(db, reader.pick_run(db, None).id)


@pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.slow), pytest.param(("--amp",), marks=pytest.mark.slow)], ids=["plain", "scaler"]
)
def test_a_healthy_script_prints_and_returns_what_it_does_alone(folder, flags):
    alone = run(folder, "train.py", *flags, "--exit", "x y")
    watched = run(folder, "-m", "nanny.cli", "run", "train.py", *flags, "--exit", "x y")
    assert (watched.returncode, watched.stdout) == (7, alone.stdout)
    assert "nanny: HEALTHY: no numerical trouble in 12 steps" in watched.stderr
    assert [f for f in findings(folder) if f.severity > Severity.INFO] == []


@pytest.mark.slow
def test_every_step_of_the_script_is_recorded_under_its_own_number(folder):
    run(folder, "-m", "nanny.cli", "run", "--trace-interval", "5", "train.py", "--amp")
    with reader.reading(folder / "nanny_logs" / "metrics.db") as db:
        curves = reader.scalars(db, reader.pick_run(db, None).id)
        names = [site.name for site in reader.sites(db, reader.pick_run(db, None).id, "output")]
        row = reader.pick_run(db, None)
    assert curves["loss"][0].tolist() == list(range(12))
    assert curves["traced"][0].tolist() == [0, 5, 10]
    assert {"encode", "act", "head", "Net", "MSELoss()"} == set(names)
    assert (row.amp_dtype, row.argv, row.status) == ("float16", ("train.py", "--amp"), "finished")


@pytest.mark.slow
def test_an_overflow_in_an_unmodified_script_is_named(folder):
    done = run(folder, "-m", "nanny.cli", "run", "--trace-interval", "1", "train.py", "--amp", "--blow-up")
    first = next(f for f in findings(folder) if f.severity is Severity.ERROR)
    assert (first.code, first.site, first.step) == ("OVERFLOW", "head", 6)
    assert "OVERFLOW head" in done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_modules_run_like_python_dash_m(folder):
    alone = run(folder, "-m", "project.train", "--amp")
    watched = run(folder, "-m", "nanny.cli", "run", "-m", "project.train", "--amp")
    assert (watched.returncode, watched.stdout) == (0, alone.stdout)
    assert (folder / "nanny_logs" / "metrics.db").exists()


@pytest.mark.slow
def test_an_exception_of_the_script_reaches_the_user_and_the_record(folder):
    watched = run(folder, "-m", "nanny.cli", "run", "train.py", "--raise")
    assert watched.returncode == 1
    assert watched.stderr.rstrip().splitlines()[-1].startswith(("ValueError: of the script", "nanny: next"))
    assert "ValueError: of the script" in watched.stderr
    with reader.reading(folder / "nanny_logs" / "metrics.db") as db:
        assert reader.pick_run(db, None).status == "crashed"


@pytest.mark.slow
def test_disabled_it_is_only_the_script(folder):
    watched = run(folder, "-m", "nanny.cli", "run", "train.py", NANNY_DISABLE="1")
    assert watched.returncode == 0
    assert "nanny" not in watched.stderr
    assert not (folder / "nanny_logs").exists()


ACCUMULATING = """
import torch
from torch import nn
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(12):
    (model(torch.randn(2, 4)).square().mean() / 4).backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_micro_batches_belong_to_the_step_of_their_optimizer(folder):
    (folder / "accumulate.py").write_text(ACCUMULATING)
    run(folder, "-m", "nanny.cli", "run", "accumulate.py")
    with reader.reading(folder / "nanny_logs" / "metrics.db") as db:
        assert reader.scalars(db, 1)["loss"][0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs a script"),
        (("nothing.py",), "there is no script 'nothing.py'"),
        (("-m", __file__), "is a script, not a module; leave -m out"),
    ],
)
def test_a_missing_script_is_told_in_one_sentence(folder, arguments, said):
    done = run(folder, "-m", "nanny.cli", "run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
