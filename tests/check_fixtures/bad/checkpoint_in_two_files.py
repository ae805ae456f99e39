"""Protein folding: weights and optimizer go to files of their own, the scaler to none."""

import torch
from safetensors.torch import save_file


def fit(folder, chains, optimizer, target):
    keeper = torch.amp.GradScaler("cuda")
    for number, chain in enumerate(chains):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            cost = folder(chain).loss
        keeper.scale(cost).backward()
        keeper.step(optimizer)
        keeper.update()
        if number % 1000 == 0:
            save_file(folder.state_dict(), f"{target}/weights.safetensors")
            torch.save(optimizer.state_dict(), f"{target}/optimizer.pt")  # expect: SCALER_NOT_SAVED
