"""Image classifier, functions and argparse."""
import argparse

import torch
import torch.nn.functional as F


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--compile", action="store_true")
    return p.parse_args()


def epoch(model, loader, opt):
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        with torch.amp.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()  # expect: SCALER_MISSING
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()


def main(model, loader):
    args = parse()
    model = model.cuda()
    if args.compile:
        model = torch.compile(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(args.epochs):
        epoch(model, loader, opt)
