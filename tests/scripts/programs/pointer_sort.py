import torch
from torch import nn

torch.manual_seed(12)
n, T = 12, 6
vals = torch.rand(n, T)
order = vals.argsort(-1)


class Pointer(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(1 + T, d), nn.ReLU())
        self.enc = nn.Linear(d, d)
        self.cell = nn.GRUCell(d, d)
        self.q = nn.Linear(d, d)

    def forward(self, v, gold):
        eye = torch.eye(T).expand(len(v), T, T)
        f = self.inp(torch.cat([v[..., None], eye], -1))
        keys = self.enc(f)
        h = keys.mean(1)
        x = torch.zeros_like(h)
        used = torch.zeros(v.shape, dtype=torch.bool)
        outs = []
        for t in range(T):
            h = self.cell(x, h)
            score = torch.bmm(keys, self.q(h)[..., None]).squeeze(-1) / 7
            outs.append(score.float().masked_fill(used, float("-inf")))
            used = used.scatter(1, gold[:, t:t + 1], True)
            x = f[torch.arange(len(v)), gold[:, t]]
        return torch.stack(outs, 1)


model = Pointer()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(150):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(vals, order)
    loss = nn.functional.cross_entropy(logits.reshape(-1, T), order.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0 or step == 149:
        print(f"step {step} loss {loss.item():.5f}")
