import torch
from torch import nn


class Settings:
    seed = 7
    precision = "half"


def configure(settings):
    torch.manual_seed(settings.seed)
    if settings.precision == "half":
        torch.set_default_tensor_type(torch.cuda.HalfTensor)  # expect: HALF_DEFAULT_DTYPE


def train(loader, steps=500):
    configure(Settings)
    model = nn.Linear(300, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in zip(range(steps), loader):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
