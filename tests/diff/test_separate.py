"""Two runs one after the other: the cross-check of carried twins, and what is left when they cannot follow a model."""

from __future__ import annotations

import pytest
import torch
from corpus.asking import network_parts
from torch import nn

import nanny
from nanny.core.formats import BF16
from nanny.core.limits import Limits
from nanny.diff.separate_runs import separate_run
from nanny.diff.settings import DiffSettings


@pytest.mark.quick(1)
@pytest.mark.representative(4)
@pytest.mark.parametrize("policy", ["native", "cuda", "full"])
@pytest.mark.parametrize("name", ["transformer", "convnet", "vision", "variational"])
def test_carried_twins_find_the_same_errors_as_two_separate_runs(name, policy):
    model, x, loss, y = network_parts(name)
    torch.manual_seed(0)
    settings = DiffSettings(model, BF16, "fp32", policy, True, False, loss, None, Limits(), batch=((x,), {}), labels=y)
    with separate_run(settings, 1.0, low=False) as reference:
        pass
    with separate_run(settings, 1.0, low=True) as low:
        calls, activations, parameters = low.beside(reference)
    report = nanny.auto_diff(model, x, "bf16", loss_fn=loss, target=y, policy=policy)
    assert (report.loss, report.reference_loss) == (low.loss, reference.loss)
    carried = {(c.site, c.call): c.error.rel_l2 for c in report.calls}
    separate = {(c.site, c.call): c.error.rel_l2 for c in calls}
    if name == "variational":  # its output has several tensors: twins tell the worst, separate runs the first
        del carried[("", 0)], separate[("", 0)]
    assert carried == pytest.approx(separate, rel=1e-6)
    assert {g.name: g.error.rel_l2 for g in report.gradients} == pytest.approx(
        {g.name: g.error.rel_l2 for g in parameters}, rel=1e-5
    )
    assert len(activations) >= len(report.activation_gradients)


@torch.library.custom_op("nanny_tests::only_low", mutates_args=(), tags=[torch.Tag.pointwise])  # it may be run twice
def only_low(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        raise KeyError("float32 is not in my table")
    return x * 2


@only_low.register_fake
def _(x):
    return torch.empty_like(x)


class OwnKernel(nn.Module):
    def forward(self, x):
        return x * 2 if x.dtype == torch.float32 else only_low(x)


def test_a_model_that_twins_cannot_follow_is_run_twice_and_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), OwnKernel(), nn.Linear(8, 2))
    report = nanny.auto_diff(model, torch.randn(4, 8), "bf16", backward=False)
    assert report.failure is None
    assert [c.name for c in report.calls] == ["0", "1", "2", "(model)"]
    assert 0 < report.outputs[0].error.rel_l2 < 0.02
    assert any("could not run in one pass (KeyError" in note for note in report.notes)
    assert not report.findings


class SparseExperts(nn.Module):
    """Each expert gets the tokens that the router sends it: another number of them in each precision."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        nn.init.constant_(self.gate.bias, 30.0)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i]).to(out.dtype)
        return out


def true_error(model, x):
    with torch.no_grad():
        reference = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = model(x)
    return float((low.double() - reference.double()).norm() / reference.double().norm())


def test_where_the_precisions_route_differently_the_errors_are_those_of_two_runs_and_it_is_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), SparseExperts(), nn.Linear(16, 3))
    x = torch.randn(200, 8)
    report = nanny.auto_diff(model, x, "bf16")
    assert report.outputs[0].error.rel_l2 == pytest.approx(true_error(model, x), rel=1e-6)
    assert report.outputs[0].error.rel_l2 > 0.2
    assert any("go different ways (index, index_put_" in note for note in report.notes)
    assert report.culprits[0].startswith("1")
    assert all(call.own is not None for call in report.calls if call.site == "1.gate")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.high, self.low = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.bar = 0.0

    def forward(self, x):
        h = self.first(x)
        return self.high(h) if h.float().sum() > self.bar else self.low(h)


def test_a_branch_that_the_reference_would_not_take_is_told():
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(4, 8)
    with torch.no_grad():
        wide = float(model.first(x).sum())
        with torch.autocast("cpu", torch.bfloat16):
            low = float(model.first(x).float().sum())
    assert wide != low
    model.bar = (wide + low) / 2
    report = nanny.auto_diff(model, x, "bf16", backward=False)
    assert report.outputs[0].error.rel_l2 == pytest.approx(true_error(model, x), rel=1e-6)
    assert any("a branch in the model itself" in note and "without a counterpart" in note for note in report.notes)
