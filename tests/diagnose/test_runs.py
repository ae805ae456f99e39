"""Diagnoses of real trainings: live, from the store, of a killed run, from the command line; and that looking changes nothing."""

from __future__ import annotations

import importlib
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from training import mlp, store_of, train

import nanny
from nanny import MixedPrecisionNanny, NannyError, NannyWarning, Severity, auto_diff
from nanny.cli import main as command
from nanny.diagnose.history import SiteHistory
from nanny.diagnose.knowledge import remedy_of
from nanny.diagnose.registry import all_causes
from nanny.diagnose.run import diagnose
from nanny.monitor.examiner import ExaminationPlan, Examiner
from nanny.monitor.watch import examine
from nanny.store import reader


class Area(nn.Module):
    """Two sides in pixels and their product, which passes 65,504."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.Linear(4, 2)
        self.head = nn.Linear(1, 1)
        nn.init.constant_(self.sides.bias, 400.0)

    def forward(self, x):
        return self.head(Product()(self.sides(x)) / 1e4)


class Product(nn.Module):
    def forward(self, sides):
        return sides[:, :1] * sides[:, 1:]


def scaled_loop(model: nn.Module, steps: int, watched: MixedPrecisionNanny | None, dtype=torch.float16) -> list[float]:
    """The usual loop; dropout and data from the global generator, so that a disturbed generator shows."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
    losses = []
    for i in range(steps):
        if watched is not None:
            watched.begin_step(i)
        x = torch.randn(8, 4)
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(x).float() - x[:, :1]).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        if watched is not None:
            watched.end_step()
    return losses


def noisy_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_examined_steps_change_neither_losses_nor_weights_nor_random_numbers(dtype):
    plain, watched = noisy_net(), noisy_net()
    alone = scaled_loop(plain, 6, None, dtype)
    state = torch.get_rng_state()
    with MixedPrecisionNanny(watched, output_dir=None, live=False, strict=True, examine="every") as monitor:
        seen = scaled_loop(watched, 6, monitor, dtype)
    assert len(monitor.evidence().examinations) == 6
    assert seen == alone
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched)))


def test_a_healthy_run_has_no_diagnosis():
    model = noisy_net()
    with MixedPrecisionNanny(model, output_dir=None, live=False, strict=True) as monitor:
        scaled_loop(model, 12, monitor)
    assert len(monitor.evidence().examinations) >= 3
    assert diagnose(monitor) == []


def diagnosed(folder: Path | None, steps: int = 6) -> tuple[MixedPrecisionNanny, list]:
    model = Area()
    with MixedPrecisionNanny(model, output_dir=folder, live=False, strict=True) as monitor:
        scaled_loop(model, steps, monitor)
    return monitor, diagnose(monitor)


def test_a_product_beyond_fp16_is_named_with_file_and_line(tmp_path):
    _, found = diagnosed(tmp_path)
    assert len(found) == 1
    best = found[0]
    assert best.cause == "product_overflow_fp16"
    assert best.precision_caused is True
    assert "test_runs.py:" in best.where
    assert any("65,504" in fact or "65504" in fact for fact in best.evidence)


def test_the_store_gives_the_same_diagnosis_as_the_live_run(tmp_path):
    monitor, live = diagnosed(tmp_path)
    assert diagnose(tmp_path) == live
    assert diagnose(str(store_of(tmp_path)), run=1) == live
    with reader.reading(store_of(tmp_path)) as db:
        stored = reader.examinations(db, 1)
    assert [e.step for e in stored] == [e.step for e in monitor.evidence().examinations]
    assert stored[0].first_bad == monitor.evidence().examinations[0].first_bad


def test_a_run_without_examinations_is_diagnosed_from_its_traces(tmp_path):
    model = Area()
    with MixedPrecisionNanny(model, output_dir=None, live=False, strict=True, examine="off") as monitor:
        scaled_loop(model, 6, monitor)
    assert monitor.evidence().examinations == ()
    best = diagnose(monitor)[0]
    assert best.family == "overflow"
    assert math.isclose(best.confidence, 0.8)  # less sure: nobody compared with FP32


def test_the_budget_is_said_in_two_words_only():
    with pytest.raises(NannyError, match="auto"):
        MixedPrecisionNanny(mlp(), output_dir=None, examine="always")


KILLED = """
import os, signal, sys
import torch
sys.path.insert(0, sys.argv[2])
from diagnose.test_runs import Area, scaled_loop
from nanny import MixedPrecisionNanny
model = Area()
monitor = MixedPrecisionNanny(model, output_dir=sys.argv[1], live=False)
scaled_loop(model, 6, monitor)
monitor.begin_step(6)
monitor._recording.writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_is_diagnosed_from_its_file(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run([sys.executable, script, tmp_path / "logs", Path(__file__).parents[1]], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = diagnose(tmp_path / "logs")
    assert [d.cause for d in found] == ["product_overflow_fp16"]


def test_the_command_prints_text_json_and_markdown_and_exits_with_1(tmp_path, capsys):
    diagnosed(tmp_path)
    assert command(["diagnose", "--db", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "product_overflow_fp16" in text
    assert "fix:" in text
    assert "nanny rule product_overflow_fp16" in text
    assert command(["--db", str(tmp_path), "diagnose", "--format", "json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["cause"] == "product_overflow_fp16"
    assert command(["diagnose", "--db", str(tmp_path), "--format", "markdown"]) == 1
    assert "## product_overflow_fp16" in capsys.readouterr().out


def test_the_remedy_is_told_in_chinese_if_asked_for(tmp_path, capsys):
    diagnosed(tmp_path)
    assert command(["diagnose", "--db", str(tmp_path), "--lang", "zh", "--format", "json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["remedy"] == remedy_of("product_overflow_fp16", "zh") != remedy_of("product_overflow_fp16", "en")


def test_the_command_says_that_a_healthy_run_is_healthy(tmp_path, capsys):
    train(mlp(), output_dir=tmp_path, steps=4)
    assert command(["diagnose", "--db", str(tmp_path)]) == 0
    assert "HEALTHY: no numerical trouble in 4 steps." in capsys.readouterr().out


def test_a_path_without_a_store_is_refused(tmp_path, capsys):
    assert command(["diagnose", "--db", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_examine_runs_a_step_function_and_tells_why_it_breaks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(8, 4))
        loss = (12 + out).exp().mean()  # in fp16, outside autocast
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    best = diagnose(examine(model, step, steps=2))[0]
    assert (best.cause, best.culprit, best.precision_caused) == ("exp_overflow_fp16", "op:exp", True)


def test_a_diff_report_can_be_diagnosed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[1].weight, 3e3)
    report = auto_diff(model, torch.ones(2, 4) * 20, "float16")
    best = diagnose(report)[0]
    assert (best.cause, best.culprit, best.precision_caused) == ("activation_overflow_fp16", "1", True)


def test_the_function_is_there_before_and_after_its_module_is_imported():
    assert callable(nanny.diagnose)
    importlib.import_module("nanny.diagnose")
    assert nanny.diagnose(MixedPrecisionNanny(mlp(), output_dir=None, live=False)) == []


def test_the_top_diagnosis_is_printed_while_the_run_goes_on_and_not_twice(capsys):
    model = Area()
    with MixedPrecisionNanny(model, output_dir=None) as monitor:
        scaled_loop(model, 6, monitor)
    err = capsys.readouterr().err
    assert err.count("diagnosis:") == 1
    assert "product_overflow_fp16" in err


def test_one_divergence_is_one_explosion_and_one_cause():
    torch.manual_seed(0)
    model = mlp(width=32, depth=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    with MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True) as monitor:
        for i in range(20):
            with monitor.step(i):
                x = torch.randn(16, 8)
                loss = (model(x) - x[:, :1]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    exploded = [f for f in monitor.findings if f.code == "GRAD_EXPLOSION" and f.severity is Severity.ERROR]
    assert len(exploded) == 1
    assert [(d.cause, d.precision_caused) for d in diagnose(monitor)] == [("lr_too_high", False)]


# which steps are examined


def test_the_first_steps_are_examined_then_at_growing_distance():
    plan, seen = ExaminationPlan(), []
    for position in range(40):
        if plan.wants(position, float(position), 0.01):
            seen.append(position)
            plan.count_done(position, 0.05)
    assert seen == [0, 1, 2, 5, 10, 21]
    assert {position % 3 for position in seen} == {0, 1, 2}


def test_examinations_beyond_the_first_seconds_must_be_earned():
    plan = ExaminationPlan()
    assert plan.wants(0, 0.0, None)
    plan.count_done(0, 80.0)  # a large model
    assert not any(plan.wants(position, 10.0 * position, 10.0) for position in range(1, 1000))
    assert plan.wants(2000, 20_000.0, 10.0)


def test_what_the_loss_scale_hid_is_looked_at_again_whatever_the_time():
    plan = ExaminationPlan()
    plan.count_done(0, 80.0, was_hidden=True)
    assert [p for p in range(1, 40) if plan.wants(p, 10.0 * p, 10.0)][:1] == [4]
    plan.count_done(4, 80.0)
    assert not any(plan.wants(position, 10.0 * position, 10.0) for position in range(5, 1000))


def test_a_short_second_step_is_looked_at_whatever_the_time():
    for seconds, wanted in ((2.0, True), (4.0, False)):
        plan = ExaminationPlan(at_once=0.0)
        plan.count_done(0, seconds)
        assert plan.wants(1, 0.1, 0.01) is wanted
        assert (plan.allowance(1, 0.1) >= 2 * seconds) is wanted


def test_a_scale_that_never_fits_is_not_looked_at_for_ever():
    plan = ExaminationPlan()
    seen = []
    for position in range(500):
        if plan.wants(position, 10.0 * position, 10.0):
            seen.append(position)
            plan.count_done(position, 80.0, was_hidden=True)
    assert seen == [0, 4, 20]


def test_suspicion_brings_an_examination_forward_a_few_times():
    plan = ExaminationPlan(count=1, _next=10_000)
    taken = 0
    for position in range(1, 20):
        plan.suspect()
        if plan.wants(position, 1.0, 0.001):
            taken += 1
            plan._next = 10_000
    assert 1 <= taken <= 6


def test_only_one_examination_is_open_in_a_process_and_none_stays_open():
    first, second = mlp(), mlp()
    one = MixedPrecisionNanny(first, output_dir=None, live=False, strict=True)
    two = MixedPrecisionNanny(second, output_dir=None, live=False, strict=True)
    one.begin_step(0)
    two.begin_step(0)
    first(torch.randn(2, 8)).sum().backward()
    two.end_step()
    one.end_step()
    two.close()
    one.close()
    assert not Examiner.turn.locked()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert len(one.evidence().examinations) + len(two.evidence().examinations) == 1


def test_an_exception_of_the_user_ends_the_examination():
    model = mlp()
    monitor = MixedPrecisionNanny(model, output_dir=None, live=False, strict=True)

    def dies() -> None:
        with monitor.step(0):
            model(torch.randn(2, 8))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        dies()
    assert not Examiner.turn.locked()
    monitor.close()


def test_an_examination_that_fails_ends_the_examinations_and_not_the_watching(monkeypatch):
    def broken(examination):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr("nanny.monitor.watch.judge", broken)
    model = Area()
    with MixedPrecisionNanny(model, output_dir=None, live=False) as monitor:
        scaled_loop(model, 4, monitor)
    assert monitor.evidence().examinations == ()
    assert monitor.evidence().facts.steps == 4
    assert any(f.code == "OVERFLOW" for f in monitor.findings)


def test_a_forward_pass_after_the_block_ends_the_examination():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    with monitor.step(0):
        model(torch.randn(2, 8)).sum().backward()
    assert Examiner.turn.locked()  # the optimizer is still to come
    optimizer.step()
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert not Examiner.turn.locked()
    monitor.close()


def test_a_fault_in_a_cause_reaches_neither_the_script_nor_its_exit_code(monkeypatch, tmp_path, capsys):
    def broken(signs):
        raise AttributeError("a bug of ours")

    nanny = MixedPrecisionNanny(mlp(), output_dir=tmp_path)
    with nanny.step(0):
        pass
    monkeypatch.setitem(all_causes(), "dead_relu", replace(all_causes()["dead_relu"], function=broken))
    with pytest.warns(NannyWarning, match="a bug of ours"):
        nanny.close()
    assert "nanny: next:" in capsys.readouterr().err


def test_parameters_that_come_later_have_an_empty_past():
    """A second stage trains an adapter: whoever asks first makes its columns."""
    history = SiteHistory(4)
    assert history.ring(("base.weight",)).shape == (4, 1)
    assert np.isnan(history.ring(("base.weight", "adapter.weight"))).all()
