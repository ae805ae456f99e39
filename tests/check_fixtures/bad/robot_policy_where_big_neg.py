import torch
from torch import nn

BIG_NEG = -2.3819763e38


class EagerAttention(nn.Module):
    def __init__(self, width=512, heads=8):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)

    def shape(self, x):
        b, n, w = x.shape
        return x.view(b, n, self.heads, w // self.heads).transpose(1, 2)

    def forward(self, x, allowed):
        q, k, v = self.shape(self.to_q(x)), self.shape(self.to_k(x)), self.shape(self.to_v(x))
        weights = torch.einsum("bhid,bhjd->bhij", q, k) * q.size(-1) ** -0.5
        weights = torch.where(allowed[:, None], weights, BIG_NEG)  # expect: NUM_MASK_CONSTANT
        probs = nn.functional.softmax(weights, dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", probs, v)
        return out.transpose(1, 2).flatten(2)


class Policy:
    def __init__(self, path):
        self.net = EagerAttention().cuda()
        self.net.load_state_dict(torch.load(path, weights_only=True))
        self.net.eval()

    @torch.no_grad()
    def act(self, obs, allowed):
        with torch.autocast("cuda", dtype=torch.float16):
            return self.net(obs.cuda(), allowed.cuda()).float().mean(1)
