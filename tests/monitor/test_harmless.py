"""The nanny never disturbs the run: same bits with and without it, nothing left behind, nothing broken."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as module_hooks
from torch.nn.utils import clip_grad
from torch.optim import SGD, Adam, AdamW
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training import Apply, HandedOn, above_info, autocast, mlp, recorded, recorded_dtypes, regression, said, scalar, the, watch

from nanny import MixedPrecisionNanny, NannyError
from nanny.core.finding import NannyWarning

FP16, BF16 = torch.float16, torch.bfloat16


# the same bits


class Blocks(nn.Module):
    """Dropout, in-place ReLU, `h += x`, a shared module, tied weights, a checkpointed part, frozen and unused parameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.shared = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.deep = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.drop(self.act(self.shared(self.norm(x))))
        h += x
        h = self.act(self.shared(h).clone())
        h = h + checkpoint(self.deep, h, use_reentrant=False)
        return self.head(self.frozen(h))


def fingerprints(seed: int, amp: torch.dtype | None, interval: int | None, steps: int = 20) -> list[Tensor]:
    """Every loss, the random state, and every gradient and weight of a training."""
    torch.manual_seed(seed)
    model = Blocks()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", enabled=amp is FP16, init_scale=2.0**20)
    nanny = None if interval is None else watch(model, optimizer, scaler, interval=interval)
    out: list[Tensor] = []
    for step in range(steps):
        ids = torch.randint(0, 11, (4, 6))
        optimizer.zero_grad()
        with nanny.step(step) if nanny is not None else contextlib.nullcontext():
            with autocast(amp):
                loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())
            scaler.scale(loss).backward()
            out += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        out += [loss.detach().clone(), torch.get_rng_state()]
    if nanny is not None:
        nanny.close()
        assert nanny.enabled
        assert above_info(nanny.findings) == []
    return [*out, *(p.detach().clone() for p in model.parameters())]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN too: the first scaled gradients in fp16 are not finite."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.quick(2)
@pytest.mark.representative(5)
@pytest.mark.parametrize("interval", [1, 7])
@pytest.mark.parametrize("amp", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_gradients_weights_and_random_state_have_the_same_bits_with_and_without_it(seed, amp, interval):
    alone, watched = fingerprints(seed, amp, None), fingerprints(seed, amp, interval)
    assert len(alone) == len(watched)
    assert all(same_bits(a, b) for a, b in zip(alone, watched))


def test_even_a_run_full_of_nan_keeps_its_bits():
    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Apply(lambda x: torch.log(x)), nn.Linear(8, 1))
        optimizer = SGD(model.parameters(), lr=0.1)
        nanny = watch(model, optimizer) if watched else None
        out = []
        for step in range(5):
            optimizer.zero_grad()
            with nanny.step(step) if nanny is not None else contextlib.nullcontext():
                loss = model(torch.randn(4, 8)).mean()
                loss.backward()
            optimizer.step()
            out += [loss.detach(), torch.get_rng_state(), *(p.detach().clone() for p in model.parameters())]
        if nanny is not None:
            nanny.close()
        return out

    assert all(same_bits(a, b) for a, b in zip(run(False), run(True)))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpointed_layers_are_measured_once_and_compute_the_same(reentrant, tmp_path):
    def run(folder) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        calls = 0

        def count(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.tanh(x)

        inner = nn.Sequential(nn.Linear(8, 8), Apply(count), nn.Dropout(0.5))
        model = nn.ModuleDict({"first": nn.Linear(8, 8), "inner": inner, "head": nn.Linear(8, 1)})
        optimizer = SGD(model.parameters(), lr=0.1)
        nanny = watch(model, optimizer, output_dir=folder) if folder else None
        for step in range(4):
            optimizer.zero_grad()
            with nanny.step(step) if nanny is not None else contextlib.nullcontext():
                hidden = checkpoint(model["inner"], model["first"](torch.randn(4, 8)), use_reentrant=reentrant)
                model["head"](hidden).square().mean().backward()
            optimizer.step()
        if nanny is not None:
            nanny.close()
        return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()], calls

    (alone, once), (watched, again) = run(None), run(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched))
    assert once == again  # nothing recomputed for our sake
    assert recorded(tmp_path, "grad", 3)["inner.0.weight"] > 0
    if not reentrant:  # the reentrant kind runs its forward pass without autograd, as a pass that is no training would
        assert recorded(tmp_path, "output", 3, "count")["inner.0"] == 32


# what is seen


@dataclass
class Answer:
    logits: Tensor
    extra: Any = None


class ModelOutput(dict):
    """A mapping with attributes, as transformers returns it."""

    __getattr__ = dict.__getitem__


SHAPES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0]),
    "list": (lambda a, b: [a, b], lambda out: out[0]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: out["a"]),
    "nested": (lambda a, b: {"a": a, "rest": [(None, b, 3)]}, lambda out: out["a"]),
    "dataclass": (lambda a, b: Answer(a, {"b": b}), lambda out: out.logits),
    "model_output": (lambda a, b: ModelOutput(a=a, b=b), lambda out: out.a),
}


@pytest.mark.parametrize("root_only", [False, True], ids=["module", "root_only"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_of_every_kind_of_output_is_seen_and_a_nan_in_the_second_is_found(shape, root_only, tmp_path):
    pack, pick = SHAPES[shape]

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Any:
            return pack(x * self.weight, (x * self.weight - 1e9).log())

    branch = Branch()
    model = branch if root_only else nn.Sequential(nn.Linear(8, 8), branch)
    optimizer = SGD(model.parameters(), lr=0.1)
    nanny = watch(model, optimizer, output_dir=tmp_path)
    with nanny.step(0):
        pick(model(torch.rand(4, 8))).mean().backward()
    optimizer.step()
    nanny.close()
    site = "Branch" if root_only else "1"
    assert set(recorded(tmp_path, "output", 0)) >= {site, f"{site}[1]"}
    nan = the(nanny.findings, "NAN")
    assert nan.site in (site, f"{site}[1]")
    assert recorded(tmp_path, "output_grad", 0)[site] == pytest.approx(math.sqrt(32) / 32)


def test_empty_boolean_integer_and_missing_outputs_are_no_trouble():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Apply(
                lambda x: (x, x.new_zeros(0), x > 0, x.argmax(-1), None, "text", {"n": 3}, torch.zeros((), device="meta"))
            )
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x)[0])

    model = Odd()
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as nanny:
        for step in range(3):
            with nanny.step(step):
                optimizer.zero_grad()
                model(torch.rand(4, 8)).mean().backward()
            optimizer.step()
    assert above_info(nanny.findings) == []


def test_the_real_dtype_of_every_output_is_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Apply(lambda x: x.float()), nn.Linear(8, 1).double())
    model.insert(3, Apply(lambda x: x.double()))
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path) as nanny, nanny.step(0):
        with autocast(BF16):
            hidden = model[:3](torch.rand(4, 8))
        model[4](model[3](hidden)).mean().backward()
    dtypes = recorded_dtypes(tmp_path, "output")
    assert (dtypes["0"], dtypes["2"], dtypes["3"], dtypes["4"]) == ("bfloat16", "float32", "float64", "float64")


def test_shared_and_nested_modules_have_one_name_each_and_calls_are_put_together(tmp_path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"cell": nn.Linear(8, 8)})
            self.alias = self.body["cell"]
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.alias(self.body["cell"](x)))

    model = Twice()
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        with nanny.step(0):
            model(torch.rand(4, 8)).mean().backward()
        optimizer.step()
    assert set(recorded(tmp_path, "grad", 0)) == {"body.cell.weight", "body.cell.bias", "head.weight", "head.bias"}
    assert recorded(tmp_path, "output", 0, "count")["body.cell"] == 64  # two calls of 32


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["data_parallel", "compile"])
def test_wrappers_leave_no_trace_in_the_names(wrap, tmp_path):
    model = wrap(mlp())
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        with nanny.step(0):
            model(torch.rand(4, 8)).mean().backward()
        optimizer.step()
    assert set(recorded(tmp_path, "grad", 0)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_submodule_that_the_user_called_module_keeps_its_name(tmp_path):
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model = Mine()
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        with nanny.step(0):
            model(torch.rand(4, 8)).mean().backward()
        optimizer.step()
    names = set(recorded(tmp_path, "grad", 0))
    assert len(names) == 2
    assert all(name.rpartition(".")[2] in ("weight", "bias") for name in names)


def per_sample_gradients(model: nn.Module, x: Tensor) -> None:
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).square().mean()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)


def fake(model: nn.Module, x: Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(4, 8))


TOOLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": per_sample_gradients,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "jit_trace": lambda model, x: torch.jit.trace(model, x),
    "export": lambda model, x: torch.export.export(model, (x,)),
    "fake": fake,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_trace_the_model_inside_a_traced_step_see_nothing_of_the_nanny(tool, tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        for step in range(2):
            x, y = regression(rows=4)(step)
            optimizer.zero_grad()
            with nanny.step(step):
                TOOLS[tool](model, x)
                F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert above_info(nanny.findings) == []
    assert recorded(tmp_path, "output", 1)["0"] > 0


def inference_features(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


ODD_OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "inference": (inference_features, lambda out: out.clone()),
    "nested": (lambda x: torch.nested.nested_tensor([x[:2], x[2:]]), lambda out: out.to_padded_tensor(0.0)),
    "sparse": (lambda x: x.relu().to_sparse(), lambda out: out.to_dense()),
    "complex": (torch.fft.fft, lambda out: out.abs()),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), lambda out: out.float()),
    "expanded": (lambda x: x[:1].expand(4, 8), lambda out: out),
    "transposed": (lambda x: x.T, lambda out: out.T),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ODD_OUTPUTS)
def test_unusual_tensors_do_not_stop_the_nanny(kind, tmp_path):
    make, back = ODD_OUTPUTS[kind]
    model = nn.ModuleDict({"odd": Apply(make), "same": nn.Identity(), "head": nn.Linear(8, 1)})
    optimizer = SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        for step in range(3):
            with nanny.step(step):
                optimizer.zero_grad()
                model["head"](back(model["same"](model["odd"](torch.rand(4, 8))))).mean().backward()
            optimizer.step()
    assert above_info(nanny.findings) == []
    assert recorded(tmp_path, "output", 2)["head"] > 0


def test_an_output_that_gets_no_gradient_is_no_trouble(tmp_path):
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    net = nn.ModuleList([body, head, Apply(lambda *outputs: HandedOn.apply(*outputs))])
    optimizer = SGD(net.parameters(), lr=0.1)
    with watch(net, optimizer, output_dir=tmp_path, examine="off") as nanny, nanny.step(0):
        hidden = body(torch.ones(2, 4))
        _, loss = net[2](head(hidden), hidden.square().mean())
        loss.backward()
        optimizer.step()
    assert above_info(nanny.findings) == []
    assert set(recorded(tmp_path, "grad", 0)) == {"0.weight", "0.bias"}


def test_lazy_modules_are_watched_once_they_know_their_size(tmp_path):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    with watch(model, output_dir=tmp_path) as nanny:
        for step in range(3):
            with nanny.step(step):
                model(torch.rand(4, 6)).mean().backward()
    assert "0.weight" in recorded(tmp_path, "grad", 2)
    assert above_info(nanny.findings) == []


def test_an_optimizer_that_steps_inside_backward_is_seen(tmp_path):
    """One optimizer per parameter, run by the hook of its gradient, which is gone when backward ends."""
    model = mlp()
    optimizers = {p: SGD([p], lr=1e-3) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    with watch(model, output_dir=tmp_path) as nanny:
        for step in range(3):
            with nanny.step(step):
                F.mse_loss(model(torch.rand(4, 8)), torch.zeros(4, 1)).backward()
    assert set(recorded(tmp_path, "grad", 2)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert above_info(nanny.findings) == []


# nothing left behind


def global_state() -> dict[str, Any]:
    """Everything of torch's that could have been touched."""
    dictionaries = {n: dict(v) for n, v in vars(module_hooks).items() if n.startswith("_global_") and isinstance(v, dict)}
    dictionaries |= {n: dict(v) for n, v in vars(optimizer_hooks).items() if n.startswith("_global_") and isinstance(v, dict)}
    methods = {n: vars(GradScaler)[n] for n in ("scale", "unscale_", "step", "update")}
    return {
        **dictionaries,
        **methods,
        "autograd": dict(vars(torch.autograd)),
        "graph": dict(vars(torch.autograd.graph)),
        "saved_tensors_hooks": dict(vars(torch.autograd.graph.saved_tensors_hooks)),
        "clip_grad": dict(vars(clip_grad)),
        "nn.utils": dict(vars(nn.utils)),
        "tensor": dict(vars(Tensor)),
        "module": dict(vars(nn.Module)),
    }


def object_state(model: nn.Module, *others: Any) -> list[Any]:
    """Attributes and hooks of every module, parameter and optimizer."""
    parts: list[Any] = []
    for m in model.modules():
        parts.append({k: v for k, v in vars(m).items() if "hooks" in k or k == "forward"})
        parts.append(sorted(vars(m)))
    for p in model.parameters():
        parts.append((p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None), sorted(vars(p))))
    for other in others:
        parts.append((sorted(vars(other)), {k: dict(v) for k, v in vars(other).items() if "hooks" in k}))
    return copy.copy(parts)


def steps_of(model: nn.Module, nanny: MixedPrecisionNanny, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for step in range(count):
        x, y = regression()(step)
        optimizer.zero_grad()
        with nanny.step(step):
            F.mse_loss(model(x), y).backward()
        optimizer.step()


def test_close_takes_every_hook_and_wrapper_away():
    model = mlp()
    optimizer, scaler = SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    before, mine = global_state(), object_state(model, optimizer, scaler)
    nanny = watch(model, optimizer, scaler)
    steps_of(model, nanny, optimizer, 5)
    nanny.close()
    assert global_state() == before
    assert object_state(model, optimizer, scaler) == mine


@pytest.mark.parametrize("where", ["forward", "backward", "between", "keyboard"])
def test_an_exception_in_the_step_propagates_and_leaves_no_hook_behind(where):
    def fail(x: Tensor) -> Tensor:
        if where == "forward":
            raise ValueError("mine")
        if where == "keyboard":
            raise KeyboardInterrupt
        if where == "backward":
            x.register_hook(lambda g: (_ for _ in ()).throw(ValueError("mine")))
        return x

    model = nn.Sequential(nn.Linear(8, 8), Apply(fail), nn.Linear(8, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    before, mine = global_state(), object_state(model, optimizer)
    nanny = watch(model, optimizer)

    def step() -> None:
        with nanny.step(0):
            out = model(torch.rand(4, 8)).mean()
            if where == "between":
                raise ValueError("mine")
            out.backward()

    with pytest.raises(KeyboardInterrupt if where == "keyboard" else ValueError) as caught:
        step()
    assert where == "keyboard" or str(caught.value) == "mine"
    assert global_state() == before
    assert object_state(model, optimizer) == mine
    nanny.close()
    assert global_state() == before


def test_after_an_exception_that_the_user_catches_the_next_step_is_watched_again(tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        for step in range(4):
            x, y = regression()(step)
            optimizer.zero_grad()
            with contextlib.suppress(RuntimeError), nanny.step(step):
                loss = F.mse_loss(model(x), y)
                if step == 1:
                    raise RuntimeError("out of memory")
                loss.backward()
            optimizer.step()
    assert {0, 2, 3} <= set(scalar(tmp_path, "loss"))
    assert recorded(tmp_path, "grad", 3)["0.weight"] > 0


def test_a_module_that_returns_its_parameter_or_its_input_keeps_no_hook():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(4, 8))

        def forward(self) -> Tensor:
            return self.positions

    model = nn.ModuleDict({"table": Table(), "same": nn.Identity(), "head": nn.Linear(8, 1)})
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.rand(4, 8, requires_grad=True)
    nanny = watch(model, optimizer)
    for step in range(3):
        with nanny.step(step):
            model["head"](model["same"](x) + model["table"]()).mean().backward()
        optimizer.step()
    nanny.close()
    for tensor in (x, model["table"].positions):
        assert not tensor._backward_hooks, "a hook outlived the nanny"


def test_double_close_and_use_after_close_are_harmless():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    before = global_state()
    nanny = watch(model, optimizer)
    steps_of(model, nanny, optimizer)
    nanny.close()
    nanny.close()
    steps_of(model, nanny, optimizer)
    with nanny:
        pass
    assert global_state() == before


def test_two_nannies_at_once_do_not_take_each_other_s_hooks(tmp_path):
    one, two = mlp(seed=1), mlp(seed=2)
    before = global_state()
    a, b = watch(one, output_dir=tmp_path / "a"), watch(two, output_dir=tmp_path / "b")
    optimizers = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
    for step in range(4):
        x, y = regression()(step)
        for o in optimizers:
            o.zero_grad()
        with a.step(step), b.step(step):
            F.mse_loss(one(x), y).backward()
            F.mse_loss(two(x), y).backward()
        for o in optimizers:
            o.step()
        if step == 1:
            a.close()
    b.close()
    assert global_state() == before
    assert len(scalar(tmp_path / "a", "grad_norm")) == 2
    assert len(scalar(tmp_path / "b", "grad_norm")) == 4


def test_backward_passes_behind_the_block_do_not_count_as_the_step_s_loss(tmp_path):
    model, other = mlp(seed=1), mlp(seed=2)
    optimizer = SGD(model.parameters(), lr=0.01)
    losses = []
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        for step in range(3):
            x, y = regression()(step)
            optimizer.zero_grad()
            with nanny.step(step):
                loss = F.mse_loss(model(x), y)
                loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            (1e6 + other(x).mean()).backward()
    assert list(scalar(tmp_path, "loss").values()) == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_a_nanny_that_is_never_closed_does_not_collect_what_happens_afterwards():
    model, other = mlp(4, 4, seed=1), mlp(4, 4, seed=2)
    optimizer = SGD(model.parameters(), lr=0.01)
    nanny = watch(model, optimizer)
    with nanny.step(0):
        model(torch.rand(2, 4)).mean().backward()
    counts = []
    for _ in range(2):
        for _ in range(100):
            other(torch.rand(2, 4)).mean().backward()
        gc.collect()
        counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
    nanny.close()
    assert counts[1] - counts[0] < 10, counts


# saving and copying


def test_saving_pickling_and_copying_work_inside_a_traced_step_and_between_steps():
    model = mlp()
    optimizer, scaler = Adam(model.parameters(), lr=0.01), GradScaler("cpu")
    plain = {"model": len(pickle.dumps(model)), "optimizer": len(pickle.dumps(optimizer))}

    def save_everything() -> None:
        for thing in (model, optimizer, scaler):
            buffer = io.BytesIO()
            torch.save(thing, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=False)
            pickle.loads(pickle.dumps(thing))
        assert len(pickle.dumps(model)) == pytest.approx(plain["model"], abs=4096)
        twin = copy.deepcopy(model)
        copy.deepcopy(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), model.state_dict().values()))

    with watch(model, optimizer, scaler) as nanny:
        for step in range(3):
            x, y = regression()(step)
            optimizer.zero_grad()
            with nanny.step(step):
                save_everything()
                scaler.scale(F.mse_loss(model(x), y)).backward()
                save_everything()
            scaler.step(optimizer)
            scaler.update()
            save_everything()
    assert above_info(nanny.findings) == []


def test_a_copy_made_while_watched_can_be_trained_unwatched(tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        with nanny.step(0):
            model(torch.rand(4, 8)).mean().backward()
            twin = copy.deepcopy(model)
            twin(torch.full((4, 8), math.nan)).mean().backward()  # another model's trouble
        optimizer.step()
        SGD(twin.parameters(), lr=0.1).step()
    assert not any(math.isnan(v) for v in recorded(tmp_path, "grad", 0).values())


# torch.compile


@pytest.mark.landing
def test_a_compiled_model_is_watched_without_an_extra_graph(tmp_path):
    from torch._dynamo.utils import counters

    def graphs(watched: bool) -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        model = mlp()
        fast = torch.compile(model, backend="aot_eager")
        optimizer = SGD(model.parameters(), lr=0.05)
        nanny = watch(fast, optimizer, interval=2, output_dir=tmp_path) if watched else None
        for step in range(6):
            x, y = regression()(step)
            optimizer.zero_grad()
            with nanny.step(step) if nanny is not None else contextlib.nullcontext():
                F.mse_loss(fast(x), y).backward()
            optimizer.step()
        if nanny is not None:
            nanny.close()
            assert above_info(nanny.findings) == []
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    assert graphs(watched=True) == graphs(watched=False)
    assert all(recorded(tmp_path, "grad", step)["0.weight"] > 0 for step in range(6))


def test_a_nan_in_a_compiled_model_is_found_through_its_gradients():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fast = torch.compile(lambda x: torch.sqrt(model(x) * 0).sum(), backend="aot_eager")
    optimizer = SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer) as nanny:
        for step in range(2):
            optimizer.zero_grad()
            with nanny.step(step):
                fast(torch.rand(4, 8)).backward()
            optimizer.step()
    assert said(nanny.findings, "NAN")


# the nanny's own mistakes


@pytest.mark.parametrize("place", ["observe", "measure", "judge", "callback"])
def test_an_internal_failure_warns_once_detaches_and_training_goes_on(place, monkeypatch):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    before, mine = global_state(), object_state(model, optimizer)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    target = {
        "observe": "nanny.monitor.recorder.Recorder._measure_weights",
        "measure": "nanny.monitor.recorder.pack_gradients",
        "judge": "nanny.monitor.watch.judge_step",
    }.get(place)
    if target:
        monkeypatch.setattr(target, broken)
    nanny = watch(model, optimizer, interval=3, strict=False, on_finding=broken)
    if place == "callback":
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
    alone = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_of(model, nanny, optimizer, 6)
        nanny.close()
    ours = [w for w in caught if issubclass(w.category, NannyWarning)]
    assert len(ours) == 1
    assert "a mistake of ours" in str(ours[0].message)
    assert global_state() == before
    assert object_state(model, optimizer) == mine
    other = SGD(alone.parameters(), lr=0.01)
    for step in range(6):
        x, y = regression()(step)
        other.zero_grad()
        F.mse_loss(alone(x), y).backward()
        other.step()
    assert all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(alone.parameters(), model.parameters()))


def test_in_strict_mode_a_mistake_of_ours_is_raised(monkeypatch):
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("nanny.monitor.watch.judge_step", broken)
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    nanny = watch(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        steps_of(model, nanny, optimizer, 3)


class OwnRate(torch.optim.Optimizer):
    """Chooses its rate by itself, as Adafactor does, and keeps a tensor where others keep a dictionary."""

    def __init__(self, params: Any, **groups: Any) -> None:
        super().__init__(params, {"lr": None, "eps": (1e-30, 1e-3), "betas": (None, "0.9"), "weight_decay": None, **groups})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = p.grad.square()
            p -= 0.01 * p.grad


@pytest.mark.parametrize("rate", [None, "auto", abs])
def test_an_optimizer_that_chooses_its_rate_itself_is_watched_like_any_other(rate, recwarn):
    model, batch = mlp(), regression()
    optimizer = OwnRate(model.parameters(), lr=rate)
    with MixedPrecisionNanny(model, optimizer, output_dir=None) as nanny:
        for i in range(6):
            with nanny.step(i):
                x, y = batch(i)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
    assert not [w for w in recwarn if w.category is NannyWarning]
    assert above_info(nanny.findings) == []


def test_findings_reach_the_callback_as_they_are_found():
    heard = []
    model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: torch.log(-x.abs())), nn.Linear(8, 1))
    optimizer = SGD(model.parameters(), lr=0.0)
    nanny = watch(model, optimizer, on_finding=heard.append)
    steps_of(model, nanny, optimizer, 2)
    assert [f.code for f in heard][:1] == ["NAN"]  # before close: the step is judged when the next one begins
    nanny.close()
    assert heard == nanny.findings


def test_bad_arguments_say_what_to_type():
    with pytest.raises(NannyError, match="model"):
        MixedPrecisionNanny([1, 2])  # type: ignore[arg-type]
    with pytest.raises(NannyError, match="trace_interval"):
        MixedPrecisionNanny(mlp(), trace_interval=0, output_dir=None)


# processes


def script(text: str, tmp_path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


TRAIN = """
    import torch, sys
    from torch import nn
    from nanny import MixedPrecisionNanny
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    nanny = MixedPrecisionNanny(model, optimizer)
    for step in range(5):
        with nanny.step(step):
            optimizer.zero_grad()
            model(torch.rand(8, 4)).mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_forgets_to_close_loses_nothing(tmp_path):
    done = script(TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(scalar(tmp_path / "nanny_logs", "loss")) == 5
    assert done.stdout == ""
    assert "HEALTHY: no numerical trouble in 5 steps" in done.stderr
    assert "nanny summary" in done.stderr


@pytest.mark.slow
def test_a_script_that_dies_in_a_step_keeps_its_own_traceback_and_what_was_recorded(tmp_path):
    done = script(TRAIN + "        if step == 3:\n            raise SystemError('mine')\n", tmp_path)
    assert done.returncode == 1
    assert "SystemError: mine" in done.stderr
    assert len(scalar(tmp_path / "nanny_logs", "loss")) >= 3


@pytest.mark.slow
def test_nanny_disable_switches_everything_off(tmp_path):
    text = (
        TRAIN
        + """
    nanny.add_model(nn.Linear(2, 2), "other.")
    print(nanny.cost_percent, nanny.findings)
    nanny.close()
    from nanny import watch_model, check_loss_scale
    watch_model(model).remove()
    check_loss_scale(torch.amp.GradScaler("cpu"))
    """
    )
    done = script(text, tmp_path, NANNY_DISABLE="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not (tmp_path / "nanny_logs").exists()


def test_forked_data_loader_workers_do_no_harm(tmp_path):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    x, y = regression(rows=32)(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, num_workers=2, multiprocessing_context="fork")
    with watch(model, optimizer, output_dir=tmp_path) as nanny:
        step = 0
        for _ in range(2):
            for a, b in loader:
                optimizer.zero_grad()
                with nanny.step(step):
                    F.mse_loss(model(a), b).backward()
                optimizer.step()
                step += 1
    assert len(scalar(tmp_path, "loss")) == 8
    assert above_info(nanny.findings) == []


@pytest.mark.slow
def test_a_forked_child_that_trains_and_exits_leaves_the_parent_s_record_alone(tmp_path):
    text = (
        TRAIN
        + """
        if step == 2:
            import os
            child = os.fork()
            if not child:
                for more in range(3, 50):
                    with nanny.step(more):
                        model(torch.full((8, 4), float("nan"))).mean().backward()
                    optimizer.step()
                nanny.close()
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    nanny.close()
    assert nanny.findings == [], nanny.findings
    """
    )
    done = script(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(scalar(tmp_path / "nanny_logs", "loss")) == [0, 1, 2, 3, 4]


# cost


def memory_of_a_run(steps: int, folder: Any) -> list[tuple[Counter[str], int]]:
    """Live objects by type and resident bytes, at each quarter of a training."""
    psutil = pytest.importorskip("psutil")
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), lr=1e-3)
    x, y = torch.rand(4, 4), torch.rand(4, 1)
    seen = []
    with watch(model, optimizer, interval=10, output_dir=folder) as nanny:
        for step in range(steps):
            optimizer.zero_grad()
            with nanny.step(step):
                F.mse_loss(model(x), y).backward()
            optimizer.step()
            if (step + 1) % (steps // 4) == 0:
                gc.collect()
                seen.append((Counter(type(o).__name__ for o in gc.get_objects()), psutil.Process().memory_info().rss))
    return seen


@pytest.mark.slow
def test_no_object_is_kept_per_step():
    before, after = memory_of_a_run(480, None)[1::2]  # the history is full after 200 steps
    grown = after[0] - before[0]
    assert grown.total() < 100, grown.most_common(5)


@pytest.mark.slow
def test_memory_is_flat_over_twenty_thousand_steps(tmp_path):
    quarters = memory_of_a_run(20_000, None)
    grown = quarters[3][0] - quarters[0][0]
    assert grown.total() < 200, grown.most_common(5)
    assert quarters[3][1] - quarters[0][1] < 4 << 20
    stored = memory_of_a_run(20_000, tmp_path)  # the writer works in a thread of its own, so objects come and go
    assert stored[3][1] - stored[0][1] < 8 << 20


class ScalarReads(TorchDispatchMode):
    """Counts what would wait for the device: every scalar read, whoever asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_scalar_is_read_in_a_healthy_step_where_reading_would_wait_for_the_device(kind, scaled, monkeypatch):
    """There is no accelerator here: the nanny is told that reading costs, and every way of reading a scalar is counted."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nanny.") and hasattr(module, "reads_freely"):
            monkeypatch.setattr(module, "reads_freely", lambda device: False)
    ours: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if "nanny" in caller.f_globals.get("__name__", ""):
                ours.append(f"{_name} in {caller.f_code.co_name}:{caller.f_lineno}")
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, read)

    def reads_per_step(watched: bool) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer, scaler = OPTIMIZERS[kind](model.parameters()), GradScaler("cpu", enabled=scaled)
        watcher = watch(model, optimizer, scaler, interval=2, examine="off") if watched else None
        counts = []
        for step in range(4):
            x, y = regression()(step)
            optimizer.zero_grad()
            if watcher is not None:
                watcher.begin_step(step)  # judges the step before, from numbers that have arrived meanwhile
            ours.clear()
            with ScalarReads() as mode:
                scaler.scale(F.mse_loss(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                if watcher is not None:
                    watcher.end_step()
            assert ours == [], f"step {step}"
            counts.append(mode.count)
        if watcher is not None:
            watcher.close()
        return counts

    assert reads_per_step(watched=True) == reads_per_step(watched=False)


def test_a_callback_that_raises_does_not_end_the_watch():
    """The user's mistake is told once, and every later finding is still made; Ctrl-C in it ends the run as it should."""
    heard: list[str] = []

    def broken(finding: Any) -> None:
        heard.append(finding.code)
        raise LookupError("not found")

    def stops(finding: Any) -> None:
        raise KeyboardInterrupt

    for callback in (broken, stops):
        model = mlp()
        optimizer = SGD(model.parameters(), lr=0.01)
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
        nanny = watch(model, optimizer, interval=3, strict=False, on_finding=callback)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if callback is stops:
                with pytest.raises(KeyboardInterrupt):
                    steps_of(model, nanny, optimizer, 3)
                nanny.close()
                continue
            steps_of(model, nanny, optimizer, 3)
            nanny.close()
        assert len([w for w in caught if issubclass(w.category, NannyWarning)]) == 1
        assert heard == [f.code for f in nanny.findings]
        assert heard
        assert not nanny._recorder.off


def test_warnings_made_errors_do_not_reach_the_training(monkeypatch, capsys):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("nanny.monitor.recorder.pack_gradients", broken)
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nanny = watch(model, optimizer, interval=3, strict=False)
        steps_of(model, nanny, optimizer, 4)
        nanny.close()
    assert capsys.readouterr().err.count("a mistake of ours") == 1


@pytest.mark.landing
@pytest.mark.parametrize("examine", ["off", "every"])
def test_a_nanny_that_is_dropped_within_a_step_leaves_nothing(examine):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    before, mine = global_state(), object_state(model, optimizer)
    nanny = MixedPrecisionNanny(model, output_dir=None, live=False, strict=True, trace_interval=1, examine=examine)
    nanny.begin_step(0)
    x, y = regression()(0)
    loss = F.mse_loss(model(x), y)
    gone = weakref.ref(nanny)
    del nanny
    gc.collect()
    assert gone() is None
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert global_state() == before
    assert object_state(model, optimizer) == mine


def test_a_nanny_hears_nothing_of_another_thread_or_another_models_scaler():
    model, other = mlp(), mlp()
    optimizer, others = SGD(model.parameters(), lr=0.01), SGD(other.parameters(), lr=0.01)
    scaler, foreign = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    nanny = watch(model, optimizer, strict=True, examine="off")
    records: list[Any] = []
    nanny._judge = records.append

    def train_other() -> None:
        x, y = regression()(1)
        foreign.scale(F.mse_loss(other(x), y)).backward()
        foreign.step(others)
        foreign.update()
        others.zero_grad()

    for step in range(2):
        x, y = regression()(step)
        with nanny.step(step):
            thread = threading.Thread(target=train_other)
            thread.start()
            thread.join()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        train_other()  # in this thread, after the step
    nanny.close()
    for record in records:
        assert record.calls == ("scale", "backward", "scaler.step", "unscale", "update", "zero_grad")
        assert (record.scale, record.scale_after, record.backwards) == (8.0, 8.0, 1)
        assert record.loss < 100


@pytest.mark.parametrize("closure", [False, True])
def test_an_examined_step_that_takes_too_long_goes_on_alone(closure, monkeypatch):
    """Many micro-batches, or a closure that runs often: the budget holds within the step, and what was seen is kept."""
    monkeypatch.setattr("nanny.monitor.examiner.STARTUP_SECONDS", 0.0)
    monkeypatch.setattr("nanny.monitor.examiner.SHARE", 0.0)
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4) if closure else SGD(model.parameters(), lr=0.01)
    nanny = watch(model, optimizer, strict=True, examine="auto")
    watched_calls: list[bool] = []
    x, y = regression()(0)

    def loss() -> Tensor:
        optimizer.zero_grad()
        with autocast(BF16):
            value = F.mse_loss(model(x), y)
        watched_calls.append(bool(torch.utils._python_dispatch._len_torch_dispatch_stack()))
        value.backward()
        return value

    with nanny.step(0):
        if closure:
            optimizer.step(loss)
        else:
            for _ in range(6):
                loss()
            optimizer.step()
    nanny.close()
    assert len(watched_calls) > 2
    assert not any(watched_calls)
    (examination,) = nanny.evidence().examinations
    assert "spent" in examination.facts["left_out"]


def test_gradients_in_float16_are_read_under_autocast_to_bfloat16() -> None:
    """A first stage in float16 ends, the next begins under autocast: what the steps before had left is read in there."""
    first, second = mlp().to(FP16), mlp()
    watcher = MixedPrecisionNanny(nn.ModuleList([first, second]), output_dir=None, live=False, strict=True)
    optimizer = SGD([*first.parameters(), *second.parameters()], 1e-3)
    for step in range(40):
        watcher.begin_step(step)
        with autocast(BF16):
            loss = second(torch.randn(4, 8)).float().square().mean()
            (loss + first(torch.randn(4, 8, dtype=FP16)).float().square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    watcher.close()
    assert watcher.evidence().facts.steps == 40
