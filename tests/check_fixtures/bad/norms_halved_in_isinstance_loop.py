import torch
from torch import nn

NORMS = (nn.LayerNorm, nn.GroupNorm)


def shrink(model):
    """Saves a few megabytes."""
    for module in model.modules():
        if isinstance(module, NORMS):
            module.to(torch.float16)  # expect: HALF_NORM
    return model


def train(model, loader):
    model = shrink(model.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for tokens, labels in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens.cuda())
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.cuda().flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
