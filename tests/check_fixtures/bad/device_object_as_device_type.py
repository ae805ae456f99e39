import torch
import torch.nn.functional as F


class Trainer:
    def __init__(self, model):
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def train_step(self, x, y):
        x, y = x.to(self.device), y.to(self.device)
        with torch.autocast(device_type=self.device, dtype=torch.bfloat16):  # expect: REGION_DEVICE
            loss = F.cross_entropy(self.model(x), y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.item()

    def fit(self, loader):
        return [self.train_step(x, y) for x, y in loader]
