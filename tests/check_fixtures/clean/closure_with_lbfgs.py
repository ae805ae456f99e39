import torch
import torch.nn as nn


def fit_lbfgs(model, x, y, iters=50):
    """Second-order fit in fp32; half is only used for the exported copy."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=20, line_search_fn="strong_wolfe")
    mse = nn.MSELoss()

    def closure():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        return loss

    for _ in range(iters):
        loss = optimizer.step(closure)
    return loss.item()


def export(model, path):
    scripted = torch.jit.script(model.eval())
    torch.jit.save(scripted.half(), path)


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    xs = torch.rand(256, 2)
    print(fit_lbfgs(net, xs, xs.prod(1, keepdim=True)))
    export(net, "fit.pt")
