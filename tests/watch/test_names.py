"""Names are found anew when something that has one has changed, and only then."""

from __future__ import annotations

import torch
from torch import nn

from nanny.watch.names import signature_of


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.LazyLinear(2)))


def changes(change) -> bool:
    one = model()
    before = signature_of([(one, "")])
    assert signature_of([(one, "")]) == before
    kept = change(one)  # what was there before must not lend its address to what comes after
    found = signature_of([(one, "")]) != before
    del kept
    return found


def replace_module(one: nn.Module) -> object:
    old = one[0]
    one[0] = nn.Linear(4, 4)
    return old


def replace_parameter(one: nn.Module) -> object:
    old = one[0].weight
    one[0].weight = nn.Parameter(torch.zeros(4, 4))
    return old


def rename(one: nn.Module) -> None:
    one._modules["first"] = one._modules.pop("0")


def add_parameter_by_name(one: nn.Module) -> None:
    one[0].register_parameter("gain", nn.Parameter(torch.ones(1)))


def test_what_gives_a_name_changes_the_signature():
    for change in (
        replace_module,
        replace_parameter,
        rename,
        add_parameter_by_name,
        lambda one: one.append(nn.ReLU()),
        lambda one: one(torch.ones(2, 4)),  # a lazy parameter comes to life where it is
        lambda one: one[1].register_buffer("seen", torch.zeros(1)),
        lambda one: setattr(one[0], "bias", None),
    ):
        assert changes(change)


def test_training_does_not():
    def train(one: nn.Module) -> None:
        with torch.no_grad():
            one[0].weight.add_(1.0)
            one[1].running_mean.add_(1.0)
        one.eval()

    assert not changes(train)


def test_a_module_that_holds_itself_is_met_once():
    one = model()
    one[2].register_module("again", one[0])
    one[0].register_module("around", one[2])
    assert signature_of([(one, "")]) == signature_of([(one, "")])
