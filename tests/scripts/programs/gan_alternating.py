import torch
from torch import nn, optim


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


def real(n):
    c = torch.tensor([[1., 1.], [-1., -1.]])[torch.randint(0, 2, (n,))]
    return c + 0.1 * torch.randn(n, 2)


def main():
    torch.manual_seed(4)
    gen, disc = mlp(3, 20, 2), mlp(2, 20, 1)
    og = optim.Adam(gen.parameters(), 1e-3, betas=(.5, .9))
    od = optim.Adam(disc.parameters(), 2e-3, betas=(.5, .9))
    bce = nn.BCEWithLogitsLoss()
    gl = None
    for step in range(200):
        x = real(32)
        fake = gen(torch.randn(32, 3))
        d_loss = bce(disc(x), torch.ones(32, 1)) + bce(disc(fake.detach()), torch.zeros(32, 1))
        od.zero_grad()
        d_loss.backward()
        od.step()
        if step % 2 == 0:
            og.zero_grad()
            gl = bce(disc(gen(torch.randn(32, 3))), torch.ones(32, 1))
            gl.backward()
            og.step()
    print("d", d_loss.item(), "g", gl.item())


main()
