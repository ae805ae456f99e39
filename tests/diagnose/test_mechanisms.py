"""What a cause needs before, at and after, on the curves of a run; names and formats."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from nanny import Finding, MixedPrecisionNanny, Severity
from nanny.cli import main
from nanny.core.examination import Examination, GradientError, Hazard, Place
from nanny.core.step import Breach, OptimizerState, StepRecord, Update
from nanny.diagnose.choose import all_that_fit, diagnoses_of
from nanny.diagnose.evidence import Evidence, RunFacts
from nanny.diagnose.history import RunHistory
from nanny.diagnose.knowledge import remedy_of
from nanny.monitor.registry import all_rules, judge_step

GROWS = [1.0, 1.1, 0.9, 1.0, 6.0, 50.0, 700.0, 9e3]


def run_of(losses: list[float], norms: list[float], weights: list[float], lr: float = 0.1, **facts: object) -> Evidence:
    steps = np.arange(len(losses))
    curves = {"loss": losses, "grad_norm": norms, "weight_norm": weights, "lr": [lr] * len(losses)}
    told = RunFacts(steps=len(losses), **facts)  # type: ignore[arg-type]
    return Evidence(told, {name: (steps, np.array(values)) for name, values in curves.items()})


def causes_of(evidence: Evidence) -> list[str]:
    return [one.cause for one in diagnoses_of(evidence)]


def test_steps_are_too_long_only_if_the_weights_go_along():
    carried = [2.0, 2.0, 2.0, 2.1, 2.4, 9.0, 80.0, 800.0]
    assert causes_of(run_of(GROWS, GROWS, carried)) == ["lr_too_high"]
    assert causes_of(run_of(GROWS, GROWS, [2.0] * 8)) == []  # the loss is made of other things than before


@pytest.mark.parametrize(("error", "told"), [(0.16, ["lr_too_high"]), (0.7, [])])
def test_gradients_that_rounding_has_moved_a_little_do_not_excuse_a_runaway(error: float, told: list[str]):
    exam = Examination(0, 100, amp_dtype="bf16", gradient_error=error)
    evidence = run_of(GROWS, GROWS, [2.0, 2.0, 2.0, 2.1, 2.4, 9.0, 80.0, 800.0])
    assert causes_of(replace(evidence, examinations=(exam,))) == told


def test_a_learning_rate_of_zero_is_not_too_high():
    assert causes_of(run_of(GROWS, GROWS, [2.0, 2.0, 2.0, 2.0, 2.0, 9.0, 80.0, 800.0], lr=0.0)) == []


def test_a_reward_that_is_maximised_may_grow():
    state = OptimizerState("SGD", True, False, 0.1, maximizes=True)
    carried = [2.0, 2.0, 2.0, 2.1, 2.4, 9.0, 80.0, 800.0]
    assert causes_of(run_of(GROWS, GROWS, carried, latest=StepRecord(0, optimizers=(state,)))) == []


def test_a_runaway_that_begins_with_the_first_step_is_seen():
    losses = [1.0, 3e5, 4e5, 3e5, 2e5, 9e4]
    assert causes_of(run_of(losses, [0.5, 1e5, 2e5, 1e5, 1e5, 9e4], [3.0, 60.0, 70.0, 80.0, 90.0, 99.0])) == ["lr_too_high"]


def test_a_fall_from_where_the_first_updates_threw_the_loss_is_no_learning():
    height = [3.7, 9.0, 8.0, 7.0, 6.0, 5.0, *[3.6] * 18]
    learnt = [*height[:6], *[1.4] * 18]
    for losses, said in ((height, ["lr_too_high"]), (learnt, [])):
        evidence = run_of(losses, [1.0] * 24, [2.0, *[9.0] * 23])
        ratios = np.arange(24), np.array([0.5] * 24)
        assert causes_of(replace(evidence, scalars={**evidence.scalars, "update_ratio": ratios})) == said


def test_one_batch_is_told_from_steps_that_are_too_long():
    calm = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 0.9, 1.0, 0.9, 0.8]
    thrown = [2.0] * 10 + [2.0, 3e4, 5e6]
    evidence = run_of([*calm, 4e9, 5e12, 7e20], [*calm, 3e6, 1e9, 4e15], thrown)
    assert causes_of(evidence) == ["data_outlier"]
    assert diagnoses_of(evidence)[0].step == 10
    assert causes_of(run_of([*calm, 4e9, 1.1, 0.9], [*calm, 3e6, 1.0, 0.9], [2.0] * 13)) == []  # clipped: no harm


@pytest.mark.parametrize(
    ("norm", "beta2", "clipped", "told"),
    [
        (4e4, 0.999, 0, ["data_outlier"]),
        (4e4, None, 0, []),  # SGD, which would have been thrown away by it
        (4e4, 0.999, 11, []),
        (50.0, 0.999, 0, []),
        (np.inf, 0.999, 0, []),  # skipped, or told by what it breaks
    ],
)
def test_one_batch_that_the_second_moment_keeps(norm: float, beta2: float | None, clipped: int, told: list[str]):
    losses = [*[0.5, 0.52, 0.48, 0.5, 0.51] * 2, 1e6, *[0.5, 0.52] * 4]
    norms = [*[0.3, 0.31, 0.29, 0.3, 0.3] * 2, norm, *[0.3, 0.31] * 4]
    latest = StepRecord(18, optimizers=(OptimizerState("AdamW", True, False, 1e-3, 1e-8, beta2),))
    evidence = run_of(losses, norms, [2.0] * 19, latest=latest, counts={"clipped": clipped})
    assert causes_of(evidence) == told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_cause_names_a_format_that_the_run_does_not_have(dtype: str):
    evidence = run_of(GROWS, GROWS, [2.0] * 8, latest=StepRecord(0, amp_dtype="" if dtype == "float32" else dtype))
    assert [one.cause for one in all_that_fit(evidence) if one.cause.endswith("_fp16")] == []
    assert all(one.format == {"float32": "", "bfloat16": "bf16"}[dtype] for one in all_that_fit(evidence))


def test_former_names_and_names_without_a_format_are_understood(capsys: pytest.CaptureFixture[str]):
    for asked, told in (("bf16_update_lost", "update_lost"), ("exp_overflow", "exp_overflow_fp16"), ("POLICY_MISMATCH",) * 2):
        assert main(["rule", asked]) == 0
        assert capsys.readouterr().out.startswith(told)
    assert remedy_of("bf16_update_lost") == remedy_of("update_lost") != ""


def scales(*numbers: float) -> list[Finding]:
    run, found = RunHistory(), []
    rules = {"SCALE_LOW": all_rules()["SCALE_LOW"]}
    for i, (before, after) in enumerate(pairwise(numbers)):
        step = StepRecord(i, scale=before, scale_after=after, skipped=after < before, stepped=True)
        found += judge_step(step, run, rules)
    return found


def test_a_scale_that_has_sunk_is_a_warning_and_the_search_for_one_is_not():
    assert [f.severity for f in scales(*[1024] * 20, 512, 256, 128, 64)] == [Severity.WARNING]
    assert [f.value for f in scales(*[2**20] * 20, 2**19, *(2.0**i for i in range(18, 12, -1)))] == [2.0**13]
    assert scales(1024, 1024, 512, 256, 128, 64, 64) == []  # so early it is still looking
    assert scales(2**26, *(2.0**i for i in range(25, 15, -1)), 2**16, 2**16) == []  # no step had passed before
    assert scales(*[64] * 30, 32, 16) == []  # a hundredth of 64 is far
    assert scales(*[128] * 30, 64) == []


def test_a_loss_is_compared_with_sums_over_as_many_terms():
    rules = {code: all_rules()[code] for code in ("LOSS_SPIKE", "GRAD_EXPLOSION")}

    def loud(longer: int) -> list[Finding]:
        run, found = RunHistory(), []
        for i in range(60):
            steady = StepRecord(i, loss=1.0 + 0.01 * (i % 7), loss_terms=10)
            found += judge_step(steady if i < 40 else replace(steady, loss=90.0, loss_terms=longer), run, rules)
        return [f for f in found if f.severity > Severity.INFO]

    assert [f.code for f in loud(longer=10)][:1] == ["LOSS_SPIKE"]
    assert loud(longer=300) == []


@pytest.mark.parametrize(("falls", "told"), [(0.8, []), (1.0, ["LOSS_SPIKE"])])
def test_a_loss_that_jumps_with_its_task_and_is_learnt_away_is_no_spike(falls: float, told: list[str]):
    run, found = RunHistory(), []
    rules = {"LOSS_SPIKE": all_rules()["LOSS_SPIKE"]}
    for i in range(80):
        loss = 9.0 * falls ** (i - 40) if i >= 40 else 0.1 + 0.001 * (i % 7)
        found += judge_step(StepRecord(i, loss=loss, loss_terms=10), run, rules)
    assert list(dict.fromkeys(f.code for f in found if f.severity > Severity.INFO)) == told


@pytest.mark.parametrize(("skipped", "moves", "told"), [(30, True, 1), (30, False, 0), (8, True, 0)])
def test_a_schedule_that_moves_on_at_skipped_steps(skipped: int, moves: bool, told: int):
    run, found, lr = RunHistory(), [], 1.0
    for i in range(60):
        lost = i < skipped
        found += judge_step(
            StepRecord(i, lr=lr, skipped=lost, stepped=True, scale=1.0), run, {"SCHEDULE_AHEAD": all_rules()["SCHEDULE_AHEAD"]}
        )
        lr = lr * 0.99 if moves or not lost else lr
    assert len({f.code for f in found}) == told


@pytest.mark.landing
def test_a_loop_that_refuses_every_step_on_bad_gradients_has_a_scale_that_is_too_high():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    nanny = MixedPrecisionNanny(None, output_dir=None, live=False, strict=True)
    nanny.steps_by_themselves(find_models=True)
    for _ in range(80):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(8, 16))
        optimizer.zero_grad()
        (out.float().square().mean() * 2.0**24).backward()
        if all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
    nanny.close()
    told = nanny.diagnoses()[0]
    assert (told.cause, told.culprit, told.precision_caused) == ("static_loss_scale_overflow", "loop:scale", True)


class HandMadeNorm(nn.Module):
    def __init__(self, in_fp32: bool):
        super().__init__()
        self.in_fp32 = in_fp32

    def forward(self, x):
        wide = x.float() if self.in_fp32 else x
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Residual(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.layer = norm, nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(self.norm(x))


@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_norm_that_overflows_to_zeros_is_told_and_not_the_branch_it_leaves_small(tmp_path, in_fp32: bool):
    """One over infinity is 0: no NaN anywhere, the loss falls, and one layer of many gets no gradient."""
    torch.manual_seed(0)
    hot = nn.Sequential(nn.Linear(16, 16), Residual(HandMadeNorm(in_fp32)))
    with torch.no_grad():
        hot[0].weight.normal_(0, 300.0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh(), hot)
    head = nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
    batch = torch.randn(8, 16)
    with MixedPrecisionNanny(nn.ModuleList([model, head]), output_dir=tmp_path, strict=True) as nanny:
        for i in range(6):
            with nanny.step(i):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = (head(model(batch).float() / 300) - batch[:, :1]).square().mean()
                loss.backward()
                optimizer.step()
        told = [(one.cause, one.culprit) for one in nanny.diagnoses()]
    assert (("norm_square_overflow_fp16", "0.6.1.norm") in told) is not in_fp32
    lost = [h for exam in nanny.evidence().examinations for h in exam.hazards if h.kind == "overflow"]
    assert bool(lost) is not in_fp32
    assert all(h.exponents["ran"]["nonfinite"] and "nonfinite" not in h.exponents["fp32"] for h in lost), "what is drawn"


def test_a_rate_that_is_spent_at_once_is_told_only_where_nothing_is_learned() -> None:
    steps = np.arange(100)
    spent = np.where(steps < 4, 2e-3, 2e-5)
    flat, falls = np.full(100, 1.6), 1.6 * 0.97**steps
    cosine = 1e-3 * (1 + np.cos(np.pi * steps / 100))
    runs = [(flat, spent, ["lr_spent_early"]), (falls, spent, []), (flat, cosine, []), (flat, spent[::-1], [])]
    for losses, rates, told in runs:
        evidence = run_of(list(losses), [0.5] * 100, [2.0] * 100)
        evidence = replace(evidence, scalars={**evidence.scalars, "lr": (steps, rates)})
        assert causes_of(evidence) == told


class TwoMoments(nn.Module):
    """The variance as a difference of two large numbers."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-3)


def test_a_metric_that_counts_choices_makes_no_router_of_what_it_counts(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(TwoMoments(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    x, y = (60 + 3 * torch.randn(8, 16)).bfloat16(), torch.arange(8) % 4
    with MixedPrecisionNanny(model, output_dir=tmp_path, strict=True) as nanny:
        for i in range(4):
            with nanny.step(i):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(x)
                nn.functional.cross_entropy(out.float(), y).backward()
                (out.argmax(-1) == y).float().mean()  # its accuracy
                optimizer.step()
        told = nanny.diagnoses()[0]
    assert (told.cause, told.culprit) == ("catastrophic_cancellation", "0")


def test_rounding_in_the_gradients_of_a_run_that_has_converged_is_no_trouble():
    hazard = Hazard(
        "amplification", "native_batch_norm", Place("bn"), 3, "bfloat16", consequence=0.2, cause="scale_imbalance_absorption"
    )
    exams = tuple(Examination(i, 100, amp_dtype="bf16", gradient_error=0.25, hazards=(hazard,)) for i in range(3))
    for last, told in ((0.004, []), (1.5, ["scale_imbalance_absorption"])):
        evidence = run_of(list(np.geomspace(1.7, last, 40)), [0.5] * 40, [2.0] * 40)
        assert causes_of(replace(evidence, examinations=exams)) == told


@pytest.mark.parametrize(
    ("dtype", "told"), [("bfloat16", 1), ("float16", 1), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("float32", 0)]
)
def test_weights_that_round_back_are_told_and_diagnosed_alike(dtype: str, told: int):
    run, found = RunHistory(), []
    optimizer = OptimizerState("SGD", True, False, 1e-5, param_dtype=dtype)
    for i in range(4):
        step = StepRecord(i, stepped=True, updates=(Update("w", dtype, 1e-5, 1000, 990, 1e-7, 0.1),), optimizers=(optimizer,))
        found += judge_step(step, run, {"LOST_UPDATE": all_rules()["LOST_UPDATE"]})
    assert len({f.code for f in found}) == told
    assert [one.cause for one in diagnoses_of(run.evidence(found))] == ["update_lost"] * told


@pytest.mark.parametrize(("in_fp32", "told"), [(0.0, ["NO_GRADIENT_ARRIVES"]), (1e-9, [])])
def test_a_gradient_that_fp32_has_is_not_cut_off(in_fp32: float, told: list[str]):
    run = RunHistory()
    gradient = GradientError("w", 0.0, in_fp32, 1.0, 0.1, 1.0, 0.0)
    run.add_examination(Examination(0, 100, amp_dtype="fp16", gradients=(gradient,)))
    breach = Breach("no_gradient", ("w",), 1, steps=10, of=10, elements=4, traits=("ran", "zero"))
    found = judge_step(
        StepRecord(9, loss=1.0, breaches=(breach,)), run, {"NO_GRADIENT_ARRIVES": all_rules()["NO_GRADIENT_ARRIVES"]}
    )
    assert [f.code for f in found] == told


def test_weights_that_round_back_are_told_where_and_when_they_were_first_seen_to():
    run, found = RunHistory(), []
    optimizer = OptimizerState("AdamW", True, False, 1e-5, param_dtype="bfloat16")
    for i, still in enumerate([(990, 900), (900, 990), (980, 985)]):
        updates = tuple(Update(name, "bfloat16", 1e-5, 1000, n, 1e-7, 0.1) for name, n in zip("ab", still))
        step = StepRecord(i, stepped=True, updates=updates, optimizers=(optimizer,))
        found += judge_step(step, run, {"LOST_UPDATE": all_rules()["LOST_UPDATE"]})
    (one,) = diagnoses_of(run.evidence(found))
    assert (one.culprit, one.step) == ("a", 0)
    assert {f.site for f in found} == {"a"}


@pytest.mark.parametrize("size", [1e-5, 1.0])
def test_gradients_that_come_back_as_nothing_are_suspected_where_no_step_was_compared(size):
    """As of weights in shards: no twin follows them. The loss is far from 0, and what fp16 is given of it is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, strict=True, examine="off")
    for step in range(12):
        x = torch.randn(4096, 8)
        with watched.step(step):
            optimizer.zero_grad()
            ((model(x.half()).float() * size - x[:, :1] * size) ** 2).mean().backward()
            optimizer.step()
    watched.close()
    told = [(one.cause, one.confidence < 0.7) for one in watched.diagnoses()]
    assert told == ([("grad_underflow_no_scaling", True)] if size < 1 else [])
