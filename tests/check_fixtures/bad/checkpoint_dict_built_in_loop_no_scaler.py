import os

import torch
import torch.nn.functional as F


def main(model, loader, out):
    os.makedirs(out, exist_ok=True)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss_scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(loader):
        optim.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss_scaler.scale(loss).backward()
        loss_scaler.step(optim)
        loss_scaler.update()
        if step and step % 2000 == 0:
            ckpt = dict(step=step, weights=model.state_dict())
            ckpt["optim"] = optim.state_dict()
            ckpt["rng"] = torch.get_rng_state()
            torch.save(ckpt, os.path.join(out, f"{step}.ckpt"))  # expect: SCALER_NOT_SAVED
