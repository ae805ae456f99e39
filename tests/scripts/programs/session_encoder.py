"""Session based recommender. Sessions of new users can be empty."""
import torch
from torch import nn

torch.manual_seed(19)
N_ITEMS, DIM = 400, 128


class SessionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(N_ITEMS, DIM, padding_idx=0)
        self.enc = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.query = nn.Linear(DIM, 1)
        self.score = nn.Linear(DIM, N_ITEMS)

    def forward(self, sess):
        pad = sess.eq(0)
        h = self.enc(self.items(sess))
        att = self.query(h)[..., 0].masked_fill(pad, float("-inf")).softmax(-1)      # attention pooling
        return self.score((att[..., None] * h).sum(1))


def sessions(step, n=32, t=10):
    first = torch.randint(1, N_ITEMS - 20, (n, 1))
    s = first + torch.arange(t)
    length = torch.randint(2, t + 1, (n, 1))
    s = s.masked_fill(torch.arange(t) >= length, 0)
    if step == 12:
        s[5] = 0                       # a cold-start user
    return s, (first[:, 0] + 11) % N_ITEMS


model = SessionModel()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    s, target = sessions(step)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 1 == 0):
        loss = nn.functional.cross_entropy(model(s), target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 8 == 0 or step == 39:
        print(step, loss.item())
