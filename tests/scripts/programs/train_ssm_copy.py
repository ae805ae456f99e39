import torch
from torch import nn

torch.manual_seed(9)


class DiagonalSSM(nn.Module):
    def __init__(self, d, n=8):
        super().__init__()
        self.log_a = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))
        self.log_dt = nn.Parameter(torch.full((d, 1), -0.7))
        self.b = nn.Parameter(torch.randn(d, n) * 0.3)
        self.c = nn.Parameter(torch.randn(d, n) * 0.3)

    def forward(self, u):
        dt = self.log_dt.exp()
        decay = torch.exp(self.log_a.exp() * dt)
        state = torch.zeros(u.shape[0], *self.b.shape)
        ys = []
        for t in range(u.shape[1]):
            state = decay * state + dt * self.b * u[:, t, :, None]
            ys.append((state * self.c).sum(-1))
        return torch.stack(ys, 1)


class Model(nn.Module):
    def __init__(self, vocab=8, d=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.ssm = DiagonalSSM(d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.emb(x)
        return self.head(self.norm(h + self.ssm(h)))


model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(80):
    x = torch.randint(0, 8, (8, 40))
    target = torch.roll(x, 1, dims=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits[:, 1:].reshape(-1, 8).float(), target[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 10 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f}")
