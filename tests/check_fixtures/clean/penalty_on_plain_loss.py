"""R1 penalty on an unscaled score in fp32; only the final loss goes through the scaler."""
import torch
import torch.nn.functional as F


def r1(disc, real, gamma=10.0):
    real = real.detach().requires_grad_(True)
    with torch.autocast("cuda", enabled=False):
        score = disc(real.float())
        (grad,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        return 0.5 * gamma * grad.pow(2).flatten(1).sum(1).mean()


def train(disc, gen, loader):
    opt = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.0, 0.99))
    scaler = torch.amp.GradScaler("cuda")
    for i, real in enumerate(loader):
        real = real.cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                fake = gen(torch.randn(len(real), 512, device="cuda"))
            loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake)).mean()
        if i % 16 == 0:
            loss = loss + 16 * r1(disc, real)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
