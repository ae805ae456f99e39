"""Planted overflow in what people write themselves: losses, sums, exponentials, products, norms, clipping."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from . import Training, low, noise, planted
from .amp_loop import usual


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


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 32), nn.ReLU())
        self.box = nn.Linear(32, 4)

    def forward(self, x):
        return F.softplus(self.box(self.backbone(x)))


def overlap_of_boxes(a, b):
    """IoU of boxes that share their upper left corner: (width, height) in pixels."""
    shared = torch.minimum(a, b)
    inner = shared[..., 0] * shared[..., 1]
    return inner / (a[..., 0] * a[..., 1] + b[..., 0] * b[..., 1] - inner)


def box_area_in_pixels(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Boxes of 640 x 480 pixels have an area of 307,200: inf in fp16, and inf / inf is NaN."""
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def data(i):
        size = noise(16, 2, key=(18, i)).sigmoid() * 300 + torch.tensor([400.0, 300.0])
        return size.repeat(1, 12) / 640 + 0.05 * noise(16, 24, key=(19, i)), size

    def loss_of(x, size):
        predicted = model(x)[:, :2] * (1.0 if fixed else 640.0)
        wanted = size.to(predicted.dtype) / (640.0 if fixed else 1.0)
        return 1 - overlap_of_boxes(predicted, wanted).float().mean()

    return usual(model, optimizer, data, loss_of, dtype)


class Relation(nn.Module):
    """Pairwise squared distances of projected points, in metres of a city-wide frame."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.project = nn.Linear(3, 3)
        self.wide = wide

    def forward(self, points):
        p = self.project(points)
        gap = (p.float() if self.wide else p).unsqueeze(2) - (p.float() if self.wide else p).unsqueeze(1)
        return torch.log1p((gap * gap).amax(-1))


class PointNet(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16))
        self.relation = Relation(wide)
        self.head = nn.Linear(16 + 8, 4)

    def forward(self, points):
        near = self.relation(points).mean(1)
        return self.head(torch.cat([self.lift(points / 500).amax(1), near.to(points.dtype)], -1))


def squared_distances_in_a_point_cloud(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Scans grow from 60 m to 900 m across; from step 7 on, squared gaps leave fp16 inside `relation`."""
    model = PointNet(wide=fixed)
    with torch.no_grad():
        model.relation.project.weight.copy_(torch.eye(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def data(i):
        label = torch.arange(12) % 4
        size = 20.0 + 50 * max(0, i - 6)
        points = noise(12, 8, 3, key=(20, i)) * size * (0.3 + label[:, None, None] / 4)
        return points, label

    def loss_of(points, label):
        return F.cross_entropy(model(points), label)

    return usual(model, optimizer, data, loss_of, dtype)


class HandNorm(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.wide = wide

    def forward(self, x):
        seen = x.float() if self.wide else x
        return (seen * torch.rsqrt(seen.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight.to(x.dtype)


class GptBlock(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.norm = HandNorm(width, wide)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x)
        h = torch.cat([h[:, :1], (h[:, 1:] + h[:, :-1]) / 2], 1)
        return x + self.down(F.gelu(self.up(self.mix(h))))


class Gpt(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(30, 32)
        self.enter = nn.Linear(32, 32)
        self.layers = nn.ModuleList(GptBlock(32, wide) for _ in range(3))
        self.head = nn.Linear(32, 30)

    def forward(self, ids):
        x = self.enter(self.token(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hand_written_rms_norm(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """One massive channel (300) leaves block 0: its square is inf in the next norm, rsqrt(inf) is 0, block 1 puts out nothing."""
    model = Gpt(wide=fixed)
    with torch.no_grad():
        model.layers[0].down.bias[3] = 300.0
        model.head.weight[:, 3] = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def data(i):
        start = (noise(8, 1, key=(21, i)).abs() * 20).long()
        return ((start + torch.arange(13)) % 30,)

    def loss_of(ids):
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return usual(model, optimizer, data, loss_of, dtype)


class UnitLength(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x):
        x = x.float() if self.wide else x
        return x / (x * x).sum(-1, keepdim=True).sqrt()


class Twins(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
        self.unit = UnitLength(wide)

    def forward(self, x):
        return self.unit(self.tower(x))


def contrastive_unit_length(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """Spectra of a thousand counts: the squared length is inf, every embedding is 0 and the loss stays ln 16."""
    model = Twins(wide=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def data(i):
        base = noise(16, 20, key=(22, i)) * 1000
        return base, base + 300 * noise(16, 20, key=(23, i))

    def loss_of(one, two):
        alike = model(one) @ model(two).T / 0.2
        return F.cross_entropy(alike, torch.arange(16))

    return usual(model, optimizer, data, loss_of, dtype)


def clip_norm_in_half(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """A pure fp16 model whose gradients are clipped by hand: squares sum to inf, the coefficient is 0, nothing moves."""
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    relation = noise(16, 8, key=(24,)) * 20

    def step(i):
        x = noise(32, 16, key=(25, i))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(dtype)).float(), x @ relation, reduction="sum") / 8
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        squares = [(g.float() if fixed else g).pow(2).sum() for g in grads]
        norm = torch.stack(squares).sum().sqrt()
        for g in grads:
            g.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def last_half_inf(run) -> bool:
    return not any(abs(x) < float("inf") for x in run.losses[len(run.losses) // 2 :])


CASES = [
    *planted(loss_not_converted, "loss_computed_in_fp16", "op:mse_loss", shows=last_half_inf, steps=32),
    *planted(
        joint_distance_in_half_pixels, "loss_computed_in_fp16", "op:pow", "op:sum", "op:sqrt", "op:mean", shows=last_half_inf
    ),
    *planted(
        dice_of_a_large_picture,
        "reduction_overflow_fp16",
        "op:sum",
        shows=lambda run: run.all_still and set(run.losses) == {1.0},
    ),
    *planted(
        energy_of_many_atoms,
        "reduction_overflow_fp16",
        "readout",
        shows=lambda run: run.stuck and run.losses[0] < 10,
        steps=30,
    ),
    *planted(vae_kl_of_raw_pixels, "exp_overflow_fp16", "op:exp", shows=lambda run: run.stuck),
    *planted(flow_scale_unbounded, "exp_overflow_fp16", "steps.2", shows=lambda run: run.stuck),
    *planted(box_area_in_pixels, "product_overflow_fp16", "op:mul", shows=lambda run: run.stuck),
    *planted(squared_distances_in_a_point_cloud, "product_overflow_fp16", "relation", shows=lambda run: run.stuck, steps=24),
    *planted(
        hand_written_rms_norm,
        "norm_square_overflow_fp16",
        "layers.1.norm",
        "layers.2.norm",
        shows=lambda run: {"layers.1.mix.weight", "layers.2.mix.weight"} <= run.still and run.finite,
    ),
    *planted(contrastive_unit_length, "norm_square_overflow_fp16", "unit", shows=lambda run: run.all_still and run.finite),
    *planted(clip_norm_in_half, "grad_norm_overflow_fp16", "loop:clip", shows=lambda run: run.all_still and run.finite),
]
