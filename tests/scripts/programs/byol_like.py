import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, d=24, h=48, o=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, o))

    def forward(self, x):
        return self.net(x)


class BYOL(nn.Module):
    def __init__(self, tau=0.97):
        super().__init__()
        self.online = Encoder()
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.teacher = copy.deepcopy(self.online)
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.tau = tau

    @torch.no_grad()
    def update_teacher(self):
        for t, o in zip(self.teacher.parameters(), self.online.parameters()):
            t.mul_(self.tau).add_(o, alpha=1 - self.tau)

    def forward(self, a, b):
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.teacher(a), self.teacher(b)
        return 2 - F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()


def main():
    torch.manual_seed(2)
    centers = torch.randn(10, 24)
    model = BYOL()
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(200):
        base = centers[torch.randint(0, 10, (64,))] + 0.3 * torch.randn(64, 24)
        loss = model(base + 0.1 * torch.randn_like(base), base + 0.1 * torch.randn_like(base))
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.update_teacher()
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
