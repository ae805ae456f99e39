"""Activation checkpointing of both kinds: the second forward pass is not counted, and the culprit is still found."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import watch

from nanny.core.step import StepRecord

pytestmark = pytest.mark.slow  # the first checkpoint of a process imports torch's compiler


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Net(nn.Module):
    def __init__(self, reentrant: bool | None, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.root, self.last = nn.Linear(4, 8), Root() if breaks else nn.Tanh(), nn.Linear(8, 1)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.root(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.inner(x))
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def train(reentrant: bool | None, breaks: bool = False, bad_step: int | None = None, interval: int = 1):
    net = Net(reentrant, breaks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seen: list[StepRecord] = []
    with watch(net, optimizer, interval=interval) as nanny:
        judge = nanny._judge
        nanny._judge = lambda step: (seen.append(step), judge(step))
        for i in range(4):
            x = torch.rand(16, 4, requires_grad=True)  # what reentrant checkpointing needs
            with torch.no_grad():
                x += math.nan if i == bad_step else 0.0
            with nanny.step(i):
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return nanny, seen


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_is_not_counted_twice(reentrant):
    _, plain = train(None)
    _, seen = train(reentrant)
    for one, other in zip(plain, seen):
        assert one.outputs is not None
        assert other.outputs is not None
        counts = {n: int(c) for n, c in zip(other.outputs.names, other.outputs.columns["count"])}
        assert counts == {n: int(c) for n, c in zip(one.outputs.names, one.outputs.columns["count"]) if n in counts}
        assert "last" in counts


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_module_that_breaks_inside_is_named(reentrant):
    nanny, _ = train(reentrant, breaks=True)
    assert [(d.cause, d.culprit) for d in nanny.diagnoses()] == [("undefined_operation", "root")]
    assert (nanny.findings[0].code, nanny.findings[0].site) == ("NAN", "Net" if reentrant else "root")  # by its hooks alone


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_bad_batch_is_named_at_a_step_that_was_not_traced(reentrant):
    nanny, _ = train(reentrant, bad_step=2, interval=100)
    assert (nanny.findings[0].code, nanny.findings[0].step) == ("INPUT_NONFINITE", 2)
    assert [d.cause for d in nanny.diagnoses()] == ["data_nan"]
