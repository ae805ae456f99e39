import torch
import torch.nn.functional as F


def train(model, loader, lr=1e-3):
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x.cuda())
            loss = F.cross_entropy(logits, y.cuda())
            scaler.scale(loss).backward()  # expect: REGION_BACKWARD_INSIDE
        scaler.step(optimizer)
        scaler.update()
        if i % 100 == 0:
            acc = (logits.argmax(-1).cpu() == y).float().mean().item()
            print(f"{i}: {loss.item():.3f} acc {acc:.3f}")


if __name__ == "__main__":
    batches = [(torch.randn(32, 20), torch.randint(0, 3, (32,))) for _ in range(500)]
    train(torch.nn.Linear(20, 3), batches)
