import torch
from torch import nn

EPS = 1e-4


class HalfGate(nn.Module):
    """Runs inside a half inference server; the eps is representable."""

    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.fc(x)
        level = h.abs().mean(-1, keepdim=True)
        return h / (level + EPS)


@torch.inference_mode()
def serve(path, stream, dim=256):
    net = HalfGate(dim)
    net.load_state_dict(torch.load(path, weights_only=True))
    net.half().cuda().eval()
    for x in stream:
        yield net(x.cuda().half()).float().clamp(min=1e-12).log().cpu()
