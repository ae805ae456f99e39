import torch
from core.net import Flow


def main(args, loader):
    model = torch.nn.DataParallel(Flow(args)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=args.mixed)
    for image, target in loader:
        loss = (model(image) - target).abs().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
