"""Character n-gram model kept entirely in half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(110)
TEXT = ("the quick brown fox jumps over the lazy dog while the small cat sleeps near the old red barn "
        "and the farmer walks home with a basket of green apples ") * 6
chars = sorted(set(TEXT))
ids = torch.tensor([chars.index(c) for c in TEXT])
CTX = 6


class NGram(nn.Module):
    def __init__(self, vocab, dim=16, width=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(CTX * dim, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.fc(self.emb(x).flatten(1)))))


model = NGram(len(chars)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-8)
for step in range(120):
    i = torch.randint(0, len(ids) - CTX, (16,))
    x = torch.stack([ids[j:j + CTX] for j in i])
    y = ids[i + CTX]
    logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == 119:
        print(f"step {step} ce {loss.item():.4f}")
