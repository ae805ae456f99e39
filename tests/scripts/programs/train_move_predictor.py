import torch
from torch import nn

torch.manual_seed(50)
M = 20
rule = torch.randn(12, M)


def positions(n=16):
    x = torch.randn(n, 12)
    legal = torch.rand(n, M) < 0.6
    legal[:, 0] = True
    score = (x @ rule).masked_fill(~legal, float("-inf"))
    return x, legal, score.argmax(-1)


class MoveNet(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.policy = nn.Linear(d, M)

    def forward(self, x, legal):
        return self.policy(self.body(x)).masked_fill(~legal, float("-inf"))


def smoothed_ce(logits, y, eps=0.05):
    logp = torch.log_softmax(logits, -1)
    soft = torch.full_like(logp, eps / M)
    soft.scatter_(1, y[:, None], 1 - eps + eps / M)
    return -(soft * logp).sum(-1).mean()


net = MoveNet()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(120):
    x, legal, y = positions()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x, legal)
    loss = smoothed_ce(logits.float(), y)
    opt.zero_grad()
    if torch.isfinite(loss):
        loss.backward()
        opt.step()
    if step % 12 == 0 or step == 119:
        acc = (logits.argmax(-1) == y).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} acc {acc:.3f}")
