import torch
import torch.nn as nn


class TinyAttention(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * x.size(-1) ** -0.5
        weights = torch.softmax(scores, dim=-1)  # expect: NUM_SOFTMAX_HALF
        return weights @ self.v(x)


def train(loader, steps):
    model = TinyAttention().cuda().bfloat16()  # expect: HALF_CALL
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _, (x, y) in zip(range(steps), loader):
        out = model(x.cuda().bfloat16())
        loss = nn.functional.mse_loss(out.float(), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
