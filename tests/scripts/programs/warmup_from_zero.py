import torch
import torch.nn as nn

torch.manual_seed(9)


def schedule(step, warm=20, total=150):
    if step < warm:
        return step / warm
    return max(0.05, 1 - (step - warm) / (total - warm))


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        self.enc = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, t):
        return self.fc(self.enc(self.emb(t)).amax(1))


m = Enc()
opt = torch.optim.Adam(m.parameters(), lr=4e-3)
sch = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
for s in range(150):
    t = torch.randint(0, 20, (24, 8))
    y = (t == 3).any(1).long()
    loss = nn.functional.cross_entropy(m(t), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    sch.step()
print("loss", loss.item(), "lr", sch.get_last_lr())
