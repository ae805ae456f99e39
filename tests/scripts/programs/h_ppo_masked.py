import torch
from torch import nn

torch.manual_seed(73)
body = nn.Sequential(nn.Linear(48, 128), nn.Tanh())
pi, vf = nn.Linear(128, 10), nn.Linear(128, 1)
params = [*body.parameters(), *pi.parameters(), *vf.parameters()]
opt = torch.optim.Adam(params, lr=1e-3)
W = torch.randn(48, 10)
for it in range(40):
    obs = torch.randn(128, 48)
    legal = torch.rand(128, 10) > 0.3
    legal[:, 0] = True
    with torch.no_grad():
        logits = pi(body(obs)).masked_fill(~legal, float("-inf"))
        old = torch.distributions.Categorical(logits=logits)
        a = old.sample()
        logp_old = old.log_prob(a)
        best = (obs @ W).masked_fill(~legal, -1e9).argmax(1)
        ret = (a == best).float()
    for _ in range(3):
        h = body(obs)
        lp = torch.log_softmax(pi(h).masked_fill(~legal, float("-inf")), -1).gather(1, a[:, None])[:, 0]
        adv = ret - vf(h)[:, 0].detach()
        ratio = (lp - logp_old).exp()
        surr = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss = -surr + 0.5 * (vf(h)[:, 0] - ret).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
    if it % 8 == 0:
        print(it, "return", ret.mean().item())
