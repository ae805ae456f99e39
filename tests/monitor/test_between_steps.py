"""What a loop does between two steps that nobody framed: the next batch is made, and its own lines may be what broke."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

POSITIONS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
bands = 2.0 ** torch.arange(8)
encode = lambda x: torch.cat([(x * bands * 6.2832).sin(), (x * bands * 6.2832).cos()], 1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model

    def forward(self, x):
        return self.net(encode(x.float()))


field = Field()
for step in range(40):
    place = torch.randint(0, 2048, (64, 1)) / 2048
    given = place.to(torch.bfloat16)FAULT
    loss = nn.functional.mse_loss(field(given), torch.sin(6.2832 * 128 * place))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ADVANTAGE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    count = 1 if step == 12 else 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(torch.randn(count, 4))
    returns = torch.randn(count)
    advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = -(scores.float().log_softmax(-1)[:, 0] * advantage).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

TABLE = """
import torch
from torch import nn

torch.manual_seed(0)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("left", torch.cumprod(1 - torch.linspace(1e-4, 0.09, 400), 0))
        self.net = nn.Linear(4, 4)

    def forward(self, x, t):
        left = self.left[t].unsqueeze(1)
        return ((x - (1 - left).sqrt() * self.net(x)) / left.sqrt()).clamp(-2, 2)


model = Noise().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    loss = model(torch.randn(32, 4).half(), torch.randint(0, 400, (32,))).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

UNCLEARED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
    optimizer.step(lambda: None)
"""

ENCODER = """
import torch
from torch import nn

torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        wide = self.second(self.first(x).relu() * 400)
        mean = (wide - wide.mean(-1, keepdim=True)) / wide.std(-1, keepdim=True)
        return mean + 0.1 * torch.randn_like(mean)


encoder, model = Encoder().requires_grad_(False).eval(), nn.Linear(16, 1)
encoder.second.weight.data *= 2000
encoder.to(FORMAT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    CLEARED
    pictures = torch.randn(32, 16)
    with torch.no_grad():
        latents = encoder(pictures.to(FORMAT)).float()
    loss = model(latents).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

DISTANCES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def spread(out):
    first, second = torch.triu_indices(len(out), len(out), 1)
    return (out[first] - out[second]).float().square().sum(-1).sqrt().mean()


for step in range(45):
    x = torch.randn(8, 8)
    if step == 37:
        x[1] = x[0] + NEAR
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = (spread(out) - 1).abs()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

AVERAGED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
shadow = [p.detach().to(FORMAT) for p in model.parameters()]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(model(x), x[:, :1].sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for average, p in zip(shadow, model.parameters()):
            average.sub_(0.002 * (average - p.to(FORMAT)))
"""

TWO_PARTS = """
import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(8, 8), nn.Linear(8, 3)
both = nn.Sequential(encoder, nn.Tanh(), head)
first, second = torch.optim.SGD(encoder.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(30):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(both(x).float(), x[:, :3].argmax(-1))
    first.zero_grad()
    second.zero_grad()
    scaler.scale(loss).backward()
    UNSCALED
    scaler.unscale_(second)
    nn.utils.clip_grad_norm_(both.parameters(), 1.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
"""

COMPILED = """
import torch
from torch import nn

torch.manual_seed(0)
hours = torch.arange(4096)
daily = torch.randn(24)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freq", 2 * torch.pi * torch.arange(1, 13) / 24)
        self.net = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, hour):
        angle = hour.unsqueeze(-1) * self.freq
        return self.net(torch.cat([angle.sin(), angle.cos()], -1)).squeeze(-1)


model = Waves()
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(30):
    hour = torch.randint(0, 4096, (64,))
    given = hour.to(FORMAT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(compiled(given).float(), daily[hour % 24])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

THROWN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(128, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
for step in range(60):
    x = torch.randint(0, 64, (32, 4), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x).float(), (x.sum(-1) // 16) % 16)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def said_of(program: str, folder: Path) -> dict[str, Any]:
    (folder / "train.py").write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def nanny(*words: str) -> str:
        command = [sys.executable, "-m", "nanny", *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300).stdout

    nanny("run", "train.py")
    found: dict[str, Any] = json.loads(nanny("summary", "--format", "json"))["diagnosis"] or {}
    return found


@pytest.mark.landing
def test_a_batch_that_is_rounded_before_its_step_is_compared_with_what_it_was(tmp_path: Path) -> None:
    found = said_of(POSITIONS.replace("FAULT", ""), tmp_path)
    assert found["cause"] == "position_precision_loss"
    assert found["precision_caused"] is True


@pytest.mark.slow
def test_one_that_is_not_rounded_is_no_fault(tmp_path: Path) -> None:
    assert said_of(POSITIONS.replace("FAULT", ".float() * 0 + place"), tmp_path) == {}


@pytest.mark.landing
def test_the_line_of_the_loop_that_made_nan_without_gradients_is_named(tmp_path: Path) -> None:
    found = said_of(ADVANTAGE, tmp_path)
    assert (found["cause"], found["culprit"], found["step"]) == ("undefined_operation", "op:std", 12)
    assert "returns.std()" in found["source"]
    assert found["precision_caused"] is False


@pytest.mark.slow
def test_a_table_that_half_has_emptied_is_not_said_to_be_so_in_fp32(tmp_path: Path) -> None:
    found = said_of(TABLE, tmp_path)
    assert (found["cause"], found["precision_caused"]) == ("constant_out_of_range", True)


@pytest.mark.slow
def test_a_closure_that_does_nothing_hides_no_gradient_that_is_never_cleared(tmp_path: Path) -> None:
    assert said_of(UNCLEARED, tmp_path)["cause"] == "gradient_never_cleared"


@pytest.mark.slow
@pytest.mark.parametrize("cleared", ["pass", "optimizer.zero_grad()"])
def test_an_encoder_that_is_not_trained_and_overflows_is_named_and_not_the_data(tmp_path: Path, cleared: str) -> None:
    """What it draws makes its line another one each time, so it cannot be made again: the next step's is looked at as it runs."""
    found = said_of(ENCODER.replace("FORMAT", "torch.float16").replace("CLEARED", cleared), tmp_path)
    assert (found["cause"], found["precision_caused"]) == ("activation_overflow_fp16", True)
    assert "self.second" in found["source"]


@pytest.mark.slow
def test_the_same_encoder_in_bf16_is_no_fault(tmp_path: Path) -> None:
    assert said_of(ENCODER.replace("FORMAT", "torch.bfloat16").replace("CLEARED", "pass"), tmp_path) == {}


@pytest.mark.landing
@pytest.mark.parametrize(
    ("near", "cause", "culprit", "precision"),
    [("1e-4", "catastrophic_cancellation", "op:sub", True), ("0.0", "singular_gradient", "op:sqrt", False)],
)
def test_a_derivative_in_the_loops_own_lines_is_explained_at_the_step_where_it_breaks(
    tmp_path: Path, near: str, cause: str, culprit: str, precision: bool
) -> None:
    """Loss and forward are finite: the lines that made the loss are made again, and differentiated beside FP32."""
    found = said_of(DISTANCES.replace("NEAR", near), tmp_path)
    assert (found["cause"], found["culprit"], found["step"]) == (cause, culprit, 37)
    assert (found["precision_caused"], found["confidence"]) == (precision, 0.95)
    assert "sqrt()" in found["source"]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "cause"), [("torch.bfloat16", "ema_stagnation"), ("torch.float32", "")])
def test_an_average_behind_zero_grad_is_seen(tmp_path: Path, form: str, cause: str) -> None:
    assert said_of(AVERAGED.replace("FORMAT", form), tmp_path).get("cause", "") == cause


@pytest.mark.landing
@pytest.mark.parametrize(("unscaled", "cause"), [("pass", "clip_before_unscale"), ("scaler.unscale_(first)", "")])
def test_one_of_two_optimizers_not_unscaled_before_both_are_clipped(tmp_path: Path, unscaled: str, cause: str) -> None:
    assert said_of(TWO_PARTS.replace("UNSCALED", unscaled), tmp_path).get("cause", "") == cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "causes"), [("torch.bfloat16", {"position_precision_loss", "integer_in_low_precision"}), ("torch.float32", {""})]
)
def test_what_a_compiled_model_is_given_is_compared_with_what_it_was(tmp_path: Path, form: str, causes: set[str]) -> None:
    assert said_of(COMPILED.replace("FORMAT", form), tmp_path).get("cause", "") in causes


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "cause"), [("3.0", "lr_too_high"), ("3e-3", "")])
def test_first_updates_that_replace_the_weights(tmp_path: Path, rate: str, cause: str) -> None:
    assert said_of(THROWN.replace("RATE", rate), tmp_path).get("cause", "") == cause
