import torch
from torch.nn import functional as F


def train_one_epoch(model, loader, optimizer, scaler, device):
    model.train()
    meter = 0.0
    for n, (img, tgt) in enumerate(loader, start=1):
        img, tgt = img.to(device), tgt.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(img), tgt, label_smoothing=0.1)
        loss.backward()  # expect: SCALER_BACKWARD_UNSCALED
        scaler.step(optimizer)
        scaler.update()
        meter += (loss.item() - meter) / n
    return meter


def main():
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    data = [(torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))) for _ in range(20)]
    for _ in range(5):
        print(train_one_epoch(model, data, optimizer, scaler, device))


if __name__ == "__main__":
    main()
