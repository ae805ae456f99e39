"""Style loss: feature energy is computed on half features outside of any region."""
import torch
import torch.nn as nn


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, stride=2, padding=1)])

    def forward(self, x):
        out = []
        for stage in self.stages:
            x = torch.relu(stage(x))
            out.append(x)
        return out


def energy(feat):
    return feat.pow(2).sum(dim=(1, 2, 3))  # expect: NUM_REDUCE_HALF


@torch.inference_mode()
def compare(style_images, content_images):
    net = Features().cuda().half().eval()
    scores = []
    for s, c in zip(style_images, content_images):
        fs, fc = net(s.cuda().half()), net(c.cuda().half())
        scores.append(sum((energy(a).float() - energy(b).float()).abs().mean().item() for a, b in zip(fs, fc)))
    return scores
