"""Planted overflow of losses, sums and exponentials that people write themselves."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from corpus import Training, planted
from corpus.draws import noise
from corpus.loops import low, usual


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 16)
        self.enter = nn.Linear(24, 32)
        self.mid = nn.Sequential(nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 32), nn.SiLU())
        self.leave = nn.Linear(32, 24)

    def forward(self, x, t):
        return self.leave(self.mid(torch.cat([F.silu(self.enter(x)), self.time(t)], -1)))


def loss_not_converted(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The seeds' second case: targets are made half "to match the output" and the criterion stands outside autocast.

    Brightness up to 1,000: squares beyond 65,504 are inf, so the loss is inf although no gradient is.
    """
    model = Denoiser()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)

    def step(i):
        clean = noise(16, 24, key=(11, i)) * 200
        t = torch.arange(16) % 10
        noisy = clean * (1 - t / 20)[:, None]
        optimizer.zero_grad()
        with low(dtype):
            output = model(noisy / 200, t) * 200
        loss = criterion(output.float(), clean) if fixed else criterion(output, clean.to(dtype))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Joints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
        self.joints = nn.Linear(144, 10)

    def forward(self, x):
        return self.joints(self.features(x).flatten(1)).view(-1, 5, 2)


def euclid(predicted, target):
    """Mean distance of joints in pixels."""
    return (predicted - target).pow(2).sum(-1).sqrt().mean()


def joint_distance_in_half_pixels(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Joints up to 900 pixels away: the squared distance is inf, sqrt turns its gradient into 0, those joints never learn."""
    model = Joints()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", enabled=dtype == torch.float16)

    def step(i):
        where = noise(16, 5, 2, key=(12, i)).tanh()
        image = where.flatten(1).repeat(1, 23)[:, :225].view(16, 1, 15, 15)
        pixels = 500 + 250 * where
        optimizer.zero_grad()
        with low(dtype):
            joints = model(image) * 400
        loss = euclid(joints.float(), pixels) if fixed else euclid(joints, pixels.to(dtype))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, scaler)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.decode = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return F.interpolate(self.decode(self.encode(x)), scale_factor=16, mode="nearest")


def dice_of_a_large_picture(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """262,144 probabilities of about one half sum to 131,000: the denominator is inf, dice is 0, the loss is 1 for ever."""
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def data(i):
        spots = (noise(4, 1, 16, 16, key=(13, i)) > 1).float()
        return spots + 0.3 * noise(4, 1, 16, 16, key=(14, i)), F.interpolate(spots, scale_factor=16, mode="nearest")

    def loss_of(x, mask):
        p = torch.sigmoid(model(x))
        wide = torch.float32 if fixed else None
        overlap = (p * mask.to(p.dtype)).sum(dtype=wide)
        return 1 - 2 * overlap / (p.sum(dtype=wide) + mask.to(p.dtype).sum(dtype=wide))

    return usual(model, optimizer, data, loss_of, dtype)


class Readout(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.atom_energy = nn.Linear(width, 1)
        self.wide = wide

    def forward(self, atoms):
        if not self.wide:
            return self.atom_energy(atoms).squeeze(-1).sum(-1)
        with torch.autocast("cpu", enabled=False):
            return self.atom_energy(atoms.float()).squeeze(-1).sum(-1)


class Molecules(nn.Module):
    """Messages along a ring, then the energy of all atoms."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.atom = nn.Embedding(5, 16)
        self.layers = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.readout = Readout(16, wide)

    def forward(self, kinds):
        x = self.atom(kinds)
        for layer in self.layers:
            near = (x.roll(1, 1) + x.roll(-1, 1)) / 2
            x = x + torch.tanh(layer(torch.cat([x, near], -1)))
        return self.readout(x)


def energy_of_many_atoms(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """2,000 atoms of 30 to 36 eV each: small at first, but as the bias learns, the sum passes 65,504 in fp16."""
    model = Molecules(wide=fixed)
    with torch.no_grad():
        model.readout.atom_energy.bias.fill_(30.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    worth = torch.tensor([30.0, 32.0, 33.0, 34.0, 36.0])

    def data(i):
        kinds = (noise(2, 2000, key=(15, i)).abs() * 2).long().clamp(max=4)
        return kinds, worth[kinds].sum(-1) + 2000

    def loss_of(kinds, energy):
        return F.mse_loss(model(kinds) / 2000, energy / 2000)

    return usual(model, optimizer, data, loss_of, dtype)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 32), nn.ReLU())
        self.mu, self.logvar = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 36))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.tanh(logvar / 8)
        return self.decoder(z), mu, logvar


def vae_kl_of_raw_pixels(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Pixels 0..255 go in as they are, so the log-variance begins around 20; its exp in the KL term is inf in fp16."""
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        return ((noise(16, 6, key=(16, i)).sigmoid().repeat_interleave(6, 1) * 255).round(),)

    def loss_of(pixels):
        seen, mu, logvar = model(pixels)
        logvar = logvar.float().clamp(-10, 10) if fixed else logvar
        kl = 0.5 * (logvar.exp() + mu.float().pow(2) - 1 - logvar).mean()
        return F.mse_loss(seen, pixels / 255) + 1e-4 * kl

    return usual(model, optimizer, data, loss_of, dtype, clip=1.0)


class Coupling(nn.Module):
    def __init__(self, width: int, flip: bool, bounded: bool) -> None:
        super().__init__()
        self.flip, self.bounded = flip, bounded
        self.net = nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, 2 * width))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, -1)
        if self.bounded:
            log_scale = 2 * torch.tanh(log_scale)
        b = b * torch.exp(log_scale) + shift
        return torch.cat([b, a] if self.flip else [a, b], -1), log_scale.sum(-1)


class Flow(nn.Module):
    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling(4, n % 2 == 1, bounded) for n in range(4))

    def forward(self, x):
        total = 0.0
        for step in self.steps:
            x, log_det = step(x)
            total = total + log_det
        return x, total


def flow_scale_unbounded(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The third coupling was resumed with a large last bias: exp(12) is 162,755, beyond fp16, and well within fp32."""
    model = Flow(bounded=fixed)
    with torch.no_grad():
        for n, step in enumerate(model.steps):
            step.net[2].weight.mul_(0.1)
            step.net[2].bias[:4].fill_(12.0 if n == 2 else 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def data(i):
        return (noise(32, 8, key=(17, i)) * 1e-3,)

    def loss_of(x):
        z, log_det = model(x)
        return F.smooth_l1_loss(z, torch.zeros_like(z)) - 1e-2 * log_det.float().mean()

    return usual(model, optimizer, data, loss_of, dtype, clip=1.0)


def last_half_inf(run) -> bool:
    return not any(abs(x) < float("inf") for x in run.losses[len(run.losses) // 2 :])


PROGRAMS = [
    *planted(
        loss_not_converted,
        "loss_computed_in_fp16",
        "op:mse_loss",
        findings="INF OVERFLOW",
        hazards="overflow",
        shows=last_half_inf,
        steps=32,
    ),
    *planted(
        joint_distance_in_half_pixels,
        "loss_computed_in_fp16",
        "op:pow",
        "op:sum",
        "op:sqrt",
        "op:mean",
        findings="INF",
        hazards="overflow",
        shows=last_half_inf,
    ),
    *planted(
        dice_of_a_large_picture,
        "reduction_overflow_fp16",
        "op:sum",
        hazards="overflow",
        examined=1,
        shows=lambda run: run.all_still and set(run.losses) == {1.0},
    ),
    *planted(
        energy_of_many_atoms,
        "reduction_overflow_fp16",
        "readout",
        findings="INF NEAR_OVERFLOW OVERFLOW SCALE_COLLAPSE SCALE_DECLINE",
        survives=False,
        hazards="overflow",
        examined=5,
        shows=lambda run: run.stuck and run.losses[0] < 10,
        steps=30,
    ),
    *planted(
        vae_kl_of_raw_pixels,
        "exp_overflow_fp16",
        "op:exp",
        findings="OVERFLOW SCALE_COLLAPSE",
        hazards="exp_range",
        shows=lambda run: run.stuck,
    ),
    *planted(
        flow_scale_unbounded,
        "exp_overflow_fp16",
        "steps.2",
        findings="INF NAN OVERFLOW SCALE_COLLAPSE",
        hazards="exp_range",
        shows=lambda run: run.stuck,
    ),
]
