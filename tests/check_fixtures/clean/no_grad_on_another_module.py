import copy

import torch
import torch.nn.functional as F


def train(q_net, replay, steps, gamma=0.99):
    q_net = q_net.cuda()
    target_net = copy.deepcopy(q_net).requires_grad_(False)
    opt = torch.optim.Adam(q_net.parameters(), lr=1e-4)
    for step in range(steps):
        obs, act, rew, nxt, done = replay.sample()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                best = target_net(nxt).float().amax(1)
            q = q_net(obs).gather(1, act[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(q, rew + gamma * (1 - done) * best)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 1000 == 0:
            target_net.load_state_dict(q_net.state_dict())
