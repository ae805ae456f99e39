"""A shorter update, tried on the batch that it came from: the numbers are those of the program, which does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from training import regression, watch

from nanny.core.examination import Trial
from nanny.diagnose.trials import trial_in_words

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """With all that a second run must put back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.head(self.drop(self.norm(self.first(x)).tanh()))
        return out if y is None else (nn.functional.mse_loss(out, y), out)


def in_one_line(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def by_the_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y)[0]


def train(rate: float, loss_of: Loss, watched: bool = True, scaled: bool = False) -> tuple[list[Any], list[Trial], list[Any]]:
    """What the run was, what was tried at each step, and each step's model and batch for whoever does it again."""
    model, batch = Net(), regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    nanny = watch(model, optimizer, examine="every") if watched else None
    tried: list[Trial] = []
    seen: list[Any] = []
    torch.manual_seed(2)
    for step in range(6):
        x, y = batch(step)
        at = copy.deepcopy(model), (x, y), torch.get_rng_state()
        with nanny.step(step) if nanny is not None else torch.enable_grad():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append((*at, copy.deepcopy(model)))
    if nanny is not None:
        nanny.close()
        tried = [trial for exam in nanny.evidence().examinations for trial in exam.trials]
    state = [loss.item(), *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]
    return state, tried, seen


def loss_behind(share: float, seen: Any, loss_of: Loss) -> float:
    """The loss of the same batch, by weights that have gone this share of the update."""
    model, (x, y), random, after = copy.deepcopy(seen[0]), *seen[1:]
    with torch.no_grad():
        for p, q in zip(model.parameters(), after.parameters()):
            p += share * (q - p)
    torch.set_rng_state(random)
    return loss_of(model, x, y).item()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("loss_of", [in_one_line, by_the_model])
def test_what_is_told_of_a_shorter_update_is_what_it_gives(loss_of: Loss, scaled: bool) -> None:
    _, tried, seen = train(30.0, loss_of, scaled=scaled)
    assert tried
    first = tried[0]
    assert (first.change, first.helped, first.was_bad) == ("shorter_update", True, False)
    told = first.loss_start, first.loss_before, first.loss
    again = [tuple(loss_behind(share, one, loss_of) for share in (0.0, 1.0, 1 / (first.value or 1.0))) for one in seen]
    assert any(told == pytest.approx(numbers, rel=1e-5) for numbers in again)


@pytest.mark.parametrize("rate", [30.0, 0.05])
def test_a_run_does_not_notice_that_a_shorter_update_is_tried(rate: float) -> None:
    watched, _, _ = train(rate, in_one_line)
    plain, _, _ = train(rate, in_one_line, watched=False)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(watched, plain))


def test_an_update_that_lowers_the_loss_of_its_batch_is_not_tried_shorter() -> None:
    assert not train(0.05, in_one_line)[1]


def test_where_the_loss_cannot_be_made_again_nothing_is_told() -> None:
    def kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        parts = {"main": out, "twice": out + out}  # what is read from here was not given by a line of its own
        return nn.functional.mse_loss(parts["main"], y) + 0.1 * parts["twice"].square().mean()

    def drawn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x) + torch.randn_like(y), y)

    for loss_of in (kept, drawn):
        _, tried, seen = train(30.0, loss_of)
        for trial in tried:  # if it is told, it is true
            told = trial.loss_start, trial.loss_before
            assert any(told == pytest.approx([loss_behind(s, one, loss_of) for s in (0.0, 1.0)], rel=1e-5) for one in seen)


@pytest.mark.parametrize(("language", "words"), [("en", "from 4 to 3 instead of 9"), ("zh", "从 4 变为 3，而不是 9")])
def test_it_is_told_in_words(language: str, words: str) -> None:
    trial = Trial("shorter_update", value=10.0, was_bad=False, loss=3.0, loss_start=4.0, loss_before=9.0)
    assert words in trial_in_words(trial, language)
