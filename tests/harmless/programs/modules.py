"""Modules of odd build, that change while they train, or that there are very many of."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from ..program import NAN, Program, batch, mlp, program, training


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


@program("backward_hooks_replace_in_both_directions", "modules")
def backward_hooks(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]
    model[0].register_full_backward_pre_hook(lambda m, out: (out[0] * 2,))
    model[2].register_full_backward_hook(lambda m, gi, go: (gi[0].flip(0),))
    model[2].register_forward_hook(lambda m, a, k, out: out + k.get("more", 1), with_kwargs=True, always_call=True)
    model.register_full_backward_hook(lambda m, gi, go: notes.append([g is None for g in gi]))
    return training(model, lambda i: model(batch(i).requires_grad_(i == 1)).square().mean(), extra=lambda: notes)


@program("hook_that_is_called_always_and_raises", "modules")
def always_raising(seed: int) -> Program:
    model, notes = mlp(), []  # type: tuple[Any, list[Any]]

    def hook(m: Any, args: Any, out: Any) -> None:
        notes.append(out is None)
        if len(notes) in (2, 5):
            raise ArithmeticError(f"hook {len(notes)}")

    model[1].register_forward_hook(hook, always_call=True, prepend=True)

    def loss(i: int) -> torch.Tensor:
        for _ in range(3):
            try:
                return model(batch(i)).square().mean()
            except ArithmeticError as error:
                notes.append(str(error))
        raise AssertionError

    return training(model, loss, steps=4, extra=lambda: notes)


@program("parametrization_comes_and_goes", "modules")
def parametrized(seed: int) -> Program:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

        def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu()

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    names: list[str] = []

    def step(i: int) -> Any:
        if i % 2:
            parametrize.register_parametrization(model[0], "weight", Symmetric())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with parametrize.cached():
            value = model(batch(i)).square().mean()
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 2:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=i == 1)
        names.extend(name for name, _ in model.named_parameters())
        names.append(type(model[0]).__name__)
        return value

    return Program([model], [], step, steps=5, extra=lambda: names)


@program("module_deletes_its_child_while_it_runs", "modules")
def deletes_child(seed: int) -> Program:
    class Ladder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)
            self.once = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(x)
            if hasattr(self, "once"):
                x = self.once(x)
                del self.once
            return x

    model = Ladder()
    return training(model, lambda i: model(batch(i)).square().mean(), torch.optim.SGD(model.parameters(), 0.1), steps=4)


@program("module_list_grows_each_step", "modules")
def growing(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(i: int) -> Any:
        layer = nn.Linear(8, 8)
        model.append(layer)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1})
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        optimizer.step()
        if i == 4:
            model.pop(1)
        return value

    return Program([model], [optimizer], step, steps=7)


@program("copies_take_over_between_backward_and_step", "modules")
def copies_take_over(seed: int) -> Program:
    model = mlp()
    pair: list[Any] = [model, torch.optim.AdamW(model.parameters(), 0.01)]

    def step(i: int) -> Any:
        value = pair[0](batch(i)).square().mean()
        value.backward()
        if i % 2:
            copied, optimizer = copy.deepcopy((pair[0], pair[1]))
            for mine, theirs in zip(copied.parameters(), pair[0].parameters()):
                mine.grad = theirs.grad.clone()
            pair[:] = [copied, optimizer]
        pair[1].step()
        pair[1].zero_grad()
        return value

    return Program([model], [], step, steps=5, extra=lambda: list(pair[0].state_dict().values()))


@program("pickled_in_hooks_of_backward", "modules")
def pickled_in_backward(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sizes: list[int] = []

    def loss(i: int) -> torch.Tensor:
        out = model(batch(i))

        def hook(grad: torch.Tensor) -> None:
            text = pickle.dumps({"weights": model.state_dict(), "state": optimizer.state_dict()})
            buffer = io.BytesIO()
            torch.save(model, buffer)
            sizes.append(len(text))
            again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            sizes.append(len(again._forward_hooks))

        out.register_hook(hook)
        return out.square().mean()

    return training(model, loss, optimizer, extra=lambda: sizes[1::2])


@program("model_calls_itself_with_less", "modules")
def recursive_call(seed: int) -> Program:
    class Fractal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int = 12) -> torch.Tensor:
            x = self.inner(x).tanh()
            return self(x, depth - 1) + self(x.detach(), 0) if depth else x

    model = Fractal()
    return training(model, lambda i: model(batch(i)).square().mean())


@program("a_thousand_heads_in_a_dictionary", "modules")
def dictionary(seed: int) -> Program:
    model = nn.ModuleDict({f"{n:x} ✓ {'x' * (n % 50)}": nn.Linear(2, 2) for n in range(1000)})

    def loss(i: int) -> torch.Tensor:
        total = torch.zeros(())
        for name in list(model)[i * 7 :: 50]:
            total = total + model[name](torch.ones(1, 2)).sum()
        return total

    return training(model, loss)


@program("classes_of_modules_patched_while_training", "modules")
def class_patched(seed: int) -> Program:
    model = mlp()
    original = nn.Linear.forward
    notes: list[str] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        notes.append("mine")
        return original(self, x) * 2

    made = training(model, lambda i: model(batch(i)).square().mean())

    def loop(watch: Any) -> None:
        call = nn.Module.__call__
        try:
            for i in range(4):
                if i == 1:
                    nn.Linear.forward = forward  # type: ignore[method-assign]
                if i == 2:
                    nn.Module.__call__ = lambda self, *a, **k: (notes.append("call"), call(self, *a, **k))[1]  # type: ignore
                with watch.step(i):
                    made.see(made.step(i))
        finally:
            nn.Linear.forward = original  # type: ignore[method-assign]
            nn.Module.__call__ = call  # type: ignore[method-assign]

    made.loop, made.extra = loop, lambda: notes
    return made


@program("forward_consumes_its_inputs", "modules")
def consumes(seed: int) -> Program:
    """Each call takes rows off a list, an iterator and a dictionary that the caller keeps."""

    class Eats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, rows: list[Any], more: Any, table: dict[int, Any]) -> torch.Tensor:
            x = rows.pop() + next(more)
            table.popitem()
            rows[0].add_(1)
            return self.inner(x)

    model = Eats()
    rows = [batch(i) for i in range(12)]
    more = iter([batch(i) * (NAN if i == 2 else 1) for i in range(12)])
    table = dict.fromkeys(range(12))
    return training(
        model,
        lambda i: model(rows, more, table).square().mean(),
        steps=5,
        extra=lambda: [len(rows), rows, len(list(more)), table],
    )


@program("side_effects_on_bad_steps", "modules")
def side_effects(seed: int) -> Program:
    """What a forward does besides computing happens once, also where the loss is no number."""
    calls: list[Any] = []

    class Effects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.drop = nn.Dropout(0.3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            calls.append(int(self.calls))
            with open("log.txt", "a") as out:
                out.write(f"{len(calls)}\n")
            return self.drop(self.norm(self.inner(x)))

    model = Effects().to(torch.bfloat16)

    def loss(i: int) -> torch.Tensor:
        scale = {2: NAN, 3: float("inf"), 5: 1e30}.get(i, 1.0)
        return model((batch(i) * scale).to(torch.bfloat16)).float().square().mean()

    return training(model, loss, torch.optim.AdamW(model.parameters(), 0.01), steps=8, extra=lambda: calls)


@program("nothing_here_can_be_copied", "modules")
def uncopyable(seed: int) -> Program:
    """No deepcopy, no pickle, on a run that goes bad in half precision with a scaler."""

    class Refuses(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("I am unique")

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise RuntimeError("I am unique")

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("I have no state")

    model = nn.Sequential(Refuses(8, 64), nn.ReLU(), Refuses(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = model(batch(i) * 1e3).square().mean()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    return Program([model], [optimizer], step, steps=8, scaler=scaler)
