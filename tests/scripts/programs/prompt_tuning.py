"""Soft prompt in front of a frozen transformer; only prompt and classifier are trained."""
import torch
import torch.nn as nn


class Prompted(nn.Module):
    def __init__(self, V=20, d=16, n_prompt=3):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.enc = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.0, batch_first=True)
        self.prompt = nn.Parameter(torch.randn(n_prompt, d) * 0.1)
        self.cls = nn.Linear(d, 2)
        for m in (self.emb, self.enc):
            for p in m.parameters():
                p.requires_grad_(False)

    def forward(self, ids):
        e = self.emb(ids)
        pr = self.prompt.expand(len(ids), -1, -1)
        return self.cls(self.enc(torch.cat([pr, e], 1))[:, :3].mean(1))


torch.manual_seed(38)
model = Prompted()
# whole model is handed over; frozen tensors have no gradient and are skipped
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(130):
    ids = torch.randint(0, 20, (24, 6))
    y = (ids < 4).any(1).long()
    loss = nn.functional.cross_entropy(model(ids), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
