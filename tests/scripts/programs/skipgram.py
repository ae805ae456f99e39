import torch
from torch import nn

torch.manual_seed(1)
V, D, TOPICS = 200, 24, 10
topic = torch.arange(V) % TOPICS
inp = nn.Embedding(V, D, sparse=True)
out = nn.Embedding(V, D, sparse=True)
nn.init.normal_(inp.weight, std=0.1)
nn.init.zeros_(out.weight)
opt = torch.optim.SparseAdam(list(inp.parameters()) + list(out.parameters()), lr=0.02)


def pairs(n=64):
    c = torch.randint(0, V, (n,))
    pos = topic[c] + TOPICS * torch.randint(0, V // TOPICS, (n,))
    return c, pos, torch.randint(0, V, (n, 4))


hist = []
for step in range(200):
    c, pos, neg = pairs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = inp(c)
        p = torch.bmm(out(pos)[:, None], h[..., None]).squeeze()
        q = torch.bmm(out(neg), h[..., None]).squeeze(-1)
    loss = -(nn.functional.logsigmoid(p.float()) + nn.functional.logsigmoid(-q.float()).sum(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if step % 20 == 19:
        print(f"step {step + 1} loss {sum(hist[-20:]) / 20:.4f}")
