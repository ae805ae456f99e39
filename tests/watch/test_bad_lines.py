"""The line of a loop that made a bad tensor, and that nobody notices who looks for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import run_command
from torch import Tensor, nn

from nanny import MixedPrecisionNanny
from nanny.watch.bad_lines import MakingLine, assignments_behind_backward


@torch.no_grad()
def assigned(scores: Tensor) -> Tensor:
    shares = torch.exp(scores / 0.05).t()
    return (shares / shares.sum()).t()


def backward(loss: Tensor) -> list[MakingLine]:
    """What is found by whoever is called with a loss."""
    assert loss.numel() == 1
    return list(assignments_behind_backward())


# no `assert` in the programs: pytest makes calls of `locals()` of them
def several_lines(unused: list[Tensor]) -> tuple[list[MakingLine], Tensor]:
    x = torch.linspace(-1, 1, 5)
    counts = torch.tensor([3, 1, 2, 0, 4])
    mask = torch.full((5,), float("-inf"))
    unused.append(torch.log(x))  # NaN
    rate, other = x / counts, mask + x
    rate = rate * 2
    total = rate.sum() + other.exp().sum()
    return backward(total), other


def test_the_earliest_line_that_made_a_bad_number_of_good_ones_is_named() -> None:
    (found,), other = several_lines([])
    assert (found.variable, found.source) == ("other", "rate, other = x / counts, mask + x")
    assert found.inputs.keys() == {"x", "counts", "mask"}
    first, second = found.as_module()(**found.inputs)
    assert not bool(first.isfinite().all())
    assert torch.equal(second, other)


def low_product() -> list[MakingLine]:
    weight = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        product = (weight @ weight) / 0
    return backward(product.sum())


def test_what_is_around_a_line_is_around_it_again() -> None:
    (made,) = low_product()
    again = made.as_module()(**made.inputs)
    assert (again.dtype, again.requires_grad) == (torch.bfloat16, False)


def looked_at(kept: list[weakref.ref[Any]]) -> Iterator[list[str]]:
    batch = torch.zeros(3)
    ratio = batch / batch
    kept.append(weakref.ref(ratio))
    found = [made.variable for made in backward(ratio.sum())]
    del ratio
    yield found


def test_a_variable_that_was_looked_at_ends_when_the_program_lets_it_go() -> None:
    kept: list[weakref.ref[Any]] = []
    running = looked_at(kept)
    assert next(running) == ["ratio"]
    gc.collect()
    assert kept[0]() is None


def with_locals() -> tuple[dict[str, Any], list[MakingLine]]:
    batch = torch.zeros(3)
    before = locals()
    ratio = batch / batch
    return before, backward(ratio.sum())


def test_what_locals_gave_to_a_program_is_not_touched() -> None:
    before, found = with_locals()
    assert found == []
    assert before.keys() == {"batch"}


class Assigner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def trained(low: bool) -> MixedPrecisionNanny:
    model = Assigner()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, examine="auto", trace_interval=10**9)
    batches = torch.randn(40, 16, 8)
    for i in range(40):
        with nanny.step(i):
            with torch.autocast("cpu", dtype=torch.float16, enabled=low):
                scores = model(batches[i]).float() * (0.1 if i < 33 else 1.0)
                wanted = assigned(scores.half() if low else scores)
            loss = -(wanted.float() * F.log_softmax(scores, -1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    nanny.close()
    return nanny


@pytest.mark.parametrize("low", [True, False])
def test_what_a_function_without_gradients_broke_is_told_with_its_operation_and_line(low: bool) -> None:
    torch.manual_seed(0)
    found = trained(low).diagnoses()
    if not low:
        assert not found
        return
    assert (found[0].cause, found[0].step, found[0].precision_caused) == ("exp_overflow_fp16", 33, True)
    assert found[0].source.startswith("shares = torch.exp(scores / 0.05).t()")


def two_in_a_row() -> list[MakingLine]:
    x = torch.linspace(-1, 1, 5)
    drawn = torch.rand(5)
    shifted = x.half() + drawn
    roots = (shifted - 2).sqrt()
    return backward(roots.sum())


def test_what_a_line_reads_is_done_again_before_it() -> None:
    (found,) = two_in_a_row()
    (source,) = found.sources  # `x` and `drawn` were made of no tensor
    assert source.variable == "shifted"
    assert torch.equal(source.as_module()(**source.inputs), source.result)


def teach(scale: float) -> MixedPrecisionNanny:
    """A student learns from the probabilities of a teacher, which are 0 in fp16 from step 30 on."""
    torch.manual_seed(0)
    teacher, model = nn.Linear(8, 16), nn.Linear(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, trace_interval=10**9)
    batches = torch.randn(40, 4, 8)
    for i in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                wanted = torch.softmax(teacher(batches[i]) * (scale if i >= 30 else 1.0), dim=-1)
            with nanny.step(i):
                said = torch.log_softmax(model(batches[i]), dim=-1)
                loss = (said.exp() * (said - wanted.log())).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    nanny.close()
    return nanny


def test_what_was_rounded_before_the_step_is_followed_to_the_line_that_made_it() -> None:
    assert not teach(2.0).diagnoses()
    first = teach(8.0).diagnoses()[0]
    assert (first.cause, first.step, first.precision_caused) == ("saturated_probability_loss", 30, True)
    assert first.source.startswith("loss = (said.exp() * (said - wanted.log()))")
    assert any(trial.change == "on_logits" and trial.outputs_finite for trial in first.tried)
    assert teach(40.0).diagnoses()[0].cause == "undefined_operation"  # in FP32 some of them are 0 as well


def test_statements_may_share_a_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(4):\n"
        "    x = torch.ones(8, 4)\n"
        "    weight = torch.log(x[:, :1] - 2)\n"
        "    loss = (model(x) * weight).mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    )
    run_command("nanny", "run", str(script), cwd=tmp_path)
    assert b"train.py:6" in run_command("nanny", "diagnose", cwd=tmp_path).stdout


class LogPower(nn.Module):
    """A front end whose eps is 0 in fp16."""

    def forward(self, wave: Tensor) -> Tensor:
        return torch.log(wave.square() @ torch.ones(8, 4) + 1e-10)


def listen() -> MixedPrecisionNanny:
    torch.manual_seed(0)
    front_end, model = LogPower(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, trace_interval=10**9)
    for i in range(4):
        wave = torch.zeros(6, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            features = front_end(wave)
            with nanny.step(i):
                loss = model(features).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    nanny.close()
    return nanny


def test_a_front_end_that_breaks_is_no_bad_batch() -> None:
    first = listen().diagnoses()[0]
    assert (first.cause, first.precision_caused) == ("eps_underflow_fp16", True)
    assert first.source.startswith("return torch.log(wave.square()")
