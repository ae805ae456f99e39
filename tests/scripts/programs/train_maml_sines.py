"""First-order MAML on sine regression."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)


def task():
    amp, phase = torch.rand(1) * 2 + 0.5, torch.rand(1) * 3.14

    def draw(n):
        x = torch.rand(n, 1) * 8 - 4
        return x, amp * torch.sin(x + phase)

    return draw


class MAML:
    def __init__(self, inner_lr=0.02, inner_steps=2):
        self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=4e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.inner_lr, self.inner_steps = inner_lr, inner_steps

    def loss(self, net, xy):
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(net(xy[0]), xy[1])

    def adapt(self, draw):
        fast = copy.deepcopy(self.net)
        for _ in range(self.inner_steps):
            inner = self.scaler.scale(self.loss(fast, draw(10)))
            grads = torch.autograd.grad(inner, list(fast.parameters()))
            with torch.no_grad():
                for p, g in zip(fast.parameters(), grads):
                    p -= self.inner_lr * g
        return fast

    def meta_step(self, n_tasks=4):
        self.opt.zero_grad()
        total = 0.0
        for _ in range(n_tasks):
            draw = task()
            fast = self.adapt(draw)
            outer = self.loss(fast, draw(20)) / n_tasks
            grads = torch.autograd.grad(self.scaler.scale(outer), list(fast.parameters()))
            for p, g in zip(self.net.parameters(), grads):
                p.grad = g if p.grad is None else p.grad + g
            total += outer.item()
        self.scaler.step(self.opt)
        self.scaler.update()
        return total


m = MAML()
avg = None
for it in range(70):
    v = m.meta_step()
    avg = v if avg is None else 0.9 * avg + 0.1 * v
    if it % 10 == 0 or it == 69:
        print(f"iter {it} query mse {v:.4f} avg {avg:.4f}")
