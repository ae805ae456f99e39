import torch
import torch.nn as nn
import torch.nn.functional as F


class Adder(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.rnn = nn.GRU(1, h, batch_first=True)
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


class Curriculum:
    def __init__(self, stages):
        self.stages, self.i = stages, 0

    def sample(self, n=32):
        L, scale = self.stages[self.i]
        x = torch.rand(n, L, 1) * scale
        return x, x.sum((1, 2))

    def advance(self):
        if self.i + 1 < len(self.stages):
            self.i += 1
            return True
        return False


def main():
    torch.manual_seed(12)
    cur = Curriculum([(4, 0.5), (8, 0.5), (12, 1.0), (16, 1.5)])
    model = Adder()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    ema = None
    for step in range(280):
        if step and step % 70 == 0 and cur.advance():
            print("stage", cur.i)
            ema = None
        x, y = cur.sample()
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
        if step % 14 == 0:
            print(f"step {step} loss {loss.item():.4f} ema {ema:.4f}")


main()
