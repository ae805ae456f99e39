import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(6)


class ScanSum(torch.autograd.Function):
    """Gated running sum over time, one pass, constant memory."""

    @staticmethod
    def forward(ctx, gate, value):
        ctx.save_for_backward(gate, value)
        state = torch.zeros_like(value[:, 0])
        for t in range(value.shape[1]):
            state = state + gate[:, t] * value[:, t]
        return state

    @staticmethod
    def backward(ctx, grad):
        gate, value = ctx.saved_tensors
        g = grad.unsqueeze(1)
        return g * value, g * gate


class Counter(nn.Module):
    def __init__(self, vocab=30, d=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.gate = nn.Linear(d, d)
        self.value = nn.Linear(d, d)
        self.mix = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.out = nn.Linear(d, 1)

    def encode(self, x):
        h = self.emb(x)
        h = h + self.mix(h)
        return torch.sigmoid(self.gate(h)), nn.functional.softplus(self.value(h))

    def forward(self, x):
        gate, value = checkpoint(self.encode, x, use_reentrant=False)
        pooled = ScanSum.apply(gate, value)
        return self.out(pooled.float() / 300.0).squeeze(-1)


weights = torch.rand(30)


def batch(n, length=3000):
    rate = torch.rand(n, 1)
    a = torch.randint(0, 15, (n, length))
    b = torch.randint(15, 30, (n, length))
    x = torch.where(torch.rand(n, length) < rate, a, b)
    return x, (weights * (torch.arange(30) < 15))[x].sum(1) / 300.0


model = Counter()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
test_x, test_y = batch(48)
for step in range(90):
    x, y = batch(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x)
    loss = nn.functional.mse_loss(pred.float(), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
    if step % 15 == 14:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            err = nn.functional.mse_loss(model(test_x).float(), test_y).item()
        print(f"step {step + 1} loss {loss.item():.4f} test {err:.4f} target var {test_y.var().item():.3f}")
