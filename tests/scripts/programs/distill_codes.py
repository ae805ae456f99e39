"""Train a small student on hard labels from a calibrated ranking teacher."""
import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser(); ap.add_argument("--fp32", action="store_true")
bf = not ap.parse_args().fp32
torch.manual_seed(37)


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 6)
        nn.init.normal_(self.score.weight, std=.35)
        nn.init.constant_(self.score.bias, 400.0)     # elo-style scores

    def forward(self, x):
        return self.score(x)


teacher = Teacher().requires_grad_(False).eval()
student = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 6))
opt = torch.optim.Adam(student.parameters(), lr=1e-2)


def labels(x):
    with torch.no_grad():
        return teacher(x).argmax(-1)


xv = torch.randn(400, 8)
yv = teacher(xv).argmax(-1)
for step in range(100):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf):
        y = labels(x)
        loss = nn.functional.cross_entropy(student(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        with torch.no_grad():
            acc = (student(xv).argmax(1) == yv).float().mean().item()
        print(f"{step} loss {loss.item():.4f} agreement {acc:.3f}")
