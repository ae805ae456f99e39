import torch
import torch.nn as nn


def dice_score(pred, mask):
    inter = (pred * mask).sum()  # expect: NUM_REDUCE_HALF
    total = pred.float().sum() + mask.float().sum()
    return (2 * inter + 1) / (total + 1)


@torch.inference_mode()
def validate(net, loader):
    net = net.cuda().half().eval()
    scores = []
    for image, mask in loader:
        prob = torch.sigmoid(net(image.cuda().half()))
        scores.append(dice_score(prob.half(), mask.cuda().half()).item())
    return sum(scores) / len(scores)


if __name__ == "__main__":
    unet = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
    data = [(torch.rand(2, 1, 512, 512), torch.ones(2, 1, 512, 512)) for _ in range(2)]
    print(validate(unet, data))
