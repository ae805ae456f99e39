"""What the code in sight decides alone is told loudly, and its message says what torch then does: the same programs are run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from nanny.check import Options, check_source
from nanny.core.finding import Severity

LOOP = """
import torch
from torch import nn

def train(batches):
    model = nn.Linear(4, 4)CAST
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
        BODY
"""
RAISES = {
    "step twice": (
        "SCALER_UNSCALE_TWICE",
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.step(optimizer)\nscaler.update()",
    ),
    "unscale twice": (
        "SCALER_UNSCALE_TWICE",
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.unscale_(optimizer)\nscaler.step(optimizer)\nscaler.update()",
    ),
    "unscale after step": (
        "SCALER_UNSCALE_TWICE",
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.unscale_(optimizer)\nscaler.update()",
    ),
    "no update": ("SCALER_UPDATE_MISSING", "scaler.scale(loss).backward()\nscaler.step(optimizer)"),
    "update before step": (
        "SCALER_UPDATE_MISPLACED",
        "scaler.scale(loss).backward()\nscaler.update()\nscaler.step(optimizer)",
    ),
    "nothing scaled": ("SCALER_BACKWARD_UNSCALED", "loss.backward()\nscaler.step(optimizer)\nscaler.update()"),
    "half weights": ("HALF_CALL", "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"),
}
QUIET = {
    "plain step": ("SCALER_STEP_BYPASSED", "scaler.scale(loss).backward()\noptimizer.step()\nscaler.update()"),
    "clip": (
        "SCALER_CLIP_BEFORE_UNSCALE",
        "scaler.scale(loss).backward()\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)\nscaler.update()",
    ),
}  # fmt: skip


def program(name: str, body: str) -> str:
    cast = ".half()" if name == "half weights" else ""
    return LOOP.replace("CAST", cast).replace("        BODY", textwrap.indent(body, " " * 8))


@pytest.mark.parametrize("name", [*RAISES, *QUIET])
def test_what_the_code_alone_decides_is_told_loudly(name: str):
    code, body = (RAISES | QUIET)[name]
    found = {f.code: f for f in check_source(program(name, body), "train.py", Options())}
    assert found[code].severity >= Severity.WARNING
    assert len(found[code].chain) >= 1


@pytest.mark.parametrize("name", RAISES)
def test_torch_raises_what_the_message_says(name: str):
    code, body = RAISES[name]
    text = program(name, body)
    message = next(f.message for f in check_source(text, "train.py", Options()) if f.code == code)
    scope: dict = {}
    exec(compile(text, "train.py", "exec"), scope)
    with pytest.raises((RuntimeError, AssertionError, ValueError)) as raised:
        scope["train"]([(torch.randn(2, 4), torch.randn(2, 4))] * 2)
    assert type(raised.value).__name__ in message


@pytest.mark.parametrize("name", ["step twice", "unscale twice", "unscale after step"])
def test_a_condition_of_its_own_leaves_it_open(name: str):
    code, body = RAISES[name]
    first, *rest = body.splitlines()
    middle = [f"if careful:\n    {line}" if n == 0 else f"if not quick:\n    {line}" for n, line in enumerate(rest[:-1])]
    text = program(name, "\n".join([first, *middle, rest[-1]])).replace(
        "def train(batches)", "def train(batches, careful, quick)"
    )
    found = {f.code: f.severity for f in check_source(text, "train.py", Options())}
    assert found.get(code, Severity.INFO) is Severity.INFO


@pytest.mark.parametrize("framework", ["accelerate", "lightning_manual"])
def test_a_step_after_a_plain_backward_raises_as_a_framework_in_fp16_asks_its_scaler(framework: str):
    text = (Path(__file__).parent / "fixtures" / "bad" / f"{framework}_plain_backward.py").read_text()
    message = next(f.message for f in check_source(text, "train.py", Options()) if f.code == "CONFIG_DOUBLE_SCALING")
    model, scaler = torch.nn.Linear(2, 2), torch.amp.GradScaler("cpu")  # what both frameworks step with
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "AssertionError" in message
