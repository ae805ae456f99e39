import torch
import torch.nn as nn
import torch.nn.functional as F


class TiedLM(nn.Module):
    def __init__(self, V=24, d=20):
        super().__init__()
        self.wte = nn.Embedding(V, d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.lm_head = nn.Linear(d, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids, labels=None):
        h, _ = self.gru(self.wte(ids))
        logits = self.lm_head(h)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def data(n=16, L=12, V=24):
    s = torch.randint(0, V, (n, 1))
    d = torch.randint(1, 3, (n, 1))
    return (s + d * torch.arange(L + 1)) % V


torch.manual_seed(11)
model = TiedLM()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(130):
    ids = data()
    out = model(ids[:, :-1], labels=ids[:, 1:])
    out["loss"].backward()
    opt.step()
    opt.zero_grad()
print("loss", out["loss"].item())
