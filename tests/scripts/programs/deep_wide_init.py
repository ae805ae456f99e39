import torch, torch.nn as nn

torch.manual_seed(6)


def init_weights(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, std=1.0)
        nn.init.zeros_(m.bias)


layers = [nn.Linear(128, 128), nn.ReLU()]
for _ in range(6):
    layers += [nn.Linear(128, 128), nn.ReLU()]
net = nn.Sequential(*layers, nn.Linear(128, 10))
net.apply(init_weights)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
centers = torch.randn(10, 128)
for it in range(60):
    y = torch.randint(0, 10, (64,))
    x = centers[y] + 0.5 * torch.randn(64, 128)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        loss = nn.functional.cross_entropy(out, y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 0 or it == 59:
        print(it, loss.item(), scaler.get_scale(), (out.argmax(1) == y).float().mean().item())
