import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)
V, D, T = 35, 40, 18


class TiedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x):
        h, _ = self.rnn(self.tok(x))
        return self.head(h) / D ** 0.5


nxt = torch.randint(0, V, (V, 2))


def sequences(n):
    out = [torch.randint(0, V, (n,))]
    for _ in range(T):
        pick = (torch.rand(n) < 0.15).long()
        out.append(nxt[out[-1], pick])
    return torch.stack(out, 1)


lm = TiedLM()
opt = torch.optim.AdamW(lm.parameters(), lr=1e-2, weight_decay=0.01)
for step in range(150):
    seq = sequences(24)
    logits = lm(seq[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), seq[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    opt.step()
    if step % 25 == 0:
        print(f"step {step} nll {loss.item():.4f}")
