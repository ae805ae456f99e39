import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--init-scale", type=float, default=2.0 ** 30)
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--iters", type=int, default=12)
    return p.parse_args()


class MLPMixerLite(nn.Module):
    def __init__(self, t=8, d=24):
        super().__init__()
        self.emb = nn.Embedding(20, d)
        self.time = nn.Linear(t, t)
        self.chan = nn.Linear(d, d)
        self.head = nn.Linear(d, 20)

    def forward(self, x):
        h = self.emb(x)
        h = h + self.time(h.transpose(1, 2)).transpose(1, 2)
        h = h + F.relu(self.chan(h))
        return self.head(h)


def run_epoch(model, opt, args):
    scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale)
    total = 0.0
    for _ in range(args.iters):
        x = torch.randint(0, 20, (8, 8))
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = F.cross_entropy(out.float().transpose(1, 2), x.roll(1, 1))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        total += loss.item()
    return total / args.iters, scaler.get_scale()


def main():
    args = parse()
    torch.manual_seed(15)
    model = MLPMixerLite()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for e in range(args.epochs):
        loss, scale = run_epoch(model, opt, args)
        print(f"epoch {e} loss {loss:.4f} scale {scale:g}")


main()
