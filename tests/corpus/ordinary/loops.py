"""Healthy loops that look suspicious: skipped steps at the start, spikes, tiny learning rates, two optimizers."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import Training, healthy
from corpus.draws import noise
from corpus.loops import Run, low, usual


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def table(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = noise(32, 10, key=(91, i))
    return x, torch.tanh(x[:, :1] - x[:, 1:2])


def squares(model: nn.Module):
    def loss_of(x, y):
        return F.mse_loss(model(x), y)

    return loss_of


def scale_finds_its_level(dtype: torch.dtype = torch.float16) -> Training:
    """Begins at 2**24: seven steps are skipped on the way down, then it trains."""
    model = mlp(10, 32, 32, 1)
    scaler = GradScaler("cpu", init_scale=2.0**24)
    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), table, squares(model), dtype, scaler=scaler)


def scale_probes_upwards(dtype: torch.dtype = torch.float16) -> Training:
    """Growth every four steps: now and then it is one too high and a step is skipped; that is how it works."""
    model = mlp(10, 32, 32, 1)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), table, squares(model), dtype, scaler=scaler)


def one_hard_batch(dtype: torch.dtype = torch.float16) -> Training:
    """Step 11 has targets of 1,000: the loss jumps, the gradients overflow once, clipping and the scaler take care."""
    model = mlp(10, 32, 32, 1)

    def data(i):
        x, y = table(i)
        return x, y * 1000 if i == 11 else y

    return usual(model, torch.optim.Adam(model.parameters(), lr=5e-3), data, squares(model), dtype, clip=1.0)


def converged_to_almost_zero(dtype: torch.dtype = torch.float16) -> Training:
    """The targets are the model's own initial outputs plus a little: the loss ends near 1e-6 and gradients are tiny."""
    model = mlp(10, 24, 1)
    with torch.no_grad():
        model[2].weight.mul_(0.1)
    origin = copy.deepcopy(model)

    def data(i):
        x = noise(32, 10, key=(92, i))
        with torch.no_grad():
            return x, origin(x) + 0.01

    return usual(model, torch.optim.Adam(model.parameters(), lr=2e-3), data, squares(model), dtype)


def tiny_steps_on_fp32_masters(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Fine-tuning at 1e-6: the weights are fp32, so each step arrives, although bf16 would not show it."""
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    batch = table(0)
    return usual(model, torch.optim.AdamW(model.parameters(), lr=1e-6), lambda i: batch, squares(model), dtype)


def bf16_weights_with_steps_that_arrive(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Pure bf16, but with SGD steps of some percent of the weights."""
    model = mlp(10, 24, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(i):
        x, y = table(i)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def accumulation_in_fp32_with_clipping(dtype: torch.dtype = torch.float16) -> Training:
    """Four micro-batches, one unscale, one clip, one step."""
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = GradScaler("cpu")

    def step(i):
        total = 0.0
        for part in range(4):
            x, y = table(4 * i + part)
            with low(dtype):
                loss = F.mse_loss(model(x), y) / 4
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Training(model, optimizer, step, scaler)


def gan_with_two_optimizers(dtype: torch.dtype = torch.float16, scale: float = 2.0**16, judged: int = 1) -> Training:
    """One scaler for both; the loss of a GAN need not fall."""
    critic = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    model = nn.ModuleDict({"generator": mlp(4, 24, 6), "critic": critic})
    optimizers = [torch.optim.Adam(model[part].parameters(), lr=1e-3, betas=(0.5, 0.99)) for part in ("generator", "critic")]
    scaler = GradScaler("cpu", init_scale=scale)

    def verdict(x, real):
        return F.binary_cross_entropy_with_logits(model["critic"](x), torch.full((len(x), 1), float(real)))

    def step(i):
        seeds, real = noise(16, 4, key=(93, i)), noise(16, 6, key=(94, i)) * 0.5 + 1
        for _ in range(judged):
            optimizers[1].zero_grad()
            with low(dtype):
                loss = verdict(real, True) + verdict(model["generator"](seeds).detach(), False)
            scaler.scale(loss).backward()
            scaler.step(optimizers[1])
            if judged > 1:
                scaler.update()
        optimizers[0].zero_grad()
        with low(dtype):
            fooled = verdict(model["generator"](seeds), True)
        scaler.scale(fooled).backward()
        scaler.step(optimizers[0])
        scaler.update()
        return loss.detach()

    return Training(model, optimizers, step, scaler)


def gan_whose_judge_is_skipped_at_first(dtype: torch.dtype = torch.float16) -> Training:
    """What the generator's backward adds to the infinite gradients of the judge is cleared before anybody uses it."""
    return gan_with_two_optimizers(dtype, scale=2.0**21, judged=2)


def teacher_averaged_in_fp32(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Mean teacher: the average moves by 1/1000 of the way each step, in fp32, where that arrives."""
    model = nn.ModuleDict({"student": mlp(10, 24, 1), "teacher": mlp(10, 24, 1).requires_grad_(False)})
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.1, momentum=0.9)

    def step(i):
        x, y = table(i)
        optimizer.zero_grad()
        with low(dtype):
            with torch.no_grad():
                hint = model["teacher"](x)
            seen = model["student"](x)
            loss = F.mse_loss(seen, y) + 0.01 * F.mse_loss(seen, hint)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model["teacher"].parameters(), model["student"].parameters()):
                slow.lerp_(fast, 0.001)
        return loss.detach()

    return Training(model, optimizer, step)


def gru_validated_in_between(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Every fourth step ends with an evaluation; the running statistics and the mode come back."""
    model = nn.ModuleDict({"rnn": nn.GRU(6, 16, batch_first=True), "norm": nn.BatchNorm1d(16), "out": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def predict(x):
        return model["out"](model["norm"](model["rnn"](x)[0][:, -1])).squeeze(-1)

    def step(i):
        x = noise(16, 9, 6, key=(95, i))
        optimizer.zero_grad()
        with low(dtype):
            loss = F.smooth_l1_loss(predict(x), torch.tanh(x[:, -1, 0]))
        loss.backward()
        optimizer.step()
        if i % 4 == 3:
            model.eval()
            with torch.no_grad(), low(dtype):
                predict(noise(16, 9, 6, key=(96, i)))
            model.train()
        return loss.detach()

    return Training(model, optimizer, step)


def ppo_with_fp32_logprobs(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Illegal actions are masked with -inf; old and new log-probabilities take the same fp32 path."""
    model = nn.ModuleDict({"body": mlp(8, 24, 24), "actor": nn.Linear(24, 5), "critic": nn.Linear(24, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def policy(state, legal):
        h = model["body"](state).relu()
        logits = model["actor"](h).float().masked_fill(~legal, float("-inf"))
        return logits.log_softmax(-1), model["critic"](h).float().squeeze(-1)

    def step(i):
        state = noise(24, 8, key=(97, i))
        legal = noise(24, 5, key=(98, i)) > -1
        legal[:, 0] = True
        with torch.no_grad(), low(dtype):
            old, value = policy(state, legal)
            action = old.exp().cumsum(-1).sub(torch.linspace(0.05, 0.95, 24)[:, None]).gt(0).long().argmax(-1)
        reward = (action == 0).float()
        loss = torch.zeros(())
        for _ in range(2):
            optimizer.zero_grad()
            with low(dtype):
                new, seen = policy(state, legal)
            ratio = (new - old).gather(-1, action[:, None]).squeeze(-1).exp()
            gain = reward - value
            worst = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            loss = F.mse_loss(seen, reward) - worst.mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def experts_chosen_in_fp32(dtype: torch.dtype = torch.bfloat16) -> Training:
    """Top-1 of four experts with an fp32 router; an expert that gets no token has a gradient of zero."""
    model = nn.ModuleDict({"router": nn.Linear(12, 4), "experts": nn.ModuleList(mlp(12, 16, 3) for _ in range(4))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def data(i):
        x = noise(32, 12, key=(99, i))
        return x, x[:, :3].argmax(-1)

    def loss_of(x, label):
        with torch.autocast("cpu", enabled=False):
            gate = model["router"](x.float()).softmax(-1)
        best, index = gate.max(-1)
        out = torch.stack([expert(x) for expert in model["experts"]], 1)[torch.arange(len(x)), index]
        return F.cross_entropy(out.float() * best[:, None] * 4, label) + 0.01 * gate.mean(0).square().sum()

    return usual(model, optimizer, data, loss_of, dtype)


def loss_moved(run: Run) -> bool:
    return run.finite and run.weights_finite and not run.still


PROGRAMS = [
    *healthy(scale_finds_its_level),
    *healthy(scale_probes_upwards, steps=32),
    *healthy(one_hard_batch, steps=24),
    *healthy(converged_to_almost_zero, steps=40),
    *healthy(tiny_steps_on_fp32_masters),
    *healthy(bf16_weights_with_steps_that_arrive),
    *healthy(accumulation_in_fp32_with_clipping, steps=12),
    *healthy(gan_with_two_optimizers, shows=loss_moved),
    *healthy(gan_whose_judge_is_skipped_at_first, tools="diagnose monitor", shows=loss_moved, survives=None),
    *healthy(teacher_averaged_in_fp32),
    *healthy(gru_validated_in_between),
    *healthy(ppo_with_fp32_logprobs, shows=loss_moved),
    *healthy(experts_chosen_in_fp32),
]
