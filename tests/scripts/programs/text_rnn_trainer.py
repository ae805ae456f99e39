import copy
import torch
import torch.nn as nn

VOCAB, SEQ, CLASSES = 40, 20, 3


class GRUClassifier(nn.Module):
    def __init__(self, vocab, dim, classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.fc = nn.Linear(dim, classes)

    def forward(self, ids):
        h, _ = self.gru(self.emb(ids))
        return self.fc(h[:, -1])


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.loss_fn = nn.CrossEntropyLoss()
        self.best = float("inf")
        self.best_model = None

    def prepare(self):
        self.best_model = self.model
        self.model = copy.deepcopy(self.best_model)
        self.model.train()

    def step(self, ids, y):
        self.model.zero_grad()
        out = self.model(ids)
        loss = self.loss_fn(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        return loss.item()

    def fit(self, sampler, steps):
        self.prepare()
        running = 0.0
        for i in range(1, steps + 1):
            running += self.step(*sampler())
            if i % 25 == 0:
                avg = running / 25
                print(f"step {i} loss {avg:.4f}")
                if avg < self.best:
                    self.best = avg
                running = 0.0


def sampler():
    ids = torch.randint(0, VOCAB, (32, SEQ))
    y = ids[:, -2] % CLASSES
    return ids, y


if __name__ == "__main__":
    torch.manual_seed(11)
    t = Trainer(GRUClassifier(VOCAB, 32, CLASSES), lr=5e-3)
    t.fit(sampler, 150)
    print("best", round(t.best, 4))
