import torch
from torch.autograd import Function
from torch.nn import functional as F


class FusedBilinear(Function):
    @staticmethod
    def forward(ctx, left, right, weight):  # expect: REGION_CUSTOM_FUNCTION
        ctx.save_for_backward(left, right, weight)
        return ((left @ weight) * right).sum(-1)

    @staticmethod
    def backward(ctx, grad_out):
        left, right, weight = ctx.saved_tensors
        g = grad_out.unsqueeze(-1)
        g_left = (g * right) @ weight.t()
        g_right = g * (left @ weight)
        g_weight = left.t() @ (g * right)
        return g_left, g_right, g_weight


fused_bilinear = FusedBilinear.apply


class Scorer(torch.nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(dim))

    def forward(self, a, b):
        return fused_bilinear(a, b, self.weight)


def train(loader):
    scorer = Scorer().cuda()
    opt = torch.optim.AdamW(scorer.parameters(), lr=1e-3)
    for a, b, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.binary_cross_entropy_with_logits(scorer(a.cuda(), b.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
