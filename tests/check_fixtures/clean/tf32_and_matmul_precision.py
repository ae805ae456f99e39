import torch
import torch.nn as nn

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
torch.set_float32_matmul_precision("high")
torch.set_default_dtype(torch.float32)


def train(model, loader, epochs=5):
    model = model.cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    mse = nn.MSELoss()
    for _ in range(epochs):
        for x, y in loader:
            pred = model(x.cuda())
            loss = mse(pred, y.cuda()) + 1e-9 * sum(p.pow(2).sum() for p in model.parameters())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
    return model
