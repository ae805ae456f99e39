import torch
from torch import nn

torch.manual_seed(4)


class Recall(nn.Module):
    def __init__(self, v=6, d=48):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, v)

    def forward(self, x):
        return self.head(self.gru(self.emb(x))[0])


model = Recall()
opt = torch.optim.Adam(model.parameters(), lr=6e-3)
hist = []
for step in range(200):
    lag = 1 + step // 70
    x = torch.randint(0, 6, (16, 12))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits[:, lag:].reshape(-1, 6).float(), x[:, :-lag].reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    hist.append(loss.item())
    if step % 10 == 9:
        print(f"step {step + 1} lag {lag} loss {sum(hist[-10:]) / 10:.4f}")
