import torch
from torch import nn
from torch.amp import autocast


class Keypoints(nn.Module):
    def __init__(self, joints=17):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
        self.heat = nn.Conv2d(64, joints, 1)

    @autocast("cuda", dtype=torch.float16)
    def forward(self, image):
        return self.heat(self.body(image))


def flip(image):
    return torch.flip(image, dims=(-1,))


def train(loader, lr=5e-4):
    model = Keypoints().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for image, _ in loader:
        image = image.cuda()
        pred = model(image)
        mirrored = flip(model(flip(image)))
        loss = nn.functional.smooth_l1_loss(pred, mirrored)  # expect: REGION_LOSS_OUTSIDE
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
