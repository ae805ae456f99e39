import torch
from torch import nn

torch.manual_seed(2)
N, HORIZON = 6, 14
policy = nn.Sequential(nn.Linear(N, 32), nn.Tanh(), nn.Linear(32, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
baseline, wins = 0.0, []
for it in range(120):
    pos = torch.zeros(16, dtype=torch.long)
    alive = torch.ones(16, dtype=torch.bool)
    reward = torch.zeros(16)
    logps, ents = [], []
    for t in range(HORIZON):
        obs = nn.functional.one_hot(pos, N).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = policy(obs)
        dist = torch.distributions.Categorical(logits=logits.float())
        a = dist.sample()
        logps.append(dist.log_prob(a) * alive)
        ents.append((dist.entropy() * alive).mean())
        pos = torch.where(alive, (pos + 2 * a - 1).clamp(0, N - 1), pos)
        arrived = alive & (pos == N - 1)
        reward[arrived] = 0.95 ** t
        alive = alive & ~arrived
    adv = reward - baseline
    loss = -(torch.stack(logps).sum(0) * adv).mean() - 0.01 * torch.stack(ents).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    wins.append(reward.mean().item())
    if it % 12 == 11:
        print(f"iter {it + 1} return {sum(wins[-12:]) / 12:.3f} loss {loss.item():.4f}")
