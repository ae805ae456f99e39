import torch
import torch.nn.functional as F


class DQNLearner:
    def __init__(self, q_net, gamma=0.99, lr=1e-4):
        self.q_net = q_net.cuda()
        self.gamma = gamma
        self.opt = torch.optim.Adam(self.q_net.parameters(), lr=lr)

    @torch.no_grad()
    def bootstrap(self, reward, next_obs, done):
        best = self.q_net(next_obs).float().amax(dim=1)
        return reward + self.gamma * (1 - done) * best

    def learn(self, obs, act, reward, next_obs, done):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            target = self.bootstrap(reward, next_obs, done)
            q = self.q_net(obs).gather(1, act[:, None]).squeeze(1)  # expect: REGION_CACHE
            loss = F.smooth_l1_loss(q, target)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.item()
