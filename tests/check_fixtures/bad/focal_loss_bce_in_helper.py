import torch
import torch.nn.functional as F


def focal(logits, target, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy(p, target, reduction="none")  # expect: REGION_BCE
    p_t = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * ce * (1 - p_t) ** gamma).mean()


def train(detector, loader):
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.01, momentum=0.9)
    for image, target in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            cls_logits, reg = detector(image.cuda())
            loss = focal(cls_logits, target["cls"].cuda()) + F.l1_loss(reg, target["box"].cuda())
        loss.backward()
        optimizer.step()
