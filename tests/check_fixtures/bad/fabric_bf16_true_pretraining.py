import torch
from lightning.fabric import Fabric

PRECISION = "bf16-true"


def main(model, loader, steps=10_000):
    fabric = Fabric(accelerator="cuda", devices=4, precision=PRECISION)  # expect: CONFIG_TRUE_HALF
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for step, (ids, labels) in enumerate(loader):
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        if step == steps:
            break
