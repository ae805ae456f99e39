"""Loops that steps are hard to see in: closures, one sample per call, no torch optimizer; healthy all, and their faulty twins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from corpus import Training, healthy, planted
from corpus.draws import noise
from corpus.loops import low


def closure_of_many_turns(dtype: torch.dtype = torch.bfloat16) -> Training:
    """L-BFGS: a step calls its closure twenty times."""
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=20, history_size=6)
    x = noise(48, 4, key=(420,))
    y = torch.sin(x[:, :1] * 2)

    def step(i: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            with low(dtype):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Training(model, optimizer, step)


def closure_that_overflows(fixed: bool = False, dtype: torch.dtype = torch.float16) -> Training:
    """The same with a distance in fp16 that is squared: 400 squared is beyond 65,504."""
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6, history_size=6)
    x = noise(48, 4, key=(421,))
    y = 300 * torch.sin(x[:, :1] * 2) + 200

    def step(i: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            with low(dtype):
                out = model(x)
            gap = out.float() - y if fixed else out - y.to(out.dtype)
            loss = gap.square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Training(model, optimizer, step)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 24), nn.Dropout(0.4), nn.ReLU())
        self.act, self.value = nn.Linear(24, 2), nn.Linear(24, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(state)
        return self.act(h), self.value(h)


def one_state_at_a_time(dtype: torch.dtype = torch.bfloat16) -> Training:
    """A policy that acts on one state per call, with dropout before the ReLU: most units are off in any one call."""
    model = Actor()
    model.value.requires_grad_(False)  # nobody asks it here
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i: int) -> Tensor:
        logs, rewards = [], []
        optimizer.zero_grad()
        for t in range(6):
            state = noise(1, 4, key=(430, i, t))
            with low(dtype):
                logits, _ = model(state)
            chance = torch.distributions.Categorical(logits=logits.float())
            action = chance.sample()
            logs.append(chance.log_prob(action))
            rewards.append(float((state[0, 0] > 0) == bool(action)))
        loss = -(torch.stack(logs).squeeze() * (torch.tensor(rewards) - 0.5)).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def layer_that_never_fires(fixed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Training:
    """One state per call as well, and a bias of -20 that keeps every unit off for every state."""
    training = one_state_at_a_time(dtype)
    if not fixed:
        with torch.no_grad():
            training.model.body[0].bias.fill_(-20.0)
    return training


def actor_and_critic(dtype: torch.dtype = torch.bfloat16) -> Training:
    """The loss is a sum over an episode, which becomes longer and worth more as the policy learns."""
    model = Actor()
    model.body[1] = nn.Identity()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i: int) -> Tensor:
        length = 4 if i < 30 else 40 + i // 2
        states = noise(length, 4, key=(431, i))
        optimizer.zero_grad()
        with low(dtype):
            logits, values = model(states)
        chance = torch.distributions.Categorical(logits=logits.float())
        action = chance.sample()
        reward = ((states[:, 0] > 0).long() == action).float()
        returns = reward.flip(0).cumsum(0).flip(0)
        gain = returns - values.float().squeeze(-1)
        loss = -(chance.log_prob(action) * gain.detach()).sum() / 10 + gain.square().sum() / 10
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def updates_by_hand(dtype: torch.dtype = torch.bfloat16) -> Training:
    """No torch optimizer: weights move by a line of the loop."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    want = noise(6, 2, key=(432,)) / 2

    def step(i: int) -> Tensor:
        x = noise(24, 6, key=(433, i))
        with low(dtype):
            loss = F.mse_loss(model(x).float(), x @ want)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p -= 0.1 * g
        return loss.detach()

    return Training(model, None, step)


PROGRAMS = [
    *healthy(closure_of_many_turns, tools="diagnose monitor", survives=None, steps=12),
    *planted(closure_that_overflows, "loss_computed_in_fp16", "op:pow", "op:square", "op:mean", steps=6),
    *healthy(one_state_at_a_time, tools="diagnose monitor", survives=None, steps=60),
    *planted(layer_that_never_fires, "dead_relu", "body.2", "body.0", precision_caused=False, steps=60),
    *healthy(actor_and_critic, tools="diagnose monitor", survives=None, steps=80),
    *healthy(updates_by_hand, tools="diagnose monitor", survives=None, steps=30),
]
