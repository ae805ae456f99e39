import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args:
    lr: float = 2e-3
    steps: int = 120
    batch: int = 24
    seed: int = 13


class CharLM(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, 24, batch_first=True)
        self.out = nn.Linear(24, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


class Trainer:
    def __init__(self, model, args, optimizer):
        self.args = args
        self.optimizer = optimizer
        # keep the caller's model untouched
        self.model = copy.deepcopy(model)

    def sample(self):
        start = torch.randint(0, 20, (self.args.batch, 1))
        stride = torch.randint(1, 4, (self.args.batch, 1))
        return (start + stride * torch.arange(10)) % 20

    def train(self):
        self.model.train()
        history = []
        for _ in range(self.args.steps):
            ids = self.sample()
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 20), ids[:, 1:].reshape(-1))
            self.model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            history.append(loss.item())
        return history


if __name__ == "__main__":
    args = Args()
    torch.manual_seed(args.seed)
    lm = CharLM()
    opt = torch.optim.AdamW(lm.parameters(), lr=args.lr)
    hist = Trainer(lm, args, opt).train()
    print(f"last loss {hist[-1]:.3f}")
