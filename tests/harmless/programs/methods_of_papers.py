"""Models and losses of papers that keep something of their own between calls: memories, counts, books of codes, first batches."""

from __future__ import annotations

import collections
import heapq
import math
import random
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from ..program import Program, mlp, program, sick
from .libraries import scaled


@program("codebook_follows_its_codes_and_revives_the_dead", "memories")
def codebook(seed: int) -> Program:
    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
            self.register_buffer("codes", torch.randn(6, 4))
            self.register_buffer("counts", torch.ones(6))
            self.revived: list[int] = []

        def forward(self, rows: torch.Tensor) -> Any:
            hidden = self.encoder(rows)
            chosen = torch.cdist(hidden.float(), self.codes).argmin(-1)
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(chosen, 6).float()
                    self.counts.mul_(0.7).add_(hot.sum(0), alpha=0.3)
                    self.codes.lerp_(torch.nan_to_num(hot.T @ hidden.float()) / (hot.sum(0)[:, None] + 1e-5), 0.3)
                    for dead in torch.nonzero(self.counts < 0.3).flatten().tolist():
                        self.codes[dead] = torch.nan_to_num(hidden[random.randrange(len(rows))].float())
                        self.counts[dead] = 1
                        self.revived.append(dead)
            quantized = hidden + (self.codes[chosen] - hidden).detach()
            return self.decoder(quantized), F.mse_loss(hidden.float(), self.codes[chosen])

    model = Quantizer()

    def loss(i: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out, commitment = model(sick(i))
        return F.mse_loss(out.float(), sick(1, 9)) + 0.25 * commitment

    return scaled(model, loss, steps=6, extra=lambda: model.revived)


@program("queue_of_keys_from_a_slow_twin_that_sees_a_shuffled_batch", "memories")
def queue(seed: int) -> Program:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 4))
            self.slow = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 4))
            self.slow.load_state_dict(self.fast.state_dict())
            self.slow.requires_grad_(False)
            self.register_buffer("keys", F.normalize(torch.randn(12, 4)))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            asked = F.normalize(self.fast(one))
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
                    slow.data = slow.data * 0.9 + fast.data * 0.1
                order = torch.randperm(len(two))
                key = F.normalize(self.slow(two[order]))[order.argsort()]
            right = (asked * key).sum(-1, keepdim=True)
            wrong = asked @ self.keys.clone().detach().T
            start = int(self.place)
            if torch.isfinite(key).all():
                self.keys[start : start + len(key)] = key
                self.place[0] = (start + len(key)) % len(self.keys)
            return torch.cat([right, wrong], 1) / 0.07

    model = Contrast()

    def loss(i: int) -> torch.Tensor:
        rows = sick(i)
        logits = model(rows + torch.randn_like(rows), rows + torch.randn_like(rows))
        return F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))

    return scaled(model, loss, torch.optim.SGD(model.fast.parameters(), 0.05), steps=6)


@program("samples_of_an_energy_walk_by_their_gradient_and_are_kept", "memories")
def energy(seed: int) -> Program:
    model = nn.Sequential(mlp(8, 8), nn.SiLU(), nn.Linear(8, 1))
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=12)

    def loss(i: int) -> torch.Tensor:
        rows = [random.choice(kept) if kept and random.random() < 0.8 else torch.rand(8) * 2 - 1 for _ in range(4)]
        point = torch.stack(rows).requires_grad_()
        model.requires_grad_(False)
        for _ in range(4):
            (slope,) = torch.autograd.grad(model(point).sum(), point)
            point = (point.detach() - 0.1 * slope + 0.01 * torch.randn_like(point)).requires_grad_()
        model.requires_grad_(True)
        kept.extend(point.detach().unbind())
        real, false = model(sick(i)), model(point.detach())
        return (real - false).mean() + 0.1 * (real.square() + false.square()).mean()

    return scaled(model, loss, extra=lambda: list(kept))


@program("solver_of_an_equation_counts_its_evaluations_and_goes_back_by_the_adjoint", "memories")
def adjoint(seed: int) -> Program:
    field = mlp(8, 8)
    counts = {"forward": 0, "backward": 0}

    def solve(function: Any, state: Any, span: float) -> Any:
        time, size = 0.0, 0.25
        while time < span:
            slope = function(state)
            there = [s + size * d for s, d in zip(state, slope)]
            error = max(float((b - d).abs().max()) for b, d in zip(function(there), slope)) * size
            if not error < 0.2 and size > 0.05:
                size /= 2
                continue
            state, time = there, time + size
        return state

    class Solve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, start: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            def slope(state: Any) -> Any:
                counts["forward"] += 1
                return [field(state[0])]

            (end,) = solve(slope, [start], 1.0)
            ctx.save_for_backward(end, *weights)
            return end  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            end, *weights = ctx.saved_tensors

            def slope(state: Any) -> Any:
                counts["backward"] += 1
                with torch.enable_grad():
                    at = state[0].detach().requires_grad_()
                    value = field(at)
                    found = torch.autograd.grad(value, [at, *weights], state[1], allow_unused=True)
                return [-value.detach(), *found]

            state = solve(slope, [end, grad, *(torch.zeros_like(w) for w in weights)], 1.0)
            return tuple(state[1:])

    head = nn.Linear(8, 4)
    model = nn.ModuleList([field, head])
    return scaled(model, lambda i: head(Solve.apply(sick(i), *field.parameters())).square().mean(), extra=lambda: counts)


@program("flow_takes_its_scale_from_its_first_batch_and_inverts_by_iteration", "memories")
def flow(seed: int) -> Program:
    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(8))
            self.ready = False

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                with torch.no_grad():
                    self.shift.copy_(-rows.mean(0))
                    self.scale.copy_(-rows.std(0).clamp(min=1e-3).log())
                self.ready = True
            return (rows + self.shift) * self.scale.exp()

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8), n_power_iterations=2), nn.ELU(), nn.Linear(8, 8)
            )
            self.rounds: list[int] = []
            with torch.no_grad():
                self.net[2].weight.mul_(0.3)

        def forward(self, rows: torch.Tensor) -> Any:
            rows.requires_grad_(True)
            noise = torch.randn_like(rows)
            moved, density, vector = self.net(rows), torch.zeros(len(rows)), noise
            for power in range(1, 4):
                (vector,) = torch.autograd.grad(moved, rows, vector, create_graph=True, retain_graph=True)
                density = density + (-1) ** (power + 1) * (vector * noise).sum(-1) / power
            return rows + moved, density

        def inverse(self, rows: torch.Tensor) -> torch.Tensor:
            at, count = rows.clone(), 0
            while count < 20:
                there = rows - self.net(at)
                count += 1
                if (there - at).abs().max() < 1e-4:
                    break
                at = there
            self.rounds.append(count)
            return at

    norm, residual = ActNorm(), Residual()
    model = nn.ModuleDict({"norm": norm, "residual": residual})

    def loss(i: int) -> torch.Tensor:
        out, density = residual(norm(sick(i)))
        with torch.no_grad():
            residual.inverse(out)
        return out.square().sum(-1).div(2).mean() - density.mean() - norm.scale.sum()

    return scaled(model, loss, torch.optim.Adamax(model.parameters(), lr=0.01), extra=lambda: residual.rounds)


@program("tasks_are_balanced_by_the_gradients_of_their_shared_layer", "memories")
def balanced(seed: int) -> Program:
    body, heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])
    model = nn.ModuleDict({"body": body, "heads": heads})
    model.register_parameter("balance", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    first: list[torch.Tensor] = []

    def step(i: int) -> Any:
        hidden = F.gelu(body(sick(i)))
        losses = torch.stack([(head(hidden) - n).square().mean() for n, head in enumerate(heads)])
        if not first:
            first.append(losses.detach())
        norms = torch.stack(
            [torch.autograd.grad(w * one, body.weight, create_graph=True)[0].norm() for w, one in zip(model.balance, losses)]
        )
        rate = losses.detach() / first[0]
        wanted = (norms.mean() * (rate / rate.mean()) ** 1.5).detach()
        optimizer.zero_grad()
        (model.balance.detach() * losses).sum().backward(retain_graph=True)
        (model.balance.grad,) = torch.autograd.grad((norms - wanted).abs().sum(), model.balance)
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        with torch.no_grad():
            model.balance.mul_(3 / model.balance.sum())
        return [losses.detach(), norms.detach()]

    return Program([model], [optimizer], step, steps=5, extra=lambda: first)


@program("values_are_rescaled_and_weights_with_them_when_targets_move", "memories")
def popart(seed: int) -> Program:
    body, head = mlp(8, 8), nn.Linear(8, 1)
    model = nn.ModuleList([body, head])
    mean, square = [0.0], [1.0]

    def loss(i: int) -> torch.Tensor:
        rows = sick(i)
        targets = rows.sum(-1, keepdim=True).nan_to_num() * 10**i
        old_mean, old_std = mean[0], math.sqrt(square[0] - mean[0] ** 2)
        mean[0] += 0.3 * (targets.mean().item() - mean[0])
        square[0] += 0.3 * (targets.square().mean().item() - square[0])
        std = math.sqrt(max(square[0] - mean[0] ** 2, 1e-4))
        with torch.no_grad():
            head.weight.mul_(old_std / std)
            head.bias.mul_(old_std).add_(old_mean - mean[0]).div_(std)
        return F.mse_loss(head(body(rows)), (targets - mean[0]) / std)

    return scaled(model, loss, extra=lambda: [mean, square])


@program("distributions_refuse_what_is_not_a_number_and_the_episode_is_left", "memories")
def refused(seed: int) -> Program:
    policy = mlp(8, 5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    left: list[str] = []

    def step(i: int) -> Any:
        state, terms = sick(1, 9), []
        optimizer.zero_grad()
        for turn in range(6):
            out = policy(state * (float("nan") if (i, turn) == (2, 4) else 1))
            try:
                action, strength = Categorical(logits=out[:, :4]), Normal(out[:, 4], 0.1)
                chosen, amount = action.sample(), strength.rsample()
            except (ValueError, RuntimeError) as error:
                left.append(str(error)[:60])
                break
            terms.append(-action.log_prob(chosen) * amount.detach() + amount.square() - 0.01 * action.entropy())
            state = state + F.one_hot(chosen, 4).repeat(1, 2) * amount.detach()[:, None]
        value = torch.stack(terms).mean()
        value.backward()
        optimizer.step()
        return value

    return Program([policy], [optimizer], step, steps=5, extra=lambda: left)


@program("decoder_is_taught_by_chance_and_searches_with_a_heap", "memories")
def beams(seed: int) -> Program:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell, self.out = (
                nn.Embedding(9, 8, max_norm=1.0, scale_grad_by_freq=True),
                nn.LSTMCell(8, 8),
                nn.Linear(8, 9),
            )
            self.taught = 0

        def forward(self, start: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            h, c, word, outs = start, torch.zeros_like(start), wanted[:, 0], []
            for at in range(1, wanted.shape[1]):
                h, c = self.cell(self.words(word), (h, c))
                outs.append(self.out(h))
                taught = random.random() < 0.5
                self.taught += taught
                word = wanted[:, at] if taught else outs[-1].detach().argmax(-1)
            return torch.stack(outs, 1)

        @torch.inference_mode()
        def search(self, start: torch.Tensor) -> list[Any]:
            heap: list[Any] = [(0.0, [0])]
            h, c = start[:1], torch.zeros_like(start[:1])
            for _ in range(3):
                score, path = heapq.heappop(heap)
                h, c = self.cell(self.words(torch.tensor([path[-1]])), (h, c))
                values, found = self.out(h).log_softmax(-1).topk(3)
                for value, word in zip(values[0].tolist(), found[0].tolist()):
                    heapq.heappush(heap, (score - value, [*path, word]))
            return heap

    model = Decoder()
    heaps: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        wanted = (torch.arange(20).reshape(4, 5) * (i + 2)).remainder(9)
        out = model(sick(i), wanted)
        heaps.append(model.search(sick(1, 9)))
        return F.cross_entropy(out.flatten(0, 1), wanted[:, 1:].flatten(), label_smoothing=0.1)

    return scaled(model, loss, extra=lambda: [heaps, model.taught])


@program("graph_is_normalised_once_and_cached_while_edges_are_dropped", "memories")
def edges(seed: int) -> Program:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)
            self._norm: Any = None

        def forward(self, rows: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            if self._norm is None:
                degree = torch.zeros(len(rows)).scatter_add_(0, edges[0], torch.ones(edges.shape[1]))
                self._norm = degree.clamp(min=1).rsqrt()
            keep = torch.rand(edges.shape[1]) > 0.2 if self.training else torch.ones(edges.shape[1], dtype=torch.bool)
            weights = (self._norm[edges[0]] * self._norm[edges[1]])[keep]
            matrix = torch.sparse_coo_tensor(edges[:, keep], weights, (len(rows), len(rows)))
            hidden = torch.sparse.mm(matrix, self.one(rows)).relu()
            far = torch.zeros_like(hidden).scatter_reduce(
                0, edges[1][:, None].expand(-1, 8), hidden[edges[0]], "amax", include_self=False
            )
            return self.two(torch.zeros_like(far).index_add(0, edges[1], far[edges[0]]) + hidden)  # type: ignore[no-any-return]

    model = Graph()
    links = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 0]])
    return scaled(model, lambda i: model(sick(i), links).square().mean(), extra=lambda: model._norm)


@program("triplets_are_mined_and_a_batch_without_any_is_passed_over", "memories")
def triplets(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    found: list[int] = []

    def step(i: int) -> Any:
        rows, labels = torch.randn(6, 8) * (float("nan") if i == 3 else 1), torch.arange(6) // (1 if i == 1 else 2)
        with torch.no_grad():
            model.eval()
            apart = torch.cdist(model(rows), model(rows))
            model.train()
        same = (labels[:, None] == labels) & ~torch.eye(6, dtype=torch.bool)
        picked = [
            (a, p, n)
            for a, p in same.nonzero().tolist()
            for n in range(6)
            if labels[n] != labels[a] and apart[a, n] < apart[a, p] + 1
        ]
        found.append(len(picked))
        if not picked:
            return None
        anchor, positive, negative = (model(rows[list(part)]) for part in zip(*picked))
        value = F.triplet_margin_with_distance_loss(anchor, positive, negative, margin=1.0)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        return value

    return Program([model], [optimizer], step, steps=5, extra=lambda: found)


@program("loss_has_weights_of_its_own_that_nobody_shows_to_a_watcher", "memories")
def own_weights(seed: int) -> Program:
    model = mlp()

    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers, self.spread = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.zeros(2))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            cosine = F.linear(F.normalize(hidden), F.normalize(self.centers)).clamp(-1 + 1e-6, 1 - 1e-6)
            angle = torch.acos(cosine) + 0.5 * F.one_hot(labels, 5)
            value = F.cross_entropy(16 * angle.cos(), labels)
            return value * (-self.spread[0]).exp() + self.spread[0] + (self.spread[1] - 1).square()

    margin = Margin()
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": margin.parameters(), "lr": 0.5, "weight_decay": 0.0}], 0.05
    )
    made = scaled(model, lambda i: margin(model(sick(i)), torch.arange(4)), optimizer)
    made.extra = margin.state_dict
    return made
