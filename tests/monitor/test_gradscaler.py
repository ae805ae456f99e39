"""GradScaler's truth table: true gradients and skipped steps, whatever the optimizer and whoever unscales."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from training import above_info, autocast, mlp, overflowed, recorded, regression, said, scalar, the, watch

from nanny import Severity

FP16, BF16 = torch.float16, torch.bfloat16
STEPS = 6

# name -> (optimizer options, explicit unscale_, scaler enabled, autocast)
WAYS = {
    "single": ({"foreach": False}, False, True, FP16),
    "foreach": ({"foreach": True}, False, True, FP16),
    "fused": ({"fused": True}, False, True, FP16),
    "unscale": ({"foreach": True}, True, True, FP16),
    "fused_unscale": ({"fused": True}, True, True, FP16),
    "disabled": ({"foreach": True}, False, False, FP16),
    "bf16": ({"foreach": True}, False, False, BF16),
    "fp32_scaled": ({"foreach": True}, False, True, None),
}


class Spoiled(nn.Module):
    """Passes its input on; backward, on the chosen steps, makes the gradient infinite (as a scale that is too high would)."""

    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self.steps = steps
        self.now = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.now in self.steps and x.requires_grad:
            x.register_hook(lambda g: g + math.inf)
        return x


def model_with(bad_steps: set[int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Spoiled(bad_steps), nn.ReLU(), nn.Linear(16, 1))


def run(
    model: nn.Sequential, optimizer: Optimizer, scaler: GradScaler, amp: torch.dtype | None, *, unscale: bool = False,
    folder: Path | None = None, given: bool = True, interval: int = 3, inside: bool = False,
):  # fmt: skip
    """One training, watched if a folder is given; returns the nanny and the true gradients of each step in float64."""
    batches = regression()
    watched = folder is not None
    nanny = watch(model, *((optimizer, scaler) if given else ()), interval=interval, output_dir=folder) if watched else None
    true: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        x, y = batches(step)
        model[1].now = step
        optimizer.zero_grad()
        if nanny is not None:
            nanny.begin_step(step)
        with autocast(amp):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        factor = scaler.get_scale() if scaler.is_enabled() else 1.0
        true.append({n: p.grad.double() / factor for n, p in model.named_parameters()})
        if nanny is not None and not inside:
            nanny.end_step()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if nanny is not None and inside:
            nanny.end_step()
    if nanny is not None:
        nanny.close()
    return nanny, true


@pytest.mark.quick(4)
@pytest.mark.representative(10)
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("bad", [set(), {2, 4}], ids=["clean", "overflow"])
@pytest.mark.parametrize("way", WAYS)
def test_recorded_gradients_are_the_true_ones_on_every_step(way, bad, given, tmp_path):
    options, unscale, enabled, amp = WAYS[way]
    model = model_with(bad)
    plain = copy.deepcopy(model)

    def kit(m: nn.Module) -> tuple[Optimizer, GradScaler]:
        return AdamW(m.parameters(), lr=1e-3, **options), GradScaler("cpu", init_scale=1024.0, enabled=enabled)

    _, true = run(plain, *kit(plain), amp, unscale=unscale)
    nanny, _ = run(model, *kit(model), amp, unscale=unscale, folder=tmp_path, given=given)

    for step in range(STEPS if enabled else min(bad, default=STEPS)):  # nothing stops the damage without a scaler
        spoiled = step in bad
        seen = recorded(tmp_path, "grad", step)
        assert set(seen) == set(true[step])
        for name, gradient in true[step].items():
            norm = float(torch.linalg.vector_norm(gradient))
            if math.isfinite(norm):
                assert seen[name] == pytest.approx(norm, rel=1e-5), (step, name)
            else:
                assert not math.isfinite(seen[name]), (step, name)
        assert overflowed(tmp_path, step) == ({"0.weight", "0.bias"} if spoiled else set())
    if enabled:
        assert scalar(tmp_path, "skipped") == {step: float(step in bad) for step in range(STEPS)}
        scale, expected = 1024.0, {}
        for step in range(STEPS):
            expected[step] = scale
            scale *= 0.5 if step in bad else 1.0
        assert scalar(tmp_path, "scale") == expected
        skipped = said(nanny.findings, "STEP_SKIPPED")
        assert [f.step for f in skipped] == ([2] if bad else [])
        for f in skipped:
            assert f.severity is Severity.INFO
            assert set(f.evidence["overflowed"]) == {"0.weight", "0.bias"}
            assert (f.value, f.evidence["scale_after"]) == (1024.0, 512.0)
        assert above_info(nanny.findings) == []
    else:
        errors = [f for f in nanny.findings if f.severity is Severity.ERROR]
        assert [f.step for f in errors[:1]] == ([2] if bad else [])
    assert len(scalar(tmp_path, "loss")) == STEPS


@pytest.mark.parametrize("inside", [True, False], ids=["optimizer_inside", "optimizer_behind"])
def test_the_optimizer_may_run_inside_the_block_or_behind_it(inside, tmp_path):
    model = model_with({2})
    optimizer, scaler = AdamW(model.parameters(), lr=1e-3), GradScaler("cpu", init_scale=64.0)
    run(model, optimizer, scaler, FP16, folder=tmp_path, inside=inside)
    assert overflowed(tmp_path, 2) == {"0.weight", "0.bias"}
    assert scalar(tmp_path, "skipped")[2] == 1.0


def test_the_norm_is_the_one_before_clipping_and_clipping_after_unscale_is_silent(tmp_path):
    model, batches = mlp(), regression()
    plain = copy.deepcopy(model)
    optimizer, scaler = SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=256.0)
    nanny = watch(model, optimizer, scaler, interval=2, output_dir=tmp_path)
    true = []
    for step in range(4):
        x, y = batches(step)
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        with autocast(FP16):
            nn.functional.mse_loss(plain(x), y).backward()
        true.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters())))
        optimizer.zero_grad()
        with nanny.step(step):
            with autocast(FP16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
    nanny.close()
    norms = scalar(tmp_path, "grad_norm")
    assert [norms[s] for s in range(4)] == pytest.approx(true, rel=5e-3)  # fp16 rounds scaled and unscaled a little differently
    assert not said(nanny.findings, "CLIP_BEFORE_UNSCALE")
    assert above_info(nanny.findings) == []


@pytest.mark.parametrize("clip", ["norm", "value", "norm_generator", "get_total_norm"])
def test_clipping_while_still_scaled_is_found(clip, tmp_path):
    model, batches = mlp(), regression()
    optimizer, scaler = SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    nanny = watch(model, optimizer, scaler, interval=2, output_dir=tmp_path)
    for step in range(3):
        x, y = batches(step)
        optimizer.zero_grad()
        with nanny.step(step):
            with autocast(FP16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            true = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters())) / 1024.0
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            elif clip == "get_total_norm":
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            else:
                nn.utils.clip_grad_norm_(model.parameters() if clip == "norm" else (p for p in model.parameters()), 1.0)
            scaler.step(optimizer)
            scaler.update()
    nanny.close()
    finding = the(nanny.findings, "CLIP_BEFORE_UNSCALE")
    assert (finding.severity, finding.step) == (Severity.ERROR, 0)
    assert scalar(tmp_path, "grad_norm")[2] == pytest.approx(true, rel=1e-5)


def test_clipping_without_any_scaler_is_silent_and_the_true_norm_is_kept(tmp_path):
    model, batches = mlp(), regression()
    optimizer = SGD(model.parameters(), lr=0.01)
    nanny = watch(model, optimizer, interval=2, output_dir=tmp_path)
    returned = []
    for step in range(4):
        x, y = batches(step)
        optimizer.zero_grad()
        with nanny.step(step):
            nn.functional.mse_loss(model(x), y).backward()
        returned.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
        optimizer.step()
    nanny.close()
    assert list(scalar(tmp_path, "grad_norm").values()) == pytest.approx(returned, rel=1e-5)
    assert above_info(nanny.findings) == []


def scaled_run(scaler: GradScaler, bad, steps: int, folder: Path | None = None, *, zero_grad: bool = True, update: bool = True):
    """`bad` says which steps overflow in backward."""
    model, batches = model_with(set()), regression()
    optimizer = SGD(model.parameters(), lr=1e-3)
    nanny = watch(model, optimizer, scaler, interval=10, output_dir=folder)
    for step in range(steps):
        x, y = batches(step)
        model[1].now, model[1].steps = step, {step} if bad(step) else set()
        if zero_grad or step == 0:
            optimizer.zero_grad()
        with nanny.step(step):
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        if update:
            scaler.update()
    nanny.close()
    return nanny.findings


def test_the_search_for_a_scale_at_the_start_is_information_only():
    """From 2**24 in real fp16 the first scaled gradients are infinite until the scale has come down."""
    model, batches = mlp(), regression()
    optimizer, scaler = SGD(model.parameters(), lr=0.05), GradScaler("cpu", init_scale=2.0**24)
    nanny = watch(model, optimizer, scaler, interval=10)
    for step in range(40):
        x, y = batches(step)
        optimizer.zero_grad()
        with nanny.step(step):
            with autocast(FP16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    nanny.close()
    assert scaler.get_scale() < 2.0**20, "the search did not happen, so the test shows nothing"
    assert said(nanny.findings, "STEP_SKIPPED")
    assert above_info(nanny.findings) == []


def test_a_lone_overflow_after_growth_is_information_only():
    found = scaled_run(GradScaler("cpu", init_scale=1024.0, growth_interval=10), lambda s: s in (12, 34, 57), 80)
    assert said(found, "STEP_SKIPPED")
    assert above_info(found) == []


def test_five_skips_in_a_row_after_a_good_start_are_a_decline():
    found = scaled_run(GradScaler("cpu"), lambda s: 10 <= s < 15, 16)
    decline = the(found, "SCALE_DECLINE")
    assert (decline.severity, decline.step, decline.value) == (Severity.ERROR, 14, 5)
    assert set(decline.evidence["overflowed"]) == {"0.weight", "0.bias"}
    assert not said(scaled_run(GradScaler("cpu"), lambda s: 10 <= s < 14, 16), "SCALE_DECLINE")


def test_a_scale_that_falls_below_one_is_a_collapse_and_says_that_backward_is_singular():
    found = scaled_run(GradScaler("cpu", init_scale=256.0), lambda s: s >= 5, 20)
    collapse = the(found, "SCALE_COLLAPSE")
    assert collapse.severity is Severity.ERROR
    assert collapse.value < 1
    assert collapse.step == 5 + 8  # 256 * 2**-9 is the first below one
    assert "singular" in collapse.message or "finite" in collapse.message


def test_a_run_in_which_no_scale_ever_fits_is_a_collapse():
    found = scaled_run(GradScaler("cpu"), lambda s: True, 20)
    collapse = the(found, "SCALE_COLLAPSE")
    assert (collapse.severity, collapse.step) == (Severity.ERROR, 16)


def test_a_collapse_by_a_broken_forward_says_that_no_scale_can_help():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.fill_(60000.0)
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), GradScaler("cpu")
    nanny = watch(model, optimizer, scaler)
    for step in range(20):
        optimizer.zero_grad()
        with nanny.step(step):
            with autocast(FP16):
                loss = model(torch.ones(4, 8)).mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    nanny.close()
    assert the(nanny.findings, "OVERFLOW").site == "0"
    assert "no loss scale can help" in the(nanny.findings, "SCALE_COLLAPSE").message


@pytest.mark.parametrize("way", ["no_update", "new_scaler", "fixed_scale"])
def test_a_scale_that_cannot_move_while_every_step_overflows_is_pinned(way):
    model, batches = model_with(set()), regression()
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), GradScaler("cpu")
    nanny = watch(model, optimizer)
    for step in range(8):
        x, y = batches(step)
        model[1].now, model[1].steps = step, {step}
        if way == "new_scaler":
            scaler = GradScaler("cpu")
        optimizer.zero_grad()
        with nanny.step(step):
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if way == "no_update":
            scaler._per_optimizer_states.clear()  # what people do to silence the error of a second step()
            scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update(2.0**16 if way == "fixed_scale" else None)
    nanny.close()
    pinned = the(nanny.findings, "SCALE_PINNED")
    assert pinned.severity is Severity.ERROR
    assert set(pinned.evidence["overflowed"]) == {"0.weight", "0.bias"}
    assert not said(nanny.findings, "SCALE_DECLINE")


@pytest.mark.slow
def test_skips_far_more_often_than_growth_explains_are_a_warning_then_an_error():
    few = scaled_run(GradScaler("cpu", init_scale=2.0**40), lambda s: s > 20 and s % 25 == 0, 260)
    assert the(few, "SKIP_RATE").severity is Severity.WARNING
    many = scaled_run(GradScaler("cpu", init_scale=2.0**60), lambda s: s > 20 and s % 4 == 0, 200)
    assert max(f.severity for f in said(many, "SKIP_RATE")) is Severity.ERROR


@pytest.mark.landing
def test_a_sawtooth_of_growth_and_back_off_is_healthy():
    """growth_interval=20: the scale doubles, overflows at once, is halved, for ever."""
    found = scaled_run(GradScaler("cpu", init_scale=1024.0, growth_interval=20), lambda s: s % 21 == 20, 230)
    assert above_info(found) == []


def test_non_finite_gradients_that_were_never_zeroed_are_stale():
    found = scaled_run(GradScaler("cpu"), lambda s: s == 3, 8, zero_grad=False)
    stale = said(found, "STALE_GRADS")
    assert stale
    assert (stale[0].severity, stale[0].step) == (Severity.ERROR, 4)
    assert set(stale[0].evidence["parameters"]) == {"0.weight", "0.bias"}


def test_zeroed_gradients_after_a_skip_are_not_stale():
    assert not said(scaled_run(GradScaler("cpu"), lambda s: s == 3, 8), "STALE_GRADS")


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_one_scaler_with_two_optimizers_names_the_one_that_was_skipped(given, tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
    spoil = Spoiled({2})
    first, second = Adam(model["body"].parameters(), lr=1e-3), Adam(model["head"].parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=512.0)
    nanny = watch(model, *((first, scaler) if given else ()), interval=3, output_dir=tmp_path)
    true: list[dict[str, float]] = []
    for step in range(5):
        x, y = regression()(step)
        spoil.now = step
        first.zero_grad()
        second.zero_grad()
        with nanny.step(step):
            with autocast(FP16):
                loss = nn.functional.mse_loss(model["head"](spoil(model["body"](x))), y)
            scaler.scale(loss).backward()
            factor = scaler.get_scale()
            true.append({n: float(torch.linalg.vector_norm(p.grad.double() / factor)) for n, p in model.named_parameters()})
        head_before = model["head"].weight.detach().clone()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        moved = not torch.equal(head_before, model["head"].weight)
        assert moved  # the head's own step is never skipped
    nanny.close()
    for step in (0, 1, 3, 4):
        assert recorded(tmp_path, "grad", step) == pytest.approx(true[step], rel=1e-5), step
    assert overflowed(tmp_path, 2) == {"body.weight", "body.bias"}
    assert recorded(tmp_path, "grad", 2)["head.weight"] == pytest.approx(true[2]["head.weight"], rel=1e-5)
    assert [s for s, v in scalar(tmp_path, "skipped").items() if v] == [2]
    assert the(nanny.findings, "STEP_SKIPPED").evidence["overflowed"] == ["body.weight", "body.bias"]
    assert above_info(nanny.findings) == []


@pytest.mark.parametrize("framed", ["each_micro_batch", "whole_update"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_gradient_accumulation_records_the_accumulated_true_gradient(options, framed, tmp_path):
    model, batches = mlp(), regression()
    optimizer, scaler = AdamW(model.parameters(), lr=1e-3, **options), GradScaler("cpu", init_scale=128.0)
    nanny = watch(model, optimizer, scaler, interval=4, output_dir=tmp_path)
    true: dict[int, dict[str, float]] = {}
    for update in range(4):
        optimizer.zero_grad()
        if framed == "whole_update":
            nanny.begin_step(update)
        for micro in range(3):
            x, y = batches(update * 3 + micro)
            if framed == "each_micro_batch":
                nanny.begin_step(update * 3 + micro)
            with autocast(FP16):
                loss = nn.functional.mse_loss(model(x), y) / 3
            scaler.scale(loss).backward()
            if framed == "each_micro_batch":
                nanny.end_step()
        at = update if framed == "whole_update" else update * 3 + 2
        true[at] = {n: float(torch.linalg.vector_norm(p.grad.double() / 128.0)) for n, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        if framed == "whole_update":
            nanny.end_step()
    nanny.close()
    for step, norms in true.items():
        assert recorded(tmp_path, "grad", step) == pytest.approx(norms, rel=1e-5), step
    assert above_info(nanny.findings) == []


def test_an_overflow_in_one_micro_batch_is_recorded_at_the_update_it_spoils(tmp_path):
    model, batches = model_with({4}), regression()
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), GradScaler("cpu", init_scale=128.0)
    nanny = watch(model, optimizer, scaler, interval=100, output_dir=tmp_path)
    for step in range(9):
        x, y = batches(step)
        model[1].now = step
        with nanny.step(step):
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        if step % 3 == 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    nanny.close()
    assert overflowed(tmp_path, 5) == {"0.weight", "0.bias"}
    assert [s for s, v in scalar(tmp_path, "skipped").items() if v] == [5]
    assert above_info(nanny.findings) == []


def test_a_disabled_scaler_leaves_no_scale_in_the_record(tmp_path):
    model = model_with(set())
    run(model, SGD(model.parameters(), lr=1e-3), GradScaler("cpu", enabled=False), FP16, folder=tmp_path)
    assert scalar(tmp_path, "scale") == {}
    assert scalar(tmp_path, "skipped") == {}


def test_a_healthy_scaled_run_is_not_taken_for_an_explosion(tmp_path):
    """Scaled by 65536 the gradients of this run are above every fixed limit; unscaled they are ordinary."""
    model = model_with(set())
    nanny, _ = run(model, SGD(model.parameters(), lr=1e-3), GradScaler("cpu"), None, folder=tmp_path, given=False)
    assert max(scalar(tmp_path, "grad_norm").values()) < 100
    assert above_info(nanny.findings) == []


def test_a_loss_that_only_its_scale_makes_infinite_is_looked_into():
    model = mlp()
    optimizer, scaler = SGD(model.parameters(), lr=1e-3), GradScaler("cpu", init_scale=2.0**127)
    batch, target = regression()(0)
    with watch(model, optimizer, scaler) as nanny, nanny.step(0):
        scaler.scale(1e3 + (model(batch) - target).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    told = nanny._history.facts.latest
    assert told.autopsy is not None
    assert told.autopsy.op == "mul"
    assert math.isfinite(told.loss or math.nan)
