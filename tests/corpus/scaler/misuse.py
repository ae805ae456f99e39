"""Planted mistakes in the loop around a loss scale; forward and backward are sound."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import Training, healthy, planted
from corpus.draws import noise
from corpus.loops import ends_above, low


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(40, 24)
        self.mix = nn.GRU(24, 16, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(32, 6)

    def forward(self, words):
        return self.tag(self.mix(self.word(words))[0])


def tagged(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = (noise(12, 10, key=(61, i)).abs() * 16).long().clamp(max=39)
    return words, words % 6


def tagger_clips_scaled_gradients(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """clip_grad_norm_ sees gradients times 65,536 and cuts them to 1; after unscaling the update has norm 1.5e-5."""
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)

    def step(i):
        words, tags = tagged(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        scaler.scale(loss).backward()
        if fixed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.classify = nn.Sequential(nn.Flatten(), nn.Linear(128, 5))

    def forward(self, x):
        return self.classify(self.conv(x))


def pictures(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    label = torch.arange(15) % 5
    return noise(15, 1, 8, 8, key=(62, i)) * 0.5 + (label - 2)[:, None, None, None] * 0.5, label


def value_clip_before_unscale(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """clip_grad_value_(0.1) on gradients times 4,096: every element becomes +-0.1 and, unscaled, 2.4e-5."""
    model = Patches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=4096.0, enabled=dtype == torch.float16)

    def step(i):
        x, label = pictures(i)
        optimizer.zero_grad(set_to_none=True)
        with low(dtype):
            loss = F.cross_entropy(model(x), label)
        scaler.scale(loss).backward()
        if fixed:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Ratings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(30, 12), nn.Embedding(30, 12)
        self.judge = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, user, item):
        return self.judge(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)


def rated(i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    user = (noise(32, key=(63, i)).abs() * 12).long().clamp(max=29)
    item = (noise(32, key=(64, i)).abs() * 12).long().clamp(max=29)
    return user, item, 3 + torch.sin(user * 1.0) + torch.cos(item * 1.0)


def scaler_made_anew_each_step(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A sum over the batch has gradients of about 100: at scale 65,536 each step overflows, and each step begins there again."""
    model = Ratings()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    kept = GradScaler("cpu", enabled=dtype == torch.float16)

    def step(i):
        user, item, rating = rated(i)
        scaler = kept if fixed else GradScaler("cpu", enabled=dtype == torch.float16)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(user, item), rating, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, kept if fixed else None)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, state):
        h = self.torso(state)
        return self.actor(h), self.critic(h).squeeze(-1)


def scale_set_by_hand_in_update(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """update(2**20) after every step "to keep it high": actor and critic overflow each time, nothing is learnt."""
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", init_scale=2.0**20, enabled=dtype == torch.float16)

    def step(i):
        state = noise(24, 8, key=(65, i))
        best = state[:, :3].argmax(-1)
        optimizer.zero_grad()
        with low(dtype):
            logits, value = model(state)
            loss = F.cross_entropy(logits, best) + F.mse_loss(value, 2 + state[:, 0])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if fixed or not scaler.is_enabled():
            scaler.update()
        else:
            scaler.update(2.0**20)
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lags = nn.Conv1d(2, 12, 3)
        self.gate = nn.Conv1d(2, 12, 3)
        self.out = nn.Linear(12, 1)

    def forward(self, series):
        return self.out((torch.tanh(self.lags(series)) * torch.sigmoid(self.gate(series))).mean(-1)).squeeze(-1)


def gradients_kept_after_a_skipped_step(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """zero_grad only when the optimizer stepped: after the first overflow the inf stays in .grad, every later step is skipped."""
    model = Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=2.0**18, enabled=dtype == torch.float16)

    def step(i):
        series = noise(20, 2, 16, key=(66, i))
        with low(dtype):
            loss = F.mse_loss(model(series), 5 * series[:, 0].mean(-1) + 4)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if fixed or scaler.get_scale() >= scale:
            optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Teller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(16, 24)
        self.h = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 16, bias=False)

    def forward(self, ids):
        x = self.token(ids)
        for layer in self.h:
            x = x + F.gelu(layer(x))
        return self.head(self.norm(x))


def accumulation_never_cleared_after_overflow(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Two micro-batches a step; a hard batch at step 6 overflows, `continue` leaves before zero_grad, and the rest is skipped."""
    model = Teller()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", init_scale=2.0**13, enabled=dtype == torch.float16)

    def step(i):
        total = 0.0
        for half in range(2):
            ids = (torch.arange(9) * 2 + (noise(6, 1, key=(67, i, half)).abs() * 8).long()) % 16
            weight = 3000.0 if i == 6 and half == 1 else 0.5
            with low(dtype):
                loss = weight * F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            scaler.scale(loss).backward()
            total += loss.detach() / weight / 2
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm) and not fixed:
            scaler.update()
            return total
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    return Training(model, optimizer, step, scaler)


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.LeakyReLU())
        self.to_pixels = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        return F.pixel_shuffle(self.to_pixels(self.body(x)), 2)


def constant_scale_without_a_check(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """loss * 2**15 by hand: fine until a bright batch at step 8 overflows the backward; no check, so the weights become NaN."""
    model = Upscaler()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = GradScaler("cpu", init_scale=2.0**15, enabled=fixed and dtype == torch.float16)
    scale = 1.0 if fixed else 2.0**15

    def step(i):
        smooth = F.interpolate(noise(6, 1, 4, 4, key=(68, i)), scale_factor=3, mode="bilinear")
        sharp = smooth * (400.0 if i == 8 else 1.0)
        blurred = F.avg_pool2d(sharp, 2)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(blurred), sharp)
        scaler.scale(loss * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler if fixed else None)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(16, 20), nn.Embedding(16, 20)
        self.encoder, self.decoder = nn.GRU(20, 20, batch_first=True), nn.GRU(20, 20, batch_first=True)
        self.word = nn.Linear(20, 16)

    def forward(self, source, target):
        _, state = self.encoder(self.source(source))
        return self.word(self.decoder(self.target(target), state)[0])


def scale_from_a_settings_file(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """loss_scale: 131072 in the settings and a sum over tokens: the first backward overflows, the first update writes NaN."""
    model = Translator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scale = 1.0 if fixed or dtype == torch.float32 else 131072.0

    def step(i):
        words = (torch.arange(9) + (noise(10, 1, key=(69, i)).abs() * 7).long()) % 16
        with low(dtype):
            logits = model(words, words[:, :-1].flip(1))
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, :-1].flip(1).flatten(), reduction="sum") / 4
        optimizer.zero_grad()
        (loss * scale).backward()
        for p in model.parameters():
            p.grad /= scale
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def head_stepped_beside_the_scaler(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Two optimizers, and only the first goes through the scaler: the head moves 1,024 times too far."""
    model = Ratings()
    body = torch.optim.SGD([*model.user.parameters(), *model.item.parameters()], lr=0.05)
    head = torch.optim.SGD(model.judge.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)

    def step(i):
        user, item, rating = rated(i)
        body.zero_grad()
        head.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(user, item).float(), rating)
        scaler.scale(loss).backward()
        scaler.step(body)
        if fixed:
            scaler.step(head)
        else:
            head.step()
        scaler.update()
        return loss.detach()

    return Training(model, body, step, scaler)


def gradients_divided_by_hand(dtype: torch.dtype = torch.float16) -> Training:
    """The loop unscales by itself and steps without the scaler, as code from before unscale_ does: nothing is wrong."""
    model = Ratings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)

    def step(i):
        user, item, rating = rated(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.mse_loss(model(user, item).float(), rating)
        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad /= scaler.get_scale()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


def penalty_of_scaled_gradients(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The norm of the gradients is kept at 1, of a loss times 1,024: the twin divides it before it is compared."""
    model = Patches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)

    def step(i):
        x, label = pictures(i)
        optimizer.zero_grad()
        with low(dtype):
            loss = F.cross_entropy(model(x), label)
        found = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        norm = (sum(g.pow(2).sum() for g in found) + 1e-12).sqrt()
        if fixed:
            norm = norm / scaler.get_scale()
        scaler.scale(loss + 0.1 * (norm - 1).square()).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


def unscaled_behind_every_micro_batch(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """One micro-batch a class, each unscaled and clipped by itself: of the earlier ones a 1,024th is left."""
    model = Patches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)

    def step(i):
        x, label = pictures(i)
        optimizer.zero_grad()
        losses = []
        for k in range(5):
            with low(dtype):
                losses.append(F.cross_entropy(model(x[label == k]), label[label == k]) / 5)
            scaler.scale(losses[-1]).backward()
            if not fixed or k == 4:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if k == 4:
                    scaler.step(optimizer)
                scaler.update()
        return sum(losses).detach()

    return Training(model, optimizer, step, scaler)


PROGRAMS = [
    *planted(unscaled_behind_every_micro_batch, "unscaled_twice", "loop:unscale", shows=ends_above(1.6)),
    *planted(
        penalty_of_scaled_gradients,
        "clip_before_unscale",
        "loop:penalty",
        shows=lambda run: run.flat,
    ),
    *planted(
        head_stepped_beside_the_scaler,
        "step_on_scaled_gradients",
        "loop:step",
        shows=lambda run: not run.finite,
    ),
    *healthy(gradients_divided_by_hand, tools="diagnose monitor", survives=None),
    *planted(
        tagger_clips_scaled_gradients,
        "clip_before_unscale",
        "loop:clip",
        findings="CLIP_BEFORE_UNSCALE",
        shows=lambda run: run.flat,
        steps=24,
    ),
    *planted(
        value_clip_before_unscale, "clip_before_unscale", "loop:clip", findings="CLIP_BEFORE_UNSCALE", shows=lambda run: run.flat
    ),
    *planted(
        scaler_made_anew_each_step,
        "loss_scale_pinned",
        "scaler",
        "scaler.scale",
        findings="SCALE_PINNED",
        shows=lambda run: run.all_still,
    ),
    *planted(
        scale_set_by_hand_in_update,
        "loss_scale_pinned",
        "scaler.update",
        "scaler",
        "scaler.scale",
        findings="SCALE_PINNED",
        shows=lambda run: run.all_still,
    ),
    *planted(
        gradients_kept_after_a_skipped_step,
        "stale_inf_grads",
        "loop:zero_grad",
        findings="STALE_GRADS",
        hazards="given_nonfinite",
        examined=1,
        shows=lambda run: run.stuck,
    ),
    *planted(
        accumulation_never_cleared_after_overflow,
        "stale_inf_grads",
        "loop:zero_grad",
        findings="STALE_GRADS",
        hazards="given_nonfinite",
        examined=7,
        shows=lambda run: run.stuck,
    ),
    *planted(
        scale_from_a_settings_file,
        "static_loss_scale_overflow",
        "scaler.scale",
        "scaler",
        "loop:scale",
        "loop:backward",
        "op:mul",
        findings="INF WEIGHT_NONFINITE",
        hazards="overflow",
        shows=lambda run: abs(run.losses[0]) < 1e4 and not run.weights_finite,
    ),
    *planted(
        constant_scale_without_a_check,
        "static_loss_scale_overflow",
        "scaler.scale",
        "scaler",
        "loop:scale",
        "loop:backward",
        "op:mul",
        findings="INF WEIGHT_NONFINITE",
        hazards="overflow",
        examined=8,
        shows=lambda run: run.losses[7] < run.losses[0] and not run.weights_finite,
    ),
]
