"""Compiled models under the nanny: the same graphs, the same bits, and a step beside FP32 that is not the compiled one."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs.query_recordings import nanny
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint
from training import watch

from nanny import MixedPrecisionNanny

pytestmark = pytest.mark.slow
BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, gain: float = 1.0, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)
        self.gain, self.recompute = gain, recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x * self.gain)))) / self.gain


class Net(nn.Module):
    def __init__(self, gain: float = 1.0, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(recompute=recompute), Block(gain, recompute)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Compile = Callable[[nn.Module], nn.Module]


def whole(net: nn.Module, **how: Any) -> nn.Module:
    return torch.compile(net, **how)


def in_place(net: nn.Module, **how: Any) -> nn.Module:
    net.compile(**how)
    return net


def parts(net: Any, **how: Any) -> nn.Module:
    net.blocks[0] = torch.compile(net.blocks[0], **how)
    net.blocks[1].compile(**how)
    return net


@dataclass
class Outcome:
    weights: list[Tensor]
    losses: list[float]
    graphs: list[int]  # after each step
    breaks: int
    nanny: MixedPrecisionNanny | None  # that watched
    gradients: list[float] = field(default_factory=list)


def train(
    compiled: Compile,
    watched: str = "",
    *,
    steps: int = 8,
    gain: float = 1.0,
    lr: float = 0.01,
    amp: torch.dtype = torch.bfloat16,
    scaled: bool = False,
    clip_scaled: bool = False,
    weights: torch.dtype = torch.float32,
    rows: Callable[[int], int] = lambda step: 8,
    bad_step: int | None = None,
    compiled_update: bool = False,
    around: Callable[[], Any] = contextlib.nullcontext,
    recompute: bool = False,
) -> Outcome:
    torch._dynamo.reset()
    counters.clear()
    net = Net(gain, recompute).to(weights)
    model = compiled(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    scaler = GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    nanny = watch(model, optimizer, scaler, interval=4, examine=watched) if watched else None
    update = torch.compile(optimizer.step, backend="aot_eager") if compiled_update else lambda: scaler.step(optimizer)
    losses, graphs, gradients = [], [], []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(rows(step), 16, generator=draw)
        if step == bad_step:
            x[1, 1] = math.nan
        with nanny.step(step) if nanny is not None else contextlib.nullcontext():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=amp):
                loss = F.mse_loss(model(x).float(), x[:, :4] * 0.5)
            with around():
                scaler.scale(loss).backward()
            if clip_scaled:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            gradients.append(
                math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters() if p.grad is not None))
            )
            update()
            scaler.update()
        losses.append(float(loss.detach()))
        graphs.append(counters["stats"]["unique_graphs"])
    if nanny is not None:
        nanny.close()
    kept = [p.detach().clone() for p in net.parameters()]
    return Outcome(kept, losses, graphs, sum(counters["graph_break"].values()), nanny, gradients)


def same(one: Outcome, other: Outcome) -> bool:
    return all(map(torch.equal, one.weights, other.weights)) and one.losses == other.losses


WAYS: dict[str, Compile] = {
    "whole": lambda net: whole(net, backend="aot_eager"),
    "whole_inductor": lambda net: whole(net, backend="inductor"),
    "in_place": lambda net: in_place(net, backend="aot_eager"),
    "parts": lambda net: parts(net, backend="aot_eager"),
    "parts_inductor": lambda net: parts(net, backend="inductor"),
    "fullgraph": lambda net: whole(net, backend="inductor", fullgraph=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_examined_run_compiles_the_same_graphs_and_trains_the_same_bits(way):
    alone = train(WAYS[way])
    assert alone.graphs[-1] > 0
    for watched in ("auto", "every"):
        seen = train(WAYS[way], watched)
        assert same(alone, seen)
        assert (seen.graphs, seen.breaks) == (alone.graphs, alone.breaks)  # nothing was compiled anew after an examination
        assert seen.nanny is not None
        exams = seen.nanny.evidence().examinations
        assert len(exams) == 8 if watched == "every" else 2 <= len(exams) < 8
        assert all(e.facts["uncompiled"] and "failed" not in e.facts for e in exams)


def test_the_examined_step_has_every_gradient_beside_fp32():
    seen = train(WAYS["whole"], "every", steps=2)
    assert seen.nanny is not None
    exam = seen.nanny.evidence().examinations[0]
    assert len(exam.gradients) == 10
    assert exam.gradient_error is not None
    assert 0 < exam.gradient_error < 0.05
    norms = math.sqrt(sum(g.norm**2 for g in exam.gradients))
    assert norms == pytest.approx(seen.gradients[0], rel=1e-2)  # of other kernels than the compiled ones


def test_the_example_is_diagnosed_down_to_its_line(tmp_path):
    script = shutil.copy(Path(__file__).parents[2] / "examples" / "compiled.py", tmp_path)
    assert nanny("run", script, cwd=tmp_path).returncode == 0
    first = json.loads(nanny("diagnose", "--format", "json", cwd=tmp_path).stdout)[0]
    line = 1 + next(i for i, text in enumerate(Path(script).read_text().splitlines()) if "energy = " in text)
    assert (first["cause"], first["culprit"]) == ("activation_overflow_fp16", "2")
    assert first["where"].endswith(f"compiled.py:{line}")


@pytest.mark.parametrize("way", ["whole", "parts"])
def test_loss_and_gradients_are_seen_as_without_compiling(way):
    seen = train(WAYS[way], "off")
    assert seen.nanny is not None
    curves = seen.nanny.evidence().scalars
    assert curves["loss"][1].tolist() == pytest.approx(seen.losses, rel=1e-6)
    assert curves["grad_norm"][1].tolist() == pytest.approx(seen.gradients, rel=1e-5)
    assert curves["lr"][1].tolist() == [0.01] * 8


@pytest.mark.parametrize("way", ["whole", "parts"])
def test_what_an_update_did_is_seen_as_without_compiling(way):
    seen, eager = train(WAYS[way], "off"), train(lambda net: net, "off")
    assert seen.nanny is not None
    assert eager.nanny is not None
    here, there = seen.nanny.evidence().scalars, eager.nanny.evidence().scalars
    for curve in ("update_ratio", "weight_norm"):
        assert here[curve][0][0] == there[curve][0][0] == 0
        both = sorted(set(here[curve][0].tolist()) & set(there[curve][0].tolist()))
        values = [[float(one[1][one[0].tolist().index(step)]) for step in both] for one in (here[curve], there[curve])]
        assert values[0] == pytest.approx(values[1], rel=0.01)  # of other kernels


def test_that_the_inner_outputs_are_not_seen_is_said_once(tmp_path, capfd):
    net = torch.compile(Net(), backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with MixedPrecisionNanny(net, optimizer, trace_interval=1, output_dir=tmp_path, strict=True) as nanny:
        for step in range(3):
            with nanny.step(step):
                net(torch.ones(2, 16)).mean().backward()
                optimizer.step()
    assert capfd.readouterr().err.count("its inner outputs are not traced") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_compile_as_often_as_unwatched(backend):
    way = lambda net: whole(net, backend=backend, dynamic=True)  # noqa: E731
    sizes = lambda step: 4 + step  # noqa: E731
    alone, seen = train(way, rows=sizes), train(way, "every", rows=sizes)
    assert same(alone, seen)
    assert seen.graphs == alone.graphs


def test_a_compiled_optimizer_step_is_not_disturbed_and_gradients_are_seen():
    alone, seen = train(WAYS["whole"], compiled_update=True), train(WAYS["whole"], "auto", compiled_update=True)
    assert same(alone, seen)
    assert seen.graphs == alone.graphs
    assert seen.nanny is not None
    assert seen.nanny.evidence().scalars["grad_norm"][1].tolist() == pytest.approx(seen.gradients, rel=1e-5)


def small(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3 if dtype is torch.float32 else 1e-6)


def loop(way: str, watched: bool, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], MixedPrecisionNanny | None]:
    """A program that does not say where its steps begin; its optimizer step is compiled in this way."""
    torch._dynamo.reset()
    net, optimizer = small(dtype)
    scaler = GradScaler("cpu", enabled=way == "scaled", init_scale=2.0**10)
    if way in ("method", "scaled"):
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]

    def step_and_clear() -> None:
        optimizer.step()
        optimizer.zero_grad()

    update = torch.compile(step_and_clear, backend="eager") if way == "function" else lambda: scaler.step(optimizer)
    nanny = watch(net, interval=8) if watched else None
    if nanny is not None:
        nanny.steps_by_themselves(find_models=False)
    for step in range(20):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(net(x.to(dtype)).float(), x[:, :4].argmax(1))
        scaler.scale(loss).backward()
        update()
        if way == "scaled":
            scaler.update()
        optimizer.zero_grad()
    if nanny is not None:
        nanny.close()
    return [p.detach().clone() for p in net.parameters()], nanny


@pytest.mark.parametrize("way", ["function", "method", "scaled"])
def test_a_compiled_update_ends_a_step_and_is_measured_as_in_eager(way):
    alone, _ = loop(way, watched=False)
    weights, nanny = loop(way, watched=True)
    _, eager = loop("eager", watched=True)
    assert all(map(torch.equal, alone, weights))
    assert nanny is not None
    assert eager is not None
    assert [f.code for f in nanny.findings if f.code != "AUTOCAST_NOT_APPLIED"] == []
    here, there = nanny.evidence().scalars, eager.evidence().scalars
    assert len(here["loss"][0]) == len(there["loss"][0]) == 20
    for curve, least in (("grad_norm", 19), ("update_ratio", 3)):  # of the first step, what is cleared inside is gone
        seen, truth = ({int(step): value for step, value in zip(*one[curve])} for one in (here, there))
        both = sorted(seen.keys() & truth.keys())
        assert len(both) >= least
        assert [seen[step] for step in both] == pytest.approx([truth[step] for step in both], rel=1e-3)


def test_an_update_that_is_lost_in_bf16_is_named_where_it_is_compiled():
    _, nanny = loop("function", watched=True, dtype=torch.bfloat16)
    assert nanny is not None
    assert nanny.diagnoses()[0].cause == "update_lost"


def test_a_compiled_function_that_holds_weights_to_a_norm_behind_the_update_is_no_update():
    torch._dynamo.reset()
    net, optimizer = small()

    @torch.compile(backend="eager")
    def hold() -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.div_(p.norm().clamp(min=5.0) / 5.0)

    with watch(net, interval=8) as nanny:
        nanny.steps_by_themselves(find_models=False)
        for step in range(6):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            F.cross_entropy(net(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
            hold()
    assert len(nanny.evidence().scalars["loss"][0]) == 6
    assert nanny.findings == []


def test_a_compiled_backward_is_not_disturbed():
    around = lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))  # noqa: E731
    alone, seen = train(WAYS["whole"], around=around), train(WAYS["whole"], "auto", around=around)
    assert same(alone, seen)
    assert seen.graphs == alone.graphs


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("cause", "planted", "repaired"),
    [
        ("activation_overflow_fp16", {"gain": 1e6, "amp": torch.float16, "scaled": True}, {"amp": torch.float16, "scaled": True}),
        ("clip_before_unscale", {"clip_scaled": True, "amp": torch.float16, "scaled": True}, {}),
        ("update_lost", {"weights": torch.bfloat16, "lr": 1e-5}, {"lr": 1e-5}),
        ("lr_too_high", {"lr": 3.0}, {"lr": 0.05}),
        ("data_nan", {"bad_step": 7}, {}),
    ],
)
def test_planted_faults_are_diagnosed_in_a_compiled_model_and_their_twins_are_not(cause, planted, repaired, recompute):
    way = WAYS["whole" if not recompute else "parts"]
    bad = train(way, "auto", steps=20, recompute=recompute, **planted)
    good = train(way, "auto", steps=20, recompute=recompute, **repaired)
    assert bad.nanny is not None
    assert good.nanny is not None
    found = bad.nanny.diagnoses()
    assert found, bad.nanny.findings
    assert found[0].cause == cause
    if cause == "activation_overflow_fp16":
        assert found[0].culprit.startswith("blocks.1")
    assert good.nanny.diagnoses() == []
    assert good.nanny.verdict("finished").healthy
