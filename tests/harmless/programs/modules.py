"""Modules of odd build, that change while they train, or that there are very many of."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from ..program import Program, mlp, program, training


@program("weight_norm_parametrization", "parametrizations")
def weight_norm(seed: int) -> Program:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("spectral_norm_parametrization", "parametrizations")
def spectral_norm(seed: int) -> Program:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("orthogonal_parametrization", "parametrizations")
def orthogonal(seed: int) -> Program:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("parametrize_cached_and_removed", "parametrizations")
def parametrize_cached(seed: int) -> Program:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).t()

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        if i == 2:
            parametrize.remove_parametrizations(model[0], "weight")
        with parametrize.cached():
            return (model(x) + model(x * 2)).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.1))


@program("old_weight_norm_and_pruning", "parametrizations")
def pruning(seed: int) -> Program:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", 0.3)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        if i == 2:
            prune.remove(model[0], "weight")
        return model(x).square().mean()

    return training(model, loss)


@program("shared_module_called_often", "sharing")
def shared(seed: int) -> Program:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer, layer)
    x = torch.randn(4, 8)
    return training(model, lambda i: model(layer(x)).square().mean())


@program("tied_weights", "sharing")
def tied(seed: int) -> Program:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.out = nn.Linear(8, 10, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(x))

    model = Tied()
    x, y = torch.randint(0, 10, (6,)), torch.randint(0, 10, (6,))
    return training(model, lambda i: nn.functional.cross_entropy(model(x), y))


@program("modules_swapped_while_training", "changing")
def swapped(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        if i == 1:
            model[1] = nn.GELU()
            model.add_module("late", nn.Linear(4, 4))
            optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.01})
        if i == 2:
            model[0] = nn.Linear(8, 8)
            optimizer.param_groups[0]["params"] = list(model[0].parameters()) + list(model[2].parameters())
        if i == 3:
            del model.late
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=5)


@program("parameters_replaced_while_training", "changing")
def replaced(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        model[0].weight = nn.Parameter(model[0].weight.detach() * 0.9)
        model.to(torch.float64 if i == 1 else torch.float32)
        return model(x.to(model[0].weight.dtype)).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.1))


@program("model_half_in_the_middle", "changing")
def halved(seed: int) -> Program:
    model = mlp()

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            model.bfloat16()
        return model(torch.randn(4, 8).to(model[0].weight.dtype)).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.1))


@program("requires_grad_toggled", "changing")
def toggled(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        model[0].requires_grad_(i % 2 == 0)
        model.train(i % 2 == 0)
        return model(x).square().mean()

    return training(model, loss, steps=4)


@program("deepcopy_inside_step", "copies")
def deepcopied(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        twin, optimizer = copy.deepcopy(model), copy.deepcopy(made.optimizers[0])
        made.models.append(twin)
        made.optimizers.append(optimizer)
        return value.detach(), twin(x)

    made.step = step
    return made


@program("deepcopy_trains_on_alone", "copies")
def deepcopy_trains(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())

    def loop(watch: Any) -> None:
        with watch.step(0):
            made.step(0)
            twin = copy.deepcopy(model)
        watch.close()
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for _ in range(2):
            twin(x).square().mean().backward()
            optimizer.step()
        made.models.append(twin)

    made.loop = loop
    return made


@program("pickle_and_save_inside_step", "copies")
def pickled(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        twin = pickle.loads(pickle.dumps(model))
        stream = io.BytesIO()
        torch.save({"model": model, "optimizer": made.optimizers[0], "state": model.state_dict()}, stream)
        stream.seek(0)
        again = torch.load(stream, weights_only=False)
        made.models += [twin, again["model"]]
        made.optimizers.append(again["optimizer"])
        return value.detach(), twin(x), again["model"](x), len(stream.getvalue())

    made.step = step
    return made


@program("pickle_of_optimizer_and_scheduler", "copies")
def pickled_optimizer(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    made = training(model, lambda i: model(x).square().mean(), optimizer)
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        scheduler.step()
        size = len(pickle.dumps(optimizer))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        scheduler.load_state_dict(scheduler.state_dict())
        return value.detach(), size

    made.step = step
    return made


@program("load_state_dict_and_assign", "copies")
def load_assign(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    start = copy.deepcopy(model.state_dict())

    def loss(i: int) -> torch.Tensor:
        if i == 2:
            model.load_state_dict(start, assign=True)
        return model(x).square().mean()

    return training(model, loss, torch.optim.SGD(model.parameters(), 0.1))


@program("getattr_tricks", "odd modules")
def getattr_tricks(seed: int) -> Program:
    asked: list[str] = []

    class Proxy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                asked.append(name)
                return getattr(super().__getattr__("inner"), name)

        def __len__(self) -> int:
            return 0

        def __bool__(self) -> bool:
            raise RuntimeError("neither true nor false")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

        __hash__ = nn.Module.__hash__

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Proxy()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("call_overridden", "odd modules")
def call_overridden(seed: int) -> Program:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def __call__(self, x: Any, *, extra: float = 1.0) -> Any:
            return super().__call__(x * extra) + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    class Never(nn.Module):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = nn.Sequential(Called(), Never(), nn.Linear(8, 4))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("forward_replaced_on_instance", "odd modules")
def forward_replaced(seed: int) -> Program:
    model = mlp()
    original = model[0].forward
    model[0].forward = lambda x: original(x) * 2
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        if i == 1:
            model[0].forward = original
        if i == 2:
            del model[0].forward
        return model(x).square().mean() + model.forward(x).mean()

    return training(model, loss)


@program("no_parameters_at_all", "odd modules")
def no_parameters(seed: int) -> Program:
    model = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Identity())
    x = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.SGD([x], 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, extra=lambda: x)


@program("empty_module_never_called", "odd modules")
def empty(seed: int) -> Program:
    w = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([w], 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return Program([nn.Module()], [optimizer], step, extra=lambda: w)


@program("lazy_modules", "odd modules")
def lazy(seed: int) -> Program:
    model = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 3, 8)
    optimizer: list[Any] = []

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        if not optimizer:
            optimizer.append(torch.optim.SGD(model.parameters(), 0.1))
        optimizer[0].zero_grad()
        loss.backward()
        optimizer[0].step()
        return loss

    return Program([model], [], step)


@program("module_containers_with_odd_names", "odd modules")
def odd_names(seed: int) -> Program:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict(
                {"a b": nn.Linear(8, 8), "ключ": nn.ReLU(), "'; DROP TABLE x; --": nn.Linear(8, 8), "n" * 5000: nn.Linear(8, 4)}
            )
            self.weights = nn.ParameterDict({"w\n": nn.Parameter(torch.ones(4))})
            self.more = nn.ParameterList([nn.Parameter(torch.ones(4))])
            self.add_module("nothing", None)
            self.register_parameter("none", None)
            self.register_buffer("gone", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x * self.weights["w\n"] + self.more[0]

    model = Odd()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())


@program("very_deep_model", "sizes")
def very_deep(seed: int) -> Program:
    model: Any = nn.Linear(4, 4)
    for _ in range(60):
        model = nn.Sequential(model)
    model = nn.Sequential(model, *[layer for _ in range(100) for layer in (nn.Linear(4, 4), nn.Tanh())])
    x = torch.randn(2, 4)
    return training(model, lambda i: model(x).square().mean(), steps=2)


@program("two_thousand_modules", "sizes")
def many_modules(seed: int) -> Program:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(2000))
    x = torch.randn(2, 1)
    return training(model, lambda i: torch.stack([layer(x) for layer in model]).square().mean(), steps=2)


@program("recursive_module", "odd modules")
def recursive(seed: int) -> Program:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 40) -> torch.Tensor:
            return x if depth == 0 else self(torch.tanh(self.layer(x)), depth - 1) + x

    model = Tree()
    x = torch.randn(2, 4)
    return training(model, lambda i: model(x).square().mean())


@program("recursion_to_the_limit", "odd modules")
def recursion_limit(seed: int) -> Program:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self(x + 1)

    model = nn.Sequential(nn.Linear(4, 4))
    tree = Tree()
    model.add_module("tree", tree)
    x = torch.randn(2, 4)

    def loss(i: int) -> torch.Tensor:
        try:
            tree(x)
        except RecursionError as error:
            kind = type(error).__name__
        return model[0](x).square().mean() * len(kind)

    return training(model, loss, steps=2)


@program("unused_and_frozen_parameters", "odd modules")
def unused(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    x = torch.randn(4, 8)
    return training(model, lambda i: model[1](model[0](x)).square().mean(), torch.optim.Adam(model.parameters(), 0.01))


@program("parametric_buffers_and_stateful_forward", "odd modules")
def stateful(seed: int) -> Program:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("mean", torch.zeros(8), persistent=False)
            self.calls = 0
            self.history: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y = self.norm(x)
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.history.append(y.detach())
            return y + self.mean * self.calls

    model = nn.Sequential(nn.Linear(8, 8), Running(), nn.Linear(8, 4))
    return training(model, lambda i: model(torch.randn(4, 8)).square().mean(), extra=lambda: [model[1].calls, model[1].history])


@program("transformer_encoder_fast_path", "odd modules")
def transformer(seed: int) -> Program:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2)
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def loss(i: int) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            fast = model(x, src_key_padding_mask=mask)
        model.train()
        return model(x, src_key_padding_mask=mask).square().mean() + fast[0].mean()

    return training(model, loss)


@program("data_parallel_and_wrappers", "odd modules")
def data_parallel(seed: int) -> Program:
    model = nn.DataParallel(mlp())
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean())
