"""Remedies tried on the step itself: what they say is what the changed program gives, and the run does not notice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanny import MixedPrecisionNanny, cli
from nanny.core.examination import Trial
from nanny.diagnose.choose import TRIED_FOR, diagnoses_of
from nanny.diagnose.records import Diagnosis
from nanny.diagnose.registry import all_causes
from nanny.diagnose.trials import trial_in_words
from nanny.examine.remedies import CHANGES
from nanny.examine.run import sanitize

Forward = Callable[["Attention", Tensor], Tensor]


def plain(attention: Attention, x: Tensor) -> Tensor:
    return attention.q(x) @ attention.k(x).transpose(1, 2) / math.sqrt(x.shape[-1])


def scaled_first(attention: Attention, x: Tensor) -> Tensor:
    return (attention.q(x) / math.sqrt(x.shape[-1])) @ attention.k(x).transpose(1, 2)


def in_fp32(attention: Attention, x: Tensor) -> Tensor:
    q, k = attention.q(x), attention.k(x)
    with torch.autocast("cpu", enabled=False):
        return q.float() @ k.float().transpose(1, 2) / math.sqrt(x.shape[-1])


class Attention(nn.Module):
    def __init__(self, scores: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 1)
        self.scores = scores
        with torch.no_grad():
            self.q.weight *= 200
            self.k.weight *= 200

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scores(self, x).softmax(-1) @ self.v(x))


def one_step(model: nn.Module, low: bool = True) -> tuple[Tensor, Tensor]:
    """Loss and all gradients."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.float16, enabled=low):
        loss = (model(torch.randn(4, 6, 16)).float() - 1).square().mean()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("by_hand", [in_fp32, scaled_first])
def test_what_is_told_is_what_the_changed_program_gives(by_hand: Forward) -> None:
    with sanitize(Attention(plain), strict=True) as seen:
        assert not math.isfinite(one_step(seen._sanitizer._models[0][0])[0])
    trials = {trial.change: trial for trial in seen.examination.trials}
    trial = trials["fp32" if by_hand is in_fp32 else "scaled_first"]
    loss, gradients = one_step(Attention(by_hand))
    wide = one_step(Attention(plain), low=False)[1]
    assert trial.loss == pytest.approx(loss.item(), rel=1e-3)
    error = float((gradients - wide).norm() / wide.norm())
    assert trial.gradient_error == pytest.approx(error, rel=0.2)
    assert (trial.op, trial.place.file.endswith("test_remedies.py"), trial.gradients_finite) == ("bmm", True, True)


class Flushed(nn.Module):
    """The eps below the root is 0 in fp16."""

    def __init__(self, divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.divide = divide

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).half() * 0.01
        h = torch.cat([h[:2], h[2:] * 1e-3])
        return self.divide(h, (h.square().mean(-1, keepdim=True) + 1e-8).sqrt()).float()


def added_to_nothing(one: Tensor, other: Tensor) -> Tensor:
    return torch.addcdiv(torch.zeros_like(one), one, other)


@pytest.mark.parametrize("divide", [torch.div, added_to_nothing])
def test_an_eps_that_the_format_can_hold_is_tried_below_the_root(divide: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Flushed(divide)
    with sanitize(model, strict=True) as seen:
        model(torch.ones(4, 8)).sum().backward()
    (trial,) = (t for t in seen.examination.trials if t.change == "larger_eps")
    assert (trial.value, trial.outputs_finite, trial.gradients_finite) == (1e-4, True, True)


class Gate(nn.Module):
    """Sure of itself: its probabilities are exactly 0 and 1 in fp16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return 40.0 * self.score(x)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loss_on_logits_is_tried_where_probabilities_are_rounded_to_zero(by_hand: bool) -> None:
    x, y = 1.7 * torch.ones(4, 8).cumsum(0), torch.ones(4, 1)
    model, wide = Gate(), Gate()
    with sanitize(model, strict=True) as seen:
        p = torch.sigmoid(-model(x).abs())
        (-p.log().float().mean() if by_hand else nn.functional.binary_cross_entropy(p, y.half())).backward()
    assert not bool(model.score.weight.grad.isfinite().all())
    (trial,) = (t for t in seen.examination.trials if t.change == "on_logits")
    loss = nn.functional.binary_cross_entropy_with_logits(-(40.0 * wide.score(x)).abs(), y)
    loss.backward()
    assert (trial.helped, trial.gradients_finite) == (True, True)
    assert trial.gradient_error is not None
    assert trial.gradient_error < 0.01
    if by_hand:
        assert trial.loss == pytest.approx(loss.item(), rel=1e-2)


def test_what_fp32_does_not_cure_is_not_tried_in_fp32() -> None:
    model = nn.Linear(8, 1)
    with sanitize(model, strict=True) as seen:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(4, 8))
        (out.float() - 100).log().sum().backward()
    assert seen.examination.first_bad is not None
    assert not seen.examination.trials


def test_a_healthy_step_tries_nothing() -> None:
    model = Attention(in_fp32)
    with sanitize(model, strict=True) as seen:
        one_step(model)
    assert not seen.examination.trials


def _trained(tmp_path: Path | None, **options: Any) -> tuple[MixedPrecisionNanny, list[Any]]:
    model = Attention(plain)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=tmp_path, live=False, strict=True, examine="every", **options)
    told = []
    for step in range(2):
        with nanny.step(step):
            loss, gradients = one_step(model)
            told += [loss, gradients, torch.get_rng_state(), *[t.clone() for t in (*model.parameters(), *model.buffers())]]
            optimizer.zero_grad()
    nanny.close()
    return nanny, told


@pytest.mark.landing
def test_nobody_notices_that_remedies_were_tried() -> None:
    (tried, seen), (_, alone) = _trained(None), _trained(None, try_remedies=False)
    assert tried.diagnoses()[0].tried
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(seen, alone))


def test_every_screen_tells_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _trained(tmp_path)
    told = "it helps: with the first factor of `bmm` divided by 4 before the product, the loss is finite, gradients"
    for words in (["diagnose"], ["summary"], ["diagnose", "--format", "markdown"]):
        cli.main([*words, "--db", str(tmp_path)])
        assert told in " ".join(capsys.readouterr().out.split()), words
    cli.main(["diagnose", "--db", str(tmp_path), "--format", "json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert [(t["change"], t["helped"]) for t in found["tried"]] == [("scaled_first", True), ("fp32", True)]
    cli.main(["diagnose", "--db", str(tmp_path), "--lang", "zh"])
    assert f"已在第 {found['step']} 步试过，有效" in capsys.readouterr().out
    cli.main(["diagnose", "--db", str(tmp_path), "--no-try"])
    text = capsys.readouterr().out
    assert "it helps" not in text
    assert "--no-try" in text


def test_nothing_is_tried_where_it_is_forbidden() -> None:
    nanny, _ = _trained(None, try_remedies=False)
    (found,) = nanny.diagnoses()
    assert found.cause == "attention_logit_overflow_fp16"
    assert not found.tried


class Deep(nn.Module):
    """Gradients grow on their way back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            for layer in self.layers:
                x = layer(x * 16.0)
        return x.float()


def _diagnosed(model: nn.Module, batch: Tensor, factor: float = 1.0, **options: Any) -> Diagnosis:
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, **options)
    for step in range(3):
        with nanny.step(step):
            (model(batch).float().sum() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    nanny.close()
    (found,) = nanny.diagnoses()
    return found


def test_a_smaller_loss_scale_is_tried_where_one_was_made_by_hand() -> None:
    found = _diagnosed(Deep(), torch.full((2, 8), 1e-4), factor=2.0**12)
    assert found.cause == "static_loss_scale_overflow"
    (trial,) = found.tried
    assert (trial.change, trial.helped, trial.gradients_finite) == ("smaller_scale", True, True)
    assert trial.gradient_error is not None
    assert trial.gradient_error < 0.01


def test_a_batch_is_tried_without_its_bad_rows() -> None:
    batch = torch.ones(4, 8)
    batch[1, 3] = batch[3, 0] = math.nan
    found = _diagnosed(nn.Linear(8, 1), batch)
    assert found.cause == "data_nan"
    assert "it helps: with 2 rows of the batch left out, the model's outputs are finite" in trial_in_words(found.tried[0])
    assert not _diagnosed(nn.Linear(8, 1), torch.full((4, 8), math.nan)).tried  # nothing would be left


def test_an_update_that_is_lost_is_tried_on_fp32_weights() -> None:
    torch.manual_seed(0)
    found = _diagnosed(nn.Linear(8, 8).bfloat16(), torch.ones(4, 8, dtype=torch.bfloat16))
    assert found.cause == "update_lost"
    (trial,) = found.tried
    assert (trial.change, trial.helped, trial.moved, trial.moved_before) == ("master_weights", True, 1.0, 0.0)
    assert (found.step, trial.step) == (0, 2), "its numbers are of another step than the verdict's"
    assert trial_in_words(trial).startswith("tried on step 2, it helps")


def _with_trials(**outcome: Any) -> Diagnosis:
    nanny, _ = _trained(None)
    evidence = nanny.evidence()
    exams = tuple(replace(e, trials=tuple(replace(t, **outcome) for t in e.trials)) for e in evidence.examinations)
    (found,) = diagnoses_of(replace(evidence, examinations=exams))
    return found


def test_a_remedy_that_was_in_vain_lowers_the_cause_and_is_not_recommended() -> None:
    found, failed = _with_trials(), _with_trials(loss=math.nan)
    assert failed.confidence < found.confidence
    assert (bool(found.remedy), failed.remedy, failed.in_language("zh").remedy) == (True, "", "")
    assert "does not help" in trial_in_words(failed.tried[0])
    assert _with_trials(gradient_error=20.0).confidence == found.confidence  # finite, but far from FP32: no word against it


@pytest.mark.parametrize("change", sorted({change for changes in TRIED_FOR.values() for change in changes} | set(CHANGES)))
@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_change_has_its_words(change: str, language: str) -> None:
    trial = Trial(change, "bmm", value=4.0, loss=1.0, gradient_error=0.003, output_error=1e-4)
    assert "0.3 %" in trial_in_words(trial, language)


def test_remedies_are_tried_for_causes_that_exist() -> None:
    assert set(TRIED_FOR) <= set(all_causes())
