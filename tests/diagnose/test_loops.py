"""Small training loops, each with its healthy twin: the cause is named, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nanny import MixedPrecisionNanny
from nanny.diagnose.records import Diagnosis

pytestmark = pytest.mark.quick(5)


def watched(loop: Callable[[], None]) -> list[Diagnosis]:
    """Under the monitor as `nanny run` has it: nobody says where steps begin."""
    nanny = MixedPrecisionNanny(None, output_dir=None, live=False, strict=True)
    nanny.steps_by_themselves(find_models=True)
    loop()
    nanny.close()
    return nanny.diagnoses()


class Scaled(torch.optim.Optimizer):
    """Divides each gradient by the root of its mean square, which is stored in `dtype` under a name of its own."""

    def __init__(self, params, lr: float, dtype: torch.dtype, eps: float) -> None:
        super().__init__(params, {"lr": lr, "dtype": dtype, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                energy = self.state[p].setdefault("energy", torch.zeros_like(p, dtype=group["dtype"]))
                energy.copy_(energy.float() * 0.99 + 0.01 * p.grad.square())
                p.sub_(group["lr"] * p.grad / (energy.float().sqrt() + group["eps"]))


@pytest.mark.parametrize(
    ("dtype", "eps", "told"),
    [
        (torch.float16, 1e-9, ["adam_eps_underflow_fp16"]),
        (torch.float16, 1e-2, []),  # far above what flushes
        (torch.float32, 1e-9, []),
    ],
)
def test_an_optimizer_that_divides_by_squares_that_were_stored_as_zero(dtype: torch.dtype, eps: float, told: list[str]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = Scaled(model.parameters(), 1e-3, dtype, eps)

    def loop() -> None:
        for _ in range(12):
            x = torch.randn(32, 8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = 0.01 * nn.functional.mse_loss(out.float(), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert [one.cause for one in watched(loop)] == told


@pytest.mark.parametrize(("clears", "told"), [("each batch", ["backward_without_step"]), ("each step", []), ("a part", [])])
def test_micro_batches_whose_gradients_the_model_itself_clears(clears: str, told: list[str]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loop() -> None:
        for i in range(48):
            if clears == "each batch" or i % 4 == 0:
                model.zero_grad()
            elif clears == "a part":
                model[0].zero_grad()
            x = torch.randn(4, 6)
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            if i % 4 == 3:
                optimizer.step()

    assert [one.cause for one in watched(loop)] == told


@pytest.mark.parametrize(("weight", "told"), [(lambda size: size / size, "undefined_operation"), (torch.ones_like, "")])
def test_nothing_divided_by_nothing_in_a_table_is_no_bad_batch(weight: Callable[[Tensor], Tensor], told: str):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizes = torch.cat([torch.linspace(1.0, 3.0, 11), torch.zeros(1)])  # one class has no members

    def loop() -> None:
        for i in range(12):
            x, kind = torch.randn(8, 4), torch.arange(8) + i % 5
            per = (model(x).squeeze(-1) - x[:, 0]).square()
            loss = (per * weight(sizes[kind])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert [one.cause for one in watched(loop)] == [told] * bool(told)


@pytest.mark.parametrize(
    ("divided", "told"), [("a part", ["step_on_scaled_gradients"]), ("all", []), ("what is stepped", ["in_no_optimizer"])]
)
def test_a_scale_by_hand_is_divided_out_of_all_that_is_stepped(divided: str, told: list[str]):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 16), nn.Tanh()), "head": nn.Linear(16, 1)})
    stepped = model["body"] if divided == "what is stepped" else model
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.05, momentum=0.9)

    def loop() -> None:
        for _ in range(30):
            x = torch.randn(32, 8)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model["head"](model["body"](x))
            loss = nn.functional.mse_loss(out.float(), x[:, :1])
            model.zero_grad()
            (loss * 2048.0).backward()
            for p in (model if divided == "all" else model["body"]).parameters():
                p.grad.mul_(1 / 2048.0)
            optimizer.step()

    assert [one.cause for one in watched(loop)] == told


@pytest.mark.parametrize(
    ("dtype", "bad", "told"),
    [
        (torch.float16, 24, ["input_out_of_range_fp16"]),
        (torch.bfloat16, 24, []),
        (torch.float16, 0, []),
        (torch.float16, 1, []),  # the first batch alone: to leave it out was right
    ],
)
def test_a_loop_that_leaves_every_infinite_loss_out_and_so_never_goes_back(dtype: torch.dtype, bad: int, told: list[str]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loop() -> None:
        for i in range(24):
            pressure = torch.rand(16, 8) * (1e6 if i < bad else 1.0)  # in Pa, or in MPa
            with torch.autocast("cpu", dtype=dtype):
                out = model(pressure)
            loss = nn.functional.smooth_l1_loss(out.float(), pressure[:, :1])
            optimizer.zero_grad()
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()

    assert [one.cause for one in watched(loop)] == told


@pytest.mark.parametrize(("divides", "told"), [(False, ["step_on_scaled_gradients"]), (True, [])])
def test_weights_that_the_loop_moves_itself_by_gradients_of_a_scaled_loss(divides: bool, told: list[str]):
    """Test-time adaptation: a copy of the head takes one step on a part of the batch, the model learns from the rest."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 24), nn.Tanh()), nn.Linear(24, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def loop() -> None:
        for _ in range(16):
            x = torch.randn(48, 6)
            y = x[:, :1] * x[:, 1:2]
            adapted = [p.detach().clone().requires_grad_() for p in head.parameters()]
            with torch.autocast("cpu", dtype=torch.float16):
                hidden = body(x)
                inner = nn.functional.mse_loss(nn.functional.linear(hidden[:16].detach(), *adapted).float(), y[:16])
            gradients = torch.autograd.grad(scaler.scale(inner), adapted)
            with torch.no_grad():
                for p, g in zip(adapted, gradients):
                    p -= 0.1 * (g / scaler.get_scale() if divides else g)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss((nn.functional.linear(hidden, *adapted) + head(hidden)).float()[16:], y[16:])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert [one.cause for one in watched(loop)] == told


def test_weights_that_begin_at_zero_may_be_moved_by_more_than_they_are():
    """Plain SGD by hand on a scaled loss, with the scale in the learning rate."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def loop() -> None:
        for _ in range(12):
            x = torch.randn(32, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            (nn.functional.mse_loss(out.float(), x[:, :1]) * 512.0).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 / 512.0 * p.grad
                    p.grad = None

    assert watched(loop) == []


@pytest.mark.parametrize(("at", "told"), [(9, [("undefined_operation", 9)]), (None, [])])
def test_a_loop_that_asks_for_derivatives_and_moves_its_weights_itself(at: int | None, told: list[tuple[str, int]]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def loop() -> None:
        for i in range(14):
            x = torch.randn(32, 6)
            loss = (torch.log(torch.sigmoid(model(x)) - (1.0 if i == at else 0.0)) + x[:, :1].abs()).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients):
                    p.sub_(0.01 * g)

    assert [(one.cause, one.step) for one in watched(loop)] == told


@pytest.mark.parametrize(("bias", "told"), [(0.0, []), (-9.0, ["dead_relu"])])
def test_units_that_one_sample_at_a_time_seldom_turns_on_are_not_dead(bias: float, told: list[str]):
    """A policy that is asked once per move, with a dropout before its ReLU."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 48), nn.Dropout(0.7), nn.ReLU(), nn.Linear(48, 2))
    nn.init.constant_(policy[0].bias, bias)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def loop() -> None:
        for _ in range(10):
            states = torch.randn(20, 4)
            tries = [torch.distributions.Categorical(logits=policy(state[None])[0]) for state in states]
            moves = [one.sample() for one in tries]
            gains = [float((state[0] > 0) == (move == 1)) - 0.5 for state, move in zip(states, moves)]
            loss = -sum(one.log_prob(move) * gain for one, move, gain in zip(tries, moves, gains))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert [one.cause for one in watched(loop)] == told


@pytest.mark.parametrize(("dtype", "told"), [(torch.float16, [("eps_underflow_fp16", 7)]), (torch.float32, [])])
def test_features_that_the_loop_has_made_infinite_before_the_model_is_called(dtype: torch.dtype, told: list[tuple[str, int]]):
    """A logarithm with an eps that is 0 in fp16, of a batch that is silent in part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(6, 8, 3), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loop() -> None:
        for i in range(10):
            power = torch.rand(4, 6, 12) * (torch.arange(12) < 6 if i == 7 else 1.0)
            level = torch.log10(power.to(dtype) + 1e-10)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(level).float(), power.mean((1, 2))[:, None])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert [(one.cause, one.step) for one in watched(loop)] == told


@pytest.mark.parametrize(
    ("dtype", "bias", "told"),
    [
        (torch.bfloat16, 6.5, [("saturated_probability_loss", True)]),
        (torch.bfloat16, 40.0, [("undefined_operation", False)]),  # 1 in FP32 too
        (torch.float32, 6.5, []),
    ],
)
def test_a_probability_that_another_line_has_rounded_to_one(dtype: torch.dtype, bias: float, told: list[tuple[str, bool]]):
    """The second player of a GAN: what goes into its model is drawn in the very line that calls it."""
    torch.manual_seed(0)
    makes, judges = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    of_maker, of_judge = torch.optim.Adam(makes.parameters(), lr=1e-3), torch.optim.Adam(judges.parameters(), lr=1e-3)

    def loop() -> None:
        for i in range(8):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
                real = torch.sigmoid(judges(torch.randn(16, 3)))
                fake = torch.sigmoid(judges(makes(torch.randn(16, 4)).detach()))
                of_both = -(torch.log(real + 1e-3) + torch.log(1 - fake + 1e-3)).mean()
            of_judge.zero_grad()
            of_both.backward()
            of_judge.step()
            if i == 7:
                with torch.no_grad():
                    judges[2].bias.fill_(bias)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
                taken = torch.sigmoid(judges(makes(torch.randn(16, 4))))
                of_one = -torch.log(1 - taken).mean()
            of_maker.zero_grad()
            of_one.backward()
            of_maker.step()

    assert [(one.cause, one.precision_caused) for one in watched(loop)] == told


def _regression(batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], ahead: Callable[[Tensor], Tensor] = lambda out: out):
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for x, y in batches():
            out = model(x).squeeze(-1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ahead(out), y)
            loss.backward()
            optimizer.step()

    return watched(loop)


def _labelled(at: int | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(160, 6)
    y = x.sum(1)
    if at is not None:
        y[at] = math.nan
    return x, y


@pytest.mark.parametrize(
    ("at", "drawn", "sure"),
    [
        (85, True, 0.95),
        (85, False, 0.6),  # sliced by hand: the program may have computed it before; surer if the step was being examined
        (None, True, 0.0),
    ],
)
def test_a_label_that_is_no_number_is_bad_data(at: int | None, drawn: bool, sure: float):
    x, y = _labelled(at)
    by_hand = lambda: ((x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8))  # noqa: E731
    found = _regression(lambda: iter(DataLoader(TensorDataset(x, y), batch_size=8)) if drawn else by_hand())
    assert [(one.cause, one.step) for one in found[:1]] == ([("data_nan", 10)] if sure else [])
    assert all(one.confidence >= sure for one in found[:1])


def test_what_the_loop_itself_makes_of_a_prediction_is_no_bad_label():
    x, y = _labelled(None)
    found = _regression(lambda: iter(DataLoader(TensorDataset(x, y), batch_size=8)), lambda out: torch.acos(9 * out))
    assert found
    assert all(one.cause != "data_nan" for one in found)
