"""Transfer learning: the convolutional backbone is fixed, only the classifier is fitted."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader


class Shapes(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(5)
        self.y = torch.randint(0, 3, (n,), generator=g)
        self.x = torch.randn(n, 1, 10, 10, generator=g) * 0.7 + 1.5
        for i, c in enumerate(self.y):
            self.x[i, 0, c * 3:c * 3 + 3] += 1.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return nn.functional.adaptive_avg_pool2d(x, (5, 1)).flatten(1)


class TransferModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.classifier = nn.Linear(40, 3)

    def forward(self, x):
        return self.classifier(self.backbone(x))


torch.manual_seed(5)
model = TransferModel()
for p in model.backbone.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Shapes(), batch_size=16, shuffle=True)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(6):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
print("final loss %.4f" % loss.item())
