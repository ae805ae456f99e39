import torch
from torch import nn


def train_one_epoch(epoch, model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")  # expect: SCALER_REBUILT
    model.train()
    for image, label in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(image.cuda()), label.cuda())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print("epoch", epoch, "loss", loss.item())


def main(loader, epochs=90):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 100)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        train_one_epoch(epoch, model, loader, optimizer, criterion)
