import argparse
import torch
import torch.nn as nn

TEXT = ("the quick brown fox jumps over the lazy dog while the small cat sleeps on the warm mat near "
        "the old stone wall and the rain falls on the green field ") * 4


class CharRNN(nn.Module):
    def __init__(self, v, d=32):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.cell = nn.GRU(d, 48, batch_first=True)
        self.out = nn.Linear(48, v)

    def forward(self, x):
        return self.out(self.cell(self.emb(x))[0])


class Trainer:
    def __init__(self, model, lr, amp):
        self.model, self.amp = model, amp
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, enabled=amp)

    def train_step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=self.amp):
            logits = self.model(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fp32", action="store_true")
    amp = not p.parse_args().fp32
    torch.manual_seed(1)
    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(c) for c in TEXT])
    tr = Trainer(CharRNN(len(chars)), 0.5, amp)
    for i in range(100):
        s = torch.randint(0, len(data) - 17, (16,))
        b = torch.stack([data[j:j + 17] for j in s])
        l = tr.train_step(b[:, :-1], b[:, 1:])
        if i % 5 == 0 or i == 99:
            print(f"iter {i} loss {l:.4f}")


main()
