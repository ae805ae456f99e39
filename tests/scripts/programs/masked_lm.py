"""Masked token prediction; loss is normalised by the number of masked positions."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader

VOCAB, MASK, LEN = 18, 17, 10


class Corpus(Dataset):
    def __init__(self, n=960, seed=4):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 16, (n, 1), generator=g)
        self.ids = (start + torch.arange(LEN)) % 16
        self.mask = torch.rand(n, LEN, generator=g) < 0.25
        self.mask[torch.arange(n), torch.randint(0, LEN, (n,), generator=g)] = True
        self.mask[560:576] = False  # documents whose annotation got lost

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = torch.where(self.mask[i], self.ids[i], torch.tensor(-100))
        inputs = torch.where(self.mask[i], torch.tensor(MASK), self.ids[i])
        return inputs, labels


class MiniBert(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.pos = nn.Embedding(LEN, d)
        self.layer = nn.TransformerEncoderLayer(d, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(LEN))
        return self.head(self.layer(h))


torch.manual_seed(4)
model = MiniBert()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(1):
    for step, (ids, labels) in enumerate(DataLoader(Corpus(), batch_size=16)):
        logits = model(ids)
        summed = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1),
                                 ignore_index=-100, reduction="sum")
        loss = summed / (labels != -100).sum().clamp(min=1)
        opt.zero_grad()
        loss.backward()
        opt.step()
print("mlm loss", loss.item())
