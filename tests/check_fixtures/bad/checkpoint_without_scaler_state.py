import torch
from pathlib import Path


def save_checkpoint(path, model, optimizer, epoch):
    torch.save(  # expect: SCALER_NOT_SAVED
        {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
        path,
    )


def train(model, loader, out_dir, epochs=50):
    out_dir = Path(out_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for batch, target in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(batch.cuda()), target.cuda())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        save_checkpoint(out_dir / f"{epoch:03d}.pt", model, optimizer, epoch)
