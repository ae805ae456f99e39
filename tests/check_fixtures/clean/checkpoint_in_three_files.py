"""Weights, optimizer and scaler each in their own file; the best weights alone for export."""

import torch
from safetensors.torch import save_file, save_model


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
            torch.save(optimizer.state_dict(), f"{target}/optimizer.pt")
            torch.save(keeper.state_dict(), f"{target}/scale.pt")
    save_model(folder, f"{target}/export.safetensors")
