import torch
_l = torch.library.Library("torchvision", "FRAGMENT"); [_l.define(f"{n}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
import timm
import torch.nn.functional as F


def crowd_labels(y, classes, flip, g):
    wrong = torch.rand(y.shape, generator=g) < flip
    return torch.where(wrong, torch.randint(0, classes, y.shape, generator=g), y)


class LinearProbe:
    def __init__(self, classes=5, flip=0.4):
        torch.manual_seed(61)
        self.model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=96, depth=2, num_heads=4, num_classes=classes,
            global_pool="avg", class_token=False,
        )
        for name, p in self.model.named_parameters():
            p.requires_grad = name.startswith("head")
        self.classes, self.flip = classes, flip
        self.g = torch.Generator().manual_seed(62)
        self.proto = torch.randn(classes, 3, 1, 1, generator=self.g)
        self.opt = torch.optim.SGD(self.model.head.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def sample(self, n=32):
        y = torch.randint(0, self.classes, (n,), generator=self.g)
        x = 0.8 * self.proto[y] + torch.randn(n, 3, 32, 32, generator=self.g)
        return x, y, crowd_labels(y, self.classes, self.flip, self.g)

    def fit(self, steps=80):
        self.model.eval()
        for s in range(steps):
            x, clean, noisy = self.sample()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(x)
                loss = F.cross_entropy(logits, noisy)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if s % 10 == 0 or s == steps - 1:
                print(f"{s:3d} noisy-loss {loss.item():.4f} clean-acc {(logits.argmax(1) == clean).float().mean().item():.2f}")


LinearProbe().fit()
