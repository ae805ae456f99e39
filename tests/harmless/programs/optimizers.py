"""Every optimizer of torch, in every variant the CPU allows, and what people do around them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from ..program import Program, mlp, program, training

_ALL = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS", "Muon")
]


def _optimised(kind: Any, **options: Any) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), kind(model.parameters(), lr=0.01, **options))


for _kind in _ALL:

    @program(f"optimizer_{_kind.__name__}", "optimizers")
    def optimised(seed: int, kind: Any = _kind) -> Program:
        return _optimised(kind)


for _kind, _options in (
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"foreach": False}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"differentiable": False, "foreach": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"foreach": True, "centered": True}),
):
    _label = "_".join(k if v is True else f"no_{k}" if v is False else f"{k}{v}" for k, v in _options.items()).replace(".", "")

    @program(f"optimizer_{_kind.__name__}_{_label}", "optimizers")
    def optimised_variant(seed: int, kind: Any = _kind, options: Any = _options) -> Program:
        return _optimised(kind, **options)


@program("optimizer_Muon", "optimizers")
def muon(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    x = torch.randn(4, 8)
    return training(model, lambda i: model(x).square().mean(), torch.optim.Muon(model.parameters(), lr=0.01), steps=2)


@program("optimizer_LBFGS_closure", "optimizers")
def lbfgs(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(6, 8), torch.randn(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return Program([model], [optimizer], lambda i: optimizer.step(closure))


@program("optimizer_SGD_closure", "optimizers")
def closure_sgd(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Program([model], [optimizer], lambda i: optimizer.step(closure=closure))


@program("optimizer_tensor_lr_and_groups", "optimizers")
def tensor_lr(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    groups = [{"params": model[0].parameters(), "lr": torch.tensor(0.01)}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    return training(model, lambda i: model(x).square().mean(), torch.optim.AdamW(groups, lr=torch.tensor(0.02), foreach=False))


@program("optimizer_differentiable", "optimizers")
def differentiable(seed: int) -> Program:
    w = torch.randn(4, requires_grad=True)
    lr = torch.tensor(0.1, requires_grad=True)

    def step(i: int) -> Any:
        inner = w.clone()
        inner.retain_grad()
        optimizer = torch.optim.SGD([inner], lr=lr, differentiable=True)
        inner.square().sum().backward(create_graph=True)
        optimizer.step()
        meta = inner.sum()
        (grad,) = torch.autograd.grad(meta, lr)
        return meta.detach(), grad

    return Program([nn.Linear(2, 2)], [], step, steps=2)


class SignSGD(torch.optim.Optimizer):
    """An optimizer of one's own, that does not look like those of torch."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, *, extra: str = "") -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.add_(p.grad.sign(), alpha=-group["lr"])
        return extra


class NotAnOptimizer:
    """Quacks like one."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                p -= 0.1 * p.grad


@program("optimizer_custom_sign", "optimizers")
def custom(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = SignSGD(model.parameters(), 0.01)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        return optimizer.step(extra="said")

    return Program([model], [optimizer], step)


@program("optimizer_that_is_none", "optimizers")
def duck(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    optimizer = NotAnOptimizer(model.parameters())

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [], step)


@program("optimizer_step_replaced_on_instance", "optimizers")
def step_replaced(seed: int) -> Program:
    made = _optimised(torch.optim.Adam)
    optimizer = made.optimizers[0]
    original = optimizer.step
    calls: list[int] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    optimizer.step = step
    made.extra = lambda: calls
    return made


@program("optimizer_hooks_of_the_user", "optimizers")
def optimizer_hooks(seed: int) -> Program:
    made = _optimised(torch.optim.Adam)
    optimizer = made.optimizers[0]
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda o, a, k: order.append("pre"))
    optimizer.register_step_post_hook(lambda o, a, k: order.append("post"))
    optimizer.register_state_dict_pre_hook(lambda o: order.append("state"))
    made.extra = lambda: order
    return made


@program("optimizer_in_backward", "optimizers")
def in_backward(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Program([model], list(optimizers.values()), step)


@program("gan_two_optimizers", "several optimizers")
def gan(seed: int) -> Program:
    maker, judge = mlp(8, 8), mlp(8, 1)
    first, second = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.RMSprop(judge.parameters(), 0.01)

    def step(i: int) -> Any:
        real, fake = torch.randn(4, 8), maker(torch.randn(4, 8))
        second.zero_grad()
        judged = judge(fake.detach()).mean() - judge(real).mean()
        judged.backward()
        second.step()
        first.zero_grad()
        made = -judge(fake).mean()
        made.backward()
        first.step()
        return judged, made

    return Program([maker, judge], [first, second], step)


@program("actor_critic", "several optimizers")
def actor_critic(seed: int) -> Program:
    actor, critic = mlp(8, 3), mlp(8, 1)
    one, two = torch.optim.Adam(actor.parameters(), 0.01), torch.optim.SGD(critic.parameters(), 0.01)

    def step(i: int) -> Any:
        x = torch.randn(4, 8)
        chosen = torch.distributions.Categorical(logits=actor(x))
        action = chosen.sample()
        value = critic(x).squeeze(-1)
        reward = (action == 1).float()
        one.zero_grad()
        two.zero_grad()
        policy = -(chosen.log_prob(action) * (reward - value.detach())).mean()
        worth = (value - reward).square().mean()
        policy.backward()
        worth.backward()
        one.step()
        two.step()
        return policy, worth, action

    return Program([actor, critic], [one, two], step)


@program("swa_and_ema_averages", "averages")
def swa(seed: int) -> Program:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    smooth = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    x = torch.randn(4, 8)
    made = training(model, lambda i: model(x).square().mean())
    inner = made.step

    def step(i: int) -> Any:
        value = inner(i)
        averaged.update_parameters(model)
        smooth.update_parameters(model)
        torch.optim.swa_utils.update_bn([x], averaged)
        return value

    made.step = step
    made.models += [averaged, smooth]
    return made


@program("ema_teacher_by_hand", "averages")
def teacher(seed: int) -> Program:
    model = mlp()
    mean = copy.deepcopy(model).requires_grad_(False)
    x = torch.randn(4, 8)

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            target = mean(x)
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.1)
        return (model(x) - target + 1).square().mean()

    made = training(model, loss)
    made.models.append(mean)
    return made


@program("clip_every_argument_by_keyword", "clipping")
def clip(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms = [
            torch.nn.utils.clip_grad_norm_(
                parameters=model.parameters(), max_norm=0.5, norm_type=norm, error_if_nonfinite=True, foreach=foreach
            )
            for norm in (2.0, float("inf"), 1.0)
            for foreach in (None, True, False)
        ]
        torch.nn.utils.clip_grad_value_(parameters=model.parameters(), clip_value=0.1, foreach=False)
        torch.nn.utils.clip_grad_norm_(model[0].weight, 0.2)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(parameters=model.parameters(), max_norm=0.1, total_norm=total)
        torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 1.0)
        torch.nn.utils.clip_grad_norm_([], 1.0)
        optimizer.step()
        return norms, total

    return Program([model], [optimizer], step)


@program("clip_raises_on_nonfinite", "clipping")
def clip_raises(seed: int) -> Program:
    model = mlp()
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        model.zero_grad()
        (model(x).square().mean() * float("inf")).backward()
        try:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            return error
        return None

    return Program([model], [torch.optim.SGD(model.parameters(), 0.1)], step)


@program("clip_imported_before", "clipping")
def clip_imported(seed: int) -> Program:
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    made = _optimised(torch.optim.SGD)
    model, optimizer = made.models[0], made.optimizers[0]
    x = torch.randn(4, 8)

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        model(x).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        return norm

    made.step = step
    return made


@program("accumulation_of_192_micro_batches", "accumulation")
def accumulate(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(i: int) -> Any:
        for _ in range(192):
            (model(torch.randn(2, 8)).square().mean() / 192).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Program([model], [optimizer], step, steps=2)


@program("accumulation_one_step_per_micro_batch", "accumulation")
def accumulate_steps(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(i: int) -> Any:
        loss = model(torch.randn(2, 8)).square().mean()
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Program([model], [optimizer], step, steps=10)


@program("several_optimizer_steps_in_one_step", "accumulation")
def several_steps(seed: int) -> Program:
    made = _optimised(torch.optim.Adam)
    inner = made.step
    made.step = lambda i: [inner(i).detach() for _ in range(3)]
    return made
