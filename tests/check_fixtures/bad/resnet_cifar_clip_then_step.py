"""CIFAR-10 classifier, mixed precision, single GPU."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class SmallResNet(nn.Module):
    def __init__(self, classes=10, width=64):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = x + F.relu(self.conv(x))
        return self.head(x.mean(dim=(2, 3)))


def train_epoch(model, loader, optimizer, scaler, max_norm):
    model.train()
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # expect: SCALER_CLIP_BEFORE_UNSCALE
        scaler.step(optimizer)
        scaler.update()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    model = SmallResNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scaler = GradScaler("cuda")
    loader = build_loader()
    for _ in range(args.epochs):
        train_epoch(model, loader, optimizer, scaler, args.clip)


def build_loader():
    data = torch.utils.data.TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
    return torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)


if __name__ == "__main__":
    main()
