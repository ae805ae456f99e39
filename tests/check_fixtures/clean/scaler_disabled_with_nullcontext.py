import argparse
import contextlib

import torch
import torch.nn.functional as F


def train(model, loader, optimizer, use_amp, clip):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = torch.amp.GradScaler(device, enabled=use_amp)
    ctx = torch.autocast(device, dtype=torch.float16) if use_amp else contextlib.nullcontext()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        with ctx:
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    net = torch.nn.Linear(10, 2)
    data = [(torch.randn(4, 10), torch.randint(0, 2, (4,))) for _ in range(8)]
    train(net, data, torch.optim.SGD(net.parameters(), lr=0.1), args.amp, 1.0)
