"""Feature distillation: both networks run in half, the distance does too."""
import torch
import torch.nn as nn


def distill(student, teacher, loader, optimizer, epochs=10):
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.MSELoss()
    teacher.eval().requires_grad_(False)
    for epoch in range(epochs):
        for x, _ in loader:
            x = x.cuda()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = student(x)
                with torch.no_grad():
                    goal = teacher(x)
            loss = criterion(pred, goal)  # expect: REGION_LOSS_OUTSIDE
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())


if __name__ == "__main__":
    small = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()
    large = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 32)).cuda()
    data = [(torch.randn(64, 16), torch.zeros(64)) for _ in range(100)]
    distill(small, large, data, torch.optim.Adam(small.parameters(), lr=1e-3))
