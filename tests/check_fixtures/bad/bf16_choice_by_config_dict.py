import torch
import torch.nn.functional as F

CFG = {"lr": 1e-4, "amp_dtype": torch.bfloat16, "epochs": 5}


def train(model, loader):
    opt = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    region = torch.autocast("cuda", dtype=CFG["amp_dtype"])
    scaler = torch.amp.GradScaler("cuda", enabled=True)  # expect: SCALER_WITH_BF16
    for _ in range(CFG["epochs"]):
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            with region:
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return model.eval()


if __name__ == "__main__":
    data = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(10)]
    train(torch.nn.Linear(16, 4).cuda(), data)
