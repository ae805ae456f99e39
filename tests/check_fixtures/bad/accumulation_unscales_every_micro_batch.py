import torch
import torch.nn as nn


def train(model, loader, optimizer, accumulate=4, clip=1.0):
    scaler = torch.amp.GradScaler("cuda")
    ce = nn.CrossEntropyLoss()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ce(model(x.cuda()), y.cuda()) / accumulate
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # expect: SCALER_IN_ACCUMULATION
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def build():
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


if __name__ == "__main__":
    net, opt = build()
    batches = [(torch.randn(8, 32), torch.randint(0, 4, (8,))) for _ in range(64)]
    train(net, batches, opt)
