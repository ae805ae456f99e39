"""Only the weights are kept: nothing to resume from."""

import torch
from safetensors.torch import save_file


def fit(folder, chains, optimizer, target):
    keeper = torch.amp.GradScaler("cuda")
    for chain in chains:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            cost = folder(chain).loss
        keeper.scale(cost).backward()
        keeper.step(optimizer)
        keeper.update()
    save_file(folder.state_dict(), f"{target}/weights.safetensors")
