"""Fit a discrete HMM by gradient; likelihood through the forward recursion."""
import sys
import torch
import torch.nn as nn

low = "--fp32" not in sys.argv
torch.manual_seed(33)
S, O = 6, 10


class HMM(nn.Module):
    def __init__(self):
        super().__init__()
        self.trans = nn.Parameter(torch.randn(S, S) * .3)
        self.emit = nn.Parameter(torch.randn(S, O) * .3)
        self.start = nn.Parameter(torch.zeros(S))

    def forward(self, obs):
        A = self.trans.softmax(-1)
        B = self.emit.softmax(-1)
        if low:
            A, B = A.half(), B.half()
        alpha = self.start.softmax(-1) * B[:, obs[:, 0]].t()
        if low:
            alpha = alpha.half()
        for t in range(1, obs.size(1)):
            alpha = (alpha @ A) * B[:, obs[:, t]].t()
        return torch.log(alpha.float().sum(-1))


@torch.no_grad()
def simulate(n, T):
    z = torch.randint(0, S, (n,))
    seq = []
    for _ in range(T):
        noise = torch.rand(n) < .15
        seq.append(torch.where(noise, torch.randint(0, O, (n,)), (z * 2 - z // 3) % O))
        z = torch.where(torch.rand(n) < .8, (z + 1) % S, z)
    return torch.stack(seq, 1)


hmm = HMM()
opt = torch.optim.Adam(hmm.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=200, enabled=low)
for step in range(90):
    T = 3 + step // 6                      # length curriculum
    obs = simulate(24, T)
    nll = -(hmm(obs) / T).mean()
    opt.zero_grad()
    scaler.scale(nll).backward()
    scaler.step(opt)
    scaler.update()
    print(f"{step:3d} T={T:2d} nll/symbol {nll.item():.4f} scale {scaler.get_scale():g}")
