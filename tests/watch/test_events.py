"""Functions of torch that are wrapped while somebody listens take exactly what they took before, and are put back in time."""

from __future__ import annotations

import gc
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader

from nanny.watch import events


class Heard(events.PartListener):
    def __init__(self) -> None:
        self.limits: list[float] = []
        self.events: list[str] = []

    def before_clip(self, parameters: Any, max_norm: Any) -> None:
        self.limits.append(float(max_norm))

    def before_backward(self, roots: tuple[torch.Tensor, ...]) -> None:
        self.events.append("backward")

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        self.events.append("step")

    def gradients_cleared(self, optimizer: Optimizer) -> None:
        self.events.append("zero_grad")

    def after_scaler_update(self, scaler: Any, given: bool) -> None:
        self.events.append(f"update {given}")


def functions() -> dict[str, Any]:
    known = [(owner, name) for owner, name, _ in events._wrappers() if hasattr(owner, name)]
    return {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in known}


ORIGINAL = functions()


@pytest.fixture
def heard():
    listener = Heard()
    events.listen(listener)
    yield listener
    events.leave(listener)
    assert functions() == ORIGINAL


def weight() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    return parameter


@pytest.mark.parametrize(
    ("clip", "given"),
    [
        ("clip_grad_norm_", {"max_norm": 0.5, "norm_type": 2.0, "error_if_nonfinite": True, "foreach": False}),
        ("clip_grad_value_", {"clip_value": 0.5, "foreach": False}),
        ("clip_grads_with_norm_", {"max_norm": 0.5, "total_norm": torch.tensor(7.0), "foreach": False}),
    ],
)
def test_clipping_takes_every_argument_by_its_own_name(heard, clip, given):
    parameter = weight()
    getattr(nn.utils, clip)(parameters=(p for p in [parameter]), **given)
    assert float(parameter.grad.max()) <= 0.5
    assert heard.limits == [0.5]


def test_a_wrong_call_gets_torchs_own_complaint(heard):
    with pytest.raises(TypeError, match="clip_value"):
        nn.utils.clip_grad_value_([weight()])
    with pytest.raises(TypeError, match="nothing"):
        torch.autograd.backward(nothing=1)


def values_for(name: str) -> dict[str, Any]:
    """Values for every parameter of a wrapped function."""
    model, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.ones(1, 2)).sum()
    if name.endswith(("unscale_", "GradScaler.step", "update")):
        scaler.scale(loss).backward()
    if name.endswith("update"):
        scaler.step(optimizer)
    return {
        "tensors": loss, "grad_tensors": None, "retain_graph": True, "create_graph": False, "grad_variables": None,
        "inputs": [model.weight] if name.endswith("grad") else None, "grad_outputs": None, "only_inputs": True,
        "allow_unused": None, "is_grads_batched": False, "materialize_grads": False,
        "self": optimizer if "Optimizer" in name else scaler if "GradScaler" in name else model if "Module" in name
        else iter(DataLoader([0, 1])) if "DataLoader" in name else torch.autograd.graph.save_on_cpu(),
        "outputs": loss if name.endswith("grad") else torch.ones(()),
        "optimizer": optimizer, "new_scale": 2.0, "parameters": [weight()], "max_norm": 1.0,
        "total_norm": torch.tensor(2.0), "clip_value": 1.0, "foreach": None, "set_to_none": False, "args": (), "kwargs": {},
    }  # fmt: skip


@pytest.mark.parametrize("name", ORIGINAL)
def test_every_wrapped_function_takes_what_the_original_takes(heard, name):
    wrapped = functions()[name]
    assert wrapped is not ORIGINAL[name]
    if inspect.isbuiltin(ORIGINAL[name]):  # has no signature to be asked for; the only one takes nothing
        before = ORIGINAL[name]()
        assert wrapped() == before + 1
        for _ in range(2):
            torch.autocast_decrement_nesting()
        return
    signature = inspect.signature(ORIGINAL[name])
    assert inspect.signature(wrapped) == signature
    assert (wrapped.__name__, wrapped.__doc__) == (ORIGINAL[name].__name__, ORIGINAL[name].__doc__)
    named = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_keyword = values_for(name)
    wrapped(**{parameter: by_keyword[parameter] for parameter in named})
    if name.endswith("saved_tensors_hooks.__enter__"):
        by_keyword["self"].__exit__()
    by_position = values_for(name)
    positional = [n for n in named if signature.parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    wrapped(*(by_position[parameter] for parameter in positional))
    if name.endswith("saved_tensors_hooks.__enter__"):
        by_position["self"].__exit__()


def test_an_update_with_no_new_scale_is_not_a_given_one(heard):
    for args in ((None,), (2.0,)):
        scaler = values_for("update")["self"]
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(*args)
    assert [e for e in heard.events if e.startswith("update")] == ["update False", "update True"]


def step_once(clear: bool = True) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if clear:
        optimizer.zero_grad()


def test_a_listener_of_one_thread_hears_nothing_of_another():
    here, elsewhere = Heard(), Heard()
    events.listen(here, threading.get_ident())
    events.listen(elsewhere, -1)
    try:
        thread = threading.Thread(target=step_once)
        thread.start()
        thread.join()
        assert here.events == []
        step_once()
        assert here.events == ["backward", "step", "zero_grad"]
        assert elsewhere.events == []
    finally:
        events.leave(here)
        events.leave(elsewhere)


def test_listeners_that_are_collected_leave_nothing_behind():
    listener = Heard()
    events.listen(listener)
    assert functions() != ORIGINAL
    del listener
    gc.collect()
    assert functions() == ORIGINAL
    assert type(optimizer_module._global_optimizer_pre_hooks).__name__ == "OrderedDict"


def test_a_wrapper_that_the_program_kept_and_sets_again_goes_at_its_first_call(heard):
    kept = torch.autograd.backward
    events.leave(heard)
    torch.autograd.backward = kept
    assert functions() != ORIGINAL
    weight = torch.ones(1, requires_grad=True)
    torch.autograd.backward(weight.exp().sum())
    assert weight.grad is not None
    assert functions() == ORIGINAL


def test_an_optimizer_may_step_while_another_thread_comes_and_goes():
    """torch goes through its dictionary of hooks with Python code in between: it must not change meanwhile."""
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def come_and_go(*_: Any) -> None:
        listener = Heard()
        events.listen(listener)
        events.leave(listener)

    handles = [register(come_and_go) for register in (
        optimizer_module.register_optimizer_step_pre_hook, optimizer_module.register_optimizer_step_post_hook
    )]  # fmt: skip
    try:
        optimizer.step()
        listener = Heard()
        events.listen(listener)
        optimizer.step()
        events.leave(listener)
    finally:
        for handle in handles:
            handle.remove()
    assert not optimizer_module._global_optimizer_pre_hooks


def test_hooks_of_others_can_be_added_and_removed_while_somebody_listens(heard):
    seen = []
    handle = optimizer_module.register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    step_once()
    events.leave(heard)
    step_once()
    handle.remove()
    step_once()
    assert len(seen) == 2
    assert not optimizer_module._global_optimizer_pre_hooks
