import argparse

import torch
import torch.nn.functional as F

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def main(model, loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    args = parser.parse_args()
    dtype = DTYPES[args.precision]
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
