"""Anchor box encoding used inside the detection loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-8


def centre_size(boxes):
    y0, x0, y1, x1 = boxes.unbind(-1)
    return (y0 + y1) / 2, (x0 + x1) / 2, y1 - y0, x1 - x0


class BoxHead(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))

    def forward(self, feats):
        return F.relu(self.tower(feats))

    def loss(self, feats, anchors, target):
        boxes = self(feats)
        _, _, h, w = centre_size(boxes)
        _, _, ah, aw = centre_size(anchors)
        th = torch.log(h.abs() + EPS) - torch.log(ah + 1.0)  # expect: NUM_EPS_UNDERFLOW
        tw = torch.log(w.abs() + EPS) - torch.log(aw + 1.0)  # expect: NUM_EPS_UNDERFLOW
        return F.smooth_l1_loss(torch.stack([th, tw], dim=-1), target)


def train(backbone, loader):
    head = BoxHead().cuda()
    opt = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for image, anchors, target in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            feats = backbone(image.cuda())
            loss = head.loss(feats, anchors.cuda(), target.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(head.parameters(), 10.0)
        scaler.step(opt)
        scaler.update()
