import torch
from accelerate import Accelerator


def main(model, loader, epochs=3):
    accelerator = Accelerator(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scaler = torch.amp.GradScaler("cuda")  # expect: CONFIG_DOUBLE_SCALING
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        accelerator.print("epoch done", loss.item())
    accelerator.wait_for_everyone()
    accelerator.save_state("out")
    return accelerator.unwrap_model(model)
