"""The stream shows every operation once, and whatever those who look do, the program goes on as it would alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nanny import CompareWithCPU, NanInfTracker, sanitize
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


def test_what_autograd_keeps_of_a_result_is_no_operation_of_another_class():
    names, given = Names(), torch.ones(2, requires_grad=True)
    with watching(names):
        given.tanh().exp().sigmoid().softmax(-1)
    assert names.seen == ["tanh", "exp", "sigmoid", "_softmax"]
    assert not names.passed


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
    assert torch._C._len_torch_dispatch_stack() == 0  # Python was asked to take it away in this thread
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


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["twins", "own", "compare", "nan"])
def test_a_recurrent_layer_in_bf16_lives_and_trains_bit_identically(tool, unwatched):
    # on processors with AVX-512 its backward reads a workspace that oneDNN laid out for bf16
    assert recurrent(tool) == unwatched


class Refusing(torch.Tensor):
    """A subclass that counts what it is asked."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Refusing.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes_of_the_program_are_asked_as_often_as_alone():
    def asked(tool: Any) -> tuple[int, list[str], list[str]]:
        Refusing.asked = 0
        net = nn.Linear(4, 4).bfloat16()
        with Operations() as below, tool(net), Operations() as operations, Functions() as functions:
            net(torch.ones(2, 4).bfloat16().as_subclass(Refusing)).square().mean().backward()
        return Refusing.asked, functions.names, operations.names + below.names

    alone = asked(lambda net: contextlib.nullcontext())
    assert alone[0] > 3
    assert asked(lambda net: sanitize(net, strict=True)) == alone
    assert asked(lambda net: NanInfTracker(strict=True)) == alone


def test_a_mode_of_the_program_may_outlive_the_stream_and_end_in_the_next():
    theirs, first, second = Operations(), Names(), Names()
    with watching(first):
        theirs.__enter__()
        torch.ones(2)
    assert torch._C._len_torch_dispatch_stack() == 1
    with watching(second):
        torch.ones(2)
        theirs.__exit__(None, None, None)
        torch.zeros(2)
    assert (first.seen, second.seen) == (["ones"], ["ones", "zeros"])
    assert theirs.names == ["aten.ones.default"] * 2
    assert torch._C._len_torch_dispatch_stack() == 0


class OurEnd(BaseException):
    pass


def test_trouble_of_any_class_is_ours_but_a_signal_handler_of_the_program_is_heard():
    broken = Names(OurEnd("ours"))  # type: ignore[arg-type]
    with watching(broken):
        torch.ones(2)
    assert [str(e) for e in broken.troubles] == ["ours"]

    def handler(*_: Any) -> None:
        raise TimeoutError("the program's")

    class Slow(Names):
        def after(self, op: Op, state: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="the program's"), watching(Slow()):
            torch.ones(2)
    finally:
        signal.signal(signal.SIGUSR1, before)


CALLS = []


@torch.library.custom_op("nanny_tests::counts", mutates_args=())
def counts(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.dtype)
    return x * len(CALLS)


def test_an_operator_of_the_programs_own_runs_once_and_its_reference_starts_anew():
    CALLS.clear()
    x = torch.ones(2).bfloat16()
    with Twins() as twins:
        y = counts(x * 3.1) + 1
    assert [torch.bfloat16] == CALLS
    assert twins.reseeds == {("counts", "it may do more than compute, so it is not run twice"): 1}
    assert torch.equal(twins.twin(y), ((x * 3.1).float() + 1))


def test_a_file_is_not_opened_twice(tmp_path):
    with Twins() as twins:
        torch.from_file(str(tmp_path / "data"), shared=True, size=64, dtype=torch.bfloat16)
    assert (tmp_path / "data").stat().st_size == 128
    assert not twins.operations


def test_twins_that_find_no_memory_end_themselves_and_give_back_what_they_have(monkeypatch):
    def none_left(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    net = nn.Linear(4, 4).bfloat16()
    with sanitize(net) as seen:
        y = net(torch.ones(2, 4).bfloat16())
        monkeypatch.setattr(Twins, "_enter", none_left)
        y.square().sum().backward()
        assert seen._sanitizer._shadows.bytes_held == 0
    assert net.weight.grad is not None
    assert "out of memory" in seen.examination.facts["failed"]


def test_nested_and_zero_tensors_pass():
    net = nn.Linear(4, 4).bfloat16()
    with sanitize(net, strict=True), NanInfTracker(strict=True):
        ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], dtype=torch.bfloat16)
        net(ragged).to_padded_tensor(0.0).sum().backward()
        torch.func.jvp(torch.sgn, (torch.randn(3),), (torch.ones(3),))
    assert net.weight.grad is not None
