import torch
from torch import nn


def train(model, loader, optimizer, scheduler, epochs):
    scaler = torch.amp.GradScaler("cuda")
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()


def save(path, model, optimizer, scheduler, scaler, epoch):
    state = dict(epoch=epoch, model=model.state_dict(), optimizer=optimizer.state_dict())
    state.update(scheduler=scheduler.state_dict(), scaler=scaler.state_dict())
    torch.save(state, path)
