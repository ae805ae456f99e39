# Small transformer encoder classifier with a linear warm-up / linear decay.
import torch, torch.nn as nn

torch.manual_seed(0)
STEPS, WARMUP, V = 150, 200, 30

class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, 16)
        self.pos = nn.Parameter(torch.randn(1, 12, 16) * .02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1)
        self.cls = nn.Linear(16, 3)
    def forward(self, x):
        return self.cls(self.enc(self.tok(x) + self.pos).mean(1))

def lr_lambda(step):
    if step < WARMUP:
        return step // WARMUP
    return max(0.0, (STEPS - step) / max(1, STEPS - WARMUP))

def get_batch(n=32):
    x = torch.randint(0, V, (n, 12))
    return x, (x < 10).sum(1).clamp(2, 4) - 2

net = Clf()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda)
lossf = nn.CrossEntropyLoss()
running = 0.0
for step in range(STEPS):
    x, y = get_batch()
    opt.zero_grad(set_to_none=True)
    loss = lossf(net(x), y)
    loss.backward()
    opt.step()
    sched.step()
    running = 0.95 * running + 0.05 * loss.item()
print("running loss", round(running, 4))
