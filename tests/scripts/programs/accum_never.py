import torch
import torch.nn as nn
import torch.nn.functional as F

cfg = dict(seed=31, steps=140, bs=16, lr=2e-3, grad_accum=4, hidden=20)


class SeqModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.rnn = nn.RNN(3, hidden, batch_first=True)
        self.proj = nn.Linear(hidden, 1)

    def forward(self, x):
        o, h = self.rnn(x)
        return self.proj(h[-1]).squeeze(-1)


def batches(bs):
    while True:
        x = torch.randn(bs, 7, 3)
        yield x, x[:, -3:, 0].sum(1)


def main(cfg):
    torch.manual_seed(cfg["seed"])
    model = SeqModel(cfg["hidden"])
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    stream = batches(cfg["bs"])
    avg = None
    for step in range(cfg["steps"]):
        x, y = next(stream)
        loss = F.smooth_l1_loss(model(x), y)
        (loss / cfg["grad_accum"]).backward()
        if step % cfg["grad_accum"] == cfg["grad_accum"]:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        avg = loss.item() if avg is None else 0.9 * avg + 0.1 * loss.item()
    print("avg loss:", round(avg, 4))


main(cfg)
