import torch
_l = torch.library.Library("torchvision", "FRAGMENT"); [_l.define(f"{n}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
import timm
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, n, num_classes=4, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = 0.2 * torch.randn(n, 3, 32, 32, generator=g)
        self.t = torch.zeros(n, 16, num_classes)
        for i in range(n):
            cell = int(torch.randint(0, 16, (1,), generator=g))
            cls = int(torch.randint(0, num_classes, (1,), generator=g))
            r, c = divmod(cell, 4)
            self.x[i, cls % 3, r * 8: r * 8 + 8, c * 8: c * 8 + 8] += 1.5 + 1.5 * (cls == 3)
            self.t[i, cell, cls] = 1.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.t[i]


class FocalLoss(nn.Module):
    def __init__(self, alpha=0.25, gamma=1.5):
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, classification, targets):
        classification = torch.clamp(classification, 1e-4, 1.0 - 1e-4)
        alpha_factor = torch.where(targets == 1.0, self.alpha, 1.0 - self.alpha)
        focal_weight = torch.where(targets == 1.0, 1.0 - classification, classification)
        focal_weight = alpha_factor * torch.pow(focal_weight, self.gamma)
        bce = -(targets * torch.log(classification) + (1.0 - targets) * torch.log(1.0 - classification))
        return (focal_weight * bce).sum() / targets.sum().clamp(min=1.0)


class Detector(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.backbone = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=0, global_pool="", class_token=False,
        )
        self.classifier = nn.Linear(48, num_classes)

    def forward(self, x):
        return self.classifier(self.backbone.forward_features(x)).sigmoid()


class Trainer:
    def __init__(self, epochs=9, lr=3e-3):
        torch.manual_seed(21)
        self.model, self.criterion, self.epochs = Detector(), FocalLoss(), epochs
        self.loader = DataLoader(Blobs(160), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
        self.opt = torch.optim.AdamW([
            {"params": self.model.backbone.parameters(), "lr": lr},
            {"params": self.model.classifier.parameters(), "lr": 30 * lr},
        ], weight_decay=0.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def fit(self):
        for epoch in range(self.epochs):
            total = 0.0
            for x, t in self.loader:
                self.opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = self.criterion(self.model(x), t)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
                total += loss.item()
            print(f"epoch {epoch}: loss {total / len(self.loader):.4f}  scale {self.scaler.get_scale():g}")


if __name__ == "__main__":
    Trainer().fit()
