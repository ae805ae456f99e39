import torch
import torch.nn.functional as F


def train(model, loader, epochs=2, clip=0.1):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    grad_scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for samples, targets in loader:
            samples = samples.to("cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(samples)
                loss = F.l1_loss(out, targets.to("cuda"))
            opt.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()  # expect: SCALER_STEP_BYPASSED
            grad_scaler.update()
        print("epoch", epoch)
