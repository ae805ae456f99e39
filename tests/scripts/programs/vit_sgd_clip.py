"""CIFAR-like classification, timm ViT, fp16 + GradScaler + clipping."""
import timm
import torch
import torch.nn.functional as F

torch.manual_seed(31)


class Run:
    def __init__(self, lr=0.1, clip=1.0):
        self.net = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=4,
                                                 num_classes=5)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
        self.clip = clip
        self.proto = torch.randn(5, 3, 16, 16)

    def data(self):
        y = torch.randint(0, 5, (16,))
        return self.proto[y] + 0.7 * torch.randn(16, 3, 16, 16), y

    def step(self):
        x, y = self.data()
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


run = Run()
hist = [run.step() for _ in range(80)]
for k in range(0, 80, 16):
    print(k, sum(hist[k:k + 16]) / 16)
