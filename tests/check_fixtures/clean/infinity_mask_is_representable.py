import torch
import torch.nn.functional as F
from torch import nn


class Causal(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        n = x.size(1)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        s = self.q(x) @ self.k(x).transpose(1, 2) / x.size(-1) ** 0.5
        s = s.masked_fill(future, float("-inf"))
        return F.softmax(s, dim=-1).to(s.dtype) @ self.v(x)


@torch.inference_mode()
def features(x):
    net = Causal(x.size(-1)).cuda().eval()
    with torch.autocast("cuda", dtype=torch.float16):
        return net(x.cuda()).float()
