import torch
import torch.nn as nn
import torch.nn.functional as F


def build_model(classes):
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def main(loader, epochs=20):
    model = build_model(100).cuda()
    model.half()  # expect: HALF_CALL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for image, label in loader:
            image = image.cuda().to(next(model.parameters()).dtype)
            logits = model(image)
            loss = F.cross_entropy(logits.float(), label.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
