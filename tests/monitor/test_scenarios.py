"""The ten faults of the scenario table (seed 001), each in a real training under real fp16 autocast where fp16 is meant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from training import Apply, above_info, mlp, regression, said, the, train

from nanny import Severity

FP16 = torch.float16


def ones(step: int) -> tuple[Tensor, Tensor]:
    return torch.ones(4, 16), torch.zeros(4, 1)


def overflowing_layer() -> nn.Linear:
    """Weights of 4500: sixteen ones give 72000, beyond the 65504 of fp16."""
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.fill_(4500.0)
        layer.bias.zero_()
    return layer


def linear_stack(factor: float, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Linear(16, 16, bias=bias), nn.Linear(16, 1, bias=bias))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


@pytest.mark.parametrize("amp", [FP16, torch.bfloat16, None], ids=["fp16", "bf16", "fp32"])
def test_an_ordinary_mlp_raises_nothing(amp):
    scaler = GradScaler("cpu", enabled=amp is FP16)
    assert train(mlp(), amp=amp, scaler=scaler, lr=0.05, steps=30) == []


@pytest.mark.parametrize("scaled", [True, False], ids=["with_scaler", "without"])
def test_an_fp16_overflow_is_an_error_at_the_layer_that_overflows(scaled):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), overflowing_layer(), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(16))
        model[0].bias.zero_()
    found = train(model, batches=ones, amp=FP16, scaler=GradScaler("cpu", enabled=scaled), steps=1)
    overflow = the(found, "OVERFLOW")
    assert (overflow.severity, overflow.site, overflow.step) == (Severity.ERROR, "2", 0)
    assert overflow.limit == 65504
    assert overflow.evidence["passed_on"] == ["3", "4"]
    assert overflow.evidence["posinf"] == overflow.evidence["count"] == 64
    assert [f for f in found if f.severity is Severity.ERROR] == [overflow]  # one culprit, no flood


def test_the_same_weights_do_not_overflow_in_bf16_or_fp32():
    for amp in (torch.bfloat16, None):
        model = nn.Sequential(overflowing_layer(), nn.ReLU(), nn.Linear(16, 1))
        found = train(model, batches=ones, amp=amp, lr=0.0, steps=2)
        assert not said(found, "OVERFLOW"), amp
        assert not said(found, "NEAR_OVERFLOW"), amp


def test_activations_that_shrink_below_fp16_are_an_underflow_at_the_module_that_shrinks_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Apply(lambda x: x * 1e-8), nn.Linear(16, 1))
    found = train(model, amp=FP16, scaler=GradScaler("cpu"), steps=2)
    underflow = [f for f in said(found, "UNDERFLOW") if f.site == "1"]
    assert [f.severity for f in underflow] == [Severity.WARNING]


def test_the_same_shrinking_is_no_underflow_in_bf16():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Apply(lambda x: x * 1e-8), nn.Linear(16, 1))
    assert not said(train(model, amp=torch.bfloat16, steps=2), "UNDERFLOW")


@pytest.mark.parametrize("amp", [FP16, torch.bfloat16, None], ids=["fp16", "bf16", "fp32"])
def test_log_of_a_negative_is_blamed_on_the_module_that_takes_it(amp):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Apply(lambda x: torch.log(-x.abs() - 1)), nn.Linear(16, 16), nn.Linear(16, 1))
    found = train(model, amp=amp, scaler=GradScaler("cpu", enabled=amp is FP16), steps=1)
    nan = the(found, "NAN")
    assert (nan.severity, nan.site, nan.step) == (Severity.ERROR, "1", 0)
    assert nan.evidence["passed_on"] == ["2", "3"]
    assert nan.evidence["nan"] == 256


def test_a_few_negatives_among_many_values_are_enough_for_the_nan_to_be_found():
    def log_of_one_negative(x: Tensor) -> Tensor:
        shifted = x.abs() + 1
        return torch.log(torch.cat([-shifted[:1, :1], shifted.reshape(1, -1)[:, 1:]], 1).reshape_as(x))

    model = nn.Sequential(nn.Linear(8, 16), Apply(log_of_one_negative), nn.Linear(16, 1))
    nan = the(train(model, amp=FP16, scaler=GradScaler("cpu"), steps=1), "NAN")
    assert (nan.site, nan.evidence["nan"]) == ("1", 1)


@pytest.mark.parametrize("amp", [FP16, None], ids=["fp16", "fp32"])
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_an_injected_infinity_is_found_where_it_was_put(amp, sign):
    def inject(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, 0] = sign * math.inf
        return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Apply(inject), nn.Linear(16, 1))
    found = train(model, amp=amp, scaler=GradScaler("cpu", enabled=amp is FP16), steps=1)
    errors = [f for f in found if f.severity is Severity.ERROR]
    assert errors, "an infinity reached the loss and nothing was said"
    assert errors[0].code in ("INF", "NAN")
    # a lone -Inf is what masks are made of: it is charged to whoever turns it into something worse
    assert errors[0].site == ("1" if sign > 0 else "2")
    assert sign < 0 or (errors[0].code == "INF" and errors[0].evidence["passed_on"] == ["2"])


def test_a_gradient_explosion_from_huge_weights_is_an_error_at_once():
    found = train(linear_stack(100.0), lr=1e-4, steps=1)
    explosion = the(found, "GRAD_EXPLOSION")
    assert (explosion.severity, explosion.step) == (Severity.ERROR, 0)
    assert explosion.value > 1e4
    assert explosion.site in dict(linear_stack(1.0).named_parameters())


def test_a_gradient_explosion_after_healthy_steps_is_measured_against_the_history():
    model = mlp()

    def blow_up(step: int) -> None:
        if step == 30:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(60.0)

    found = train(model, steps=32, interval=10, before_step=blow_up)
    explosion = said(found, "GRAD_EXPLOSION")
    assert explosion
    assert (explosion[0].severity, explosion[0].step) == (Severity.ERROR, 30)
    assert explosion[0].evidence["ratio"] > 100


def test_vanishing_gradients_of_the_whole_model_are_a_warning():
    torch.manual_seed(0)
    found = train(linear_stack(1e-6, bias=False), lr=0.01, steps=3)
    vanish = the(found, "GRAD_VANISH")
    assert (vanish.severity, vanish.site) == (Severity.WARNING, "gradients")
    assert 0 < vanish.value < 1e-8


def test_gradients_that_vanish_on_the_way_to_the_first_layers_are_a_warning_there():
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(14):
        layers += [nn.Linear(8, 8), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    found = train(model, lr=0.01, steps=8, interval=1)
    vanish = said(found, "GRAD_VANISH")
    assert vanish, above_info(found)
    assert vanish[0].severity is Severity.WARNING
    assert vanish[0].site == "0"
    assert "26" not in vanish[0].evidence["layers"]  # the last ones learn


class Gated(nn.Module):
    """A router of one choice: its weight is 1 whatever it says, and its gradient rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        best = self.gate(hidden).softmax(-1).amax(-1, keepdim=True)
        return self.last(hidden * (best / (best + 1e-12 * best)))


def test_a_layer_behind_others_that_learn_does_not_fade():
    torch.manual_seed(0)
    assert said(train(Gated(), lr=0.01, steps=8, interval=1), "GRAD_VANISH") == []


def test_a_sum_that_leaves_the_fp16_range_is_an_overflow_though_every_term_is_small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 320), Apply(lambda x: (x * 0 + 256).sum(-1, keepdim=True)), nn.Linear(1, 1))
    found = train(model, amp=FP16, scaler=GradScaler("cpu"), steps=1)
    overflow = the(found, "OVERFLOW")
    assert (overflow.severity, overflow.site) == (Severity.ERROR, "1")
    assert overflow.evidence["input_absmax"] < 1000


def test_an_overflow_that_turns_into_nan_is_one_culprit_and_the_place_where_it_turned():
    model = nn.Sequential(overflowing_layer(), nn.LayerNorm(16), nn.Linear(16, 1))
    found = train(model, batches=ones, amp=FP16, scaler=GradScaler("cpu"), steps=1)
    overflow, nan = the(found, "OVERFLOW"), the(found, "NAN")
    assert (overflow.severity, overflow.site) == (Severity.ERROR, "0")
    assert set(overflow.evidence["passed_on"]) == {"1", "2"}
    assert (nan.site, nan.severity, nan.evidence["from"]) == ("1", Severity.WARNING, "0")
    assert found.index(overflow) < found.index(nan)


@pytest.mark.parametrize("interval", [1, 4])
def test_gradual_degradation_is_silent_first_and_an_overflow_at_the_right_step(interval):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    weights = [0.1, 0.1, 0.5, 1, 5, 10, 50, 5000, 5000, 5000]

    def degrade(step: int) -> None:
        with torch.no_grad():
            model[0].weight.fill_(weights[step])

    found = train(
        model, batches=ones, criterion=lambda out, y: (out - y).mean(), amp=FP16, scaler=GradScaler("cpu", init_scale=1.0),
        lr=1e-6, steps=10, interval=interval, before_step=degrade,
    )  # fmt: skip
    bothering = [f for f in found if f.severity > Severity.INFO]
    assert bothering[0].step == 7
    overflow = the(found, "OVERFLOW")
    assert overflow.site == "0"
    assert overflow.step == 7


def test_values_close_to_the_end_of_fp16_are_a_warning_before_they_overflow():
    model = nn.Sequential(overflowing_layer(), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.fill_(2500.0)  # sums to 40000
        model[2].weight.mul_(1e-3)
    found = train(model, batches=ones, amp=FP16, scaler=GradScaler("cpu", init_scale=8.0), lr=1e-9, steps=2)
    near = said(found, "NEAR_OVERFLOW")
    assert [f.severity for f in near if f.site == "0"] == [Severity.WARNING]
    assert near[0].value == pytest.approx(40000, rel=1e-3)
    assert not said(found, "OVERFLOW")


def test_repeats_are_counted_and_not_told_again():
    model = nn.Sequential(nn.Linear(8, 16), Apply(lambda x: torch.log(-x.abs() - 1)), nn.Linear(16, 1))
    found = train(model, amp=FP16, scaler=GradScaler("cpu"), steps=4)
    assert len([f for f in found if f.severity is Severity.ERROR]) == 1


def test_a_mask_of_minus_infinity_is_fine_until_a_whole_row_is_masked():
    class Attention(nn.Module):
        def __init__(self, masked_rows: int) -> None:
            super().__init__()
            self.score = nn.Linear(8, 8)
            self.mask = Apply(lambda s: s.masked_fill(torch.arange(16)[:, None] < masked_rows, -math.inf) if masked_rows else
                              s.masked_fill(torch.ones(16, 8).triu(1).bool(), -math.inf))  # fmt: skip
            self.soft = nn.Softmax(-1)
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.soft(self.mask(self.score(x))))

    torch.manual_seed(0)
    assert above_info(train(Attention(0), batches=regression(), steps=5)) == []
    found = train(Attention(2), batches=regression(), steps=1)
    nan = the(found, "NAN")
    assert nan.site == "soft"
