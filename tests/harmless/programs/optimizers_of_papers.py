"""Optimizers and updates as papers describe them and people write them down: states of their own, several passes, projections."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..program import Program, mlp, program, sick
from .libraries import scaled


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            means = [self.state[p].setdefault("mean", torch.zeros_like(p)) for p in params]
            torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
            update = torch._foreach_mul(means, group["betas"][0])
            torch._foreach_add_(update, grads, alpha=1 - group["betas"][0])
            torch._foreach_sign_(update)
            torch._foreach_add_(params, update, alpha=-group["lr"])
            torch._foreach_lerp_(means, grads, 1 - group["betas"][1])


@program("lion_with_cautious_updates_and_state_in_half_precision", "optimizers")
def lion(seed: int) -> Program:
    model = mlp()

    class Cautious(Lion):
        def step(self, closure: Any = None) -> None:
            before = [p.detach().clone() for p in model.parameters()]
            super().step()
            for p, old in zip(model.parameters(), before):
                agree = ((old - p.detach()) * p.grad > 0).to(p.dtype)
                p.data.copy_(old + (p.data - old) * agree / agree.mean().clamp(min=0.01))
                self.state[p]["mean"] = self.state[p]["mean"].bfloat16().to(p.dtype)

    return scaled(model, lambda i: model(sick(i)).square().mean(), Cautious(model.parameters()))


@program("adafactor_with_factored_moments_and_numbers_of_python", "optimizers")
def adafactor(seed: int) -> Program:
    model = mlp()

    class Factored(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.rms: dict[int, float] = {}

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            value = closure() if closure else None
            for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                squared = p.grad.square() + 1e-30
                if p.ndim == 2:
                    keep = 1 - state["step"] ** -0.8
                    rows = state["rows"] = state.get("rows", 0) * keep + squared.mean(1) * (1 - keep)
                    columns = state["columns"] = state.get("columns", 0) * keep + squared.mean(0) * (1 - keep)
                    squared = torch.outer(rows, columns) / rows.mean()
                update = p.grad / squared.sqrt()
                self.rms[number] = float(update.square().mean().sqrt())
                p.sub_(update, alpha=0.01 * max(1e-3, float(p.norm()) / math.sqrt(p.numel())) / max(1.0, self.rms[number]))
            return value

    optimizer = Factored(model.parameters())
    return scaled(model, lambda i: model(sick(i)).square().mean(), optimizer, extra=lambda: optimizer.rms)


@program("shampoo_takes_roots_in_double_and_falls_back_when_they_fail", "optimizers")
def shampoo(seed: int) -> Program:
    model = mlp()
    fallen: list[int] = []

    class Shampoo(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                update = p.grad
                if p.ndim == 2 and self.state[p].get("off") is None:
                    for side, product in ((0, update @ update.T), (1, update.T @ update)):
                        sum_ = self.state[p].setdefault(side, 1e-4 * torch.eye(p.shape[side], dtype=torch.float64))
                        sum_ += product.double()
                        try:
                            values, vectors = torch.linalg.eigh(sum_)
                        except torch.linalg.LinAlgError:
                            fallen.append(side)
                            sum_.copy_(torch.eye(p.shape[side], dtype=torch.float64))
                            continue
                        root = (vectors * values.clamp(min=1e-8) ** -0.25 @ vectors.T).to(p.dtype)
                        update = root @ update if side == 0 else update @ root
                p.add_(torch.nan_to_num(update), alpha=-self.param_groups[0]["lr"])

    optimizer = Shampoo(model.parameters())

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        value.backward()
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: fallen)


@program("galore_projects_gradients_where_they_arrive_and_drops_them", "optimizers")
def galore(seed: int) -> Program:
    model = mlp()
    states: dict[str, Any] = {}

    def arrives(name: str) -> Callable[[torch.Tensor], None]:
        def hook(p: torch.Tensor) -> None:
            state = states.setdefault(name, {"seen": 0})
            state["seen"] += 1
            grad, p.grad = p.grad, None
            if not torch.isfinite(grad).all():
                state["bad"] = state.get("bad", 0) + 1
                return
            if p.ndim == 2:
                if state["seen"] % 3 == 1:
                    state["basis"] = torch.linalg.svd(grad, full_matrices=False)[0][:, :2]
                low = state["basis"].T @ grad
                mean = state["mean"] = state.get("mean", torch.zeros_like(low)).lerp(low, 0.1)
                grad = state["basis"] @ mean.sign()
            p.data.sub_(grad, alpha=0.01)

        return hook

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(arrives(name))

    def step(i: int) -> Any:
        value = model(sick(i)).square().mean()
        value.backward()
        return value

    return Program([model], [], step, steps=6, extra=lambda: states)


@program("curvature_is_collected_by_hooks_and_inverted_for_the_update", "optimizers")
def kfac(seed: int) -> Program:
    model = mlp()
    sums: dict[str, Any] = {}

    def came(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                rows = args[0].detach()
                sums[f"{name}.in"] = sums.get(f"{name}.in", 0) * 0.9 + rows.T @ rows / len(rows)
                sums[f"{name}.calls"] = sums.get(f"{name}.calls", 0) + 1

        return hook

    def went(name: str) -> Any:
        def hook(module: nn.Module, given: Any, taken: Any) -> None:
            sums[f"{name}.out"] = sums.get(f"{name}.out", 0) * 0.9 + taken[0].T @ taken[0] / len(taken[0])

        return hook

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linear.items():
        module.register_forward_pre_hook(came(name))
        module.register_full_backward_hook(went(name))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(sick(i)).square().mean()
        value.backward()
        if not torch.isfinite(value):
            sums.update({key: one for key, one in sums.items() if key.endswith("calls")})
            for key in [key for key in sums if not key.endswith("calls")]:
                del sums[key]
            return value
        for name, module in linear.items():
            inside = sums[f"{name}.in"] + 0.1 * torch.eye(module.in_features)
            outside = sums[f"{name}.out"] + 0.1 * torch.eye(module.out_features)
            module.weight.grad = torch.linalg.solve(outside, torch.linalg.solve(inside, module.weight.grad.T).T)
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=6, extra=lambda: sums)


@program("largest_scores_are_remembered_and_weights_clipped_after_the_update", "optimizers")
def score_clip(seed: int) -> Program:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)
            self.largest = -math.inf
            self.forwards = 0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(rows).chunk(3, -1)
            scores = q @ k.T
            self.forwards += 1
            self.largest = max(self.largest, scores.detach().max().item())
            return self.out(scores.softmax(-1) @ v)  # type: ignore[no-any-return]

    model = Attention()
    seen: list[float] = []
    made = scaled(model, lambda i: model(sick(i, 3)).square().mean(), Lion(model.parameters(), lr=0.1), steps=6)
    one = made.step

    def step(i: int) -> Any:
        value = one(i)
        seen.append(model.largest)
        if model.largest > 1:
            with torch.no_grad():
                model.qkv.weight[:16] *= math.sqrt(1 / model.largest)
        model.largest = -math.inf
        return value

    made.step, made.extra = step, lambda: [seen, model.forwards]
    return made


@program("learning_rate_is_estimated_from_the_way_travelled", "optimizers")
def prodigy(seed: int) -> Program:
    model = mlp()

    class Estimating(torch.optim.Adam):
        distance, top = 1e-3, 0.0

        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                first = self.__dict__.setdefault("first", {}).setdefault(id(p), p.detach().clone())
                if p.grad is not None:
                    self.top += float((p.grad * (first - p.detach())).sum())
            self.distance = max(self.distance, min(self.top, 10 * self.distance))
            for group in self.param_groups:
                group["lr"] = 10 * self.distance
            return super().step(closure)

    optimizer = Estimating(model.parameters(), lr=1.0)
    return scaled(
        model, lambda i: model(sick(i)).square().mean(), optimizer, steps=7, extra=lambda: [optimizer.distance, optimizer.top]
    )


@program("range_of_learning_rates_is_tried_on_the_model_itself_and_undone", "optimizers")
def finder(seed: int) -> Program:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(4), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    curve: list[Any] = []

    def train(i: int, rows: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(rows) * torch.arange(4)).square().mean() + model[0](rows).square().square().mean()
        value.backward()
        optimizer.step()
        return value  # type: ignore[no-any-return]

    made = Program([model], [optimizer], lambda i: None, extra=lambda: curve)

    def loop(watch: Any) -> None:
        number = 0
        for _ in range(2):
            kept, random_ = copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()
            for power in range(8):
                optimizer.param_groups[0]["lr"] = 10.0 ** (power - 4)
                with watch.step(number):
                    curve.append(train(number, sick(number % 3, 9)))
                number += 1
                if not curve[-1] < 1e6:
                    break
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            torch.set_rng_state(random_)
            for _ in range(3):
                with watch.step(number):
                    curve.append(train(number, sick(number % 3, 9)))
                number += 1
        for value in curve:
            made.see(value)
        curve[:] = [len(curve)]

    made.loop = loop
    return made
