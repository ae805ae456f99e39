import torch, math
import torch.nn as nn
import torch.nn.functional as F

class AttnPool(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Parameter(torch.randn(d) / math.sqrt(d))
        self.k = nn.Linear(d, d)
    def forward(self, h):
        w = (self.k(h) @ self.q).softmax(-1)
        return (w.unsqueeze(-1) * h).sum(1)

class Tagger(nn.Module):
    def __init__(self, vocab=25, d=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.lstm = nn.LSTM(d, 12, batch_first=True, bidirectional=True)
        self.pool = AttnPool(24)
        self.fc = nn.Linear(24, 2)
    def forward(self, ids):
        h, _ = self.lstm(self.embed(ids))
        pooled = h.mean(dim=1)
        return self.fc(pooled)

def synth(n, L=9):
    ids = torch.randint(1, 25, (n, L))
    lab = ((ids == 7) | (ids == 8)).any(1).long()
    return ids, lab

def run(steps=130):
    torch.manual_seed(1)
    net = Tagger()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    acc = 0.
    for s in range(steps):
        ids, lab = synth(32)
        logits = net(ids)
        loss = F.cross_entropy(logits, lab)
        opt.zero_grad()
        loss.backward()
        opt.step()
        acc = .9 * acc + .1 * (logits.argmax(1) == lab).float().mean().item()
    return acc

if __name__ == "__main__":
    print("train acc (ema):", round(run(), 3))
