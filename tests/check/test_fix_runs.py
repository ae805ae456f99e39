"""Fixed programs are run: what raised, overflowed or did not learn before the fix is right after it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nanny.check.config import Config
from nanny.check.files import check_paths
from nanny.check.fix import fix_all


def fixed(tmp_path: Path, text: str, code: str, unsafe: bool = False) -> str:
    """The text without the findings of this code, and with all others that it had."""
    path = tmp_path / "program.py"
    path.write_text(text)

    def check(texts):
        return check_paths([str(path)], Config(select=("",)), 1, texts=texts)

    before = {f.code for f in check({}).findings}
    assert code in before
    done = fix_all(check, [str(path)], unsafe)
    assert {f.code for f in done.report.findings} == before - {code}
    return done.texts[str(path)]


def run(text: str, *args: Any) -> Any:
    """What the program's `main` gives back."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), names)
    return names["main"](*args)


TRAINING = """\
import torch
from torch import nn


def main():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(16, 4)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
            loss = nn.functional.mse_loss(pred, y)
        scaler.scale(loss).backward()
{}
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses
"""


def test_gradients_are_clipped_after_unscaling_and_the_loss_follows_the_real_gradient(tmp_path):
    clip = "        nn.utils.clip_grad_value_(model.parameters(), 0.05)  # per element"
    text = TRAINING.format(clip)
    new = fixed(tmp_path, text, "SCALER_CLIP_BEFORE_UNSCALE")
    broken, right = run(text), run(new)
    without = run(TRAINING.format(""))
    assert broken[-1] > 0.9 * broken[0], "clipped at 0.05 of a gradient that is 65536 times too large"
    assert right[-1] < 0.8 * right[0]
    assert without[-1] < right[-1]


def test_noise_is_added_to_gradients_that_are_no_longer_scaled(tmp_path):
    noise = "        for p in model.parameters():\n            p.grad.add_(torch.ones_like(p.grad))"
    text = TRAINING.replace("return losses", "return losses, model.bias.item()").format(noise)
    new = fixed(tmp_path, text, "SCALER_GRADS_STILL_SCALED")
    assert run(new)[1] < -0.2 < run(text)[1], "a gradient of 1 more at every step moves the bias far"


CHECKPOINT = """\
import torch
from torch import nn


class Run:
    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)

    def step(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.model(x).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, path):
        state = {  # all of it
            "model": self.model.state_dict(),
            'optimizer_state': self.optimizer.state_dict(),  # with momentum
        }
        torch.save(state, path)

    def load(self, path):
        blob = torch.load(path)
        self.optimizer.load_state_dict(blob['optimizer_state'])
        self.model.load_state_dict(blob["model"])


def main(path):
    first, second = Run(), Run()
    for _ in range(3):
        first.step(torch.randn(4, 2))
    first.save(path)
    second.load(path)
    return first.scaler.get_scale(), second.scaler.get_scale()
"""


def test_the_scale_survives_a_checkpoint_and_an_old_checkpoint_can_still_be_loaded(tmp_path):
    new = fixed(tmp_path, CHECKPOINT, "SCALER_NOT_SAVED")
    assert run(CHECKPOINT, tmp_path / "old.pt") == (2.0**13, 2.0**10)
    assert run(new, tmp_path / "new.pt") == (2.0**13, 2.0**13)
    assert "'scaler_state': self.scaler.state_dict()" in new
    names: dict[str, Any] = {"__name__": "program"}
    exec(new, names)
    resumed = names["Run"]()
    resumed.load(tmp_path / "old.pt")
    assert resumed.scaler.get_scale() == 2.0**10


HELPER = """\
import torch


def save(path, model, optimizer, note=""):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "note": note}, path)


def main(path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(4, 2)).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    save(path, model, optimizer)
    return torch.load(path)
"""


def test_a_function_that_saves_gets_the_scaler_and_may_be_called_without(tmp_path):
    new = fixed(tmp_path, HELPER, "SCALER_NOT_SAVED")
    assert run(new, tmp_path / "new.pt")["scaler"]["scale"] == 2.0**10
    names: dict[str, Any] = {"__name__": "program"}
    exec(new, names)
    model = torch.nn.Linear(2, 1)
    names["save"](tmp_path / "other.pt", model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.load(tmp_path / "other.pt")["scaler"] is None


LOSS = """\
import torch
import torch.nn.functional as F


def main():
    model = torch.nn.Linear(8, 3)
    x, y = torch.randn(16, 8), torch.arange(16) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu")
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)

        # how far off
        loss = F.cross_entropy(  # in two lines
            logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.detach())
    return seen
"""


@pytest.mark.parametrize("between", ["", "        x = x + 0\n"], ids=["moved into the block", "cast where it is"])
def test_the_loss_is_computed_in_float32_and_falls(tmp_path, between):
    text = LOSS.replace("        # how far off\n", f"{between}        # how far off\n")
    new = fixed(tmp_path, text, "REGION_LOSS_OUTSIDE")
    assert run(text)[0].dtype == torch.float16
    seen = run(new)
    assert seen[0].dtype == torch.float32
    assert seen[-1] < 0.9 * seen[0]
    assert ("logits.float()" in new) == bool(between)


ATTENTION = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        scores = self.q(x) @ x.transpose(1, 2)
{}
        return weights @ self.v(x)


def main():
    with torch.autocast("cpu", dtype=torch.{}):
        return Attention()(torch.randn(2, 3, 4), torch.eye(3, dtype=torch.bool))
"""


def test_a_softmax_under_autocast_runs_in_float32_and_the_product_after_it_still_works(tmp_path):
    text = ATTENTION.format("        weights = scores.softmax(dim=-1)", "bfloat16")
    new = fixed(tmp_path, text, "NUM_SOFTMAX_HALF")
    assert "scores.float().softmax(dim=-1)" in new
    assert torch.allclose(run(new).float(), run(text).float(), atol=2e-2)


def test_a_mask_constant_that_raised_masks(tmp_path):
    lines = "        scores = scores.masked_fill(mask, -1e9)\n        weights = scores.float().softmax(-1)"
    text = ATTENTION.format(lines, "float16")
    with pytest.raises(RuntimeError, match="cannot be converted"):
        run(text)
    assert run(fixed(tmp_path, text, "NUM_MASK_CONSTANT")).isfinite().all()


BCE = """\
import torch
import torch.nn.functional as F
from torch import nn


def main(logits, target):
    criterion = nn.BCELoss(reduction="sum")
    with torch.autocast("cuda"):
        return {}
"""


@pytest.mark.parametrize("loss", ["F.binary_cross_entropy(torch.sigmoid(logits), target)", "criterion(logits.sigmoid(), target)"])
def test_binary_cross_entropy_takes_logits_and_has_the_same_value(tmp_path, loss):
    text = BCE.format(loss)
    new = fixed(tmp_path, text, "REGION_BCE")
    logits, target = torch.linspace(-3, 3, 7), torch.tensor([0.0, 1, 0, 1, 0, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no CUDA here: autocast says that it is off
        assert torch.allclose(run(new, logits, target), run(text, logits, target))
        assert run(new, logits * 100, target).isfinite()
    assert "sigmoid(" not in new


def test_the_new_names_run_without_a_warning(tmp_path):
    text = """\
import torch
from torch.cpu.amp import autocast, GradScaler


def main():
    scaler = GradScaler(2.0**8, enabled=True)
    with autocast(True, torch.bfloat16):
        y = torch.ones(2, 2) @ torch.ones(2, 2)
    return y.dtype, scaler.get_scale(), isinstance(scaler, GradScaler)
"""
    new = fixed(tmp_path, text, "REGION_DEPRECATED")
    with pytest.warns(FutureWarning):
        old = run(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(new) == old == (torch.bfloat16, 256.0, True)


FORMULAS = {
    "NUM_EPS_UNDERFLOW": "x / (x.std(1, keepdim=True) + 1e-8)",
    "NUM_REDUCE_HALF": "(x * x).sum()",
    "NUM_EXP_HALF": "torch.exp(x)",
    "NUM_LOG_OF_SOFTMAX": "torch.log(torch.softmax(x, -1))",
    "NUM_LOG_OF_SIGMOID": "torch.log(1 - torch.sigmoid(x))",
    "NUM_LOGSUMEXP": "x.exp().sum(-1).log()",
}
FORMULA = """\
import torch


def main():
    x = torch.tensor([[300.0, 300.0], [0.0, 30.0]]).half()
    return {}
"""


@pytest.mark.parametrize("code", FORMULAS)
def test_a_formula_that_overflows_in_half_is_finite_in_float32(tmp_path, code):
    scaled = FORMULAS[code] if code != "NUM_EXP_HALF" else "torch.exp(0.1 * x)"
    text = FORMULA.format(scaled)
    assert not run(text).isfinite().all()
    new = fixed(tmp_path, text, code, unsafe=True)
    if code == "NUM_EPS_UNDERFLOW":
        assert "x / (x.float().std(1, keepdim=True) + 1e-8)" in new
    assert run(new).isfinite().all()
    assert run(new).dtype == torch.float32


RAISING = {
    "NUM_INDEXED_WRITE": "out = torch.zeros(3, 2)\n    out[torch.tensor([0, 2])] = x\n    return out",
    "NUM_UNSUPPORTED_OP": "return torch.quantile(x, 0.5)",
}


@pytest.mark.parametrize("code", RAISING)
def test_what_raised_runs(tmp_path, code):
    text = f"import torch\n\n\ndef main():\n    x = torch.ones(2, 2).half()\n    {RAISING[code]}\n"
    with pytest.raises(RuntimeError):
        run(text)
    assert run(fixed(tmp_path, text, code)).dtype == torch.float32


def test_a_second_step_is_possible_once_update_is_called(tmp_path):
    text = TRAINING.format("").replace("        scaler.update()\n", "")
    with pytest.raises(RuntimeError, match="since the last update"):
        run(text)
    losses = run(fixed(tmp_path, text, "SCALER_UPDATE_MISSING"))
    assert losses[-1] < 0.1 * losses[0]
