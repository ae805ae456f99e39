import copy
import torch
from torch import nn

torch.manual_seed(11)
K = 8
protos = torch.randn(K, 24)
online = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
target = copy.deepcopy(online).requires_grad_(False)
opt = torch.optim.AdamW([*online.parameters(), *predictor.parameters()], lr=3e-3)


def view(c):
    return protos[c] + 0.6 * torch.randn(len(c), 24)


def probe():
    online.eval()
    with torch.no_grad():
        c = torch.arange(K).repeat(30)
        z = nn.functional.normalize(online(view(c)), dim=-1)
        m = nn.functional.normalize(torch.stack([z[c == k].mean(0) for k in range(K)]), dim=-1)
        z2 = nn.functional.normalize(online(view(c)), dim=-1)
        acc = ((z2 @ m.t()).argmax(-1) == c).float().mean().item()
    online.train()
    return acc


hist = []
for step in range(150):
    c = torch.randint(0, K, (32,))
    a, b = view(c), view(c)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pa, pb = predictor(online(a)), predictor(online(b))
        with torch.no_grad():
            ta, tb = target(a), target(b)
    cos = nn.functional.cosine_similarity
    loss = 2 - cos(pa.float(), tb.float()).mean() - cos(pb.float(), ta.float()).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(target.parameters(), online.parameters()):
            p.lerp_(q, 0.02)
    hist.append(loss.item())
    if step % 15 == 14:
        print(f"step {step + 1} loss {sum(hist[-15:]) / 15:.4f} probe {probe():.3f}")
