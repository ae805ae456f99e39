# ULMFiT-like: one more layer is released every 40 steps
import torch
from torch import nn

torch.manual_seed(10)
layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)])


def forward(x):
    for l in layers[:-1]:
        x = torch.tanh(l(x))
    return layers[-1](x)


def set_trainable(k):
    for i, l in enumerate(layers):
        l.requires_grad_(i >= len(layers) - k)


opt = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
W = torch.randn(8, 3)
for step in range(200):
    if step % 40 == 0:
        set_trainable(min(len(layers), 1 + step // 40))
    x = torch.randn(32, 8)
    y = (x @ W).argmax(1)
    loss = nn.functional.cross_entropy(forward(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
