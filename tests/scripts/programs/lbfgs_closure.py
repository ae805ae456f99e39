import torch
import torch.nn as nn

torch.manual_seed(14)
t = torch.linspace(-2, 2, 120).unsqueeze(1)
target = torch.sin(2 * t) + 0.3 * t
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=8,
                        line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    opt.zero_grad()
    loss = ((net(t) - target) ** 2).mean()
    loss.backward()
    return loss


history = []
for outer in range(60):
    loss = opt.step(closure)
    history.append(loss.item())
print("closure calls", calls, "loss", history[-1])
