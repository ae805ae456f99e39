"""Names are found anew when something that has one has changed, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from nanny.watch.names import called_part, is_compiled, parts_of, signature_of, unwrap


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


def test_a_program_s_own_look_up_of_attributes_is_not_asked():
    asked: list[str] = []

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Linear(4, 4), backend="eager")

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(super().__getattr__("inner"), name)

    wrapper = Wrapper()
    asked.clear()
    assert unwrap(wrapper) is called_part(wrapper) is wrapper
    assert not is_compiled(wrapper)
    assert set(parts_of([(wrapper, "")]).parameters.values()) == {"inner.weight", "inner.bias"}
    assert asked == []


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_the_module_inside_fsdp_is_found_though_only_a_property_gives_it():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        inner = nn.Linear(4, 4)
        wrapped = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
        assert unwrap(wrapped) is inner
    finally:
        torch.distributed.destroy_process_group()
