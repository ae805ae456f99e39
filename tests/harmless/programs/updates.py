"""Updates as code bases write them: schedules, scalers and clipping in odd orders, passes without a backward pass."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import warnings
from collections import defaultdict
from typing import Any

import torch
import torch.distributed
import torch.utils.benchmark
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from ..program import Program, batch, mlp, program, sick, training


def _data() -> tuple[nn.Sequential, torch.Tensor]:
    return mlp(), torch.randn(4, 8)


_SCHEDULERS: dict[str, Any] = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


for _name, _make in _SCHEDULERS.items():

    @program(f"scheduler_{_name}_made_inside_first_step", "optimizers")
    def scheduler_inside(seed: int, make: Any = _make, name: str = _name) -> Program:
        """The scheduler wraps optimizer.step while a step is under way, and is stepped inside, outside and after close."""
        model, x = _data()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        made = Program([model], [optimizer], lambda i: None)

        def loop(watch: Any) -> None:
            scheduler = None
            for i in range(5):
                if i == 4:
                    watch.close()
                frame = watch.step(i) if i < 4 else contextlib.nullcontext()
                with frame:
                    if scheduler is None:
                        scheduler = make(optimizer)
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    if i % 2:
                        scheduler.step(*([float(loss)] if name == "plateau" else []))
                if not i % 2:
                    scheduler.step(*([float(loss)] if name == "plateau" else []))
                made.see([loss, [group["lr"] for group in optimizer.param_groups]])

        made.loop = loop
        return made


@program("scheduler_made_before_everything", "optimizers")
def scheduler_before(seed: int) -> Program:
    """The scheduler wrapped optimizer.step before; torch warns if it then finds the step replaced or never called."""
    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss, scheduler.get_last_lr()

    return Program([model], [optimizer], step, extra=lambda: [scheduler.last_epoch, scheduler._step_count])


@program("scheduler_stepped_first_warns", "optimizers")
def scheduler_first(seed: int) -> Program:
    """scheduler.step before optimizer.step: torch's own warning must come, once, as it comes alone."""
    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        scheduler.step()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step)


@program("optimizer_step_compiled", "optimizers")
def compiled_step(seed: int) -> Program:
    """The optimizer's step goes through torch.compile with the eager backend; the graphs are counted."""
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len([n for n in graph.graph.nodes if n.op == "call_function"]))
        return graph.forward

    @torch.compile(backend=backend)
    def apply() -> None:
        optimizer.step()

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at the first compilation
            apply()
        return loss

    return Program([model], [optimizer], step, extra=lambda: len(graphs))


@program("optimizer_made_anew_each_step", "optimizers")
def anew(seed: int) -> Program:
    """Each step makes another kind of optimizer over the same weights, loads the old state and drops it."""
    model, x = _data()
    kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adam]
    states: list[Any] = []

    def step(i: int) -> Any:
        optimizer = kinds[i](model.parameters(), lr=0.01)
        if i == 3:
            optimizer.load_state_dict(states[1])
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        states.append(optimizer.state_dict())
        return loss

    return Program([model], [], step, steps=4, extra=lambda: states)


@program("groups_added_taken_and_replaced", "optimizers")
def groups(seed: int) -> Program:
    """Parameter groups are added in a step, taken away, and state and param_groups replaced by fresh objects."""
    model, x = _data()
    optimizer = torch.optim.AdamW(model[0].parameters(), 0.01)

    def step(i: int) -> Any:
        if i == 1:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1, "note": "new"})
        if i == 2:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
            optimizer.state = defaultdict(dict)
        if i == 3:
            for p in optimizer.param_groups.pop(0)["params"]:
                optimizer.state.pop(p)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4)


@program("step_functions_kept_beyond_close", "optimizers")
def kept_functions(seed: int) -> Program:
    """optimizer.step, zero_grad and clip_grad_norm_ are fetched before, inside and after steps and called after close."""
    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    early = optimizer.step
    made = Program([model], [optimizer], lambda i: None)

    def loop(watch: Any) -> None:
        kept = []
        for i in range(3):
            with watch.step(i):
                kept.append((optimizer.step, optimizer.zero_grad, nn.utils.clip_grad_norm_, torch.nn.Module.__call__))
                kept[0][1]()
                loss = kept[0][3](model, x).square().mean()
                loss.backward()
                kept[0][2](model.parameters(), 0.5)
                (early if i == 1 else kept[-1][0])()
            made.see(loss)
        watch.close()
        for step, zero, clip, call in kept:
            zero()
            loss = call(model, x).square().mean()
            loss.backward()
            clip(model.parameters(), 0.5)
            step()
            made.see(loss)

    made.loop = loop
    return made


@program("instance_step_deleted_inside_step", "optimizers")
def step_deleted(seed: int) -> Program:
    """Inside a step the user takes away whatever hangs on the optimizer instance as `step`, sets another, takes it away."""
    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if i == 0:
            vars(optimizer).pop("step", None)
        if i == 1:
            optimizer.step = types.MethodType(functools.partial(torch.optim.SGD.step), optimizer)
        if i == 2:
            vars(optimizer).pop("step", None)
            vars(optimizer).pop("zero_grad", None)
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4, extra=lambda: sorted(vars(optimizer)))


@program("optimizer_class_patched_inside_step", "optimizers")
def class_patched(seed: int) -> Program:
    """The class of the optimizer gets another step inside one step, and its own back inside a later one."""

    class Mine(torch.optim.SGD):
        pass

    model, x = _data()
    optimizer = Mine(model.parameters(), 0.1)
    calls: list[str] = []

    def step(i: int) -> Any:
        if i == 1:
            inner = Mine.step

            def patched(self: Any, closure: Any = None) -> Any:
                calls.append("patched")
                return inner(self, closure)

            Mine.step = patched
        if i == 3:
            del Mine.step
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program([model], [optimizer], step, steps=4, extra=lambda: calls)


@program("sharpness_aware_two_pass", "optimizers")
def sharpness(seed: int) -> Program:
    """SAM: the weights are moved, run again and moved back inside one step, by an optimizer that wraps another."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, params: Any, base: Any, **kwargs: Any) -> None:
            super().__init__(params, {"rho": 0.05, **kwargs})
            self.base = base(self.param_groups, **kwargs)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            params = [p for g in self.param_groups for p in g["params"]]
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            for p in params:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * 0.05 / norm)
            with torch.enable_grad():
                self.zero_grad()
                value = closure()
            for p in params:
                p.copy_(self.state[p].pop("old"))
            self.base.step()
            return value

    model, x = _data()
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def closure() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def step(i: int) -> Any:
        optimizer.zero_grad()
        return closure(), optimizer.step(closure)

    return Program([model], [optimizer], step)


@program("optimizer_step_takes_gradients", "optimizers")
def step_arguments(seed: int) -> Program:
    """step(grads, *, lr) of an odd optimizer with required arguments and a result; it forbids new attributes."""

    class Odd:
        def __init__(self, params: Any) -> None:
            vars(self).update(param_groups=[{"params": list(params), "lr": 0.1}], state={})

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"{name} on a sealed optimizer")

        @torch.no_grad()
        def step(self, grads: Any, /, *, lr: float) -> Any:
            for p, g in zip(self.param_groups[0]["params"], grads):
                p.sub_(g, alpha=lr)
            return "moved", len(grads)

        def zero_grad(self) -> None: ...

        def state_dict(self) -> Any:
            return {"groups": len(self.param_groups)}

    model, x = _data()
    optimizer = Odd(model.parameters())

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return loss, optimizer.step(grads, lr=0.1 / (i + 1))

    return Program([model], [optimizer], step)


@program("sparse_adam_beside_adam_in_one_wrapper", "optimizers")
def sparse_adam(seed: int) -> Program:
    """SparseAdam and Adam under one object that forwards step, zero_grad and param_groups by __getattr__."""

    class Both:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __getattr__(self, name: str) -> Any:
            if name == "parts" or name.startswith("__"):
                raise AttributeError(name)
            if name == "param_groups":
                return [g for part in self.parts for g in part.param_groups]
            return lambda *args, **kwargs: [getattr(part, name)(*args, **kwargs) for part in self.parts]

    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
    ids = torch.tensor([1, 3, 3, 7])
    optimizer = Both(torch.optim.SparseAdam(model[0].parameters(), 0.01), torch.optim.Adam(model[1].parameters(), 0.01))

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    made = Program([model], [], step)
    made.extra = lambda: optimizer.state_dict()
    return made


@program("clip_of_a_generator_with_side_effects", "optimizers")
def clip_generator(seed: int) -> Program:
    """The clipping functions get generators that can be read once and count; also the newer pieces of clipping."""
    model, x = _data()
    read: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def once() -> Any:
        for name, p in model.named_parameters():
            read.append(name)
            yield p

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        a = nn.utils.clip_grad_norm_(once(), 0.5, norm_type=float("inf"))
        nn.utils.clip_grad_value_(once(), 0.01)
        b = nn.utils.get_total_norm([p.grad for p in once()], 1.0)
        nn.utils.clip_grads_with_norm_(once(), 0.1, b)
        c = nn.utils.clip_grad_norm_(model[0].weight, 0.1)
        d = nn.utils.clip_grad_norm_([], 1.0)
        optimizer.step()
        return loss, a, b, c, d

    return Program([model], [optimizer], step, extra=lambda: read)


@program("global_optimizer_hooks", "optimizers")
def global_hooks(seed: int) -> Program:
    """Global optimizer hooks of the user come and go inside steps and count the calls that they see."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Any] = []

    def step(i: int) -> Any:
        before = register_optimizer_step_pre_hook(lambda o, a, k: seen.append(["pre", len(a), len(k)]))
        after = register_optimizer_step_post_hook(lambda o, a, k: seen.append(["post", len(a), len(k)]))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        before.remove()
        after.remove()
        return loss

    return Program([model], [optimizer], step, extra=lambda: seen)


@program("scaler_of_lists_and_reloaded", "optimizers")
def scaler_lists(seed: int) -> Program:
    """scaler.scale of nested iterables, growth at each step, its state loaded and the scale set by hand in between."""
    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        y = model(x)
        parts = scaler.scale([y[:2].square().mean(), (y[2:].abs().mean(),)])
        torch.autograd.backward([parts[0], parts[1][0]])
        if i == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        with contextlib.suppress(RuntimeError):
            scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        scaler.update(torch.tensor(4.0) if i == 2 else None)
        if i == 2:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0, "growth_interval": 1})
        return parts, result is None, scaler.get_scale()

    return Program([model], [optimizer], step, steps=4, scaler=scaler)


@program("optimizer_that_unscales_itself", "optimizers")
def amp_scaling(seed: int) -> Program:
    """An optimizer with _step_supports_amp_scaling reads grad_scale and found_inf that the scaler hangs on it."""
    notes: list[Any] = []

    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> Any:
            scale, found = self.grad_scale, self.found_inf
            notes.append([None if scale is None else float(scale), None if found is None else float(found)])
            if found is not None and found:
                return "skipped"
            for group in self.param_groups:
                for p in group["params"]:
                    if scale is not None:
                        p.grad.div_(scale)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad, alpha=0.1)
            return "moved"

    model, x = _data()
    optimizer = Own(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss * (float("inf") if i == 1 else 1)).backward()
        result = scaler.step(optimizer)
        scaler.update()
        return loss, result, hasattr(optimizer, "grad_scale")

    return Program([model], [optimizer], step, scaler=scaler, extra=lambda: notes)


@program("scaler_replaced_by_another", "optimizers")
def scaler_replaced(seed: int) -> Program:
    """Two scalers take turns on one optimizer; one is deep-copied and the copy goes on after close."""
    model, x = _data()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    made = Program([model], [optimizer], lambda i: None, scaler=scaler)

    def one(s: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()
        return loss, s.get_scale()

    def loop(watch: Any) -> None:
        for i in range(4):
            with watch.step(i):
                value = one((scaler, other)[i % 2])
                if i == 2:
                    twin = copy.deepcopy(other)
            made.see(value)
        watch.close()
        made.see(one(twin))
        made.see(one(scaler))
        made.see(sorted(vars(twin)))

    made.loop = loop
    return made


@program("master_weights_by_hand", "optimizers")
def master(seed: int) -> Program:
    """The optimizer knows only float32 masters; the bf16 model gets copies and its gradients are moved by hand."""
    model = mlp().to(torch.bfloat16)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, 0.01)

    def step(i: int) -> Any:
        loss = model(x).float().square().mean()
        loss.backward()
        for p, m in zip(model.parameters(), masters):
            m.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        return loss

    return Program([model], [optimizer], step, extra=lambda: masters)


@program("optimizer_stepped_inside_backward_hook", "optimizers")
def step_in_backward(seed: int) -> Program:
    """One optimizer steps inside a module's backward hook while another belongs to the rest, and the closure raises once."""
    model, x = _data()
    tail = torch.optim.SGD(model[2].parameters(), 0.1)
    head = torch.optim.SGD(model[0].parameters(), 0.1)
    count: list[int] = []

    def hook(p: torch.Tensor) -> None:
        count.append(1)
        if len(count) % 2 == 0:
            tail.step()
            tail.zero_grad()

    for p in model[2].parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        loss.backward()

        def closure() -> Any:
            raise LookupError("closure")

        with contextlib.suppress(LookupError):
            head.step(closure)
        head.step(lambda: loss)
        head.zero_grad()
        return loss

    return Program([model], [tail, head], step)


@program("gradient_dtype_of_its_own", "optimizers")
def grad_dtype(seed: int) -> Program:
    """bf16 parameters keep their gradients in float32 through grad_dtype, where torch has it."""
    model = mlp().to(torch.bfloat16)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    for p in model.parameters():
        if hasattr(p, "grad_dtype"):
            p.grad_dtype = torch.float32

    def step(i: int) -> Any:
        loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad.to(p.dtype), alpha=0.1)
        kinds = [str(p.grad.dtype) for p in model.parameters()]
        model.zero_grad()
        return loss, kinds

    return Program([model], [], step)


@program("trains_through_functional_optimizer", "optimizers")
def functional(seed: int) -> Program:
    """Uses torch.optim's functional forms directly, with gradients taken by autograd.grad: no optimizer object at all."""
    from torch.optim.adam import adam

    model, x = _data()
    params = list(model.parameters())
    averages, squares = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    counts = [torch.tensor(0.0) for _ in params]

    def step(i: int) -> Any:
        loss = model(x).square().mean()
        grads = list(torch.autograd.grad(loss, params))
        with torch.no_grad():
            adam(
                params, grads, averages, squares, [], counts, foreach=bool(i % 2), amsgrad=False, beta1=0.9, beta2=0.99,
                lr=0.01, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip
        return loss

    return Program([model], [], step, steps=4, extra=lambda: [averages, squares])


class _Lookahead(torch.optim.Optimizer):
    """Takes over the groups and states of another and steps it itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow):
                torch._foreach_lerp_(slow, group["params"], 0.5)
                torch._foreach_copy_(group["params"], slow)
        return found


@program("optimizer_that_was_never_made_looks_ahead", "updates")
def lookahead(seed: int) -> Program:
    model = mlp()
    optimizer = _Lookahead(torch.optim.AdamW(model.parameters(), 1e-2))
    made = training(model, lambda i: model(sick(i, 4)).square().mean(), optimizer, steps=6)
    made.optimizers, made.extra = [optimizer.inner], lambda: optimizer.slow
    return made


@program("best_of_three_copies_is_taken", "updates")
def line_search(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step(i: int) -> Any:
        found = []
        for rate in (0.5, 0.05, 0.005):
            tried = copy.deepcopy(model)
            other = torch.optim.SGD(tried.parameters(), rate, momentum=0.9)
            other.load_state_dict(optimizer.state_dict())
            other.param_groups[0]["lr"] = rate
            tried(sick(i, 3)).square().mean().backward()
            other.step()
            with torch.no_grad():
                found.append((float(tried(batch(i)).square().mean().nan_to_num(1e9)), rate, tried, other))
        _, rate, best, other = min(found, key=lambda one: one[:2])
        if i != 3:
            model.load_state_dict(best.state_dict())
            optimizer.load_state_dict(other.state_dict())
        return [one[:2] for one in found]

    return Program([model], [optimizer], step, steps=5)


@program("scale_of_the_loss_kept_by_hand", "updates")
def by_hand(seed: int) -> Program:
    model = mlp().half()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(master, 1e-2)
    scale, skipped = [2.0**15], []  # type: tuple[list[float], list[int]]

    def step(i: int) -> Any:
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model((batch(i) * (100 if i == 2 else 1)).half()).float().square().mean()
        (loss * scale[0]).backward()
        grads = [p.grad.float() / scale[0] for p in model.parameters() if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in grads):
            scale[0] /= 2
            skipped.append(i)
            return loss
        for weight, grad in zip(master, grads):
            weight.grad = grad
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), master)
        return loss

    return Program([model], [optimizer], step, steps=6, extra=lambda: [scale, skipped, master])


@program("what_rounding_took_is_added_later", "updates")
def kahan(seed: int) -> Program:
    model = mlp().bfloat16()
    lost = [torch.zeros_like(p) for p in model.parameters()]

    def step(i: int) -> Any:
        loss = model(sick(i, 3).bfloat16()).float().square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad, rest in zip(model.parameters(), grads, lost):
                change = -0.01 * grad.nan_to_num(0) + rest
                before = parameter.clone()
                parameter.add_(change)
                rest.copy_(change - (parameter - before))
        return loss

    return Program([model], [], step, steps=5, extra=lambda: lost)


class _Eight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return (grad * scale).to(torch.float8_e5m2).to(grad.dtype) / scale, None, None


@program("scales_of_eight_bits_follow_a_history", "updates")
def delayed_scaling(seed: int) -> Program:
    class Scaled(nn.Linear):
        def __init__(self, *size: int) -> None:
            super().__init__(*size)
            self.register_buffer("history", torch.ones(4))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.history.copy_(torch.roll(self.history, 1))
                self.history[0] = x.detach().abs().max()
                self.scale.fill_(448.0).div_(self.history.nan_to_num(1.0).max().clamp_min(1e-4))
            given = _Eight.apply(x, self.scale.clone(), torch.tensor(64.0))
            return F.linear(given, _Eight.apply(self.weight, self.scale.clone(), torch.tensor(64.0)), self.bias)

    model = nn.Sequential(Scaled(8, 8), nn.GELU(), Scaled(8, 4))
    return training(model, lambda i: model(sick(i, 3)).square().mean(), steps=5)


@program("weights_differ_between_training_and_evaluation", "updates")
def schedule_free(seed: int) -> Program:
    """An optimizer with `train()` and `eval()`, which exchange the weights for their average and back."""

    class Averaging(torch.optim.SGD):
        training = True

        @torch.no_grad()
        def exchange(self, to_training: bool) -> None:
            for parameter in self.param_groups[0]["params"]:
                average = self.state[parameter].setdefault("average", parameter.clone())
                if self.training != to_training:
                    kept = parameter.clone()
                    parameter.copy_(average)
                    average.copy_(kept)
            self.training = to_training

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.3)

    model = mlp()
    optimizer = Averaging(model.parameters(), 0.05)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        loss = model(sick(i, 4)).square().mean()
        loss.backward()
        optimizer.step() if i != 4 else None
        optimizer.exchange(False)
        model.eval()
        with torch.no_grad():
            seen = model(batch(i)).square().mean()
        model.train()
        optimizer.exchange(True)
        return [loss, seen]

    return Program([model], [optimizer], step, steps=6)
