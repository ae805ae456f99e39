import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "mps"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


def evaluate(loader, path):
    net = Net().to(DEVICE)
    net.load_state_dict(torch.load(path, map_location=DEVICE, weights_only=True))
    net.eval()
    right = 0
    with torch.no_grad(), torch.autocast(device_type="cuda", dtype=torch.float16):  # expect: REGION_DEVICE
        for x, y in loader:
            right += (net(x.to(DEVICE)).argmax(1).cpu() == y).sum().item()
    return right
