import torch
import torch.nn.functional as F


def train(policy, value, buffer, lr=3e-4, epochs=4):
    params = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(params, lr=lr, eps=1e-5)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for obs, act, adv, ret, old in buffer:
            with torch.autocast("cuda", dtype=torch.float16):
                logits = policy(obs)
                v = value(obs).squeeze(-1)
                logp = F.log_softmax(logits, dim=-1).gather(1, act[:, None]).squeeze(1)
                ratio = torch.exp((logp - old).clamp(-5, 5))
                pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                loss = pg + 0.5 * F.mse_loss(v, ret)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(params, 0.5)  # expect: SCALER_CLIP_BEFORE_UNSCALE
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
