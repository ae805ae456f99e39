"""A bad step run again: what does not come out the same, what only looks so, and gradients that are bad behind a finite loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanny import MixedPrecisionNanny
from nanny.diagnose.records import Diagnosis
from nanny.watch import effects

BAD_AT = 23  # no step that is examined by itself


class Layer(nn.Module):
    """`act` between two layers; a bad batch is the one whose first number is 1."""

    def __init__(self, act: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)
        self.act = act
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.act(self, self.first(x))))


def run(model: nn.Module, loss_of: Callable[[Any], Tensor] = Tensor.mean, micro: int = 1, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, **options)
    left = []
    for step in range(BAD_AT + 1):
        with nanny.step(step):
            for i in range(micro):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * micro + i))
                state.bad = step == BAD_AT
                loss_of(model(x)).backward()
            left = [p.grad.clone() for p in model.parameters() if p.grad is not None] + [torch.get_rng_state()]
            optimizer.step()
            optimizer.zero_grad()
    nanny.close()
    return nanny, [*left, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]


class state:
    bad = False


faulty: Any = torch.testing  # what a broken kernel goes by lies where nobody puts it back


def _flip(x: Tensor) -> Tensor:
    """One bit of an exponent."""
    out = x.clone()
    out.view(torch.int32).view(-1)[0] ^= 1 << 30
    return out * 1e30


@torch.library.custom_op("twice::once", mutates_args=())
def _once(x: Tensor) -> Tensor:
    faulty.flips += state.bad
    return _flip(x) if state.bad and faulty.flips == 1 else x.clone()


@torch.library.custom_op("twice::always", mutates_args=())
def _always(x: Tensor) -> Tensor:
    faulty.flips += state.bad
    return x * math.nan if state.bad and faulty.flips % 2 else x + 1e-7 * faulty.flips


@pytest.fixture(autouse=True)
def own_operators_stand_for_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a program are not run a second time, and what is in them is looked at; kernels of torch are no Python."""
    monkeypatch.setattr("nanny.examine.again.is_pure", lambda func: True)
    monkeypatch.setattr("nanny.watch.effects._LEADS_ON", effects._LEADS_ON - {"nanny.watch.op_stream"})


def _diagnosis(act: Callable[[Layer, Tensor], Tensor]) -> Diagnosis:
    faulty.flips, state.bad = 0, False
    return run(Layer(act))[0].diagnoses()[0]


def test_a_kernel_that_gives_other_bits_of_the_same_inputs_is_named() -> None:
    found = _diagnosis(lambda layer, x: x + _always(x.detach()))
    assert (found.cause, found.culprit, found.step, found.precision_caused) == ("not_reproducible", "op:always", BAD_AT, False)
    assert found.confidence > 0.9
    assert "test_twice.py" in found.where
    assert "on cpu, rank 0" in found.evidence[0]


def test_a_bit_that_flipped_once_is_told_as_such() -> None:
    found = _diagnosis(lambda layer, x: (x + _once(x.detach())).square().square())
    assert (found.cause, found.step, found.culprit.partition(":")[0]) == ("not_reproducible", BAD_AT, "op")
    assert "both gave the same bits, and the step itself on cpu, rank 0 others" in found.evidence[0]


def _counted(layer: Layer, x: Tensor) -> Tensor:
    layer.calls += 1
    return (x * layer.calls).log() if state.bad else x


def _python_draw(layer: Layer, x: Tensor) -> Tensor:
    return (x * random.random() * np.random.rand()).log() if state.bad else x * random.random() * np.random.rand()


def _normed(layer: Layer, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5).log() if state.bad else nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("act", [_counted, _python_draw, _normed], ids=["counter", "python and numpy", "dropout"])
def test_what_keeps_a_state_or_draws_is_no_faulty_kernel(act: Callable[[Layer, Tensor], Tensor]) -> None:
    found = _diagnosis(act)
    assert (found.cause, found.culprit) == ("undefined_operation", "op:log")
    assert not any("other bits" in fact for fact in found.evidence) or act is not _normed


def _root(layer: Layer, x: Tensor) -> Tensor:
    x = x - x.detach() * state.bad
    return x + x.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_that_are_bad_behind_a_finite_loss_are_explained_with_their_line(micro: int) -> None:
    nanny, _ = run(Layer(_root), micro=micro)
    (found,) = nanny.diagnoses()
    line = _root.__code__.co_firstlineno + 2
    assert (found.cause, found.step) == ("singular_gradient", BAD_AT)
    assert found.where.endswith(f"test_twice.py:{line}")


def test_gradients_weights_and_random_numbers_are_what_they_were() -> None:
    (watched, seen), (_, alone) = run(Layer(_root)), run(Layer(_root), examine="off")
    assert watched.evidence().examinations[-1].facts["again"]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(seen, alone))


class WithLoss(nn.Module):
    """Computes its loss itself, as library models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.float16):
            h = self.first(x) * (600.0 if state.bad else 1.0)
            scores = self.last((h @ h.t()).relu() @ h if state.bad else h)
        return {"scores": scores, "loss": (scores.float() - 1).abs().mean()}


def test_a_remedy_is_followed_into_the_gradients_of_a_loss_that_the_model_computes() -> None:
    nanny, _ = run(WithLoss(), loss_of=lambda out: out["loss"] / 2)
    (found,) = nanny.diagnoses()
    helped = [t for t in found.tried if t.helped]
    assert helped
    assert helped[0].gradients_finite
    assert helped[0].gradient_error < 0.05
