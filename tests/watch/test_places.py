"""Every operation of a step is placed by the model's own names, forward and backward."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import types
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nanny.watch.op_stream import watching
from nanny.watch.places import Places


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Block(nn.Module):
    def __init__(self, plain=False):
        super().__init__()
        self.fc, self.act, self.plain = nn.Linear(4, 4), nn.ReLU(inplace=True), plain

    def forward(self, x):
        h = self.act(self.fc(x)).exp()
        return h if self.plain else {"h": h}


class Net(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.embed, self.recompute = nn.Linear(3, 4), recompute
        self.blocks = nn.ModuleList(Block(plain=recompute is True) for _ in range(2))  # reentrant ones take no dictionaries

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            h = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
            x = x + (h["h"] if isinstance(h, dict) else h)
        return Square.apply(x)


class PlacesOfOps(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # True imports the compiler

    def __init__(self, where):
        super().__init__()
        self.where, self.seen, self.classes = where, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        spot = self.where.spot()
        self.seen.append((func.overloadpacket.__name__, spot.resolve()))
        self.classes.append(spot.classes)
        return func(*args, **(kwargs or {}))

    def sites(self, op, phase):
        return [place.site for name, place in self.seen if name == op and place.phase == phase]


# as one of nanny's own modes, whose frames are nobody's source line
DISPATCH = inspect.unwrap(PlacesOfOps.__torch_dispatch__)
DISPATCH.__code__ = DISPATCH.__code__.replace(co_filename=inspect.getfile(Places))


def step(model, optimizer=None):
    loss = model(torch.randn(2, 3)).sum()
    loss.backward()
    if optimizer is not None:
        optimizer.step()


@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_forward_and_backward_carry_the_real_names(recompute):
    model = Net(recompute)
    with Places(model) as where, PlacesOfOps(where) as places:
        step(model)
    once, again = ["blocks.0.fc", "blocks.1.fc"], [] if recompute is None else ["blocks.1.fc", "blocks.0.fc"]
    assert places.sites("addmm", "forward") == ["embed", *once, *again]
    assert places.sites("threshold_backward", "backward") == ["blocks.1.act", "blocks.0.act"]
    backward = Counter(places.sites("mm", "backward"))
    assert set(backward) == {"embed", "blocks.0.fc", "blocks.1.fc"}  # embed: although its input has no gradient
    exp_backward = [p for name, p in places.seen if name == "mul" and p.site == "blocks.1" and p.phase == "backward"]
    assert [p.module for p in exp_backward] == ["Block"]


def test_the_roots_own_code_and_the_loop_have_no_site():
    model = Net()
    with Places(model) as where, PlacesOfOps(where) as places:
        step(model, torch.optim.SGD(model.parameters(), 0.1))
    squared = [p for name, p in places.seen if name == "mul" and p.module == "Net"]
    assert [p.phase for p in squared] == ["forward", "backward", "backward"]
    assert {p.site for p in squared} == {""}
    assert [(p.site, p.phase) for name, p in places.seen if name == "sum" and p.phase != "backward"] == [("", "loop")]
    assert [p.phase for name, p in places.seen if name == "expand"] == ["backward"]
    assert {p.phase for name, p in places.seen if name == "add_" and p.module == "SGD"} == {"optimizer"}


def test_lines_are_the_users_and_in_backward_those_of_the_forward_operation():
    model = Net()
    with Places(model) as where, PlacesOfOps(where) as places:
        step(model)
    first = inspect.getsourcelines(Block.forward)[1]
    lines = {(name, p.phase): (os.path.abspath(p.file), p.line) for name, p in places.seen if p.site.startswith("blocks.0")}
    assert lines["addmm", "forward"] == lines["mm", "backward"] == (__file__, first + 1)
    assert lines["exp", "forward"] == (__file__, first + 1)
    loop = next(p for name, p in places.seen if name == "sum" and p.phase == "loop")
    assert loop.line == inspect.getsourcelines(step)[1] + 1
    text = "loss = model(torch.randn(2, 3)).sum()"
    shown = loop.source.splitlines()
    assert shown[0] == text
    if sys.version_info >= (3, 11):  # older ones do not know the columns
        assert shown[1] == " " * len("loss = ") + "^" * len(text.removeprefix("loss = "))


def test_gradients_that_are_added_up_belong_to_their_parameter():
    model = Net()
    step(model)
    with Places(model) as where, PlacesOfOps(where) as places:
        step(model)
    assert "blocks.1.fc.weight" in places.sites("add_", "backward")


def test_a_gradient_inside_forward_is_backward_and_what_is_made_of_it_keeps_its_place():
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.fc(x).tanh().sum(), x, create_graph=True)
            return slope.square()

    model = Penalised()
    with Places(model) as where, PlacesOfOps(where) as places:
        step(model)
    assert places.sites("addmm", "forward") == ["fc"]
    assert set(places.sites("mm", "backward")) == {"fc"}
    assert set(places.sites("tanh_backward", "backward")) == {""}


def test_an_exception_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self, message="deep inside"):
            super().__init__()
            self.message = message

        def forward(self, x):
            raise ValueError(self.message)

    broken = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Fails()))
    with Places(broken) as where, PlacesOfOps(where) as places:
        with pytest.raises(ValueError, match="deep"):
            broken(torch.randn(2, 3))
        torch.ones(2).exp()
        broken[0](torch.randn(2, 3))
    assert [p.phase for name, p in places.seen if name == "exp"] == ["loop"]
    assert places.sites("addmm", "forward") == ["0", "0"]


def test_an_optimizer_that_raises_does_not_swallow_the_next_step():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no update")

    model = Net()
    with Places(model) as where, PlacesOfOps(where) as places:
        with pytest.raises(ValueError, match="no update"):
            step(model, Fails(model.parameters(), 0.1))
        model(torch.randn(2, 3)).exp2()
    assert [p.phase for name, p in places.seen if name == "exp2"] == ["loop"]


def test_a_closure_is_forward_and_backward_inside_the_optimizer():
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    with Places(model) as where, PlacesOfOps(where) as places:
        optimizer.step(closure)
    assert set(places.sites("addmm", "forward")) == {"0"}
    assert {p.phase for name, p in places.seen if name == "dot"} == {"optimizer"}


def test_opened_twice_or_beside_another_nothing_is_doubled():
    model = Net()
    with Places(model) as where, Places(model) as other, PlacesOfOps(where) as places:
        where.open()
        other.close()
        step(model)
    assert places.sites("addmm", "forward") == ["embed", "blocks.0.fc", "blocks.1.fc"]
    assert "Net/Block/Linear" in places.classes
    assert not any("Net/Net" in classes for classes in places.classes)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks_always_called


def test_unknown_models_are_found_when_they_are_called():
    first, second, criterion = Net(), nn.Sequential(nn.Linear(4, 1)), nn.MSELoss()
    with Places(None) as where, PlacesOfOps(where) as places:
        out = second(first(torch.randn(2, 3)))
        criterion(out, torch.zeros(2, 1)).backward()
    assert places.sites("addmm", "forward") == ["embed", "blocks.0.fc", "blocks.1.fc", "Sequential.0"]
    assert [(p.site, p.module, p.phase) for name, p in places.seen if name == "mse_loss"] == [("", "MSELoss", "forward")]


def test_a_part_that_was_called_first_gets_its_name_from_the_whole():
    model = Net()
    with Places(None) as where, PlacesOfOps(where) as places:
        model.blocks[0](torch.randn(2, 4))
        model(torch.randn(2, 3))
    assert places.sites("addmm", "forward") == ["fc", "embed", "blocks.0.fc", "blocks.1.fc"]


def test_models_are_not_kept_alive_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("nanny.watch.places._MOST_KEPT", 64)
    with Places(None) as where, PlacesOfOps(where) as places:
        for _ in range(20):
            step(Net())
        gc.collect()
    assert len(where._since) <= 64
    assert len(where._code_of_node) <= 64
    assert sum(named.thing() is not None for named in where._names.values()) <= len(list(Net().modules()))
    assert places.sites("mm", "backward")[-1].endswith("embed")


def test_wrappers_are_left_out_of_the_names():
    class DataParallelLike(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

        def forward(self, x):
            return self._orig_mod(x)

    model = DataParallelLike(Net())
    with Places(model) as where, PlacesOfOps(where) as places:
        step(model)
    assert places.sites("addmm", "forward") == ["embed", "blocks.0.fc", "blocks.1.fc"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_code_that_claims_to_come_from_a_pipe_has_a_line_but_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")  # nobody writes: to open it waits for ever
    made: dict = {}
    exec(compile("def double(x):\n    return x * 2\n", str(tmp_path / "pipe.py"), "exec"), made)
    with Places(None) as where, PlacesOfOps(where) as ops:
        made["double"](torch.ones(2))
    ((_, place),) = [found for found in ops.seen if found[0] == "mul"]
    assert (place.line, place.source) == (2, "")


def test_in_a_function_without_builtins_nobody_looks_and_behind_it_again():
    """torch imports in the name of the function that runs, to call a mode, and that raises where it has no builtins."""

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return (self.fc(x) * x).digamma().erfinv()

    Bare.forward = types.FunctionType(Bare.forward.__code__, {})
    seen, why = [], []

    class Looking:
        on_trouble = None

        def before(self, op):
            seen.append(op.name)

        def interrupted(self, reason):
            why.append(reason)

    model = nn.Sequential(Bare(), nn.ReLU())
    with Places(model), watching(Looking()):
        model(torch.ones(2, 4))
    assert seen.count("relu") == 1
    assert not {"digamma", "erfinv"} & set(seen)
    assert "__builtins__" in why[0]
