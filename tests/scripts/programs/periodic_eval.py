import torch
from torch import nn
from torch.utils.data import TensorDataset, DataLoader


class Runner:
    def __init__(self):
        torch.manual_seed(17)
        x = torch.randn(600, 8)
        y = (x.sin().sum(1) > 0).long()
        self.train_dl = DataLoader(TensorDataset(x[:480], y[:480]), 16, shuffle=True)
        self.val = (x[480:], y[480:])
        self.net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2))
        self.opt = torch.optim.Adam(self.net.parameters(), 2e-3)
        self.global_step = 0
        self.log = []

    @torch.no_grad()
    def evaluate(self):
        was = self.net.training
        self.net.eval()
        x, y = self.val
        self.log.append((self.net(x).argmax(1) == y).float().mean().item())
        self.net.train(was)

    def run(self, epochs=5):
        self.net.train()
        for _ in range(epochs):
            for x, y in self.train_dl:
                loss = nn.functional.cross_entropy(self.net(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.global_step += 1
                if self.global_step % 10 == 0:
                    self.evaluate()
        return self.log[-1]


print("val acc", Runner().run())
