"""BiLSTM-CRF style tagger on a synthetic segmentation language."""
import torch
import torch.nn as nn

torch.manual_seed(13)
VOCAB, TAGS, LEN = 40, 5, 24
emit = torch.randint(0, TAGS, (VOCAB,))


def batch(n):
    x = torch.randint(0, VOCAB, (n, LEN))
    y = emit[x]
    prev = torch.cat([y[:, :1], y[:, :-1]], 1)
    y = torch.where(prev == 2, (y + 1) % TAGS, y)
    return x, y


class CRF(nn.Module):
    def __init__(self, n_tags):
        super().__init__()
        self.trans = nn.Parameter(torch.zeros(n_tags, n_tags))

    def score(self, emission, tags):
        s = emission.gather(2, tags.unsqueeze(-1)).squeeze(-1).sum(1)
        return s + self.trans[tags[:, :-1], tags[:, 1:]].sum(1)

    def log_partition(self, emission):
        top = emission.amax(2, keepdim=True)
        pot = torch.exp(emission - top)
        step = torch.softmax(self.trans, 1)
        alpha = pot[:, 0] / pot.size(2)
        for i in range(1, emission.size(1)):
            alpha = (alpha @ step) * pot[:, i]
        n = emission.size(1)
        z = torch.log(alpha.sum(1)) + top.squeeze(-1).sum(1)
        return z + torch.log(torch.tensor(float(pot.size(2))))

    def forward(self, emission, tags):
        step = torch.log_softmax(self.trans, 1)
        path = emission.gather(2, tags.unsqueeze(-1)).squeeze(-1).sum(1)
        path = path + step[tags[:, :-1], tags[:, 1:]].sum(1)
        return (self.log_partition(emission) - path).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 32)
        self.conv = nn.Conv1d(32, 48, 3, padding=1)
        self.out = nn.Linear(48, TAGS)
        self.crf = CRF(TAGS)

    def forward(self, x):
        h = torch.relu(self.conv(self.emb(x).transpose(1, 2))).transpose(1, 2)
        return self.out(h)


model = Tagger()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for step in range(100):
    x, y = batch(16)
    with torch.autocast("cpu", dtype=torch.float16):
        em = model(x)
        loss = model.crf(em, y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 99:
        acc = (em.argmax(-1) == y).float().mean().item()
        print(f"step {step} nll {loss.item():.4f} acc {acc:.3f} scale {scaler.get_scale():g}")
