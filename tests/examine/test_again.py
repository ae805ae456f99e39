"""A forward pass made again beside FP32: what it tells, and that nobody notices."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanny
from nanny.examine.again import Again, NotAgain, examine_again
from nanny.examine.hazards import judge
from nanny.monitor.examiner import ExaminationPlan
from nanny.watch import memory
from nanny.watch.calls import ModelCalls
from nanny.watch.effects import no_effects


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls: list[int] = []

    def forward(self, x: Tensor, *, size: float = 1.0) -> Tensor:
        self.calls.append(len(self.calls))
        self.seen += 1
        h = self.drop(self.norm(self.first(x)))
        h = h * size
        return self.head(h * h)


def _everything(model: Net) -> list[Any]:
    tensors = [(t.clone(), t._version) for t in (*model.parameters(), *model.buffers())]
    return [tensors, list(model.calls), torch.get_rng_state(), [p.grad for p in model.parameters()], dict(vars(Net))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other))
    return bool(one == other)


def test_the_first_bad_operation_is_named_and_nothing_changes() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 8)
    calls = ModelCalls([model]).open()
    with torch.autocast("cpu", torch.float16):
        out = model(x, size=300.0)
    before = _everything(model)
    examination = judge(examine_again(calls.made, [(model, "")], step=4))
    assert _same(before, _everything(model))
    calls.close()
    out.sum().backward()  # the graph is whole
    bad = examination.first_bad
    assert bad is not None
    assert (bad.op, examination.step) == ("mul", 4)
    assert bad.place.file.endswith("test_again.py")
    assert "other_bits" not in examination.facts
    assert bad.place.source.splitlines()[0] == "return self.head(h * h)"
    ran, wide = bad.exponents["ran"], bad.exponents["fp32"]
    assert ran["nonfinite"] == sum(count for order, count in wide.items() if order.isdecimal() and int(order) >= 16) > 0
    assert sum(ran.values()) == sum(wide.values()) == 6 * 16
    assert "nonfinite" not in wide


class SlowTwin(nn.Module):
    """Its forward moves a second set of weights by giving it other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        out = self.fast(x) - self.slow(x)
        self.mean.data = out.detach().mean(0)
        return out


def test_what_a_forward_gives_other_memory_has_its_own_again() -> None:
    torch.manual_seed(0)
    model = SlowTwin()
    calls = ModelCalls([model]).open()
    out = model(torch.randn(6, 8))
    before = [(t.clone(), t.data_ptr(), t._version) for t in (*model.parameters(), *model.buffers())]
    examine_again(calls.made, [(model, "")], 0)
    assert _same(before, [(t, t.data_ptr(), t._version) for t in (*model.parameters(), *model.buffers())])
    calls.close()
    out.sum().backward()


def test_a_second_run_ends_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is enough when the run begins: what it makes itself is what is missing then."""
    model = nn.Sequential(nn.Linear(8, 2048), nn.GELU(), nn.Linear(2048, 8))
    calls = ModelCalls([model]).open()
    out = model(torch.randn(4096, 8))
    looks = iter([memory.ENOUGH] + [memory.ENOUGH // 2] * 50)
    monkeypatch.setattr(memory, "free_bytes", lambda device: next(looks))
    with pytest.raises(NotAgain, match="64 MiB of memory are free"):
        Again(calls.made).run()
    calls.close()
    out.sum().backward()


def test_dropout_draws_the_same_numbers_again() -> None:
    torch.manual_seed(0)
    model = Net()
    calls = ModelCalls([model]).open()
    kept = model(torch.randn(6, 8))
    made = tuple(calls.made)
    assert "other_bits" not in examine_again(made, [(model, "")], 0).facts
    kept.detach().numpy()[0] += 1  # as if the first run had given something else
    assert examine_again(made, [(model, "")], 0).facts["other_bits"]
    calls.close()


def _written_over(model: Net, calls: ModelCalls) -> None:
    x = torch.randn(6, 8)
    model(x)
    x.zero_()


def _with_hook(model: Net, calls: ModelCalls) -> None:
    model.head.register_forward_hook(lambda *_: None)
    model(torch.randn(6, 8))


def _never_called(model: Net, calls: ModelCalls) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(6, 8))


class AsksItsCaller(nn.Module):
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return x * self.look().f_back.f_locals.get("factor", 1)


def _by_getframe(model: Net, calls: ModelCalls) -> None:
    model.head = nn.Sequential(model.head, AsksItsCaller(lambda: sys._getframe(1)))
    model(torch.randn(6, 8))


def _by_inspect(model: Net, calls: ModelCalls) -> None:
    model.head = nn.Sequential(model.head, AsksItsCaller(lambda: inspect.currentframe().f_back))  # type: ignore[union-attr]
    model(torch.randn(6, 8))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (_written_over, "written over"),
        (_with_hook, "hooks"),
        (_never_called, "no call"),
        (_by_getframe, "looks at who calls it"),
        (_by_inspect, "looks at who calls it"),
    ],
    ids=["inputs", "hooks", "evaluation", "getframe", "inspect"],
)
def test_what_cannot_be_made_again_is_left_alone(act: Any, why: str) -> None:
    model = Net()
    calls = ModelCalls([model]).open()
    act(model, calls)
    with pytest.raises(NotAgain, match=why):
        examine_again(calls.made, [(model, "")], 0)
    calls.close()


def test_garbage_of_before_is_neither_collected_within_a_second_run_nor_cut_off() -> None:
    """Its finalizers may do what a second run may not, and when Python looks for garbage is a matter of luck."""

    def forget_a_folder() -> Path:
        class Holder:
            pass

        holder = Holder()
        holder.me, holder.folder = holder, tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
        return Path(holder.folder.name)  # type: ignore[attr-defined]

    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(300)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            folder = forget_a_folder()
            with no_effects(set()):
                many = [[i] for i in range(10_000)]
            assert folder.exists()
            del many
            gc.collect()
            assert not folder.exists()
    finally:
        gc.set_threshold(*before)


class CatchesAll(nn.Module):
    """Whatever its operator raises, it goes on without."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.layer, self.operator = nn.Linear(8, 1), operator

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        try:
            return h + self.operator(h)
        except Exception:  # noqa: BLE001
            return h


def test_a_second_run_is_stopped_although_the_program_s_code_catches_what_stops_it() -> None:
    counted: list[int] = []
    library = torch.library.Library("nanny_test_again", "DEF")
    library.define("count(Tensor x) -> Tensor")
    library.impl("count", lambda x: counted.append(1) or x.clone(), "CompositeExplicitAutograd")
    model = CatchesAll(torch.ops.nanny_test_again.count)
    calls = ModelCalls([model]).open()
    model(torch.randn(6, 8))
    with pytest.raises(NotAgain, match="may do more than compute"):
        examine_again(calls.made, [(model, "")], 0)
    calls.close()
    assert counted == [1]


def test_the_class_is_as_it_was_once_nobody_listens() -> None:
    before = dict(vars(Net))
    first, second, model = ModelCalls([Net()]), ModelCalls([Net()]), Net()
    first.open(), second.open()
    copy.deepcopy(model)(torch.randn(2, 8))
    pickle.loads(pickle.dumps(model))
    first.close()
    assert vars(Net)["__call__"] is not None
    second.close()
    assert dict(vars(Net)) == before


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)

    def forward(self, x, floor):
        h = self.drop(torch.tanh(self.first(x)))
        h = torch.log(h + floor)
        return self.head(h)


model = Score()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(30):
    loss = model(torch.randn(16, 8), floor=2.0 if step < 23 else 0.5).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), torch.randn(1).item(), [p.sum().item() for p in model.parameters()])
"""


@pytest.mark.parametrize(
    "framed", [pytest.param(framed, marks=pytest.mark.slow) for framed in (False, True)], ids=["nanny run", "nanny.step"]
)
def test_a_step_nobody_had_planned_to_look_at_is_explained(tmp_path: Path, framed: bool) -> None:
    code = SCRIPT
    if framed:
        code = code.replace("for step", "import nanny\nn = nanny.MixedPrecisionNanny(model, optimizer)\nfor step").replace(
            "    loss = model", "    n.begin_step(step)\n    loss = model"
        )
        code = code.replace("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    n.end_step()\n") + "n.close()\n"
    (tmp_path / "plain.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(nanny.__file__).parents[1])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    watched = run("train.py") if framed else run("-m", "nanny", "run", "train.py")
    assert watched.stdout == run("plain.py").stdout, watched.stderr
    line = code.splitlines().index("        h = torch.log(h + floor)") + 1
    assert f"undefined_operation in op:log at step 23 (train.py:{line}), 95 % sure" in watched.stderr


def test_a_loss_outside_the_model_on_outputs_that_low_precision_saturates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watched = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    for step in range(30):
        with watched.step(step):
            x = torch.ones(8, 4) * (10.0 if step == 23 else 1.0) * model[0].weight.detach().sign()
            with torch.autocast("cpu", torch.bfloat16):
                p = model(x)
            loss = -(1 - p).log().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    watched.close()
    (found,) = watched.diagnoses()
    assert (found.cause, found.step, found.precision_caused) == ("saturated_probability_loss", 23, True)


def test_why_a_bad_step_was_not_run_again_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watched = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, examine="auto", strict=True)
    for step in range(24):
        with watched.step(step):
            out = model(torch.ones(2, 4))
            (out.sum() * (math.inf if step == 23 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    watched.close()
    (found,) = watched.diagnoses()
    assert found.confidence < 0.7
    told = capsys.readouterr().err
    assert "not run again beside FP32: the model has hooks" in told
    assert "to see it: nanny trace --sanitize --start-step 23 " in told


def _many(x: Tensor) -> Tensor:
    for _ in range(100):
        x = x * 1.01
    return x


@pytest.mark.parametrize("calls_follow", [False, True])
def test_an_examination_that_ran_out_of_time_does_not_leave_the_step_unexplained(
    monkeypatch: pytest.MonkeyPatch, calls_follow: bool
) -> None:
    monkeypatch.setattr(ExaminationPlan, "seconds_left", lambda *_: 0.0)
    torch.manual_seed(0)

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = _many(self.first(x))
            h = (h - 100).log()
            return self.last(h) if calls_follow else h

    model = Long()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watched = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    with watched.step(0):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watched.close()
    (found,) = watched.diagnoses()
    assert (found.cause, found.step, found.confidence) == ("undefined_operation", 0, 0.95)
    assert "test_again.py" in found.where
    assert [e.step for e in watched.evidence().examinations] == [0]


def test_a_run_whose_weights_are_lost_is_not_examined_until_they_are_put_back():
    """What any operation makes of NaN weights blames nothing, and every such examination costs as much as a telling one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watched = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True)
    sound = copy.deepcopy(model.state_dict())
    for step in range(60):
        if step == 3:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)
        if step == 40:
            model.load_state_dict(sound)
        with watched.step(step):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    watched.close()
    steps = [e.step for e in watched.evidence().examinations]
    assert not [s for s in steps if 5 <= s < 40]
    assert [s for s in steps if s > 40]


def test_a_recurrent_layer_that_turns_its_own_tensors_over_is_made_again():
    """oneDNN's recurrence calls `transpose_` on what it has just made: nobody else has seen its shape."""
    torch.manual_seed(0)
    layer, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)
    model = nn.ModuleDict({"layer": layer, "head": head})
    model.forward = lambda x: head(layer(x)[0][:, -1])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watched = nanny.MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, examine="auto")
    for step in range(9):
        x = torch.randn(4, 6, 4)
        if step == 7:
            x[2, 3, 1] = torch.nan
        with watched.step(step):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watched.close()
    (found,) = watched.diagnoses()
    assert (found.cause, found.step) == ("data_nan", 7)
    assert [trial.change for trial in found.tried] == ["rows_left_out"]
