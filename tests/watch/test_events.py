"""Functions of torch that are wrapped while somebody listens take exactly what they took before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nanny.watch import events


class Heard(events.PartListener):
    def __init__(self) -> None:
        self.limits: list[float] = []

    def before_clip(self, parameters: list[torch.Tensor], max_norm: float) -> None:
        self.limits.append(max_norm)


@pytest.fixture
def heard():
    listener = Heard()
    events.listen(listener)
    yield listener
    events.leave(listener)


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
