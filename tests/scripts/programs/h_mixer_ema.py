import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

torch.manual_seed(8)
model = timm.models.MlpMixer(img_size=16, patch_size=4, in_chans=3, num_classes=4, embed_dim=48, num_blocks=1)
nn.init.normal_(model.head.weight, std=0.5)        # warm start stand-in
model = model.to(torch.float32)
ema = ModelEmaV3(model, decay=0.998, foreach=False)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
protos = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def loader(n):
    for _ in range(n):
        y = torch.randint(0, 4, (8,))
        yield (protos[y] * 0.5 + torch.randn(8, 3, 16, 16)).to(torch.float32), y


def evaluate(m):
    m.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        tot = [nn.functional.cross_entropy(m(x).float(), y).item() for x, y in loader(10)]
    return sum(tot) / len(tot)


start = [p.detach().clone() for p in model.parameters()]
for i, (x, y) in enumerate(loader(350)):
    model.train()
    loss = nn.functional.cross_entropy(model(x).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update(model)
    if i % 50 == 0:
        print(i, loss.item())
moved = sum((a.float() - b.float()).norm() for a, b in zip(ema.module.parameters(), start))
live = sum((a.float() - b.float()).norm() for a, b in zip(model.parameters(), start))
print("model eval", evaluate(model), "ema eval", evaluate(ema.module), "ema moved", (moved / live).item())
