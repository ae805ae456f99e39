import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    NEG = -1e4

    def __init__(self, dim=128):
        super().__init__()
        self.qk = nn.Linear(dim, 2 * dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x, pad):
        q, k = self.qk(x).chunk(2, dim=-1)
        s = torch.bmm(q, k.transpose(1, 2)) * q.size(-1) ** -0.5
        s = s.masked_fill(pad[:, None, :], self.NEG)
        return torch.bmm(F.softmax(s, dim=-1).to(x.dtype), self.v(x).to(x.dtype))


def train(loader):
    net, out = Attn().cuda(), nn.Linear(128, 3).cuda()
    opt = torch.optim.Adam([*net.parameters(), *out.parameters()], lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, pad, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(out(net(x.cuda(), pad.cuda())[:, 0]), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
