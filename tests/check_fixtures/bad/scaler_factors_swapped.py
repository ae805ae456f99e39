import torch
from torch import nn


class Config:
    lr = 5e-4
    growth = 0.5
    backoff = 2.0


def main(train_batches):
    model = nn.GRU(40, 128, num_layers=2, batch_first=True).cuda()
    head = nn.Linear(128, 1).cuda()
    params = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(params, lr=Config.lr)
    scaler = torch.amp.GradScaler("cuda", growth_factor=Config.growth, backoff_factor=Config.backoff)  # expect: SCALER_SETTINGS
    for x, y in train_batches:
        with torch.autocast("cuda", dtype=torch.float16):
            out, _ = model(x.cuda())
            pred = head(out[:, -1]).squeeze(-1)
            loss = nn.functional.mse_loss(pred, y.cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
