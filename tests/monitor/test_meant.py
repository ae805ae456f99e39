"""Loops that break an invariant on purpose: 200 steps each, and nothing is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, SparseAdam
from torch.utils.data import DataLoader, TensorDataset
from training import watch

from nanny.monitor.invariants.watched import are_unwritten, versions_of

STEPS = 200
Loop = tuple[nn.Module, Callable[[int], Any]]
LOOPS: dict[str, Callable[[], Loop]] = {}


def meant(build: Callable[[], Loop]) -> Callable[[], Loop]:
    LOOPS[build.__name__] = build
    return build


def batch(i: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1000 + i))
    return x, torch.tanh(x.sum(1, keepdim=True))


def mlp(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def usual(model: nn.Module, *optimizers: torch.optim.Optimizer, schedule: Any = None) -> Callable[[int], None]:
    def step(i: int) -> None:
        x, y = batch(i)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        if schedule is not None:
            schedule.step()

    return step


class Stages(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@meant
def lora() -> Loop:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    base = mlp(nn.Dropout(0.1))
    model = nn.Sequential(*(Adapter(m) if isinstance(m, nn.Linear) else m for m in base))
    return model, usual(model, AdamW(model.parameters(), lr=1e-3))


@meant
def frozen_backbone_in_evaluation_mode() -> Loop:
    model = Stages()
    model.backbone.requires_grad_(False).eval()
    return model, usual(model, Adam(model.head.parameters(), lr=1e-3))


@meant
def a_head_on_a_model_in_evaluation_mode() -> Loop:
    model = Stages()
    model.backbone.requires_grad_(False)
    model.eval()
    return model, usual(model, Adam(model.parameters(), lr=1e-3))


@meant
def norms_kept_in_evaluation_mode() -> Loop:
    model = Stages()
    model.backbone[1].eval()
    return model, usual(model, Adam(model.parameters(), lr=1e-3))


@meant
def a_teacher_that_follows() -> Loop:
    class WithTeacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Stages()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x), target

    model = WithTeacher()
    optimizer = Adam(model.student.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, y = batch(i)
        optimizer.zero_grad()
        out, target = model(x + 0.01)
        (F.mse_loss(out, target) + F.mse_loss(out, y)).backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.student.parameters(), model.teacher.parameters()):
                q.lerp_(p, 0.01)

    return model, step


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))


def gan(every: int, toggles: bool) -> Loop:
    model = Pair()
    for_g, for_d = Adam(model.g.parameters(), lr=1e-3), Adam(model.d.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, _ = batch(i)
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        if toggles:
            model.d.requires_grad_(True)
        for_d.zero_grad()
        fake = model.g(noise)
        (F.softplus(-model.d(x)).mean() + F.softplus(model.d(fake.detach())).mean()).backward()
        for_d.step()
        if i % every == every - 1:
            if toggles:
                model.d.requires_grad_(False)
            for_g.zero_grad()
            F.softplus(-model.d(model.g(noise))).mean().backward()
            for_g.step()

    return model, step


@meant
def two_optimizers_in_turn() -> Loop:
    return gan(1, toggles=False)


@meant
def a_generator_at_every_fifth_step() -> Loop:
    return gan(5, toggles=False)


@meant
def a_discriminator_that_is_switched_off_in_between() -> Loop:
    return gan(1, toggles=True)


@meant
def shared_parameters_of_two_optimizers() -> Loop:
    model = Stages(norm=False)
    both = SGD(model.parameters(), lr=1e-2), Adam(model.head.parameters(), lr=1e-3)
    return model, usual(model, *both)


class Experts(nn.Module):
    """One of four is chosen; two are never."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        if self.how == "all":
            outs = [expert(x) for expert in self.experts]
            return self.head(x + outs[int(chosen[0])])
        if self.how == "masked":
            return self.head(x + sum((chosen == k).float()[:, None] * e(x) for k, e in enumerate(self.experts)))
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(1)
            if len(rows) or self.how == "empty":
                out = out.index_add(0, rows, expert(x[rows]))
        return self.head(x + out)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all", "masked", "routed", "empty"])
def test_idle_experts_are_meant(how):
    model = Experts(how)
    is_silent(model, usual(model, Adam(model.parameters(), lr=1e-3)))


@meant
def a_branch_that_is_taken_now_and_then() -> Loop:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.common, self.rare, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.left_over = nn.Parameter(torch.zeros(3))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.head(torch.tanh(self.rare(x) if self.calls % 30 == 0 else self.common(x)))

    model = Branches()
    return model, usual(model, Adam(model.parameters(), lr=1e-3))


def accumulation(every: int, to_none: bool, last: bool) -> Loop:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i)
        (F.mse_loss(model(x), y) / every).backward()
        if i % every == every - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        elif last and i % every == 0:
            assert model[0].weight.grad is not None

    return model, step


@meant
def accumulation_over_four() -> Loop:
    return accumulation(4, to_none=True, last=True)


@meant
def accumulation_over_fifty_with_zeros() -> Loop:
    return accumulation(50, to_none=False, last=False)


@meant
def warm_up_from_nothing() -> Loop:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: i / 10_000)
    return model, usual(model, optimizer, schedule=schedule)


@meant
def a_cosine_that_ends_at_nothing() -> Loop:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5)
    return model, usual(model, optimizer, schedule=schedule)


@meant
def a_last_epoch_at_nothing() -> Loop:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - (i // 40) / 4)
    return model, usual(model, optimizer, schedule=schedule)


@meant
def a_rate_that_comes_back() -> Loop:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20)
    return model, usual(model, optimizer, schedule=schedule)


@meant
def one_of_two_optimizers_pauses() -> Loop:
    model = Stages(norm=False)
    first, second = Adam(model.backbone.parameters(), lr=1e-2), Adam(model.head.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda i: float(i < 60))
    return model, usual(model, first, second, schedule=schedule)


@meant
def a_model_that_has_converged() -> Loop:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.2)

    def step(i: int) -> None:
        x, _ = batch(i, 32)
        optimizer.zero_grad()
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()

    return model, step


@meant
def a_small_rate_after_a_large_one() -> Loop:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0 if i < 40 else 1e-4)
    return model, usual(model, optimizer, schedule=schedule)


@meant
def a_head_in_full_precision_behind_autocast() -> Loop:
    model = Stages(norm=False)
    optimizer = Adam(model.parameters(), lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model.backbone(x)
        optimizer.zero_grad()
        F.mse_loss(model.head(h.float()), y).backward()
        optimizer.step()

    return model, step


@meant
def layers_that_freeze_one_after_the_other() -> Loop:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    inner = usual(model, optimizer)

    def step(i: int) -> None:
        if i in (20, 60):
            model[0 if i == 20 else 2].requires_grad_(False)
        inner(i)

    return model, step


@meant
def layers_that_thaw() -> Loop:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    inner = usual(model, optimizer)

    def step(i: int) -> None:
        if i == 30:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        inner(i)

    return model, step


class Steep(nn.Module):
    """Its body has gradients some thousand times those of its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16, bias=False), nn.Linear(16, 1)
        with torch.no_grad():
            self.body.weight /= 3000

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(3000 * x)))


@meant
def a_second_phase_thaws_the_body() -> Loop:
    model = Steep()
    model.body.requires_grad_(False)
    now = usual(model, SGD(model.head.parameters(), lr=0.05))

    def step(i: int) -> None:
        nonlocal now
        if i == 60:
            model.body.requires_grad_(True)
            now = usual(model, Adam(model.parameters(), lr=1e-5))
        now(i)

    return model, step


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5000, 8, sparse=sparse)
        self.out = nn.Linear(8, 5000, bias=False)
        if not sparse:
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True], ids=["tied", "sparse"])
def test_tied_and_sparse_tables_are_meant(sparse):
    model = Words(sparse)
    optimizers = (
        [SparseAdam(model.table.parameters(), lr=1e-3), Adam(model.out.parameters(), lr=1e-3)]
        if sparse
        else [Adam(model.parameters(), lr=1e-3)]
    )

    def step(i: int) -> None:
        ids = torch.randint(0, 5000, (6,), generator=torch.Generator().manual_seed(i))
        for one in optimizers:
            one.zero_grad()
        F.cross_entropy(model(ids), ids.flip(0)).backward()
        for one in optimizers:
            one.step()

    is_silent(model, step)


@meant
def a_table_alone() -> Loop:
    """Most rows are touched at no step that is looked at."""
    torch.manual_seed(0)
    model = nn.Embedding(5000, 4)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(i: int) -> None:
        pair = model(torch.randint(0, 5000, (2, 64), generator=torch.Generator().manual_seed(i)))
        optimizer.zero_grad()
        F.softplus(-(pair[0] * pair[1]).sum(-1)).mean().backward()
        optimizer.step()

    return model, step


@meant
def one_sample_per_call() -> Loop:
    """REINFORCE: rollouts without gradients, rewards that are often 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        state = batch(i, rows=1)[0]
        with torch.no_grad():
            action = int(model(state).argmax())
        optimizer.zero_grad()
        reward = float(i % 3 > 0) - 0.0
        (-F.log_softmax(model(state), -1)[0, action] * reward).backward()
        optimizer.step()

    return model, step


@meant
def lbfgs() -> Loop:
    model = mlp()
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = batch(0, 32)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return model, lambda i: optimizer.step(closure)


@meant
def an_optimizer_that_steps_by_another() -> Loop:
    """Sharpness-aware: up by the gradient, a second pass, back, and a step of the one inside."""
    model = mlp()
    outer = SGD(model.parameters(), lr=0.1)
    inner = SGD(outer.param_groups, lr=0.1, momentum=0.9)

    def step(i: int) -> None:
        x, y = batch(i)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            ways = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for p, way in zip(model.parameters(), ways):
                p.add_(way)
        outer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, way in zip(model.parameters(), ways):
                p.sub_(way)
        inner.step()
        outer.zero_grad()

    return model, step


@meant
def a_new_solver_at_each_step() -> Loop:
    model = mlp()

    def step(i: int) -> None:
        x, y = batch(i)
        optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, step


@meant
def no_optimizer_of_torch() -> Loop:
    model = mlp()

    def step(i: int) -> None:
        x, y = batch(i)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    return model, step


@meant
def master_weights_of_one_s_own() -> Loop:
    model = mlp()
    masters = [p.detach().clone().double().requires_grad_() for p in model.parameters()]
    optimizer = Adam(masters, lr=1e-3)

    def step(i: int) -> None:
        x, y = batch(i)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.double()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)

    return model, step


@meant
def gradients_made_by_hand() -> Loop:
    """No backward pass of torch.autograd.backward at all."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i)
        found = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        for p, grad in zip(model.parameters(), found):
            p.grad = grad
        optimizer.step()

    return model, step


@meant
def adversarial_inputs() -> Loop:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, y = batch(i)
        for _ in range(3):
            x = x.detach().requires_grad_()
            F.mse_loss(model(x), y).backward()
            x = x + 0.01 * x.grad.sign()
            optimizer.zero_grad()
        F.mse_loss(model(x.detach()), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@meant
def the_whole_data_set_at_each_step() -> Loop:
    x, y = batch(0, 64)
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        for part, target in loader:
            optimizer.zero_grad()
            F.mse_loss(model(part), target).backward()
            optimizer.step()

    return model, step


@meant
def one_batch_by_heart() -> Loop:
    """Drawn once from a loader with many, to see whether the model can learn at all; and a validation batch beside it."""
    x, y = batch(0, 64)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    part, target = next(iter(loader))
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(part), target).backward()
        optimizer.step()

    return model, step


@meant
def batches_from_a_loader_and_one_for_validation() -> Loop:
    x, y = batch(0, 1600)
    loader = iter(DataLoader(TensorDataset(x, y), batch_size=8))
    held_out = DataLoader(TensorDataset(*batch(1, 64)), batch_size=8)
    model = mlp(nn.Dropout(0.1))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        part, target = next(loader)
        model.train()
        optimizer.zero_grad()
        F.mse_loss(model(part), target).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(next(iter(held_out))[0])

    return model, step


@meant
def evaluation_in_its_mode() -> Loop:
    model = mlp(nn.BatchNorm1d(16), nn.Dropout(0.2))
    inner = usual(model, Adam(model.parameters(), lr=1e-3))

    def step(i: int) -> None:
        model.train()
        inner(i)
        if i % 20 == 19:
            model.eval()
            with torch.no_grad():
                for k in range(4):
                    model(batch(k)[0])

    return model, step


@meant
def a_second_view_without_gradients() -> Loop:
    """In train mode at every step: a target of one's own (BYOL), a first pass that is repeated with gradients."""
    model = mlp(nn.BatchNorm1d(16))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, y = batch(i)
        with torch.no_grad():
            target = model(x + 0.1)
        optimizer.zero_grad()
        out = model(x)
        (F.mse_loss(out, target) + F.mse_loss(out, y)).backward()
        optimizer.step()

    return model, step


@meant
def one_island_of_full_precision() -> Loop:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, y = batch(i)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model[:4](x)
            with torch.autocast("cpu", enabled=False):
                out = model[4](h.float())
        F.mse_loss(out, y).backward()
        optimizer.step()

    return model, step


@meant
def autocast_for_a_teacher_alone() -> Loop:
    model, teacher = mlp(), mlp().eval()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, _ = batch(i)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            y = teacher(x).float()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return model, step


@meant
def compiled() -> Loop:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)
    return model, usual(torch.compile(model, backend="eager"), optimizer)


@meant
def a_loss_that_reaches_zero() -> Loop:
    """A hinge that is satisfied for good."""
    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i)
        optimizer.zero_grad()
        F.relu(0.2 - model(x) * y.sign()).mean().backward()
        optimizer.step()

    return model, step


@meant
def rows_of_the_whole_data_set_chosen_anew() -> Loop:
    """The same numbers in a new tensor at each step, by a mask that stays."""
    x, y = batch(0, 64)
    mask, model = x[:, 0] > 1, mlp()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x[mask]), y[mask]).backward()
        optimizer.step()

    return model, step


@meant
def a_grid_made_anew() -> Loop:
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        t = torch.linspace(0, 1, 32).unsqueeze(1)
        optimizer.zero_grad()
        F.mse_loss(model(t), t.sin() + 0.01 * torch.rand(32, 1)).backward()
        optimizer.step()

    return model, step


@meant
def a_second_pass_on_the_same_batch() -> Loop:
    """Sharpness-aware: the first gradients are cleared on purpose."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i)
        F.mse_loss(model(x), y).backward()
        moves = [0.01 * p.grad for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p += move
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p -= move
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@meant
def gradients_gathered_by_hand() -> Loop:
    """Clipped by sample: each backward pass is cleared, and the sum is put back."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)

    def step(i: int) -> None:
        x, y = batch(i, 4)
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for k in range(4):
            optimizer.zero_grad()
            F.mse_loss(model(x[k : k + 1]), y[k : k + 1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for total, p in zip(sums, model.parameters()):
                total += p.grad
        for total, p in zip(sums, model.parameters()):
            p.grad = total
        optimizer.step()

    return model, step


@meant
def frozen_with_zeros_left() -> Loop:
    """Plain SGD: an old gradient of zeros moves nothing, and is no layer that is dead."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=1e-2)
    frozen_at = 60

    def step(i: int) -> None:
        if i == frozen_at:
            model[0].requires_grad_(False)
        x, y = batch(i)
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return model, step


def is_silent(model: nn.Module, step: Callable[[int], Any], interval: int = 100) -> None:
    nanny = watch(model, interval=interval)
    for i in range(STEPS):
        with nanny.step(i):
            step(i)
    nanny.close()
    assert [(f.code, f.site, f.step, f.message) for f in nanny.findings] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_what_is_meant_is_not_told(name):
    is_silent(*LOOPS[name]())


def test_a_new_tensor_at_the_address_of_an_old_one_is_another():
    old = torch.ones(3)
    before, address = versions_of([old]), id(old)
    assert are_unwritten([old], before)
    del old
    new = next(t for t in [torch.ones(3) for _ in range(100)] if id(t) == address)
    assert not are_unwritten([new], before)
