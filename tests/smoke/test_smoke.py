"""One pass over everything that touches torch, with nothing installed but torch, numpy, safetensors and pytest.

`make test-matrix` runs this folder alone on the oldest and the newest torch and on every Python that can be had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanny
from nanny import CompareWithCPU, MixedPrecisionNanny, NanInfTracker, NannyWarning, auto_diff, sanitize

pytestmark = pytest.mark.slow  # each part has its own tests; this is for other versions of torch and Python

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x * x * SIZE) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def _no_warning_of_ours() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NannyWarning)
        yield


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))


def _train(steps: int, dtype: torch.dtype, folder: Path | None = None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    watched = MixedPrecisionNanny(model, optimizer, scaler, output_dir=folder, live=False, **options) if options else None
    torch.manual_seed(1)
    for step in range(steps):
        if watched is not None:
            watched.begin_step(step)
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(4, (4,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        nn.utils.clip_grad_value_(model.parameters(), clip_value=0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if watched is not None:
            watched.end_step()
    if watched is not None:
        watched.close()
    return model.state_dict(), watched


def _nanny(*arguments: str, folder: Path, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(nanny.__file__).parents[1])}
    command = [sys.executable, "-m", "nanny", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", [n for n in nanny.__all__ if n != "__version__"])
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(nanny, name) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("examine", ["off", "every"])
def test_a_watched_training_has_the_same_bits(dtype: torch.dtype, examine: str, tmp_path: Path) -> None:
    plain, _ = _train(4, dtype)
    watched, monitor = _train(4, dtype, tmp_path, examine=examine, trace_interval=2)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert not [f for f in monitor.findings if f.severity > nanny.Severity.INFO]
    assert monitor.diagnoses() == []


def test_the_record_is_summarised_and_diagnosed(tmp_path: Path) -> None:
    _train(6, torch.bfloat16, tmp_path / "nanny_logs", trace_interval=2)
    assert json.loads(_nanny("summary", "--format", "json", folder=tmp_path))
    _nanny("diagnose", folder=tmp_path)
    _nanny("layer", "0", folder=tmp_path)


def test_an_overflow_is_explained_by_an_examined_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("SIZE", "1e38"))
    _nanny("run", "train.py", folder=tmp_path)
    assert "train.py:11" in _nanny("diagnose", folder=tmp_path, code=1)


def test_sanitize_follows_an_error_to_the_gradients() -> None:
    model = nn.Linear(8, 1)
    with sanitize(model) as seen, torch.autocast("cpu", torch.float16):
        model(torch.full((2, 8), 300.0) * 300).sum().backward()
    assert seen.examination.first_bad is not None


def test_traces_name_the_operation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("SIZE", "1"))
    for tool in ("--sanitize", "--compare", "--nan"):
        _nanny("trace", tool, "train.py", folder=tmp_path)
    with NanInfTracker() as tracker:
        torch.log(torch.tensor([-1.0]))
    assert tracker.faults
    with CompareWithCPU() as compared:
        torch.randn(4, 4) @ torch.randn(4, 4)
    assert not compared.faults


def test_diff_of_both_precisions() -> None:
    report = auto_diff(_model(), torch.randn(4, 8), torch.bfloat16)
    assert report.calls


def test_one_tensor_and_one_source_file(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1e-9, 1.0, 7e4])}, tmp_path / "w.pt")
    assert "fp16" in _nanny("tensor", "w.pt:w", "--dtype", "fp16", folder=tmp_path, code=1)
    (tmp_path / "train.py").write_text(SCRIPT.replace("SIZE", "1"))
    _nanny("check", "train.py", folder=tmp_path)
