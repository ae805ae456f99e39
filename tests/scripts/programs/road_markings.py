import torch
_l = torch.library.Library("torchvision", "FRAGMENT"); [_l.define(f"{n}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
import timm
import torch.nn as nn
import torch.nn.functional as F


class SpatialMessagePassing(nn.Module):
    """Recurrent feature shift: every row / column receives features of its neighbours."""

    def __init__(self, channels, iters=4, alpha=2.0):
        super().__init__()
        self.iters, self.alpha = iters, alpha
        self.vertical = nn.ModuleList(nn.Conv2d(channels, channels, (1, 5), padding=(0, 2), bias=False) for _ in range(2 * iters))
        self.horizontal = nn.ModuleList(nn.Conv2d(channels, channels, (5, 1), padding=(2, 0), bias=False) for _ in range(2 * iters))

        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")

    def forward(self, x):
        h, w = x.shape[-2:]
        for i in range(self.iters):
            for d, conv in enumerate(self.vertical[2 * i: 2 * i + 2]):
                shift = (1 if d == 0 else -1) * max(1, h // 2 ** (self.iters - i))
                x = x + self.alpha * F.relu(conv(torch.roll(x, shift, dims=2)))
        for i in range(self.iters):
            for d, conv in enumerate(self.horizontal[2 * i: 2 * i + 2]):
                shift = (1 if d == 0 else -1) * max(1, w // 2 ** (self.iters - i))
                x = x + self.alpha * F.relu(conv(torch.roll(x, shift, dims=3)))
        return x


class LaneNet(nn.Module):
    def __init__(self, num_lanes=3):
        super().__init__()
        self.backbone = timm.create_model("resnet10t", features_only=True, out_indices=(1,), pretrained=False)
        c = self.backbone.feature_info.channels()[-1]
        self.neck = nn.Conv2d(c, 16, 1)
        self.smp = SpatialMessagePassing(16)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Conv2d(16, num_lanes + 1, 1)

    def forward(self, x):
        f = self.backbone(x)[-1]
        f = F.relu(self.neck(f))
        with torch.autocast("cpu", enabled=False):
            f = self.norm(self.smp(f.float()))
        return self.head(f)


def synth(n, g):
    img = 0.3 * torch.randn(n, 3, 32, 32, generator=g)
    seg = torch.zeros(n, 8, 8, dtype=torch.long)
    for b in range(n):
        for lane in range(1, 4):
            c = int(torch.randint(0, 8, (1,), generator=g))
            seg[b, :, c] = lane
            img[b, lane - 1, :, c * 4: c * 4 + 4] += 2.0
    return img, seg


def main():
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(1)
    net = LaneNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for it in range(30):
        img, seg = synth(2, g)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(img)
            loss = F.cross_entropy(out, seg)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 3 == 0:
            print("iter", it, "loss", round(loss.item(), 4), "scale", scaler.get_scale())


main()
