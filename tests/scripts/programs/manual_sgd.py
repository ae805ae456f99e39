import torch

torch.manual_seed(15)


def init(i, o):
    w = (torch.randn(i, o) / i ** 0.5).requires_grad_()
    b = torch.zeros(o, requires_grad=True)
    return w, b


w1, b1 = init(8, 20)
w2, b2 = init(20, 2)
params = [w1, b1, w2, b2]
vel = [torch.zeros_like(p) for p in params]


def forward(x):
    return torch.relu(x @ w1 + b1) @ w2 + b2


lr, mu = 0.05, 0.8
for step in range(200):
    x = torch.randn(32, 8)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    loss = torch.nn.functional.cross_entropy(forward(x), y)
    loss.backward()
    with torch.no_grad():
        for p, v in zip(params, vel):
            v.mul_(mu).add_(p.grad)
            p -= lr * v
            p.grad = None
print("loss", loss.item())
