"""The stream shows every operation once, and whatever those who look do, the program goes on as it would alone."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanny import CompareWithCPU, NanInfTracker
from nanny.watch.op_stream import Op, Stopped, watching
from nanny.watch.twins import Twins


class Names:
    """Notes what it is shown; `fail` may raise."""

    def __init__(self, fail: Exception | None = None, strict: bool = False) -> None:
        self.seen: list[str] = []
        self.passed: list[str] = []
        self.troubles: list[Exception] = []
        self._fail = fail
        self.on_trouble = None if strict else self.troubles.append

    def before(self, op: Op) -> Any:
        self.seen.append(op.name)
        return op.name

    def after(self, op: Op, state: Any) -> None:
        assert state == op.name
        if self._fail is not None:
            raise self._fail

    def passed_by(self, op: Op) -> None:
        self.passed.append(op.name)


def test_two_who_look_share_one_mode_and_see_the_same():
    first, second = Names(), Names()
    with watching(first), watching(second):
        assert torch._C._len_torch_dispatch_stack() == 1
        torch.ones(2).mul(3).add_(1).sum()
    assert first.seen == second.seen == ["ones", "mul", "add_", "sum"]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_who_came_first_may_go_first():
    first, second = Twins(), Names()
    first.__enter__()
    with watching(second):
        first.__exit__()
        torch.ones(2)
    assert second.seen == ["ones"]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_who_joins_where_the_modes_are_set_aside_sees_what_runs_there():
    outer, inner = Names(), Names()
    with watching(outer):
        with _disable_current_modes(), watching(inner):
            torch.ones(2)
        torch.zeros(2)
    assert (outer.seen, inner.seen) == (["zeros"], ["ones"])
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_operation_tells_what_it_writes_and_whether_it_is_a_view():
    told = {}

    class Facts(Names):
        def after(self, op: Op, state: Any) -> None:
            told.setdefault(op.name, ([tuple(t.shape) for t in op.written], op.is_view, len(op.inputs)))

    x = torch.ones(4)
    with watching(Facts()):
        x.view(2, 2)
        x.add_(x)
        torch.stack([x, x], out=torch.empty(2, 4))
        nn.BatchNorm1d(4)(torch.randn(3, 4))
    assert told["view"] == ([], True, 1)
    assert told["add_"] == ([(4,)], False, 2)
    assert told["stack"] == ([(2, 4)], False, 3)
    assert told["native_batch_norm"][0] == [(4,), (4,)]


def test_trouble_ends_its_consumer_only_and_is_told_once():
    broken, sound = Names(ValueError("ours")), Names()
    with watching(broken), watching(sound):
        result = torch.ones(2).mul(3).sum()
    assert result == 6
    assert (broken.seen, [str(e) for e in broken.troubles]) == (["ones"], ["ours"])
    assert sound.seen == ["ones", "mul", "sum"]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_strict_trouble_is_raised_and_a_stop_always():
    with pytest.raises(ValueError, match="ours"), watching(Names(ValueError("ours"), strict=True)):
        torch.ones(2)
    lenient = Names(Stopped("asked to"))
    with pytest.raises(Stopped), watching(lenient):
        torch.ones(2)
    assert not lenient.troubles
    assert torch._C._len_torch_dispatch_stack() == 0


def test_it_does_not_look_at_stand_ins():
    names = Names()
    with watching(names), FakeTensorMode() as fake:
        fake.from_tensor(torch.ones(2)).mul(3)
    assert "mul" not in names.seen
    assert "mul" in names.passed


def test_a_graph_that_is_recorded_holds_nothing_of_those_who_look():
    with NanInfTracker(strict=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: x * 3, torch.ones(2), check_trace=False)
    assert [node.kind() for node in traced.graph.nodes()] == ["prim::Constant", "aten::mul"]


def test_under_vmap_it_is_given_plain_tensors_and_the_gradients_stay():
    x, w = torch.randn(4, 3), torch.randn(3)
    gradients = torch.func.vmap(torch.func.grad(lambda row: (row * w).sin().sum()))
    alone = gradients(x)
    with watching(Names()), NanInfTracker(strict=True), CompareWithCPU(strict=True) as compared, Twins():
        assert torch.equal(gradients(x), alone)
    assert compared.tally.compared > 3
    assert not compared.faults


def test_another_thread_is_not_looked_at_and_may_look_for_itself():
    mine, theirs = Names(), Names()

    def work() -> None:
        torch.ones(2).mul(3)
        with watching(theirs):
            torch.ones(2).exp()

    with watching(mine):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.ones(2)
    assert (mine.seen, theirs.seen) == (["ones"], ["ones", "exp"])


def test_who_is_left_from_another_thread_sees_nothing_more():
    names, after = Twins(), Names()
    names.__enter__()
    thread = threading.Thread(target=names.__exit__)
    thread.start()
    thread.join()
    torch.ones(2, dtype=torch.bfloat16) + 1
    assert names.operations == 0
    with watching(after):
        torch.ones(2)
    assert after.seen == ["ones"]
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_worker_is_not_looked_at():
    names, told = Names(), multiprocessing.get_context("fork").Queue()

    def work() -> None:
        torch.ones(2)
        told.put(len(names.seen))

    with watching(names), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(60)
    assert told.get(timeout=10) == 0


def test_what_those_who_look_compute_reaches_no_other_of_them():
    names = Names()
    x = torch.ones(2, dtype=torch.bfloat16)
    with watching(names), Twins(), CompareWithCPU(strict=True), NanInfTracker(strict=True):
        (x * 3).sum()
    assert [n for n in names.seen if n not in ("mul", "sum")] == []


def test_the_package_has_one_dispatch_mode():
    from nanny.watch import op_stream

    modes = {c for c in TorchDispatchMode.__subclasses__() if c.__module__.startswith("nanny")}
    assert modes == {op_stream._OpStream}


RECURRENT = """
import sys, contextlib, io, torch
from torch import nn
from nanny import CompareWithCPU, NanInfTracker
from nanny.watch.twins import Twins
tool = {"plain": contextlib.nullcontext, "twins": Twins, "own": lambda: Twins(own=True),
        "compare": lambda: CompareWithCPU(strict=True), "nan": lambda: NanInfTracker(strict=True)}[sys.argv[1]]
torch.manual_seed(0)
lstm, head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 1)
parameters = [*lstm.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, 0.1)
with contextlib.redirect_stderr(io.StringIO()), tool():
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = head(lstm(torch.randn(4, 5, 8))[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
print(sum(p.double().sum() for p in parameters).item().hex(), torch.rand(1).item().hex())
"""


def recurrent(tool: str) -> str:
    """In a process of its own: what this guards against is not an exception but an abort."""
    done = subprocess.run([sys.executable, "-c", RECURRENT, tool], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unwatched() -> str:
    return recurrent("plain")


@pytest.mark.parametrize("tool", ["twins", *(pytest.param(t, marks=pytest.mark.slow) for t in ("own", "compare", "nan"))])
def test_a_recurrent_layer_in_bf16_lives_and_trains_bit_identically(tool, unwatched):
    # on processors with AVX-512 its backward reads a workspace that oneDNN laid out for bf16
    assert recurrent(tool) == unwatched
