"""Nothing of ours is on where torch's compiler, or somebody who records operations, would take it for a part of the program."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from nanny import CompareWithCPU, NanInfTracker, sanitize
from nanny.watch import compiler
from nanny.watch.op_stream import Op, watching
from nanny.watch.places import Places
from nanny.watch.twins import Twins

torch.set_num_threads(1)


class Names:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.interruptions: list[str] = []
        self.on_trouble = None

    def before(self, op: Op) -> Any:
        self.seen.append(op.name)

    def after(self, op: Op, state: Any) -> None: ...
    def passed_by(self, op: Op) -> None: ...
    def interrupted(self, why: str) -> None:
        self.interruptions.append(why)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))


@pytest.fixture
def graphs():
    """A backend that notes what it is given to compile; nothing of it stays."""
    made: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        made.append(str(module.graph))
        return module.forward

    backend.made = made  # type: ignore[attr-defined]
    torch._dynamo.reset()
    yield backend
    torch._dynamo.reset()


@pytest.mark.landing
def test_a_compiled_model_gets_the_graph_that_it_gets_alone_and_compiles_once(graphs):
    net = model()
    compiled = torch.compile(net, backend=graphs, fullgraph=True)
    x = torch.ones(3, 4)
    compiled(x)
    alone = list(graphs.made)
    torch._dynamo.reset()
    graphs.made.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with sanitize(net, strict=True) as seen:
                compiled(x).sum().backward()
        with NanInfTracker(strict=True), CompareWithCPU(strict=True):
            compiled(x).sum().backward()
        compiled(x)
    assert graphs.made == alone
    assert "compiled function" in seen.examination.facts["left_out"]
    assert "compiled function" in str(seen)


def test_after_a_compiled_function_the_stream_and_the_hooks_are_on_again(graphs):
    names, net = Names(), model()
    function = torch.compile(lambda x: (x * 3).sin(), backend=graphs)
    with Places(net) as places, watching(names):
        y = function(torch.ones(3, 4))
        assert "sin" not in names.seen
        net(y)
        assert torch._C._len_torch_dispatch_stack() == 1
        assert places.here().phase == "loop"
    assert names.seen[-1] == "addmm"
    assert len(names.interruptions) == 1
    assert torch._C._len_torch_dispatch_stack() == 0


def test_one_that_raises_inside_a_compiled_function_leaves_nothing_switched(graphs):
    def fails(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        raise ValueError("the program's")

    with watching(Names()), pytest.raises(ValueError, match="the program's"):
        torch.compile(fails, backend=graphs)(torch.ones(2))
    assert not compiler._inside
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_doors_are_there_and_are_put_back():
    doors = [(d._owner, d._name) for d in (*compiler._COMPILER_DOORS, *compiler._OTHER_DOORS)]
    before = [getattr(owner, name) for owner, name in doors]  # AttributeError: torch has renamed one
    with watching(Names()):
        assert all(getattr(owner, name) is not f for (owner, name), f in zip(doors, before))
    assert [getattr(owner, name) for owner, name in doors] == before


def test_higher_order_operators_work_and_give_the_same():
    x = torch.ones(3)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    alone = branch(x)
    names = Names()
    with watching(names):
        assert torch.equal(branch(x), alone)
    assert len(names.interruptions) == 1
    torch._dynamo.reset()


def test_a_higher_order_operator_that_is_not_compiled_passes_by():
    names = Names()
    with watching(names):
        out = torch.ops.higher_order.cond(torch.tensor(True), lambda y: (y * 2,), lambda y: (y * 3,), (torch.ones(2),))
    assert out[0].tolist() == [2.0, 2.0]
    assert "cond" in names.interruptions[0]


def test_recorded_graphs_hold_nothing_of_ours():
    net, x = model(), torch.ones(3, 4)

    def recorded() -> tuple[str, str, list[str]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("error", torch.jit.TracerWarning)
            traced = [node.kind() for node in torch.jit.trace(net, x).inlined_graph.nodes()]
        return make_fx(lambda y: net(y).sum())(x).code, str(torch.export.export(net, (x,)).graph), traced

    alone = recorded()
    with sanitize(net, strict=True) as seen:
        assert recorded() == alone
    assert "recorded" in seen.examination.facts["left_out"]
    with NanInfTracker(strict=True):
        assert recorded() == alone


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, 6).bfloat16())
        self.fill = nn.Parameter(torch.tensor(0.3).bfloat16())

    def forward(self) -> torch.Tensor:
        masked = self.weight.masked_fill(torch.arange(6) % 2 == 0, self.fill)
        return masked.prod() + self.weight.cumprod(0).sum()


@pytest.mark.parametrize(
    "tool", [sanitize, lambda net: NanInfTracker(), lambda net: CompareWithCPU()], ids=["examined", "nan", "cpu"]
)
def test_a_gradient_with_another_formula_under_a_mode_keeps_its_bits(tool):
    alone, net = Product(), Product()
    for _ in range(2):
        alone().backward()
        with tool(net) as seen:
            net().backward()
    assert torch.equal(alone.weight.grad, net.weight.grad)
    assert torch.equal(alone.fill.grad, net.fill.grad)
    if tool is sanitize:
        assert "another formula" in seen.examination.facts["left_out"]


def test_an_ordinary_mask_does_not_end_an_examination():
    net = nn.Linear(4, 4).bfloat16()
    with sanitize(net, strict=True) as seen:
        net(torch.ones(2, 4).bfloat16()).masked_fill(torch.eye(4)[:2].bool(), float("-inf")).softmax(-1).sum().backward()
    assert "left_out" not in seen.examination.facts
    assert seen.examination.gradients


@pytest.mark.parametrize("tool", [sanitize, lambda net: NanInfTracker(strict=True)], ids=["examined", "nan"])
def test_what_calls_others_inside_runs_under_autocast_as_it_does_alone(tool):
    def outcome(net: nn.Bilinear) -> list[torch.Tensor]:
        net.zero_grad()
        x = torch.linspace(-1, 1, 24).reshape(3, 8)
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x, x.flip(0))
            z = torch.linalg.pinv(y.float()) + torch.pinverse(y.float()) + torch.cdist(x, x).sum()
            (y.float().square().mean() + z.sum() + F.mse_loss(y, y.detach() + 1)).backward()
        return [y.detach(), z.detach(), *(p.grad.clone() for p in net.parameters())]

    torch.manual_seed(0)
    net = nn.Bilinear(8, 8, 4)
    alone = outcome(net)
    with tool(net):
        watched = outcome(net)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(alone, watched))


def test_conjugated_tensors_are_computed_as_alone():
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.complex64)
    alone = torch.linalg.pinv(x)
    with watching(Names()):
        assert torch.allclose(torch.linalg.pinv(x), alone)


def test_a_compiled_function_in_another_thread_takes_no_stream_away(graphs):
    names = Names()
    function = torch.compile(lambda x: x * 3, backend=graphs)
    with watching(names):
        thread = threading.Thread(target=lambda: function(torch.ones(2)))
        thread.start()
        thread.join()
        torch.zeros(2)
    assert names.seen == ["zeros"]
    assert not names.interruptions


def test_what_autocast_has_cast_is_not_cast_again_inside():
    """cdist runs in FP32 with autocast off, and the product in its kernel with it."""
    x = torch.randn(32, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        alone = torch.cdist(x, x)
    with Twins(), torch.autocast("cpu", torch.bfloat16):
        seen = torch.cdist(x, x)
    assert torch.equal(seen, alone)
    seen.sum().backward()
