import torch
from torch import nn


class RadianceField(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, pts):
        return self.net(pts)


@torch.inference_mode()
def render(field, pts, delta):
    raw = field(pts.half())
    sigma, rgb = torch.relu(raw[..., 3]), torch.sigmoid(raw[..., :3])
    depth = torch.cumsum(sigma * delta.half(), dim=-1)  # expect: NUM_REDUCE_HALF
    trans = torch.exp(-depth.float())
    weights = trans * (1 - torch.exp(-(sigma.float() * delta)))
    return (weights[..., None] * rgb.float()).sum(-2)


def main(checkpoint, rays):
    field = RadianceField()
    field.load_state_dict(torch.load(checkpoint, weights_only=True))
    field = field.cuda().half().eval()
    return [render(field, pts.cuda(), delta.cuda()) for pts, delta in rays]
