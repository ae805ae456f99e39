import torch
import torch.nn as nn

torch.manual_seed(13)
x = torch.linspace(-3, 3, 120).unsqueeze(1)
y = torch.sin(2 * x) * torch.exp(-0.1 * x ** 2) + 0.02 * torch.randn_like(x)


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1, 24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


model = Curve()
opt = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, history_size=10, line_search_fn="strong_wolfe")
evals = 0


def closure():
    global evals
    evals += 1
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for outer in range(60):
    loss = opt.step(closure)
    if outer % 5 == 0:
        print(f"outer {outer} evals {evals} loss {loss.item():.6f}")


with torch.no_grad():
    grid = torch.linspace(-2.5, 2.5, 50).unsqueeze(1)
    err = (model(grid) - torch.sin(2 * grid) * torch.exp(-0.1 * grid ** 2)).abs().max()
print(f"max error {err.item():.4f}")
