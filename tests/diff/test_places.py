"""Calls, gradients and operations stand at modules by their real names, whatever wraps them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import nanny


def places_of(wrapped: bool) -> tuple[list[str], list[tuple[str, str]], set[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    if wrapped:
        model[1] = checkpoint_wrapper(model[1])
    report = nanny.auto_diff(model, torch.randn(4, 8), backward=True)
    gradients = [(gradient.name, gradient.own_site) for gradient in report.activation_gradients]
    return [call.site for call in report.calls], gradients, {op.site for op in report.operations}


def test_a_block_that_is_checkpointed_keeps_its_places_also_where_backward_runs_it_again():
    assert places_of(wrapped=True) == places_of(wrapped=False)
    assert ("1.1", "2") in places_of(wrapped=True)[1]  # added by the backward of the layer behind
