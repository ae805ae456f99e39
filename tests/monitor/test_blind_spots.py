"""Faults that other monitors are known to miss: each line of the peers' list that concerns a running training."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam
from training import Apply, above_info, autocast, mlp, recorded, regression, said, scalar, store_of, the, train, watch

from nanny import Severity
from nanny.store import reader

FP16 = torch.float16


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch, self.head = branch, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.branch(x))


def errors(findings) -> list[tuple[str, str, int | None]]:
    return [(f.code, f.site, f.step) for f in findings if f.severity is Severity.ERROR]


class BreaksAt(nn.Module):
    """The identity, until the given steps, when it takes the logarithm of negative numbers."""

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self.steps, self.now = steps, 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-x.abs() - 1) if self.now in self.steps else x


def breaking(steps: set[int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), BreaksAt(steps), nn.Linear(16, 1))


def run_breaking(steps: set[int], *, scaler: GradScaler | None = None, count: int = 12, interval: int = 100):
    model = breaking(steps)

    def tell(step: int) -> None:
        model[2].now = step

    return train(model, scaler=scaler, steps=count, interval=interval, before_step=tell)


def test_a_nan_on_an_untraced_step_is_found_at_that_step_with_its_operation_and_the_modules_in_question():
    found = run_breaking({7}, scaler=GradScaler("cpu", init_scale=8.0))
    code, site, step = errors(found)[0]
    assert (code, step) == ("NAN", 7)
    nan = said(found, "NAN")[0]
    assert site == "2" or (nan.evidence["op"] == "log" and "2" in nan.evidence["modules"] and "3" not in nan.evidence["modules"])


def test_a_nan_that_recurs_is_named_at_its_module():
    found = run_breaking({7, 8, 9, 10}, scaler=GradScaler("cpu", init_scale=2.0**20))
    assert errors(found)[0][2] == 7
    assert any(f.site == "2" and f.severity is Severity.ERROR for f in said(found, "NAN"))


def test_without_a_scaler_the_poisoned_weights_are_told_apart_from_the_first_nan():
    found = run_breaking({7})
    codes = errors(found)
    assert codes[0][0] == "NAN"
    assert codes[0][2] == 7
    assert ("WEIGHT_NONFINITE", 8) in {(code, step) for code, _, step in codes}


@pytest.mark.parametrize("interval", [1, 100])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first_hands_it_on", [False, True])
def test_a_batch_that_is_not_finite_is_blamed_on_the_data(interval, value, first_hands_it_on):
    model = nn.Sequential(nn.Identity(), *mlp()) if first_hands_it_on else mlp()
    batches = regression()

    def spoiled(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        if step == 4:
            x = x.clone()
            x[3, 2] = value
        return x, y

    found = train(model, batches=spoiled, scaler=GradScaler("cpu", init_scale=8.0), steps=6, interval=interval)
    first = the(found, "INPUT_NONFINITE")
    assert (first.severity, first.step) == (Severity.ERROR, 4)
    assert not said(found, "NAN")


def test_a_target_that_is_not_finite_is_blamed_on_the_loss_not_on_a_layer():
    batches = regression()

    def spoiled(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x, y * math.nan if step == 2 else y

    found = train(mlp(), batches=spoiled, scaler=GradScaler("cpu", init_scale=8.0), steps=4)
    first = errors(found)[0]
    assert first[2] == 2
    assert first[1] in ("loss", "input") or first[1].startswith("op:")


def test_a_non_finite_tensor_that_comes_as_a_keyword_or_inside_a_dict_is_an_input():
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 1)

        def forward(self, batch: dict[str, list[Tensor]], *, shift: Tensor) -> Tensor:
            return self.lin(batch["x"][0] + shift)

    for where in ("dict", "keyword"):
        model = Keyword()
        with watch(model) as nanny, nanny.step(0):
            x, shift = torch.rand(4, 8), torch.zeros(8)
            (x if where == "dict" else shift)[..., 0] = math.nan
            model({"x": [x]}, shift=shift).mean().backward()
        first = errors(nanny.findings)[0]
        assert first[0] == "INPUT_NONFINITE", (where, nanny.findings)


@pytest.mark.parametrize("interval", [1, 100])
def test_a_nan_that_arises_only_in_backward_is_named_at_the_right_place(interval):
    """sqrt at 0: forward and loss are finite, the gradient is inf * 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Apply(lambda x: torch.sqrt((x * 0) ** 2)), nn.Linear(16, 1))
    found = train(model, steps=1, interval=interval)
    first = the(found, "NAN")
    assert first.severity is Severity.ERROR
    # what arrives at the output of 1 is finite; it is 1's own derivative that breaks, and 0 that receives it
    assert first.site in ("0", "1", "0.weight", "0.bias")
    assert set(first.evidence["parameters"]) == {"0.weight", "0.bias"}
    assert "finite" in first.message


def test_a_nan_in_one_parameter_gradient_alone_is_seen():
    class Split(torch.autograd.Function):
        """A weight whose own gradient is NaN, while the input's is fine."""

        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            return grad, grad.sum(0) * math.nan

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return Split.apply(x, self.gain)

    for interval in (1, 100):
        model = nn.Sequential(nn.Linear(8, 16), Gain(), nn.Linear(16, 1))
        found = train(model, steps=1, interval=interval)
        first = the(found, "NAN")
        assert first.evidence["parameters"] == ["1.gain"]
        assert first.site in ("1", "1.gain")


def test_an_infinite_gradient_is_seen_without_any_nan():
    class Inf(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.full_like(grad, math.inf)

    for interval in (1, 100):
        model = nn.Sequential(nn.Linear(8, 4), Apply(Inf.apply), nn.Linear(4, 1))
        found = train(model, batches=lambda s: (torch.ones(2, 8), torch.zeros(2, 1)), steps=1, interval=interval)
        assert the(found, "INF").severity is Severity.ERROR


def test_a_model_that_is_one_module_with_everything_in_its_own_forward_is_watched(tmp_path):
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((8, 1), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x @ self.w)

    model = Root()
    with watch(model, output_dir=tmp_path) as nanny, nanny.step(0):
        model(-torch.rand(4, 8)).mean().backward()
    assert errors(nanny.findings)[0][:2] == ("NAN", "Root")


def test_a_nan_that_the_loss_function_makes_is_not_blamed_on_a_layer():
    model = mlp()
    for criterion in (lambda out, y: torch.log(-out.abs()).mean(), lambda out, y: (out * 0).mean() / (y * 0).sum()):
        found = train(model, criterion=criterion, steps=1)
        site = errors(found)[0][1]
        assert site == "loss" or site.startswith("op:"), found


def test_a_criterion_module_is_named_by_its_class():
    class LogLoss(nn.Module):
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return torch.log(-out.abs() - 1).mean()

    found = train(mlp(), criterion=LogLoss(), steps=1)
    assert errors(found)[0][1] == "LogLoss()"


def test_fp16_gradients_that_all_flush_to_zero_do_not_pass_in_silence():
    """No GradScaler and a small loss: every gradient is exactly 0, the loss stands still, nothing is NaN."""
    model = mlp()
    found = train(model, criterion=lambda out, y: 1e-9 * out.float().mean(), amp=FP16, lr=0.1, steps=6)
    assert above_info(found), "all gradients are zero and nothing was said"
    assert {f.code for f in found} & {"UNDERFLOW", "DEAD_LAYER", "GRAD_VANISH"}


def test_a_dead_layer_is_named_and_living_ones_are_not():
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        branch[0].bias.fill_(-100.0)  # never active: its weights get a gradient of exactly 0

    found = train(Residual(branch), steps=6)
    dead = said(found, "DEAD_LAYER")
    assert [f.site for f in dead] == ["branch.0"]
    assert dead[0].severity is Severity.WARNING


def test_healthy_fp32_steps_raise_no_underflow():
    assert train(mlp(depth=3), lr=0.05, steps=10) == []


def test_a_loss_that_jumps_and_stays_there_is_a_spike():
    model, batches = mlp(), regression()

    def shifted(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x, y + (10.0 if step >= 60 else 0.0)

    found = train(model, batches=shifted, lr=1e-4, steps=90, interval=10)
    spike = [f for f in said(found, "LOSS_SPIKE") if f.severity is Severity.WARNING]
    assert [f.step for f in spike] == [79]  # the updates before were usual: a new task, which would have been learnt by then


def test_a_loss_pinned_by_an_overflowing_sum_is_a_plateau():
    """A Dice loss whose denominator is inf in fp16: exactly 1, gradient exactly 0, for ever."""
    model = nn.Linear(8, 1)

    def dice(out: Tensor, y: Tensor) -> Tensor:
        p = torch.sigmoid(out.half())
        return 1 - (2 * (p * 0.5).sum()) / (p * 6e4).sum()

    found = train(model, criterion=dice, lr=0.1, steps=60, interval=20)
    assert the(found, "LOSS_PLATEAU").value == 1.0


def test_an_explosion_that_clipping_has_dealt_with_is_information():
    model, batches = mlp(), regression()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)

    def outlier(step: int) -> tuple[Tensor, Tensor]:
        x, y = batches(step)
        return x, y + (5000.0 if step == 40 else 0.0)

    found = train(model, batches=outlier, criterion=loss, clip=0.1, steps=45, interval=10)
    assert above_info(f for f in found if f.code == "GRAD_EXPLOSION") == []
    assert said(found, "GRAD_EXPLOSION")


def test_two_runs_in_one_folder_are_kept_apart(tmp_path):
    train(mlp(), steps=3, output_dir=tmp_path)
    train(breaking({0}), steps=2, output_dir=tmp_path)
    with reader.reading(store_of(tmp_path)) as db:
        first, second = reader.runs(db)
        assert reader.findings(db, first.id) == []
        assert reader.findings(db, second.id)
        assert reader.steps(db, first.id) == (0, 2)
        assert {first.status, second.status} == {"finished"}


def test_steps_that_are_counted_anew_in_every_epoch_do_not_overwrite_each_other(tmp_path):
    model, batches = mlp(), regression()
    optimizer = SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        for _ in range(3):
            for i in range(4):
                x, y = batches(i)
                optimizer.zero_grad()
                with nanny.step(i):
                    F.mse_loss(model(x), y).backward()
                optimizer.step()
    assert len(scalar(tmp_path, "loss")) == 12


def test_parameters_that_join_the_optimizer_later_are_watched(tmp_path):
    model, batches = mlp(), regression()
    optimizer = Adam(model[2].parameters(), lr=0.01)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": model[0].parameters()})
            x, y = batches(step)
            optimizer.zero_grad()
            with nanny.step(step):
                F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert set(recorded(tmp_path, "grad", 3)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_an_attention_whose_scores_overflow_fp16_is_an_overflow_not_a_nan_in_softmax():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.scores = Apply(lambda q, k: q @ k.transpose(-1, -2))
            self.soft = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.soft(self.scores(self.q(x), self.k(x))) @ self.v(x)

    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(2, 4, 16) * 800
    found = []
    with watch(model) as nanny:
        for step in range(1):
            with nanny.step(step):
                with autocast(FP16):
                    loss = model(x).float().mean()
                loss.backward()
        found = nanny.findings
    nanny.close()
    overflow = the(found, "OVERFLOW")
    assert overflow.site == "scores"
    assert "soft" in overflow.evidence["passed_on"]


def test_three_faults_in_one_model_name_the_first_and_list_the_others():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), Apply(lambda x: torch.log(-x.abs())), nn.Linear(16, 16), Apply(lambda x: x / 0), nn.Linear(16, 1)
    )
    found = train(model, steps=1)
    assert errors(found) == [("NAN", "1", 0)]
    assert the(found, "NAN").evidence["passed_on"] == ["2", "3", "4"]


def test_two_independent_branches_that_break_are_both_told_or_the_first_one_is():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Apply(lambda x: torch.log(-x.abs())), Apply(lambda x: torch.sqrt(-x.abs() - 1))
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.left(x) + self.right(x))

    found = train(Two(), steps=1)
    assert errors(found)[0] == ("NAN", "left", 0)


@pytest.mark.parametrize("lr", [10.0, 100.0])
def test_a_run_that_diverges_in_its_first_steps_is_an_explosion_before_it_is_a_nan(lr):
    """Only step 0 is traced, and all is well there: the growth of the norm tells."""
    found = train(mlp(8, 32, depth=2), lr=lr, steps=30, interval=100)
    explosion, first_bad = (
        said(found, "GRAD_EXPLOSION")[0],
        min(f.step for f in found if f.code in ("NAN", "INF", "WEIGHT_NONFINITE")),
    )
    assert explosion.step < first_bad
    assert explosion.severity is Severity.ERROR


def test_many_dead_layers_are_one_finding_that_names_the_one_nearest_to_the_loss():
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with torch.no_grad():
        branch[2].bias.fill_(-100.0)

    dead = the(train(Residual(branch), steps=6), "DEAD_LAYER")
    assert dead.site == "branch.2"
    assert dead.evidence["layers"] == ["branch.0", "branch.2"]


def test_an_fp16_value_near_the_end_is_told_once_with_those_it_is_handed_on_to():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.fill_(2500.0)
        model[3].weight.mul_(1e-3)
    found = train(model, batches=lambda s: (torch.ones(4, 16), torch.zeros(4, 1)), amp=FP16, lr=1e-9, steps=2)
    near = the(found, "NEAR_OVERFLOW")
    assert near.site == "0"
    assert near.evidence["passed_on"] == ["1", "2"]


def test_a_nan_that_has_not_reached_the_loss_is_a_warning_and_an_infinity_is_information():
    for function, code, severity in ((lambda x: (x, x.detach() * math.nan), "NAN", Severity.WARNING),
                                     (lambda x: (x, x.detach().abs() / 0), "INF", Severity.INFO)):  # fmt: skip
        model = nn.Sequential(nn.Linear(8, 8), Apply(function), Apply(lambda pair: pair[0]), nn.Linear(8, 1))
        finding = the(train(model, steps=1), code)
        assert finding.severity is severity
        assert "has not reached" in finding.message
