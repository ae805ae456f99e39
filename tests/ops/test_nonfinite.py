"""NanInfTracker: the producer of the first NaN, apart from those who passed it on; silence on healthy steps and on masks."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

from nanny import CompareWithCPU, NanInfTracker
from nanny.core.finding import NannyWarning
from ops.op_models import TinyGpt, images, language, optimizer_for, series, train


def track(**options):
    return NanInfTracker(strict=True, **options)


def producers(tool):
    return [(f.op.rpartition(".")[2], f.kind, f.place.site, f.place.phase) for f in tool.faults]


class Poisoned(nn.Module):
    """Its middle makes what is asked for."""

    def __init__(self, make):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), Call(make), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.quick(4)
@pytest.mark.parametrize("make", [language, images, series])
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_healthy_training_is_silent_and_undisturbed(make, amp, capsys):
    model, x, y = make()
    alone = train(model, x, y, steps=3, amp=amp)
    drawn = torch.rand(1)
    model, x, y = make()
    with track() as tool:
        watched = train(model, x, y, steps=3, amp=amp)
    assert torch.equal(drawn, torch.rand(1))
    assert watched == alone
    assert tool.faults == []
    said = capsys.readouterr().err
    assert "[WARNING]" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("mask", ["-inf", "finfo.min"])
def test_masks_are_no_fault(mask):
    model, x, y = language(TinyGpt(mask=mask))
    with track() as tool:
        train(model, x, y, amp=torch.float16)
    assert tool.faults == []


def test_masks_that_came_in_as_buffers_or_were_added_twice_are_no_fault():
    bias = torch.full((4, 4), float("-inf")).triu(1)
    half = torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1)
    log_mask = torch.ones(4, 4).tril()
    with track() as tool:
        (torch.randn(4, 4) + bias).softmax(-1).sum()
        (torch.randn(4, 4).half() + half + half).softmax(-1).sum()
        low = torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1)
        (low + low).softmax(-1)
        (torch.randn(4, 4) + log_mask.log()).softmax(-1).sum()
    assert tool.faults == []


def test_a_mask_that_becomes_nan_is_named_where_it_does():
    rows = torch.tensor([False, True, False])[:, None]
    model = Poisoned(lambda x: x.masked_fill(rows, float("-inf")).softmax(-1))
    with track() as tool:
        model(torch.randn(3, 4)).sum().backward()
    assert producers(tool)[0] == ("_softmax", "nan", "middle", "forward")
    assert tool.faults[0].passed_on_count > 1


def test_a_mask_that_becomes_nan_in_the_loss_is_a_fault_if_it_reaches_a_gradient():
    with track() as tool:
        scores = torch.randn(3, 4).masked_fill(torch.eye(4)[:3].bool(), float("-inf"))
        ratio = scores - scores.clone()
        torch.where(ratio.isnan(), 0.0, ratio).sum()
    assert tool.faults == []
    with track() as tool:
        (torch.tensor([float("-inf")], requires_grad=True) - torch.full((1,), float("-inf"))).exp().square().backward()
    assert producers(tool) == [("sub", "nan", "", "loop")]


@pytest.mark.parametrize(
    ("make", "op", "kind"),
    [
        (lambda x: (x.half() * 6e4 + 6e4).float() * 2, "mul", "inf"),
        (lambda x: (x - 100).sqrt(), "sqrt", "nan"),
        (lambda x: x / torch.zeros_like(x), "div", "inf"),
        (lambda x: (x * 1e4).exp(), "exp", "inf"),
        (lambda x: (x.abs() + 7e4).half().float(), "_to_copy", "inf"),
        (lambda x: torch.zeros_like(x).log() * x.abs(), "log", "inf"),
        (lambda x: x.abs().add(1e20).square().neg(), "pow", "inf"),
    ],
    ids=["overflow", "root", "zero", "exp", "cast", "log", "square"],
)
def test_the_producer_is_named_and_the_others_only_passed_it_on(make, op, kind):
    torch.manual_seed(0)
    model = Poisoned(make)
    with track() as tool:
        loss = model(torch.randn(8, 4)).float().square().mean()
        loss.backward()
    assert producers(tool)[0] == (op, kind, "middle", "forward")
    assert len([f for f in tool.faults if f.place.phase != "backward"]) == 1
    assert tool.faults[0].passed_on_count > 2
    assert os.path.abspath(tool.faults[0].place.file) == __file__
    assert tool.findings[0].site == "middle"


def test_a_backward_that_is_singular_is_named():
    model = Poisoned(lambda x: (x * 0).norm(dim=-1, keepdim=True).expand(-1, 4) + (x * 0).sqrt())
    with track() as tool:
        model(torch.randn(8, 4)).sum().backward()
    first = producers(tool)[0]
    assert first[2:] == ("middle", "backward")
    assert tool.faults[0].place.line is not None


def test_what_a_formula_of_backward_masks_out_itself_is_no_fault():
    with track() as tool:
        x = torch.zeros(3, 4, requires_grad=True)
        torch.linalg.norm(x).backward()
        torch.linalg.vector_norm(x, 0.5).backward()
        torch.tensor([0.0, 2.0, 0.0, 3.0], requires_grad=True).cumprod(0).sum().backward()
        assert x.grad.isfinite().all()
    assert tool.faults == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_gradient_that_nobody_reads_is_still_named(keep, tmp_path):
    x = torch.zeros(3, requires_grad=True)
    with track(dump_error_data=keep, stop_on_error=False, output_dir=tmp_path) as tool:
        x.sqrt().sum().backward()
    assert [(f.op.rpartition(".")[2], f.kind, f.place.phase) for f in tool.faults] == [("div", "inf", "backward")]


def test_zero_and_negated_tensors_are_read_by_their_values():
    with track() as tool:
        torch.sgn(torch.randn(3, dtype=torch.complex64, requires_grad=True)).abs().sum().backward()
        torch.sgn(torch.randn(3, requires_grad=True)).sum().backward()
        torch.randn(3, dtype=torch.complex64).conj().imag + 1
    assert tool.faults == []


def test_data_and_weights_that_came_in_broken_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    data = torch.randn(2, 4)
    data[0, 0] = float("nan")
    with track() as tool:
        model(data)
    assert [(f.kind, f.op) for f in tool.faults] == [("came_in", "data")]
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    with track() as tool:
        model(torch.randn(2, 4))
    assert [(f.kind, f.op, f.place.site) for f in tool.faults] == [("came_in", "1.weight", "1.weight")]


def test_missing_labels_that_are_marked_with_nan_are_no_fault_until_they_reach_a_gradient():
    model = nn.Linear(4, 1)
    target = torch.randn(8, 1)
    target[2] = float("nan")
    x = torch.randn(8, 4)
    with track() as tool:
        error = (model(x) - target).square()
        torch.where(target.isnan(), 0.0, error).sum().detach()
        (model(x) - target.masked_fill(target > 1, float("nan"))).nanmean().detach()
    assert tool.faults == []
    with track() as tool:
        (model(x) - target).square().mean().backward()
    assert [(f.kind, f.op) for f in tool.faults] == [("came_in", "data")]


def test_sparse_gradients_pass():
    embedding = nn.Embedding(10, 4, sparse=True)
    with track() as tool, CompareWithCPU(strict=True) as comparing:
        embedding(torch.tensor([1, 2, 2])).sum().backward()
        torch.optim.SparseAdam(embedding.parameters()).step()
    assert (tool.faults, comparing.faults) == ([], [])


def test_one_poisoned_update_is_told_once_however_long_the_run_goes_on(capsys):
    model, x, y = images()
    optimizer = optimizer_for(model, "SGD")
    with track() as tool:
        train(model, x, y, steps=1, optimizer=optimizer)
        with torch.no_grad():
            model.head.weight.mul_(1e30).mul_(1e30)
        train(model, x, y, steps=4, optimizer=optimizer)
    assert producers(tool) == [("mul_", "inf", "", "loop")]
    assert capsys.readouterr().err.count("[WARNING]") == 1


def test_values_on_a_device_are_read_once_per_step(monkeypatch):
    monkeypatch.setattr("nanny.watch.nonfinite._reads_at_once", lambda tensor: False)
    model, x, y = images()
    optimizer = optimizer_for(model, "SGD")
    reads = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, f=original, n=name: (reads.append(n), f(t))[1])
    with track() as tool:
        for _ in range(3):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            tool.step()
    assert reads == ["tolist"] * 3


def test_an_overflow_of_a_multiplication_in_an_optimizer_is_its_own():
    class Blown(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    for factor in (0.5, 1e20, 1e20):
                        p.mul_(factor)

    model, x, y = images()
    optimizer = Blown(model.parameters(), lr=0.1)
    with track() as tool:
        train(model, x, y, steps=1, optimizer=optimizer)
    assert {(fault.op, fault.kind) for fault in tool.faults} == {("torch.ops.aten.mul_", "inf")}
    low, high = next((n.minimum, n.maximum) for fault in tool.faults for n in fault.inputs)
    assert 1e18 < max(-low, high) < 1e20


def test_a_write_into_a_part_does_not_hide_what_the_rest_holds():
    with track() as tool:
        table = torch.zeros(3, 4)
        table[0] = torch.tensor(-1.0).sqrt()
        table[1].add_(1.0)
        table[2].mul_(2.0)
        table.sum().exp()
    assert producers(tool) == [("sqrt", "nan", "", "loop")]


def test_values_beyond_fp32_are_finite_in_fp64():
    with track() as tool:
        torch.full((3,), 1e200, dtype=torch.float64) * 1e50
    assert tool.faults == []
    with track() as tool:
        torch.full((3,), 1e200, dtype=torch.float64) * 1e200
    assert producers(tool) == [("mul", "inf", "", "loop")]


def test_uninitialised_memory_is_nobodys_fault():
    with track() as tool:
        for _ in range(20):
            x = torch.empty(1000)
            x.fill_(1.0)
            y = torch.empty_like(x)
            torch.add(x, x, out=y)
    assert tool.faults == []


def test_fp8_empty_complex_and_integer_tensors_pass():
    with track() as tool:
        torch.randn(4).to(torch.float8_e4m3fn).float()
        torch.randn(0, 3).sum(1)
        torch.randn(3, dtype=torch.complex64) * 2
        torch.arange(5) // 2
        torch.eye(3).to_sparse() * 2
    assert tool.faults == []


def test_the_scalers_overflow_is_seen_and_the_window_hides_it():
    model, x, y = images()

    def run(tool):
        optimizer = optimizer_for(model, "SGD")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(2.0**40 if tool.step_cnt == 0 else 256.0)
            optimizer.zero_grad()
            tool.step()

    with track() as tool:
        run(tool)
    assert {f.step for f in tool.faults} == {0, 1}
    assert tool.faults[0].place.phase == "backward"
    with track(start_step=2) as tool:
        run(tool)
    assert tool.faults == []


def test_memory_does_not_grow_with_the_steps():
    model, x, y = images()
    with track() as tool:
        held = []
        train(model, x, y, steps=12, after_step=lambda: held.append((len(tool._consumer._held), len(tool._consumer._waiting))))
    assert held[-1][0] <= held[3][0] + 5
    assert held[-1][1] < 50


def test_own_trouble_is_told_once_and_the_program_goes_on(monkeypatch):
    model, x, y = images()
    with warnings.catch_warnings(record=True) as told, NanInfTracker() as tool:
        warnings.simplefilter("always")
        monkeypatch.setattr(tool._consumer, "_results", lambda *_: 1 / 0)
        train(model, x, y, steps=3, after_step=tool.step)
    ours = [str(w.message) for w in told if w.category is NannyWarning]
    assert ours == ["NanInfTracker could not do its work and is off now (ZeroDivisionError: division by zero)"]


def test_what_is_kept_for_a_dump_is_let_go_of(tmp_path):
    model, x, y = images()
    with NanInfTracker(dump_error_data=True, output_dir=tmp_path, strict=True) as tool:
        held = []
        train(model, x, y, steps=6, after_step=lambda: held.append(len(tool._consumer._held)))
        kept = [origin for origin in tool._consumer._held.values() if origin.kept is not None]
    assert not kept
    assert held[-1] <= max(held[:2]) + 64
