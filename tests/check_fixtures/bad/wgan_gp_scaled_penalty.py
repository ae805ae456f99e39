"""WGAN-GP critic step in mixed precision."""
import torch


def gradient_penalty(critic, real, fake, scaler):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(mix)
    grads = torch.autograd.grad(  # expect: SCALER_GRAD_PENALTY
        outputs=scaler.scale(score.float().sum()), inputs=mix, create_graph=True
    )[0]
    return ((grads.flatten(1).float().norm(2, dim=1) - 1) ** 2).mean()


def critic_step(critic, generator, real, opt, scaler, gp_weight=10.0):
    z = torch.randn(real.size(0), 128, device=real.device)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        with torch.no_grad():
            fake = generator(z)
        loss = critic(fake).float().mean() - critic(real).float().mean()
    loss = loss + gp_weight * gradient_penalty(critic, real, fake.float(), scaler)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


def run(critic, generator, loader):
    scaler = torch.amp.GradScaler("cuda")
    opt = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for real, _ in loader:
        critic_step(critic, generator, real.cuda(), opt, scaler)
