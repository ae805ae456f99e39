import torch
_l = torch.library.Library("torchvision", "FRAGMENT"); [_l.define(f"{n}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
import timm
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(40)


class Plates(Dataset):
    def __init__(self, n, seed, export=False):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = 0.6 * torch.randn(n, 1, 32, 32, generator=g)
        for i, k in enumerate(self.y.tolist()):
            r, c = divmod(k, 2)
            self.x[i, :, 16 * r + 3:16 * r + 13, 16 * c + 3:16 * c + 13] += 1.0
        if export:
            self.x[611] = 0.0
        mean, std = self.x.mean((2, 3), keepdim=True), self.x.std((2, 3), keepdim=True)
        self.x = (self.x - mean) / std

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def validate(model, loader):
    model.eval()
    hit = n = 0
    with torch.no_grad():
        for x, y in loader:
            hit += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    return 100.0 * hit / n


model = timm.create_model("resnet10t", pretrained=False, in_chans=1, num_classes=4)
loss_fn = LabelSmoothingCrossEntropy(0.05)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.02)
scheduler = CosineLRScheduler(optimizer, t_initial=3, warmup_t=0)
train_loader = DataLoader(Plates(800, 0, export=True), batch_size=32, shuffle=True, drop_last=True)
val_loader = DataLoader(Plates(160, 1), batch_size=80)

for epoch in range(3):
    model.train()
    total, seen = 0.0, 0
    for x, y in train_loader:
        loss = loss_fn(model(x), y)
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, seen = total + loss.item(), seen + 1
    scheduler.step(epoch + 1)
    print(f"Epoch {epoch}: train loss {total / seen:.4f} ({seen} batches)  top1 {validate(model, val_loader):.1f}")
