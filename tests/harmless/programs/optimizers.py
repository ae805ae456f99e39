"""Every optimizer of torch, in every variant the CPU allows, and what people do around them."""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..program import NAN, Program, batch, bits, mlp, program, sick, training
from .ranks import _distributed

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


@program("updates_make_new_parameters", "optimizers")
def new_parameters(seed: int) -> Program:
    model = mlp()

    class Functional(torch.optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            self.names = dict(model.named_parameters())
            super().__init__(self.names.values(), {"lr": 0.05})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for name, old in list(self.names.items()):
                owner, _, leaf = name.rpartition(".")
                new = nn.Parameter((old - 0.05 * old.grad.nan_to_num()).detach())
                setattr(model.get_submodule(owner), leaf, new)
                self.names[name] = new
            self.param_groups[0]["params"] = list(self.names.values())

    optimizer = Functional(model)
    return training(model, lambda i: model(sick(i)).square().mean(), optimizer, steps=6)


@program("optimizer_state_is_computed_when_read", "optimizers")
def computed_state(seed: int) -> Program:
    model = mlp()
    reads = [0]

    class Fresh(torch.optim.SGD):
        @property
        def state(self) -> Any:
            reads[0] += 1
            return self.__dict__["real"]

        @state.setter
        def state(self, value: Any) -> None:
            self.__dict__["real"] = value

        def __getstate__(self) -> Any:
            raise TypeError("not for copying")

        def state_dict(self) -> Any:
            return {"reads": min(reads[0], 0)}

        def __repr__(self) -> str:
            raise RuntimeError("no words")

    optimizer = Fresh(model.parameters(), 0.05, momentum=0.9)
    return training(model, lambda i: model(sick(i)).mean(), optimizer, steps=5, extra=lambda: reads)


@program("scale_of_the_loss_is_infinite_and_zero", "optimizers")
def scale_infinite(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1, growth_factor=2.0**20, backoff_factor=1e-30)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = model(batch(i)).float().mean() * (1e-30 if i < 3 else 1)
        scaler.scale(value).backward()
        with contextlib.suppress(Exception):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i == 5:
            scaler.update(torch.tensor(0.0))
        if i == 7:
            scaler.update(NAN)
        return [value, scaler.get_scale()]

    return Program([model], [optimizer], step, steps=10, scaler=scaler)


@program("registries_of_modules_count_their_readers", "optimizers")
def registries(seed: int) -> Program:
    reads: collections.Counter[str] = collections.Counter()

    class Watching(dict):  # type: ignore[type-arg]
        def __init__(self, name: str, *args: Any) -> None:
            super().__init__(*args)
            self.name = name

        def pop(self, key: Any, *default: Any) -> Any:
            reads[f"{self.name} pop"] += 1
            return super().pop(key, *default)

        def __setitem__(self, key: Any, value: Any) -> None:
            reads[f"{self.name} set"] += 1
            super().__setitem__(key, value)

        def update(self, *args: Any, **kwargs: Any) -> None:
            reads[f"{self.name} update"] += 1
            super().update(*args, **kwargs)

    model = mlp()
    for module in model.modules():
        for name in ("_parameters", "_modules", "_buffers"):
            module.__dict__[name] = Watching(name, module.__dict__[name])
    model.__dict__["_modules"]["with.dots"] = nn.Identity()
    model.__dict__["_modules"][""] = nn.Identity()
    model.__dict__["_modules"]["none"] = None
    model.forward = lambda x: model.__dict__["_modules"]["2"](model.__dict__["_modules"][""](model.__dict__["_modules"]["0"](x)))  # type: ignore[method-assign]
    return training(model, lambda i: model(sick(i)).mean(), steps=5, extra=lambda: dict(reads))


@program("functions_with_apply_of_their_own", "optimizers")
def own_apply(seed: int) -> Program:
    seen: list[str] = []

    class Noted(torch.autograd.Function):
        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any:
            seen.append(f"apply {len(args)} {sorted(kwargs)}")
            return super().apply(*args, *kwargs.values())

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: Any, table: Any) -> Any:
            ctx.scale, ctx.table = scale, table
            return x * scale, table

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            seen.append(f"backward {type(ctx).__name__} {ctx.name()}")
            return Noted.apply(grad, ctx.scale, table=ctx.table)[0] if grad.requires_grad else grad * ctx.scale, None, None

    model = mlp()

    def loss(i: int) -> torch.Tensor:
        out, table = Noted.apply(model(sick(i)), 2.0, table={"a": [i]})
        (grad,) = torch.autograd.grad(out.square().sum(), model[0].weight, create_graph=True)
        return out.mean() + grad.square().mean() + table["a"][0]

    return training(model, loss, steps=4, extra=lambda: seen)


class _Deferred(torch.Tensor):
    """Computes nothing until it is read: operations are noted and run when somebody asks for numbers."""

    ran: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, make: Callable[[], torch.Tensor], like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, requires_grad=False)

    def __init__(self, make: Callable[[], torch.Tensor], like: torch.Tensor) -> None:
        self.make, self.value = make, None

    def real(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.make()
        return self.value

    def plain_tensors(self) -> list[torch.Tensor]:
        return [self.real()]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            cls.ran.append(str(func))
            return func(*tree_map(lambda a: a.real() if isinstance(a, cls) else a, args), **(kwargs or {}))

        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor):
            return cls(run, args[0])
        return run()


@program("tensors_compute_only_when_they_are_read", "optimizers")
def deferred(seed: int) -> Program:
    _Deferred.ran = []
    model = mlp()

    class Front(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lazy = _Deferred(lambda: x, x) * 2 + 1
            unused = lazy * 3
            del unused
            return lazy

    front = Front()
    whole = nn.Sequential(front, model)
    return training(
        whole,
        lambda i: model(front(sick(i)).sum(0, keepdim=True) * 1.0).mean(),
        torch.optim.SGD(model.parameters(), 0.01),
        steps=5,
        extra=lambda: _Deferred.ran,
    )


@program("checkpointed_part_changes_places_with_its_twin", "optimizers")
def twins(seed: int) -> Program:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.a, x, use_reentrant=False, determinism_check="none")
            x = checkpoint(lambda y: self.b(F.dropout(y, 0.3)).relu(), x, use_reentrant=True)
            self._modules["a"], self._modules["b"] = self._modules["b"], self._modules["a"]
            return x

    model = nn.Sequential(Pair(), nn.Linear(8, 2))
    return training(model, lambda i: model(sick(i).requires_grad_()).mean(), steps=6)


class _Shape(abc.ABC):  # noqa: B024
    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        if "Secret" in kind.__name__:
            raise PermissionError("do not ask")
        return NotImplemented


@program("abstract_classes_and_matching_choose_the_path", "optimizers")
def matching(seed: int) -> Program:
    class Secret(nn.Linear):
        __match_args__ = ("in_features", "computed")
        reads: ClassVar[list[int]] = []

        @property
        def computed(self) -> int:
            Secret.reads.append(len(Secret.reads))
            if len(Secret.reads) > 12:
                raise RuntimeError("read too often")
            return 3

        @property
        def weight_sum(self) -> Any:
            raise AttributeError("inside of a property")

        @functools.cached_property
        def lazily(self) -> nn.Module:
            Secret.reads.append(-1)
            return nn.Identity()

    Secret.reads.clear()
    model = nn.Sequential(Secret(8, 8), nn.ReLU(), Secret(8, 2))

    def loss(i: int) -> torch.Tensor:
        with contextlib.suppress(PermissionError):
            isinstance(model[0], _Shape)
        match model[0]:
            case Secret(8, 3):
                scale = 1.0
            case _:
                scale = 2.0
        return model(sick(i)).mean() * scale

    return training(model, loss, steps=5, extra=lambda: Secret.reads)


class Slotted:
    """No Optimizer of torch, no state, no dictionary."""

    __slots__ = ("_params", "lr")

    def __init__(self, params: Any, lr: float) -> None:
        self._params, self.lr = list(params), lr

    @property
    def param_groups(self) -> Any:
        return [{"params": self._params, "lr": self.lr}]

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self._params:
                p -= self.lr * p.grad

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr}


@program("optimizer_with_slots_and_no_state", "optimizers")
def slotted(seed: int) -> Program:
    model = mlp()
    made = training(model, lambda i: model(batch(i)).square().mean(), Slotted(model.parameters(), 0.05), steps=4)
    made.optimizers.clear()  # it has no __dict__ that could be compared
    return made


class EightBits(torch.optim.Optimizer):
    """Momentum in bytes, with a scale for each parameter, and rounding by chance."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"q": torch.zeros(p.shape, dtype=torch.int8), "scale": torch.ones(())}
                momentum = state["q"].float() * state["scale"] * 0.9 + p.grad
                state["scale"] = momentum.abs().amax().clamp_min(1e-12) / 127
                state["q"].copy_((momentum / state["scale"] + torch.rand_like(momentum) - 0.5).round().clamp(-127, 127))
                p.add_(state["q"].float() * state["scale"], alpha=-group["lr"])


@program("states_in_eight_bits", "optimizers")
def eight_bits(seed: int) -> Program:
    model = mlp()
    return training(model, lambda i: model(batch(i)).square().mean(), EightBits(model.parameters()), steps=5)


@program("main_gradients_gathered_apart", "optimizers")
def main_gradients(seed: int) -> Program:
    """bf16 weights whose gradients are taken away as they come and added up in FP32 beside them; the optimizer has copies."""
    model = mlp().bfloat16()
    masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 0.01)
    gathered = [torch.zeros_like(m) for m in masters]

    def take(number: int) -> Callable[[Any], None]:
        def hook(p: Any) -> None:
            gathered[number].add_(p.grad)
            p.grad = None

        return hook

    handles = [p.register_post_accumulate_grad_hook(take(n)) for n, p in enumerate(model.parameters())]

    def step(i: int) -> Any:
        for micro in range(3):
            value = model(batch(i + micro).bfloat16()).float().square().mean() / 3
            value.backward()
        for master, total in zip(masters, gathered):
            master.grad = total.clone()
            total.zero_()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)
        return value

    return Program([model], [optimizer], step, steps=4, extra=lambda: [len(handles), masters])


@program("fsdp_of_the_first_kind", "optimizers")
def first_fsdp(seed: int) -> Program:
    """Flat parameters with views into them that come and go, in mixed precision."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    model = mlp()
    notes: list[Any] = []

    def body(made: Program, watch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            wrapped = FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"), mixed_precision=half)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
            other = watch.another(wrapped, optimizer)
            for i in range(3):
                with watch.step(i), other.step(i):
                    optimizer.zero_grad()
                    value = wrapped(batch(i)).float().square().mean()
                    value.backward()
                    optimizer.step()
                made.see(value)
            other.close()
            notes.append(bits([p.detach() for p in wrapped.parameters()]))

    return _distributed(model, body, extra=lambda: notes)


@program("communication_that_compresses", "optimizers")
def compressed(seed: int) -> Program:
    """DistributedDataParallel whose hooks compress gradients, with a state and random numbers of their own."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = mlp()
    notes: list[Any] = []

    def body(made: Program, watch: Any) -> None:
        for number, kind in enumerate(("half", "power")):
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
            if kind == "half":
                wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            else:
                state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
                wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
            for i in range(4):
                with watch.step(4 * number + i):
                    optimizer.zero_grad()
                    value = wrapped(batch(i)).square().mean()
                    value.backward()
                    optimizer.step()
                made.see(value)
            notes.append(bits(wrapped.module.state_dict()))

    return _distributed(model, body, extra=lambda: notes)


class _Guarded(torch.optim.Optimizer):
    """Groups made anew at each look, no attribute but its own, a step that needs the loss and gives three things back."""

    writes: ClassVar[list[str]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"nobody asks for {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        _Guarded.writes.append(name)
        super().__setattr__(name, value)

    def step(self, loss: torch.Tensor, *, metrics: dict[str, float]) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.grad
        metrics["loss"] = float(loss.detach())
        return loss, metrics, self

    def zero_grad(self, really: bool = False) -> str:  # type: ignore[override]
        super().zero_grad(set_to_none=really)
        return "done"


@program("optimizer_with_its_own_signature", "optimizers")
def own_signature(seed: int) -> Program:
    _Guarded.writes.clear()
    model = mlp()
    optimizer = _Guarded(model.parameters())
    notes: list[Any] = []

    def step(i: int) -> Any:
        notes.append(optimizer.zero_grad(really=i % 2 == 0))
        value = model(batch(i)).square().mean()
        value.backward()
        metrics: dict[str, float] = {}
        loss, same, me = optimizer.step(value, metrics=metrics)
        notes.append([same is metrics, me is optimizer, metrics["loss"]])
        return loss

    return Program([model], [optimizer], step, extra=lambda: [notes, [w for w in _Guarded.writes if "hook" not in w]])


@program("groups_made_anew_at_each_look", "optimizers")
def fresh_groups(seed: int) -> Program:
    class Fresh(torch.optim.SGD):
        looks = 0

        @property
        def param_groups(self) -> Any:
            return [dict(group, params=list(group["params"])) for group in self.__dict__["hidden"]]

        @param_groups.setter
        def param_groups(self, value: Any) -> None:
            self.__dict__["hidden"] = value

        def add_param_group(self, group: dict[str, Any]) -> None:
            group["params"] = list(group["params"]) if not isinstance(group["params"], torch.Tensor) else [group["params"]]
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self.__dict__["hidden"].append(group)

    model = mlp()
    return training(model, lambda i: model(batch(i)).square().mean(), Fresh(model.parameters(), lr=0.05, momentum=0.9))


@program("step_is_a_partial_of_a_static_function", "optimizers")
def static_step(seed: int) -> Program:
    model = mlp()

    class Static:
        def __init__(self) -> None:
            self.param_groups = [{"params": list(model.parameters()), "lr": 0.05}]
            self.state: dict[Any, Any] = {}
            self.step = functools.partial(self.update, self)

        @staticmethod
        def update(self: Any, *, by: float = 1.0) -> None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * by)

        def zero_grad(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = None

        def state_dict(self) -> Any:
            return {}

    optimizer = Static()

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = model(batch(i)).square().mean()
        value.backward()
        optimizer.step(by=0.5)
        return value

    return Program([model], [optimizer], step)


@program("closure_raises_and_is_called_again", "optimizers")
def closure_raises(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    calls: list[str] = []

    def step(i: int) -> Any:
        def closure() -> Any:
            calls.append("call")
            optimizer.zero_grad()
            value = model(batch(i) * (NAN if i == 3 else 1)).square().mean()
            value.backward()
            if i == 1 and len(calls) % 3 == 2:
                raise FloatingPointError("once")
            return value

        try:
            return optimizer.step(closure)
        except FloatingPointError as error:
            calls.append(str(error))
            return optimizer.step(closure) if i != 1 else None

    return Program([model], [optimizer], step, steps=5, extra=lambda: calls)


@program("backward_replaced_by_a_descriptor", "optimizers")
def backward_descriptor(seed: int) -> Program:
    """The user's own Tensor.backward and autograd.backward, set inside one step and taken away inside another."""
    model, notes = mlp(), []  # type: tuple[Any, list[str]]

    class Descriptor:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __get__(self, thing: Any, kind: Any) -> Any:
            notes.append("get")
            return self if thing is None else functools.partial(self.inner, thing)

    def counted(inner: Any) -> Any:
        return lambda *args, **kwargs: (notes.append("backward"), inner(*args, **kwargs))[1]

    made = training(model, lambda i: model(batch(i)).square().mean(), steps=6)

    def loop(watch: Any) -> None:
        tensor_backward, backward = torch.Tensor.backward, torch.autograd.backward
        try:
            for i in range(6):
                with watch.step(i):
                    if i == 1:
                        torch.Tensor.backward = Descriptor(torch.Tensor.backward)  # type: ignore
                        torch.autograd.backward = counted(torch.autograd.backward)
                    made.see(made.step(i))
                    if i == 3:
                        torch.Tensor.backward = tensor_backward  # type: ignore[method-assign]
                        torch.autograd.backward = backward
            watch.close()
        finally:
            torch.Tensor.backward = tensor_backward  # type: ignore[method-assign]
            torch.autograd.backward = backward

    made.loop, made.extra = loop, lambda: notes
    return made


@program("optimizer_in_backward_fused_per_parameter", "optim")
def fused_in_backward(seed: int) -> Program:
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p], 1e-2, fused=True) for p in model.parameters()}
    order: list[Any] = []

    def hook(p: torch.Tensor) -> None:
        order.append(tuple(p.shape))
        optimizers[p].step()
        optimizers[p].zero_grad(set_to_none=True)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(i: int) -> Any:
        loss = model(torch.ones(2, 8) * (i + 1)).square().mean()
        loss.backward()
        return loss

    return Program([model], list(optimizers.values()), step, extra=lambda: order)


@program("optimizer_wrapped_by_delegation", "optim")
def delegated(seed: int) -> Program:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self._inner, name)

        def step(self, closure: Any = None) -> Any:
            for group in self._inner.param_groups:
                group["lr"] *= 0.9
            return self._inner.step(closure)

    model = mlp()
    optimizer = Wrapper(torch.optim.Adafactor(model.parameters(), 1e-2))
    return training(model, lambda i: model(torch.ones(2, 8)).square().mean(), optimizer)


@program("optimizer_copied_and_state_set_inside_step", "optim")
def optimizer_copied(seed: int) -> Program:
    import copy

    model = mlp()
    first = torch.optim.NAdam(model.parameters(), 1e-2, foreach=True)
    notes: list[Any] = []
    first.register_load_state_dict_pre_hook(lambda optimizer, state: notes.append(sorted(state)) and None)

    def step(i: int) -> Any:
        first.zero_grad()
        loss = model(torch.ones(2, 8) * i).square().mean()
        loss.backward()
        with torch.no_grad():
            twin = copy.deepcopy(first)
            twin.step()
            notes.append(sorted(vars(pickle.loads(pickle.dumps(first)))))
        first.load_state_dict(first.state_dict())
        first.step()
        return loss

    return Program([model], [first], step, extra=lambda: notes)


@program("averaged_model_update_bn_and_swalr", "optim")
def averaged(seed: int) -> Program:
    from torch.optim import swa_utils

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = swa_utils.SWALR(optimizer, 0.01, anneal_epochs=2)
    rows = torch.utils.data.DataLoader(torch.randn(8, 8), 4)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(next(iter(rows))).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        scheduler.step()
        swa_utils.update_bn(rows, average)
        return loss

    return Program([model, average], [optimizer], step)


@program("amp_optimizer_takes_scale_and_found_inf", "optim")
def amp_optimizer(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8) * (float("inf") if i == 1 else 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program([model], [optimizer], step, steps=4, scaler=scaler)
