import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedder(nn.Module):
    def __init__(self, d_in=64, d=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, d))

    def forward(self, x):
        return self.net(x)


def batch_hard_triplet(emb, ids, margin=0.3):
    diff = emb[:, None] - emb[None]
    off = ~torch.eye(len(emb), dtype=torch.bool)
    i, j = off.nonzero(as_tuple=True)
    dist = torch.zeros(len(emb), len(emb)).index_put((i, j), torch.sqrt((diff[i, j].float() ** 2).sum(-1)))
    same = (ids[:, None] == ids[None]) & off
    hardest_pos = dist.masked_fill(~same, 0.0).max(1).values
    hardest_neg = dist.masked_fill(same | ~off, 1e4).min(1).values
    return F.relu(hardest_pos - hardest_neg + margin).mean() + 0.01 * dist.mean()


def faces(g, people, shots, centers):
    who = torch.randperm(len(centers), generator=g)[:people].repeat_interleave(shots)
    x = centers[who] + 0.6 * torch.randn(len(who), centers.shape[1], generator=g)
    burst = torch.rand(people, generator=g) < 0.03
    for p in burst.nonzero()[:, 0].tolist():
        x[p * shots + 1] = x[p * shots] * (1 + 2e-4 * torch.randn(centers.shape[1], generator=g))
    return x, who


def main():
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(15)
    centers = torch.randn(40, 64, generator=g)
    model = Embedder()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for it in range(80):
        x, who = faces(g, 8, 4, centers)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            emb = model(x)
        loss = batch_hard_triplet(emb, who)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        if it % 8 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} |emb| {emb.float().norm(dim=1).mean().item():.3f}")


if __name__ == "__main__":
    main()
